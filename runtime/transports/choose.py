"""Which transport a group uses: the first that works on every rank, said in one log line."""

from __future__ import annotations

import logging

import torch

from megamoe.runtime.devices.base import Device
from megamoe.runtime.errors import TransportError
from megamoe.runtime.group import DistGroup, Group
from megamoe.runtime.transports import nvshmem, torch_symm
from megamoe.runtime.transports.base import Transport
from megamoe.runtime.transports.local import LocalTransport
from megamoe.runtime.transports.preflight import check_one_gpu_a_rank, gpu_identity

NAMES = ("auto", "local", "nvshmem", "torch")
log = logging.getLogger("megamoe.transport")


def reasons(group: Group, device: torch.device) -> dict[str, str | None]:
    """Why this rank cannot use a transport (None: it can), in order of preference."""
    alone = None if group.size == 1 else f"the group has {group.size} processes"
    return {
        "local": alone,
        "nvshmem": nvshmem.unavailable(group, device),
        "torch": torch_symm.unavailable(group, device),
    }


def decide(name: str, gathered: list[dict[str, str | None]]) -> tuple[str, str]:
    """The transport for a group, and the line that explains it.

    Args:
        name: one of ``NAMES``.
        gathered: ``reasons`` of every rank; so every rank decides alike.

    Raises:
        ValueError: unknown name. TransportError: nothing that was asked for works.
    """
    if name not in NAMES:
        raise ValueError(f"transport={name!r}: must be one of {', '.join(map(repr, NAMES))}")
    refused: dict[str, str] = {}
    for candidate in gathered[0]:
        if name not in ("auto", candidate):
            refused[candidate] = f"transport={name!r} was asked for"
            continue
        for rank, mine in enumerate(gathered):
            if mine[candidate] is not None:
                where = "" if len(gathered) == 1 else f"rank {rank}: "
                refused[candidate] = f"{where}{mine[candidate]}"
                break
        else:
            others = [other for other in gathered[0] if other not in (candidate, *refused)]
            refused |= dict.fromkeys(others, f"{candidate} comes first")
            text = "; ".join(f"not {other}: {why}" for other, why in refused.items())
            return candidate, f"transport {candidate} for {len(gathered)} PEs; {text}"
    text = "; ".join(f"{other}: {why}" for other, why in refused.items())
    raise TransportError(f"transport={name!r}: no transport works for {len(gathered)} PEs: {text}")


def choose_transport(name: str, *, group: Group, device: Device, memory: torch.device) -> Transport:
    """Build the transport of a group. Collective.

    Args:
        name: one of ``NAMES``.
        device, memory: this PE's device and where its memory lies.

    Raises:
        ValueError, TransportError: alike on every rank.
    """
    chosen, line = decide(name, group.gather("transports", reasons(group, memory)))
    log.log(logging.INFO if group.rank == 0 else logging.DEBUG, line)
    if chosen == "local":
        return LocalTransport(device)
    check_one_gpu_a_rank(group, gpu_identity(memory))
    if chosen == "nvshmem":
        return nvshmem.NvshmemTransport(group, memory)
    assert isinstance(group, DistGroup)
    return torch_symm.TorchTransport(group, memory)
