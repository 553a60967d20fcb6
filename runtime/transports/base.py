"""What a session needs from a transport: memory that every PE of the group can address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megamoe.runtime.devices.base import Allocation


@dataclass(frozen=True)
class SymmetricBlock:
    """One PE's block of symmetric memory and the addresses of all PEs' blocks, own included."""

    allocation: Allocation
    peers: tuple[int, ...]


class Transport(Protocol):
    """One PE's side. All three calls are collective over the group, in the same order."""

    name: str

    def allocate(self, nbytes: int) -> SymmetricBlock:
        """``nbytes`` on every PE, 256-byte aligned, and where each lies for this PE.

        Raises:
            TransportError: alike on every rank.
        """
        ...

    def free(self, block: SymmetricBlock) -> None:
        """Give a block back; no PE may have a launch in flight that uses it."""
        ...

    def close(self) -> None:
        """End what the transport itself holds; blocks still allocated end with the process."""
        ...
