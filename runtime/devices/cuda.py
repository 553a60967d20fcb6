"""Device ``cuda``: images loaded and launched through the CUDA driver, on the caller's stream."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.tensor_maps import TensorMapSpec
from megamoe.runtime.devices.base import Allocation
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.errors import LaunchRefused, UnsupportedDevice

ALIGNMENT = 1024
CAPABILITY = {"sm_90a": (9, 0), "sm_100a": (10, 0)}
"""Compute capability that runs an architecture-specific image; no other does."""


class CudaDevice:
    """One GPU, or one PE's share of it (see ``devices/base.py`` for the interface).

    Args:
        index: CUDA device number.
        driver: None uses the installed driver.
        sharers: PEs that run on this GPU at the same time. With more than one, each may use
            ⌊resident CTAs / sharers⌋ and launches are not cooperative: cooperative grids of one
            context may be run one after the other, but these wait for each other.
        memory: where buffers are allocated; None is this GPU.
        stream: returns the stream to launch on; None is torch's current stream of this GPU.

    Raises:
        DriverMissing: no driver. UnsupportedDevice: the GPU cannot launch cooperatively.
    """

    def __init__(
        self,
        index: int,
        *,
        driver: Driver | None = None,
        sharers: int = 1,
        memory: torch.device | None = None,
        stream: Callable[[], int] | None = None,
    ):
        if sharers < 1:
            raise ValueError(f"sharers={sharers}: must be at least 1")
        self.index, self.sharers = index, sharers
        self.driver = driver or Driver()
        self.handle = self.driver.device(index)
        self.memory = memory or torch.device("cuda", index)
        self.name = self.driver.device_name(self.handle)
        self.capability = (
            self.driver.attribute(self.handle, "COMPUTE_CAPABILITY_MAJOR"),
            self.driver.attribute(self.handle, "COMPUTE_CAPABILITY_MINOR"),
        )
        self.sms = self.driver.attribute(self.handle, "MULTIPROCESSOR_COUNT")
        self.smem_limit = self.driver.attribute(self.handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        if not self.driver.attribute(self.handle, "COOPERATIVE_LAUNCH"):
            raise UnsupportedDevice(f"GPU {index} ({self.name}): cannot launch cooperatively")
        self.launches = 0
        self._context = self.driver.primary_context(self.handle)
        self._context_address = int(self._context)
        self._stream = stream or self._current_stream
        self._allocations: list[Allocation] = []

    def _current_stream(self) -> int:
        return torch.cuda.current_stream(self.index).cuda_stream

    # --- memory ---------------------------------------------------------------------------------

    def allocate(self, nbytes: int, name: str) -> Allocation:
        """Torch's memory of this GPU, so that its accounting and out-of-memory texts hold."""
        raw_N = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=self.memory)
        skip = -raw_N.data_ptr() % ALIGNMENT
        return self._keep(raw_N[skip : skip + nbytes])

    def allocate_shared(self, nbytes: int, name: str) -> Allocation:
        """Page-locked host memory: with unified addressing the GPU uses the same address."""
        pinned = self.memory.type == "cuda"
        return self._keep(torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned))

    def _keep(self, bytes_N: torch.Tensor) -> Allocation:
        allocation = Allocation(bytes_N.data_ptr(), bytes_N)
        self._allocations.append(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        self._allocations = [kept for kept in self._allocations if kept is not allocation]

    def address_of(self, tensor: torch.Tensor, name: str, *, keep: bool = False) -> int:
        return tensor.data_ptr()

    def forget(self, address: int) -> None:
        """The caller's tensor keeps itself alive."""

    # --- code -----------------------------------------------------------------------------------

    @contextmanager
    def guard(self) -> Iterator[None]:
        """This GPU's context is current inside, whatever the caller's is (CASES J7)."""
        if self.driver.current_context() == self._context_address:
            yield
            return
        self.driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self.driver.call("cuCtxPopCurrent")

    def encode_tensor_map(self, spec: TensorMapSpec, address: int) -> bytes:
        return self.driver.encode_tensor_map(spec, address)

    def check(self, image: Image) -> None:
        """Refuse what this GPU cannot run.

        Raises:
            UnsupportedDevice: another architecture, or too little shared memory.
        """
        needed = CAPABILITY.get(image.arch)
        if needed != self.capability:
            found = ".".join(map(str, self.capability))
            wanted = ".".join(map(str, needed)) if needed else "none known"
            raise UnsupportedDevice(
                f"GPU {self.index} ({self.name}) has compute capability {found}, the kernel "
                f"{image.arch} needs {wanted}; megamoe.classical runs on any GPU"
            )
        if image.smem_bytes > self.smem_limit:
            raise UnsupportedDevice(
                f"GPU {self.index} ({self.name}) gives a CTA {self.smem_limit} bytes of shared "
                f"memory, the kernel needs {image.smem_bytes}; use fewer stages or ring slots"
            )

    def largest_grid(self, image: Image) -> int:
        """CTAs of an image that one PE may launch here."""
        with self.guard():
            _, function = _loaded(self, image)
            cluster = image.config.cluster_size
            if cluster > 1:
                config = self._launch_config(image, cluster)
                resident = cluster * self.driver.resident_clusters(function, config)
            else:
                per_sm = self.driver.resident_ctas(function, image.threads, image.smem_bytes)
                resident = per_sm * self.sms
        return resident // self.sharers

    def _launch_config(self, image: Image, grid: int) -> Any:
        return self.driver.launch_config(
            grid=grid,
            threads=image.threads,
            smem_bytes=image.smem_bytes,
            cooperative=self.sharers == 1,
            cluster=image.config.cluster_size,
        )

    def prepare(self, image: Image, *, grid: int) -> CudaLaunch:
        self.check(image)
        limit = self.largest_grid(image)
        if not 1 <= grid <= limit:
            shared = f", shared by {self.sharers} PEs" if self.sharers > 1 else ""
            raise LaunchRefused(
                f"grid={grid}: GPU {self.index} ({self.name}) holds 1 to {limit} CTAs of this "
                f"kernel at once ({self.sms} SMs{shared}); waits between CTAs need all resident"
            )
        if grid % image.config.cluster_size:
            raise LaunchRefused(
                f"grid={grid}: must be a multiple of {image.config.cluster_size}, the CTAs of a "
                "cluster of this kernel"
            )
        with self.guard():
            _, function = _loaded(self, image)
        config = self._launch_config(image, grid)
        return CudaLaunch(self, image, function, config)

    def synchronize(self) -> None:
        with self.guard():
            self.driver.call("cuCtxSynchronize")


class CudaLaunch:
    """One image on one GPU. Not for use by several threads at once."""

    def __init__(self, device: CudaDevice, image: Image, function: Any, config: Any):
        self._device, self._driver = device, device.driver
        self._function, self._config = function, config
        last = image.parameters[-1]
        self._nbytes = last.offset + last.nbytes
        self._block = ctypes.create_string_buffer(self._nbytes)
        self._address = ctypes.addressof(self._block)
        self._pointers = (ctypes.c_void_p * len(image.parameters))(
            *[self._address + parameter.offset for parameter in image.parameters]
        )
        self._parameters = ctypes.addressof(self._pointers)
        self._stream = -1

    def __call__(self, block: bytes) -> None:
        """The driver copies the parameters before it returns, also while a graph is captured."""
        device = self._device
        if len(block) != self._nbytes:
            raise ValueError(f"block: {len(block)} bytes, the kernel takes {self._nbytes}")
        ctypes.memmove(self._address, block, self._nbytes)
        stream = device._stream()
        if stream != self._stream:
            self._config.hStream = self._driver.api.CUstream(stream)
            self._stream = stream
        if self._driver.current_context() == device._context_address:
            self._driver.launch(self._config, self._function, self._parameters)
        else:
            with device.guard():
                self._driver.launch(self._config, self._function, self._parameters)
        device.launches += 1


_LOADED: dict[tuple[Any, int, bytes, str], tuple[Any, Any]] = {}
_LOADED_LOCK = threading.Lock()


def _loaded(device: CudaDevice, image: Image) -> tuple[Any, Any]:
    """(module, function) of an image on a GPU, loaded once a GPU. Its context is current."""
    key = (device.driver.api, device.index, image.cubin, image.entry)
    with _LOADED_LOCK:
        if key not in _LOADED:
            _LOADED[key] = device.driver.load_function(image.cubin, image.entry, image.smem_bytes)
        return _LOADED[key]
