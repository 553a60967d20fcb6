"""Activations: exact numbers, scalar formulas, gradients at and beyond the clamp (CASES A3)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loops import scalar_activation

from megamoe import MoEConfig
from megamoe.activations import activate
from megamoe.config import ACTIVATIONS

REPORTED = [6.9, 7.1, -8.0, 100.0]


def cfg_of(activation: Any, limit: float | None = None) -> MoEConfig:
    if activation in ("gpt_oss", "swiglu_clamped"):
        limit = 7.0 if limit is None else limit
    return MoEConfig(
        hidden=8,
        intermediate=8,
        num_experts=1,
        top_k=1,
        num_pes=1,
        max_tokens=1,
        activation=activation,
        activation_limit=limit,
    )


def apply(cfg: MoEConfig, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return activate(
        gate,
        up if cfg.gated else None,
        activation=cfg.activation,
        alpha=cfg.activation_alpha,
        limit=cfg.activation_limit,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_every_activation_equals_its_formula(activation: Any, limit: float) -> None:
    if activation not in ("gpt_oss", "swiglu_clamped"):
        limit = None  # type: ignore[assignment]
    cfg = cfg_of(activation, limit)
    values = [0.0, -0.0, 0.3, -0.3, 1.0, -1.0, 3.5, -3.5, -30.0, *REPORTED]
    gate, up = torch.cartesian_prod(*[torch.tensor(values, dtype=torch.float64)] * 2).unbind(1)
    expected = [
        scalar_activation(cfg, g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)
    ]
    # The formula of gelu subtracts nearly equal numbers for g << 0: accurate to 2^-52 |g u| only.
    torch.testing.assert_close(
        apply(cfg, gate, up), torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=1e-12
    )


def test_clamps_of_the_report() -> None:
    """A3: gate=min(g,7), up=clamp(u,-7,7), g·sigmoid(1.702 g)·(up+1) at 6.9, 7.1, -8, 100."""
    x = torch.tensor(REPORTED, dtype=torch.float64)
    oss = apply(cfg_of("gpt_oss"), x, x)
    by_hand = [
        6.9 / (1 + math.exp(-1.702 * 6.9)) * 7.9,
        7.0 / (1 + math.exp(-1.702 * 7.0)) * 8.0,
        -8.0 / (1 + math.exp(1.702 * 8.0)) * -6.0,
        7.0 / (1 + math.exp(-1.702 * 7.0)) * 8.0,
    ]
    torch.testing.assert_close(oss, torch.tensor(by_hand, dtype=torch.float64), rtol=1e-14, atol=0)
    assert oss[1] == oss[3]
    clamped = apply(cfg_of("swiglu_clamped"), x, x)
    assert clamped[1] == clamped[3] == pytest.approx(49 / (1 + math.exp(-7.0)), rel=1e-14)
    # The gate has no lower clamp, up has: -8 stays -8 in the gate and becomes -7 in up.
    assert clamped[2] == pytest.approx(-8.0 / (1 + math.exp(8.0)) * -7.0, rel=1e-14)
    # Plain swiglu is not clamped.
    assert apply(cfg_of("silu"), x, x)[3] == pytest.approx(1e4, rel=1e-14)


@pytest.mark.parametrize("activation", ["gpt_oss", "swiglu_clamped"])
def test_gradient_is_zero_beyond_the_clamp_and_only_there(activation: Any) -> None:
    cfg = cfg_of(activation)

    def gradients(gate: float, up: float) -> tuple[float, float]:
        g = torch.tensor(gate, dtype=torch.float64, requires_grad=True)
        u = torch.tensor(up, dtype=torch.float64, requires_grad=True)
        dg, du = torch.autograd.grad(apply(cfg, g, u), [g, u])
        return dg.item(), du.item()

    for value in (7.1, 100.0):
        assert gradients(value, 2.0)[0] == 0.0 and gradients(value, 2.0)[1] != 0.0
        assert gradients(2.0, value)[1] == 0.0 and gradients(2.0, value)[0] != 0.0
    assert gradients(2.0, -8.0)[1] == 0.0
    assert gradients(-8.0, 2.0)[0] != 0.0  # no lower clamp on the gate
    for value in (6.9, 7.0):  # at the limit the one-sided derivative of the inside
        assert gradients(value, 2.0)[0] != 0.0 and gradients(2.0, value)[1] != 0.0
    assert gradients(2.0, -7.0)[1] != 0.0


def test_gelu_is_that_of_torch() -> None:
    gate = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    ours = activate(gate, torch.ones_like(gate), activation="gelu_tanh")
    theirs = torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    # The exact gelu is another function: 4.7e-4 away.
    assert 4e-4 < (ours - torch.nn.functional.gelu(gate)).abs().max() < 5e-4


def test_alpha_and_limit_reach_the_formula() -> None:
    gate, up = torch.tensor([2.0, 9.0]), torch.tensor([3.0, -9.0])
    base = activate(gate, up, activation="gpt_oss", alpha=1.702, limit=7.0)
    assert (activate(gate, up, activation="gpt_oss", alpha=1.0, limit=7.0) != base).all()
    other = activate(gate, up, activation="gpt_oss", alpha=1.702, limit=5.0)
    assert other[0] == base[0] and other[1] != base[1]


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_integers_stay_integers(activation: Any) -> None:
    value = torch.arange(-40, 41, dtype=torch.float32)
    out = apply(cfg_of(activation), value, value.flip(0))
    assert torch.equal(out, out.round()) and out.any()


def test_bad_arguments() -> None:
    one = torch.ones(1)
    for args, match in (
        ({"activation": "gelu"}, "activation='gelu': must be one of 'silu', 'gelu_tanh'"),
        ({"activation": "gpt_oss"}, "limit=None: must be given for activation='gpt_oss'"),
        ({"activation": "relu2"}, "up is given: must be None for activation='relu2'"),
        ({"activation": "silu", "up": None}, "up is None: must be a tensor for .*'silu'"),
    ):
        with pytest.raises(ValueError, match=match):
            activate(one, **{"up": one, **args})  # type: ignore[arg-type]
