"""Transport ``local``: all PEs live in this process, so a peer's address is just an address."""

from collections.abc import Sequence

from megamoe.runtime.devices.base import Device
from megamoe.runtime.transports.base import SymmetricBlock


def allocate_symmetric(devices: Sequence[Device], nbytes: int) -> list[SymmetricBlock]:
    """A block of ``nbytes`` on every PE's device, known to all."""
    blocks = [device.allocate(nbytes, "symmetric") for device in devices]
    peers = tuple(block.address for block in blocks)
    return [SymmetricBlock(block, peers) for block in blocks]
