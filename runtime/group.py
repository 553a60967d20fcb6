"""The ranks of an expert-parallel group, for setup only: gather values, agree, fail alike.

A PE is a rank **in the group**, not in the world (CASES X11). Nothing here runs in steady state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from megamoe.runtime.errors import MegaMoEError


class Group(Protocol):
    """The ranks that share a layer."""

    rank: int
    size: int

    def gather(self, what: str, value: Any) -> list[Any]:
        """Everybody's ``value`` in rank order. Collective; ``what`` names it in errors."""
        ...


class SoloGroup:
    """A group of one process."""

    rank = 0
    size = 1

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value]


class DistGroup:
    """A ``torch.distributed`` process group.

    Args:
        process_group: None is the default group.

    Raises:
        MegaMoEError: torch.distributed is not initialised, or this rank is not in the group.
    """

    def __init__(self, process_group: Any = None):
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise MegaMoEError(
                "torch.distributed is not initialised: call init_process_group() first, or use a "
                "config with num_pes=1"
            )
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.rank < 0:
            raise MegaMoEError(f"rank {dist.get_rank()} of the world is not in this group")
        self.global_ranks = tuple(dist.get_process_group_ranks(self.process_group))

    def gather(self, what: str, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self.process_group)
        except (RuntimeError, ValueError) as error:
            raise MegaMoEError(
                f"exchanging the {what} of {self.size} ranks failed on rank {self.rank}: a rank is "
                f"missing or has failed: {error}"
            ) from error
        return values


def group_of(process_group: Any, *, num_pes: int) -> Group:
    """The group of a layer; one process needs no torch.distributed.

    Raises:
        ValueError: the group has another size than ``num_pes``. MegaMoEError: as ``DistGroup``.
    """
    if process_group is None and num_pes == 1:
        return SoloGroup()
    group = DistGroup(process_group)
    if group.size != num_pes:
        raise ValueError(f"num_pes={num_pes}: must be the size of the group, {group.size}")
    return group


def agree(group: Group, values: Mapping[str, Any]) -> None:
    """Refuse, alike on every rank, values that differ between ranks.

    Raises:
        ValueError: names the first that differs, and two ranks with their values.
    """
    gathered = group.gather("settings", dict(values))
    for name in values:
        first = gathered[0].get(name)
        for rank, other in enumerate(gathered):
            if other.get(name) != first:
                raise ValueError(
                    f"{name}: rank 0 has {first!r}, rank {rank} has {other.get(name)!r}; must be "
                    "the same on every rank"
                )


def fail_alike(group: Group, what: str, error: Exception | None) -> None:
    """Raise on every rank if any rank has an error: its own there, the first one's elsewhere.

    Raises:
        MegaMoEError, or ``error`` itself.
    """
    texts = group.gather(what, None if error is None else f"{type(error).__name__}: {error}")
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return
    if error is not None:
        raise error
    raise MegaMoEError(f"{what} failed on rank {failed[0]}: {texts[failed[0]]}")


def barrier(group: Group, what: str) -> None:
    """Wait for every rank."""
    group.gather(what, None)


def free_bytes(device: torch.device) -> int:
    """Bytes a GPU has left; no limit on the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62
