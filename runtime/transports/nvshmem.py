"""Transport ``nvshmem``: nvshmem4py as allocator and rendezvous; the kernel uses plain addresses.

One runtime a process, however many sessions there are, and no team of its own for any of them
(CASES X19). It stays up until ``shutdown`` or the end of the process: NVSHMEM does not promise that
it can start twice.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from typing import Any

import torch

from megamoe.runtime.devices.base import Allocation
from megamoe.runtime.errors import TransportError
from megamoe.runtime.group import Group, free_bytes
from megamoe.runtime.transports.base import SymmetricBlock
from megamoe.runtime.transports.preflight import allocate_alike, check_pairs

ALIGNMENT = 256
REMOTE = "NVSHMEM_REMOTE_TRANSPORT"
BOOTSTRAP_VARIABLES = (
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME",
    "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY",
    REMOTE,
    "NVSHMEM_SYMMETRIC_SIZE",
)

log = logging.getLogger("megamoe.transport")
_owned: list[Any] = []
_live_blocks = 0


def unavailable(group: Group, device: torch.device) -> str | None:
    """Why this rank cannot use NVSHMEM, or None."""
    if device.type != "cuda":
        return f"the device is {device}, not a GPU"
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed (pip install 'megamoe[nvshmem]')"
    return None


class NvshmemTransport:
    """One PE's side (see ``transports/base.py``). Building it is collective over the group.

    Args:
        group: the PEs. NVSHMEM's own world must be exactly these ranks; if it is not running, it
            is started over them.
        device: this PE's GPU.
        core: ``nvshmem.core``, or a stand-in.
        make_device: makes the device object that ``core.init`` takes, made current.

    Raises:
        TransportError: alike on every rank.
    """

    name = "nvshmem"

    def __init__(
        self, group: Group, device: torch.device, *, core: Any = None, make_device: Any = None
    ):
        if core is None:
            import nvshmem.core as core  # type: ignore[no-redef]
        self._core, self._group, self._device = core, group, device
        self._buffers: dict[int, Any] = {}
        self._start(make_device or _current_device)
        pes = group.gather("PE numbers", int(core.my_pe()))
        self._pe_of_rank = tuple(pes)

    def _start(self, make_device: Any) -> None:
        core, group = self._core, self._group
        error: str | None = None
        state: tuple[bool, int] = (False, 0)
        try:
            core.get_version()  # loads the host library, which the status query needs
            running = core.init_status() >= core.InitStatus.STATUS_IS_INITIALIZED
            state = (bool(running), int(core.n_pes()) if running else 0)
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
        states = group.gather("NVSHMEM state", (error, *state))
        for rank, (text, _, _) in enumerate(states):
            if text is not None:
                raise TransportError(f"NVSHMEM cannot be loaded on rank {rank}: {text}")
        running_ranks = [rank for rank, (_, running, _) in enumerate(states) if running]
        if len(running_ranks) == group.size:
            for rank, (_, _, pes) in enumerate(states):
                if pes != group.size:
                    raise TransportError(
                        f"NVSHMEM is initialised over {pes} PEs on rank {rank}, the group has "
                        f"{group.size}: its allocations need exactly the group; transport='torch' "
                        "works with any group"
                    )
            return
        if running_ranks:
            missing = next(rank for rank in range(group.size) if rank not in running_ranks)
            raise TransportError(
                f"NVSHMEM is initialised on rank {running_ranks[0]} but not on rank {missing}: "
                "initialise it on all ranks of the group or on none"
            )
        self._bootstrap(make_device)

    def _bootstrap(self, make_device: Any) -> None:
        core, group = self._core, self._group
        hosts = group.gather("host names", socket.gethostname())
        if len(set(hosts)) == 1:
            # One node needs no network; searching for one fails on machines without InfiniBand.
            os.environ.setdefault(REMOTE, "none")
        error: str | None = None
        uid = None
        try:
            uid = core.get_unique_id(empty=group.rank != 0)
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
        shared = group.gather("NVSHMEM unique id", (error, uid if group.rank == 0 else None))
        error = error or shared[0][0]
        if error is None:
            try:
                core.init(
                    device=make_device(self._device.index or 0),
                    uid=shared[0][1],
                    rank=group.rank,
                    nranks=group.size,
                    initializer_method="uid",
                )
            except Exception as exc:
                error = f"{type(exc).__name__}: {exc!r}"
        for rank, text in enumerate(group.gather("NVSHMEM initialisation", error)):
            if text is not None:
                looked_at = ", ".join(
                    f"{name}={os.environ.get(name)}" for name in BOOTSTRAP_VARIABLES
                )
                raise TransportError(
                    f"NVSHMEM did not start on rank {rank}: {text}; it looks at {looked_at}"
                )
        _owned.append(core)

    def allocate(self, nbytes: int) -> SymmetricBlock:
        global _live_blocks
        core, group = self._core, self._group
        buffer = allocate_alike(
            group,
            nbytes=nbytes,
            free_bytes=free_bytes(self._device),
            # Freed by `free` alone: an implicit free at exit would be collective (CASES X14).
            allocate=lambda: core.buffer(nbytes, except_on_del=False),
            release=None,
        )
        own = int(buffer.handle)
        addresses, unreachable = [], []
        for rank, pe in enumerate(self._pe_of_rank):
            address = own
            # Asking for the own PE would count as another reference to the block and keep it.
            if rank != group.rank:
                try:
                    address = int(core.get_peer_buffer(buffer, pe).handle)
                except Exception as exc:
                    unreachable.append((rank, str(exc) or repr(exc)))
            addresses.append(address)
        try:
            check_pairs(group, unreachable)
        except TransportError:
            core.free(buffer)  # every rank is here
            raise
        bytes_N = torch.from_dlpack(buffer).view(torch.uint8)
        if own % ALIGNMENT or bytes_N.numel() != nbytes:
            raise TransportError(f"NVSHMEM gave {bytes_N.numel()} bytes at {own:#x}")
        self._buffers[own] = buffer
        _live_blocks += 1
        return SymmetricBlock(Allocation(own, bytes_N), tuple(addresses))

    def free(self, block: SymmetricBlock) -> None:
        global _live_blocks
        buffer = self._buffers.pop(block.allocation.address, None)
        if buffer is not None:
            self._core.free(buffer)
            _live_blocks -= 1

    def close(self) -> None:
        """The runtime serves other sessions too; see ``shutdown``."""


def shutdown() -> None:
    """End the NVSHMEM runtime if megamoe started it. Collective over the ranks that share it;
    idempotent.

    Raises:
        TransportError: a session still has memory in it.
    """
    if _live_blocks:
        raise TransportError(f"{_live_blocks} sessions still use NVSHMEM memory: close them first")
    while _owned:
        _owned.pop().finalize()


def _current_device(index: int) -> Any:
    from cuda.core import Device

    device = Device(index)
    device.set_current()
    return device
