"""Transport ``local``: all PEs live in this process, so a peer's address is just an address."""

from collections.abc import Sequence
from dataclasses import dataclass

from megamoe.runtime.devices.base import Allocation, Device


@dataclass(frozen=True)
class SymmetricBlock:
    """One PE's block of symmetric memory and the addresses of all PEs' blocks, own included."""

    allocation: Allocation
    peers: tuple[int, ...]


def allocate_symmetric(devices: Sequence[Device], nbytes: int) -> list[SymmetricBlock]:
    """A block of ``nbytes`` on every PE's device, known to all."""
    blocks = [device.allocate(nbytes, "symmetric") for device in devices]
    peers = tuple(block.address for block in blocks)
    return [SymmetricBlock(block, peers) for block in blocks]
