"""A model of two MoE layers trains on the compiled kernels: its loss follows the oracle's, with
gradients added over micro-batches, at once or delayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.testing import VgpuMoE
from megamoe.testing_engine import VgpuEngine
from megamoe.verify.toy import OracleEngine, Training, Weights, train

CFG = MoEConfig(hidden=64, intermediate=64, num_experts=4, top_k=2, num_pes=2, max_tokens=24)
NOISE = 0.02
"""Largest relative distance of a loss from the exact one that rounding to bf16 explains here; the
rounding oracle stays within half of it, the faults below do not."""


def training(**more: Any) -> Training:
    options: dict[str, Any] = {"cfg": CFG, "tokens": (20, 12), "rate": 1.0, "steps": 8}
    return Training(**(options | more))


def on_vgpu(weights: Weights) -> VgpuEngine:
    split = {n: [each[n].detach() for each in weights] for n in weights[0]}
    return VgpuEngine(VgpuMoE(CFG, **split, training=True))


def distance(losses: list[float], exact: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, exact, strict=True))


@pytest.mark.parametrize("delay", [False, True])
def test_the_loss_follows_the_oracle(delay: bool) -> None:
    how = training(delay=delay)
    exact = train(how, lambda weights: OracleEngine(CFG))
    assert exact[-1] < 0.6 * exact[0]
    engines: list[VgpuEngine] = []

    def make(weights: Weights) -> VgpuEngine:
        engines.append(on_vgpu(weights))
        return engines[-1]

    assert distance(train(how, make), exact) < NOISE
    # Two micro-batches a step: two forwards, two dgrads, and two wgrads or a delayed one.
    per_step = 5 if delay else 6
    assert [engine.launches for engine in engines] == [[8 * per_step] * 2] * 2


@pytest.mark.slow
def test_fifty_steps() -> None:
    how = training(steps=50, delay=True)
    exact = train(how, lambda weights: OracleEngine(CFG))
    got = train(how, on_vgpu)
    rounded = train(how, lambda weights: OracleEngine(CFG, exact=False))
    assert got[-1] < 0.2 * got[0]
    # Top-k decisions flip in time; until then the noise stays small.
    assert distance(got[:20], exact[:20]) < NOISE
    assert distance(got, exact) < max(2 * distance(rounded, exact), NOISE)


class FaultyEngine(OracleEngine):
    """Its gradients have one fault."""

    def __init__(self, fault: str):
        super().__init__(CFG, exact=False)
        self.fault = fault

    def dgrad(self, dy: Any, saved: Any) -> Any:
        dx, d_router = super().dgrad(dy, saved)
        if self.fault == "dx":
            dx = [0.5 * each for each in dx]
        if self.fault == "router":
            d_router = [torch.zeros_like(each) for each in d_router]
        return dx, d_router

    def wgrad(self, saved: Any, grads: Any, *, accumulate: bool) -> None:
        super().wgrad(saved, grads, accumulate=accumulate and self.fault != "accumulation")
        if self.fault == "an expert":
            grads[1]["w2"][0] = 0


@pytest.mark.parametrize("fault", ["none", "dx", "router", "accumulation", "an expert"])
def test_a_faulty_gradient_is_seen(fault: str) -> None:
    exact = train(training(), lambda weights: OracleEngine(CFG))
    off = distance(train(training(), lambda weights: FaultyEngine(fault)), exact)
    assert off < NOISE / 2 if fault == "none" else off > NOISE, off
