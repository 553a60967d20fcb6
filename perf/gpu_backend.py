"""What the GPU check needs from the machine: a real GPU, or a recording one for ``--dry``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from megamoe.runtime.cache import ImageCache
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.devices.recording import RecordingApi

FLUSH_BYTES = 256 << 20
"""Written before a timed call, so that weights come from memory, not from a warm L2."""


class RealBackend:
    """One CUDA GPU."""

    dry = False

    def __init__(self, images: ImageCache):
        self.images = images
        self.driver = Driver()
        self.memory = torch.device("cuda", torch.cuda.current_device())
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.memory)

    def describe(self) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(self.memory)
        return {
            "gpu": found.name,
            "sms": found.multi_processor_count,
            "memory_gib": round(found.total_memory / 2**30, 1),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "driver": self.driver.call("cuDriverGetVersion"),
        }

    def devices(self, count: int) -> list[CudaDevice]:
        """``count`` PEs on this GPU, a stream each."""
        streams = [torch.cuda.Stream(self.memory) for _ in range(count)]
        return [
            CudaDevice(
                self.memory.index,
                driver=self.driver,
                sharers=count,
                stream=lambda stream=stream: stream.cuda_stream,
            )
            for stream in streams
        ]

    def whole_device(self) -> CudaDevice:
        """The GPU for one PE, launching on torch's current stream."""
        return CudaDevice(self.memory.index, driver=self.driver)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.memory)

    def delay(self, device: CudaDevice, cycles: int) -> None:
        """Keep a PE's stream busy for some cycles."""
        with torch.cuda.stream(torch.cuda.ExternalStream(device._stream(), self.memory)):
            torch.cuda._sleep(cycles)

    def capture(self, call: Callable[[], Any]) -> Callable[[], None]:
        """A CUDA graph of ``call``; returns its replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def time_us(self, call: Callable[[], Any], *, repeats: int = 20, flush: bool = True) -> float:
        """Median time of a call on the GPU, by events, after three calls to warm up."""
        for _ in range(3):
            call()
        times = []
        for _ in range(repeats):
            if flush:
                self._flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times)


class DryBackend:
    """Everything but the driver: buffers on the CPU, launches recorded, nothing computed."""

    dry = True

    def __init__(self, images: ImageCache):
        self.images = images
        self.api = RecordingApi(verify="first")
        self.api.keep_calls = False  # launches of several signatures: none is kept
        self.driver = Driver(self.api)
        self.memory = torch.device("cpu")

    def describe(self) -> dict[str, Any]:
        return {"gpu": "none (dry run)", "sms": 132, "torch": torch.__version__}

    def devices(self, count: int) -> list[CudaDevice]:
        return [self._device(sharers=count, stream=index + 1) for index in range(count)]

    def whole_device(self) -> CudaDevice:
        return self._device(sharers=1, stream=1)

    def _device(self, *, sharers: int, stream: int) -> CudaDevice:
        return CudaDevice(
            0, driver=self.driver, sharers=sharers, memory=self.memory, stream=lambda: stream
        )

    def synchronize(self) -> None:
        """Nothing runs."""

    def delay(self, device: CudaDevice, cycles: int) -> None:
        """Nothing runs."""

    def capture(self, call: Callable[[], Any]) -> Callable[[], None]:
        call()
        return lambda: None

    def time_us(self, call: Callable[[], Any], *, repeats: int = 20, flush: bool = True) -> float:
        """Host time of one call: no figure of any GPU."""
        started = time.perf_counter()
        call()
        return (time.perf_counter() - started) * 1e6


Backend = RealBackend | DryBackend
