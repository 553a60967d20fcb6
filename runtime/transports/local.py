"""Transport ``local``: all PEs live in this process, so a peer's address is just an address."""

from collections.abc import Sequence

from megamoe.runtime.devices.base import Device
from megamoe.runtime.transports.base import SymmetricBlock


def allocate_symmetric(devices: Sequence[Device], nbytes: int) -> list[SymmetricBlock]:
    """A block of ``nbytes`` on every PE's device, known to all."""
    blocks = [device.allocate(nbytes, "symmetric") for device in devices]
    peers = tuple(block.address for block in blocks)
    return [SymmetricBlock(block, peers) for block in blocks]


class LocalTransport:
    """A group of one PE (see ``transports/base.py``)."""

    name = "local"

    def __init__(self, device: Device):
        self._device = device

    def allocate(self, nbytes: int) -> SymmetricBlock:
        return allocate_symmetric([self._device], nbytes)[0]

    def free(self, block: SymmetricBlock) -> None:
        self._device.free(block.allocation)

    def close(self) -> None:
        """Nothing beyond the blocks."""
