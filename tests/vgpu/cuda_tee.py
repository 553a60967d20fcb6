"""A vgpu device that also launches on a recording ``cuda`` device, with the same block."""

from __future__ import annotations

from typing import Any

import torch

from megamoe.cute_kernels.image import Image
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.devices.recording import RecordingApi
from megamoe.runtime.devices.vgpu import VgpuDevice


class TeeDevice(VgpuDevice):
    """``interpreted`` holds what the vgpu world was given, ``api.launches`` what the driver was."""

    def __init__(self, world: Any, pe: int, roles: Any = None):
        super().__init__(world, pe, roles)
        self.api = RecordingApi()
        self.interpreted: list[dict[str, Any]] = []
        self.cuda = CudaDevice(
            0, driver=Driver(self.api), memory=torch.device("cpu"), stream=lambda: 1
        )

    def prepare(self, image: Image, *, grid: int) -> Any:
        self.api.parameter_bytes = tuple(parameter.nbytes for parameter in image.parameters)
        launches = (self.cuda.prepare(image, grid=grid), super().prepare(image, grid=grid))
        world_launch = self.world.launch

        def recorded(**arguments: Any) -> Any:
            if arguments["pe"] == self.pe:
                self.interpreted.append(arguments)
            return world_launch(**arguments)

        self.world.launch = recorded

        def launch(block: bytes) -> None:
            for each in launches:
                each(block)

        return launch
