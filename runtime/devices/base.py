"""What a session needs from a device."""

from dataclasses import dataclass
from typing import Protocol

import torch

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.tensor_maps import TensorMapSpec


@dataclass(frozen=True)
class Allocation:
    """Device memory: ``address`` as kernels see it, ``bytes_N`` a uint8 tensor over it."""

    address: int
    bytes_N: torch.Tensor


class Launch(Protocol):
    """An image made ready for one grid on one device; calling it enqueues one launch."""

    def __call__(self, block: bytes) -> None: ...


class Device(Protocol):
    """One PE's device. Memory handed out is not cleared; tests poison it."""

    def allocate(self, nbytes: int, name: str) -> Allocation:
        """``nbytes`` of device memory, 1024-byte aligned."""
        ...

    def allocate_shared(self, nbytes: int, name: str) -> Allocation:
        """Memory that kernels write and the host reads without waiting for anything."""
        ...

    def free(self, allocation: Allocation) -> None:
        """Give memory back; touching it afterwards is an error."""
        ...

    def address_of(self, tensor: torch.Tensor, name: str, *, keep: bool = False) -> int:
        """Address of a caller's tensor, for the next launch or (``keep``) for good."""
        ...

    def forget(self, address: int) -> None:
        """End the validity of an address that was asked for with ``keep``."""
        ...

    def encode_tensor_map(self, spec: TensorMapSpec, address: int) -> bytes:
        """The 128 bytes of a tensor map of bf16 at ``address``."""
        ...

    def prepare(self, image: Image, *, grid: int) -> Launch:
        """Load the code and check that ``grid`` CTAs can be resident at once.

        Raises:
            MegaMoEError: they cannot, or the device cannot run the image.
        """
        ...

    def synchronize(self) -> None:
        """Wait for everything enqueued here. Setup and error paths only."""
        ...
