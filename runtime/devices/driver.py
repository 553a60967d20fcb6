"""The CUDA driver through cuda-python: every call checked, every failure named.

``Driver(api)`` takes the module to call, so that tests and dry runs pass a recording one
(``recording.py``) through the same code.
"""

from __future__ import annotations

import ctypes
from typing import Any

from megamoe.cute_kernels.tensor_maps import TensorMapSpec
from megamoe.cute_kernels.workspace import TENSOR_MAP_BYTES
from megamoe.runtime.errors import DriverError, DriverMissing


class Driver:
    """Typed, checked driver calls.

    Args:
        api: a module with the functions, structures and enumerations of
            ``cuda.bindings.driver``; None imports that one.

    Raises:
        DriverMissing: cuda-python or the driver is not installed.
    """

    def __init__(self, api: Any = None):
        if api is None:
            try:
                from cuda.bindings import driver
            except ImportError as error:
                raise DriverMissing(f"cuda-python is not installed: {error}") from error
            api = driver
        self.api = api
        self._success = api.CUresult.CUDA_SUCCESS
        try:
            self.call("cuInit", 0)
        except DriverError:
            raise
        except Exception as error:  # cuda-python's own type for "no driver library found"
            raise DriverMissing(
                f"no CUDA driver on this machine ({error}); megamoe.testing runs kernels without "
                "one, and MegaMoE computes CPU tensors with the reference"
            ) from error
        self._launch = api.cuLaunchKernelEx
        self._current = api.cuCtxGetCurrent

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; returns its outputs (one bare, none as None).

        Raises:
            DriverError: it did not return success.
        """
        status, *outputs = getattr(self.api, name)(*arguments)
        if status != self._success:
            raise self._error(name, status)
        if not outputs:
            return None
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _error(self, name: str, status: Any) -> DriverError:
        _, text = self.api.cuGetErrorString(status)
        described = text.decode() if isinstance(text, bytes) else str(text)
        return DriverError(f"{name}: {getattr(status, 'name', status)}: {described}")

    # --- device and context ---------------------------------------------------------------------

    def device(self, index: int) -> Any:
        """Handle of GPU ``index``."""
        return self.call("cuDeviceGet", index)

    def attribute(self, device: Any, name: str) -> int:
        """A ``CU_DEVICE_ATTRIBUTE_…`` by the rest of its name."""
        attribute = getattr(self.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, device))

    def device_name(self, device: Any) -> str:
        return self.call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()

    def primary_context(self, device: Any) -> Any:
        """The context that torch uses too; retained once for each call."""
        return self.call("cuDevicePrimaryCtxRetain", device)

    def current_context(self) -> int:
        """Address of this thread's context, 0 = none."""
        status, context = self._current()
        if status != self._success:
            raise self._error("cuCtxGetCurrent", status)
        return int(context)

    # --- code -----------------------------------------------------------------------------------

    def load_function(self, cubin: bytes, entry: str, smem_bytes: int) -> tuple[Any, Any]:
        """(module, function) of a cubin in the current context, allowed ``smem_bytes``."""
        module = self.call("cuModuleLoadData", cubin)
        function = self.call("cuModuleGetFunction", module, entry.encode())
        attribute = self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.call("cuFuncSetAttribute", function, attribute, smem_bytes)
        return module, function

    def resident_ctas(self, function: Any, threads: int, smem_bytes: int) -> int:
        """CTAs of a function that fit one SM at once."""
        name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
        return int(self.call(name, function, threads, smem_bytes))

    def resident_clusters(self, function: Any, config: Any) -> int:
        """Clusters of a launch configuration that fit the GPU at once."""
        return int(self.call("cuOccupancyMaxActiveClusters", function, config))

    def launch_config(
        self, *, grid: int, threads: int, smem_bytes: int, cooperative: bool, cluster: int = 1
    ) -> Any:
        """A reusable launch configuration; its stream is set before every launch."""
        api = self.api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = smem_bytes
        attributes = []
        if cooperative:
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = api.CUlaunchAttribute()
            attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attributes.append(attribute)
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config

    def launch(self, config: Any, function: Any, parameters: int) -> None:
        """Enqueue a launch; ``parameters`` is the address of an array of parameter addresses."""
        status = self._launch(config, function, parameters, 0)[0]
        if status != self._success:
            raise self._error("cuLaunchKernelEx", status)

    # --- tensor maps ----------------------------------------------------------------------------

    def encode_tensor_map(self, spec: TensorMapSpec, address: int) -> bytes:
        """``cuTensorMapEncodeTiled`` for bf16, zeros out of bounds."""
        api = self.api
        wide, narrow = api.cuuint64_t, api.cuuint32_t
        tensor_map = self.call(
            "cuTensorMapEncodeTiled",
            api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            len(spec.dims),
            address,
            [wide(size) for size in spec.dims],
            [wide(stride) for stride in spec.strides],
            [narrow(size) for size in spec.box],
            [narrow(1) for _ in spec.dims],
            api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(api.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{spec.swizzle}B"),
            api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return ctypes.string_at(tensor_map.getPtr(), TENSOR_MAP_BYTES)
