"""Device ``vgpu``: images run as interpreted PTX on the CPU. For testing, not for serving."""

import functools
from collections.abc import Mapping

import torch

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.tensor_maps import TensorMapSpec
from megamoe.runtime.devices.base import Allocation
from megamoe.runtime.launch import split_block
from megamoe.runtime.vgpu.kernel import Kernel
from megamoe.runtime.vgpu.tensormap import TensorMapDesc
from megamoe.runtime.vgpu.world import World


@functools.lru_cache(maxsize=8)
def _decoded(ptx: str) -> Kernel:
    """Decoding takes longer than a small run, and a decoded kernel tens of megabytes."""
    return Kernel.from_ptx(ptx)


def kernel_of(image: Image) -> Kernel:
    """The decoded kernel of an image, kept while it is among the last few used."""
    return _decoded(image.ptx)


class VgpuDevice:
    """One PE of a vgpu world (see ``devices/base.py`` for the interface).

    Args:
        world: the world; ``world.run()`` executes what was launched on all its PEs.
        pe: this PE.
        roles: warp → role name, for reports.
    """

    def __init__(self, world: World, pe: int, roles: Mapping[int, str] | None = None):
        self.world, self.pe, self.roles = world, pe, dict(roles or {})
        self.launches = 0
        self._allocations: list[Allocation] = []
        self._callers: dict[str, int] = {}

    def allocate(self, nbytes: int, name: str) -> Allocation:
        address = self.world.alloc(nbytes, name=name, pe=self.pe)
        allocation = Allocation(address, torch.from_numpy(self.world.bytes_at(address)))
        self._allocations.append(allocation)
        return allocation

    def allocate_shared(self, nbytes: int, name: str) -> Allocation:
        return self.allocate(nbytes, name)

    def free(self, allocation: Allocation) -> None:
        self._allocations.remove(allocation)
        self.world.unregister(allocation.address)

    def address_of(self, tensor: torch.Tensor, name: str, *, keep: bool = False) -> int:
        """Address of a caller's tensor, or of a view of memory allocated here. Unless ``keep``,
        the tensor that had the name before stops being addressable: a kernel that kept a stale
        pointer faults."""
        if tensor.numel() == 0:
            return 0
        for allocation in self._allocations:
            offset = tensor.data_ptr() - allocation.bytes_N.data_ptr()
            if 0 <= offset < allocation.bytes_N.numel():
                return allocation.address + offset
        if keep:
            return self.world.register(tensor, name=name, pe=self.pe)
        # By address: one tensor may be passed under two names, as x and residual.
        if name in self._callers:
            self.world.unregister(self._callers.pop(name))
        self._callers[name] = self.world.register(tensor, name=name, pe=self.pe)
        return self._callers[name]

    def forget(self, address: int) -> None:
        if address:
            self.world.unregister(address)

    def encode_tensor_map(self, spec: TensorMapSpec, address: int) -> bytes:
        return TensorMapDesc(
            address=address,
            dtype="bf16",
            dims=spec.dims,
            strides_bytes=spec.strides,
            box=spec.box,
            swizzle=spec.swizzle,
        ).to_bytes()

    def prepare(self, image: Image, *, grid: int) -> "VgpuLaunch":
        return VgpuLaunch(self, image, grid)

    def synchronize(self) -> None:
        """Nothing runs outside ``world.run()``."""


class VgpuLaunch:
    """One image on one PE (see ``devices/base.py``)."""

    def __init__(self, device: VgpuDevice, image: Image, grid: int):
        self._device, self._image, self._grid = device, image, grid
        self._kernel = kernel_of(image)

    def __call__(self, block: bytes) -> None:
        self._device.world.launch(
            pe=self._device.pe,
            kernel=self._kernel,
            grid=(self._grid, 1, 1),
            block=(self._image.threads, 1, 1),
            cluster=(self._image.config.cluster_size, 1, 1),
            smem=self._image.smem_bytes,
            args=split_block(self._image, block),
            roles=self._device.roles,
        )
        self._device.launches += 1
