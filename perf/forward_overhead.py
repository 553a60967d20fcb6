"""Host time of one ``MegaMoE.forward`` up to the driver's launch call, which is recorded, not made.

Prints one JSON line: medians in microseconds, and the multiple of an empty ``nn.Module`` call.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megamoe import MegaMoE, MoEConfig, Session
from megamoe.runtime.cache import ImageCache
from megamoe.runtime.devices.cuda import CudaDevice
from megamoe.runtime.devices.driver import Driver
from megamoe.runtime.devices.recording import RecordingApi, stub_image

CALLS = 2000


class Empty(nn.Module):
    """What any module call costs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def median_us(call: Callable[[], Any], calls: int) -> float:
    """Median over single calls."""
    times = []
    for _ in range(calls):
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1e3


def measure(calls: int = CALLS) -> dict[str, float]:
    """Medians of the layer and of an empty module in the same run."""
    cfg = MoEConfig(
        hidden=512, intermediate=64, num_experts=8, top_k=4, num_pes=1, max_tokens=64,
        invalid_ids="mask",
    )  # fmt: skip
    api = RecordingApi(verify="first")
    device = CudaDevice(0, driver=Driver(api), memory=torch.device("cpu"), stream=lambda: 1)
    api._contexts = [device._context_address]  # as torch leaves it on a GPU machine
    api.parameter_bytes = tuple(parameter.nbytes for parameter in stub_image().parameters)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        cache = ImageCache(folder, compile=lambda **what: stub_image())
        layer = MegaMoE(
            cfg,
            torch.zeros(8, *cfg.w13_shape, dtype=torch.bfloat16),
            torch.zeros(8, *cfg.w2_shape, dtype=torch.bfloat16),
            session=Session(cfg, device=device, cache=cache),
        )
        x = torch.zeros(16, cfg.hidden, dtype=torch.bfloat16)
        ids = torch.zeros(16, cfg.top_k, dtype=torch.int32)
        weights = torch.zeros(16, cfg.top_k)
        out = torch.empty_like(x)
        layer(x, ids, weights, out=out)
        # The recording itself must not be timed.
        api.keep_calls, api.parameter_bytes = False, ()
        before = api.counts["cuLaunchKernelEx"]
        empty = Empty()
        forward = median_us(lambda: layer(x, ids, weights, out=out), calls)
        bare = median_us(lambda: empty(x), calls)
        assert api.counts["cuLaunchKernelEx"] == before + calls
    return {"forward_us": forward, "empty_module_us": bare, "ratio": forward / bare}


if __name__ == "__main__":
    print(json.dumps({name: round(value, 2) for name, value in measure().items()}))
