"""Transport ``torch``: symmetric memory of torch.distributed; no NVSHMEM needed, any group."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.runtime.devices.base import Allocation
from megamoe.runtime.errors import TransportError
from megamoe.runtime.group import DistGroup, Group, fail_alike, free_bytes
from megamoe.runtime.transports.base import SymmetricBlock
from megamoe.runtime.transports.preflight import allocate_alike, check_pairs

ALIGNMENT = 256


def unavailable(group: Group, device: torch.device) -> str | None:
    """Why this rank cannot use torch's symmetric memory, or None."""
    if device.type != "cuda":
        return f"the device is {device}, not a GPU"
    if not isinstance(group, DistGroup):
        return "torch.distributed is not initialised"
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    return None


class TorchTransport:
    """One PE's side (see ``transports/base.py``).

    Args:
        group: the PEs.
        device: this PE's GPU.
        symm: ``torch.distributed._symmetric_memory``, or a stand-in.
    """

    name = "torch"

    def __init__(self, group: DistGroup, device: torch.device, *, symm: Any = None):
        if symm is None:
            import torch.distributed._symmetric_memory as symm
        self._group, self._device, self._symm = group, device, symm
        self._kept: dict[int, tuple[torch.Tensor, Any]] = {}

    def allocate(self, nbytes: int) -> SymmetricBlock:
        group = self._group
        bytes_N = allocate_alike(
            group,
            nbytes=nbytes,
            free_bytes=free_bytes(self._device),
            allocate=lambda: self._symm.empty(nbytes, dtype=torch.uint8, device=self._device),
            release=lambda tensor: None,
        )
        handle: Any = None
        failed: Exception | None = None
        try:
            handle = self._symm.rendezvous(bytes_N, group.process_group)
        except Exception as error:
            failed = TransportError(
                f"rank {group.rank} could not exchange its memory with the group: {error}"
            )
        fail_alike(group, "rendezvous", failed)
        own = bytes_N.data_ptr()
        # A tensor from a pool lies at an offset of its allocation, the same on every rank.
        offset = own - int(handle.buffer_ptrs[group.rank])
        addresses = [int(pointer) + offset for pointer in handle.buffer_ptrs]
        unreachable = [
            (rank, "no address")
            for rank, pointer in enumerate(handle.buffer_ptrs)
            if not int(pointer)
        ]
        check_pairs(group, unreachable)
        wrong: Exception | None = None
        if len(addresses) != group.size or int(handle.rank) != group.rank:
            wrong = TransportError(
                f"torch gave {len(addresses)} addresses to rank {handle.rank}, this is rank "
                f"{group.rank} of {group.size}"
            )
        elif own % ALIGNMENT or offset < 0:
            wrong = TransportError(f"torch gave memory at {own:#x}, offset {offset}")
        fail_alike(group, "symmetric addresses", wrong)
        self._kept[own] = (bytes_N, handle)
        return SymmetricBlock(Allocation(own, bytes_N), tuple(addresses))

    def free(self, block: SymmetricBlock) -> None:
        self._kept.pop(block.allocation.address, None)

    def close(self) -> None:
        """Nothing beyond the blocks."""
