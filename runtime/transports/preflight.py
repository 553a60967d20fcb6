"""Checks before symmetric memory is used: alike on every rank, naming who and how much."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megamoe.runtime.errors import SymmetricMemoryError, TransportError
from megamoe.runtime.group import Group

T = TypeVar("T")
LESS_MEMORY = "a smaller max_tokens or capacity in MoEConfig lowers the need"


def gpu_identity(device: torch.device) -> tuple[str, str]:
    """(host name, GPU UUID) of a rank's device."""
    uuid = "cpu"
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname(), uuid


def check_one_gpu_a_rank(group: Group, identity: tuple[str, str]) -> None:
    """Two ranks on one GPU cannot both wait on it for the other.

    Raises:
        TransportError: names the two ranks.
    """
    if identity[1] == "cpu":
        return
    seen: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(group.gather("GPU of every rank", identity)):
        if gpu in seen:
            raise TransportError(
                f"ranks {seen[gpu]} and {rank} use the same GPU ({gpu[1]} of {gpu[0]}); every PE "
                "needs its own: torch.cuda.set_device(local_rank)"
            )
        seen[gpu] = rank


def check_pairs(group: Group, unreachable: list[tuple[int, str]]) -> None:
    """Refuse a group in which a PE cannot address another's memory (CASES X15).

    Args:
        unreachable: (peer, why) of every peer that this rank cannot reach.

    Raises:
        TransportError: names the pairs.
    """
    pairs = [
        f"{rank} → {peer} ({why})"
        for rank, found in enumerate(group.gather("reachable peers", unreachable))
        for peer, why in found
    ]
    if pairs:
        more = f" and {len(pairs) - 4} more" if len(pairs) > 4 else ""
        raise TransportError(
            f"peer memory is not addressable for the pairs {', '.join(pairs[:4])}{more}; all PEs "
            "must be in one NVLink domain; megamoe.classical works across nodes"
        )


def allocate_alike(
    group: Group,
    *,
    nbytes: int,
    free_bytes: int,
    allocate: Callable[[], T],
    release: Callable[[T], None] | None,
) -> T:
    """Allocate on every rank or fail on every rank (CASES X17).

    Args:
        free_bytes: what this rank's device has left.
        release: gives a block back when another rank failed; None if that would be collective.

    Raises:
        TransportError: the ranks ask for different sizes (CASES X1).
        SymmetricMemoryError: names the rank, asked and free bytes.
    """
    wants = group.gather("symmetric memory", (nbytes, free_bytes))
    for rank, (asked, _) in enumerate(wants):
        if asked != wants[0][0]:
            raise TransportError(
                f"symmetric memory: rank 0 asks for {wants[0][0]} bytes, rank {rank} for {asked}; "
                "must be the same on every rank"
            )
    for rank, (asked, free) in enumerate(wants):
        if asked > free:
            raise SymmetricMemoryError(
                f"symmetric memory: rank {rank} asked for {asked} bytes, {free} are free; "
                f"{LESS_MEMORY}"
            )
    block: Any = None
    error: str | None = None
    try:
        block = allocate()
    except Exception as exc:  # whatever a package raises, every rank must hear of it
        error = f"{type(exc).__name__}: {exc!s}" if str(exc) else repr(exc)
    for rank, text in enumerate(group.gather("symmetric allocation", error)):
        if text is not None:
            if block is not None and release is not None:
                release(block)
            asked, free = wants[rank]
            raise SymmetricMemoryError(
                f"symmetric memory: rank {rank} asked for {asked} bytes with {free} free and "
                f"failed: {text}; {LESS_MEMORY}"
            )
    return block
