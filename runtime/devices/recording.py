"""A stand-in for ``cuda.bindings.driver`` that records every call: for tests and dry runs.

Structures and enumerations are the installed package's own. Where there is no driver, every call is
first made for real: the package converts and checks the arguments and then fails for want of the
driver, so a wrong type or number of arguments is found without a GPU.
"""

from __future__ import annotations

import ctypes
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megamoe.cute_kernels.abi import PARAMETERS, WGRAD_PARAMETERS
from megamoe.cute_kernels.image import Image, Parameter

H200 = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "COOPERATIVE_LAUNCH": 1,
}
WGRAD_ENTRY = "megamoe_wgrad"
ATTRIBUTE = "CU_DEVICE_ATTRIBUTE_"


@dataclass(frozen=True)
class RecordedLaunch:
    """What one ``cuLaunchKernelEx`` was given; ``parameters`` as the driver would copy them."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    stream: int
    context: int
    attributes: dict[str, Any]
    parameters: list[bytes]
    entry: str


@dataclass
class RecordingApi:
    """Functions answer as a machine with ``devices`` like the one described would.

    Args:
        attributes: device attributes by name; the default describes an H200.
        resident_ctas: what the occupancy query answers.
        parameter_bytes: sizes of the kernels' parameters, to copy them at a launch.
        entry_bytes: the same for kernels that differ, by entry name.
        failures: function name → name of the ``CUresult`` to fail with.
        verify: "all" or "first" checks all calls or the first of each function against the
            installed package; "none" none.
        on_launch: called with every launch.
    """

    attributes: dict[str, int] = field(default_factory=lambda: dict(H200))
    devices: int = 2
    resident_ctas: int = 1
    parameter_bytes: tuple[int, ...] = ()
    entry_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    verify: str = "all"
    on_launch: Callable[[RecordedLaunch], None] | None = None

    def __post_init__(self) -> None:
        from cuda.bindings import driver

        self.real = driver
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.counts: Counter[str] = Counter()
        self.launches: list[RecordedLaunch] = []
        self.keep_calls = True
        self._entries: dict[int, str] = {}
        self._contexts = [0]
        self._has_driver = driver_present(driver)

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.__dict__["real"], name)
        if not name.startswith("cu") or inspect.isclass(real):
            return real

        def function(*arguments: Any) -> tuple[Any, ...]:
            return self._call(name, real, arguments)

        self.__dict__[name] = function
        return function

    def _call(self, name: str, real: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.counts[name] += 1
        if self.keep_calls:
            self.calls.append((name, arguments))
        if self.verify == "all" or (self.verify == "first" and self.counts[name] == 1):
            self._verify(name, real, arguments)
        if name in self.failures:
            failed = getattr(self.real.CUresult, self.failures[name])
            return (failed, b"") if name == "cuGetErrorString" else (failed,)
        outputs = getattr(self, f"_{name}", self._nothing)(*arguments)
        return (self.real.CUresult.CUDA_SUCCESS, *outputs)

    def _verify(self, name: str, real: Any, arguments: tuple[Any, ...]) -> None:
        inspect.signature(real).bind(*arguments)
        if self._has_driver:
            return
        try:
            real(*arguments)
        except Exception as error:
            if "driver library" not in str(error):
                raise

    def _nothing(self, *arguments: Any) -> tuple[Any, ...]:
        return ()

    def _cuGetErrorString(self, status: Any) -> tuple[Any, ...]:
        return (f"text of {status.name}".encode(),)

    def _cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return (self.real.CUdevice(index),)

    def _cuDeviceGetName(self, length: int, device: Any) -> tuple[Any, ...]:
        return (b"recording GPU\0",)

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        return (self.attributes[attribute.name.removeprefix(ATTRIBUTE)],)

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any, ...]:
        return (self.real.CUcontext(0x1000 + int(device)),)

    def _cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return (self.real.CUcontext(self._contexts[-1]),)

    def _cuCtxPushCurrent(self, context: Any) -> tuple[Any, ...]:
        self._contexts.append(int(context))
        return ()

    def _cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return (self.real.CUcontext(self._contexts.pop()),)

    def _cuModuleLoadData(self, image: Any) -> tuple[Any, ...]:
        return (self.real.CUmodule(0x2000 + self.counts["cuModuleLoadData"]),)

    def _cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:
        function = self.real.CUfunction(0x3000 + int(module))
        self._entries[int(function)] = name.decode()
        return (function,)

    def _cuOccupancyMaxActiveClusters(self, function: Any, config: Any) -> tuple[Any, ...]:
        (size,) = [
            attribute.value.clusterDim.x
            for attribute in config.attrs
            if attribute.id.name.endswith("CLUSTER_DIMENSION")
        ]
        sms = self.attributes["MULTIPROCESSOR_COUNT"]
        return (self.resident_ctas * sms // size,)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *arguments: Any) -> tuple[Any, ...]:
        return (self.resident_ctas,)

    def _cuTensorMapEncodeTiled(self, *arguments: Any) -> tuple[Any, ...]:
        tensor_map = self.real.CUtensorMap()
        number = self.counts["cuTensorMapEncodeTiled"]
        tensor_map.opaque = [self.real.cuuint64_t(number)] * 16
        return (tensor_map,)

    def _cuLaunchKernelEx(
        self, config: Any, function: Any, parameters: int, extra: int
    ) -> tuple[Any, ...]:
        entry = self._entries[int(function)]
        sizes = self.entry_bytes.get(entry, self.parameter_bytes)
        pointers = (ctypes.c_void_p * len(sizes)).from_address(parameters)
        attributes: dict[str, Any] = {}
        for attribute in config.attrs[: config.numAttrs]:
            name = attribute.id.name.removeprefix("CU_LAUNCH_ATTRIBUTE_")
            size = attribute.value.clusterDim
            cluster = (size.x, size.y, size.z)
            attributes[name] = cluster if "CLUSTER" in name else attribute.value.cooperative
        launch = RecordedLaunch(
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ),
            block=(config.blockDimX, config.blockDimY, config.blockDimZ),
            smem_bytes=config.sharedMemBytes,
            stream=int(config.hStream),
            context=self._contexts[-1],
            attributes=attributes,
            parameters=[
                ctypes.string_at(pointer, nbytes)
                for pointer, nbytes in zip(pointers, sizes, strict=True)
            ],
            entry=entry,
        )
        if self.keep_calls:
            self.launches.append(launch)
        if self.on_launch is not None:
            self.on_launch(launch)
        return ()


def stub_image(
    smem_bytes: int = 231552, arch: str = "sm_90a", entry: str = "megamoe_forward"
) -> Image:
    """An image without code for recorded launches, with the signature of the wgrad kernel if
    ``entry`` is ``"megamoe_wgrad"``, else of the forward kernel."""
    parameters, offset = [], 0
    table = WGRAD_PARAMETERS if entry == WGRAD_ENTRY else PARAMETERS
    for name, width, _ in table:
        nbytes = int(width[1:]) // 8
        offset = -(-offset // nbytes) * nbytes
        parameters.append(Parameter(name, nbytes, offset))
        offset += nbytes
    return Image(
        entry=entry,
        arch=arch,
        ptx="",
        cubin=b"\x7fELF stub " + entry.encode(),
        parameters=tuple(parameters),
        threads=384,
        smem_bytes=smem_bytes,
        registers=168,
        spill_bytes=0,
        setmaxnreg=(),
        mma_instructions={},
        notes=(),
        compile_seconds=0.0,
    )


def driver_present(driver: Any) -> bool:
    """True if ``cuda.bindings.driver`` finds a driver on this machine."""
    try:
        driver.cuInit(0)
    except Exception:
        return False
    return True
