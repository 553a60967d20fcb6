"""The bound of the gradients holds, is not loose, and is broken by faults (CASES A4, B4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.activations import activation_gradients
from megamoe.config import CLAMPED
from megamoe.error_bound_backward import CURVATURE, backward_error_bound
from megamoe.reference_backward import Gradients, moe_backward_oracle
from megamoe.verify.inputs import Inputs, make_inputs

CFG = MoEConfig(hidden=128, intermediate=96, num_experts=6, top_k=3, num_pes=2, max_tokens=64)
NAMES = ("dx", "d_topk_weights", "dw13", "dw2", "db13", "db2")


def output_gradients(inputs: Inputs, seed: int = 3) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, generator=rng).bfloat16() for x in inputs.x]


def flat(grads: Gradients, name: str) -> torch.Tensor | None:
    parts = getattr(grads, name)
    return None if parts is None else torch.cat([part.flatten().double() for part in parts])


def ratios(
    cfg: MoEConfig, inputs: Inputs, model: Gradients | None = None, dtype: Any = torch.float32
) -> dict[str, float]:
    """Largest |model - exact| / bound of every gradient; the model rounds as the kernels do."""
    dy = output_gradients(inputs)
    exact = moe_backward_oracle(cfg, dy=dy, **inputs.kwargs)
    if model is None:
        model = rounded(cfg, inputs)
    bound = backward_error_bound(cfg, dy=dy, **inputs.kwargs, grad_dtype=dtype)
    found = {}
    for name in NAMES:
        got, want, most = (flat(grads, name) for grads in (model, exact, bound))
        if got is None or want is None or most is None:
            continue
        if name.startswith(("dw", "db")):
            got = got.to(dtype).double()
        # Where the bound is zero (masked slots, experts without rows) nothing may be off.
        assert bool((got[most == 0] == want[most == 0]).all()), name
        found[name] = ((got - want).abs() / most)[most > 0].max().item()
    return found


def rounded(cfg: MoEConfig, inputs: Inputs) -> Gradients:
    return moe_backward_oracle(
        cfg, dy=output_gradients(inputs), **inputs.kwargs, dtype=torch.float32, rounding="kernel"
    )


FEATURES: list[dict[str, Any]] = [
    {},
    {"activation": "relu"},
    {"activation": "relu2"},
    {"activation": "gelu_tanh", "weight_at": "combine"},
    {"activation": "gpt_oss"},
    {"activation": "gpt_oss", "activation_limit": 0.5, "activation_alpha": 3.0},
    {"activation": "swiglu_clamped", "activation_limit": 0.7},
    {"fc1_bias": True, "fc2_bias": True, "weight_at": "combine"},
    {"fc1_bias": True, "fc2_bias": True, "activation": "relu2", "weight_at": "combine"},
    {"combine": "direct"},
    {"combine": "prereduced", "num_pes": 1},
    {"w13_layout": "interleaved", "w13_transposed": True, "w2_transposed": True, "fc1_bias": True},
    {"hidden": 8, "intermediate": 8, "fc1_bias": True},
    {"hidden": 1024, "intermediate": 16, "top_k": 1},
]


@pytest.mark.parametrize("more", FEATURES, ids=str)
def test_holds_and_is_not_loose(more: dict[str, Any]) -> None:
    cfg = replace(CFG, **more)
    tokens = [24, 9] if cfg.num_pes == 2 else [33]
    inputs = make_inputs(cfg, tokens=tokens, masked=0.1)
    found = ratios(cfg, inputs)
    assert found.keys() >= {"dx", "d_topk_weights", "dw13", "dw2"}
    assert max(found.values()) <= 1.0, found
    assert min(found[name] for name in ("dx", "dw13", "dw2")) > 0.03, found


def test_bf16_gradients() -> None:
    inputs = make_inputs(CFG, tokens=[24, 9])
    found = ratios(CFG, inputs, dtype=torch.bfloat16)
    assert 0.1 < max(found.values()) <= 1.0
    assert max(ratios(CFG, inputs, dtype=torch.float32).values()) <= 1.0


def test_jumps_are_covered() -> None:
    """Gate and up on and around the limit, and relu around 0: rounding moves them across."""
    for activation, limit in (("swiglu_clamped", 1.0), ("gpt_oss", 1.0), ("relu", None)):
        cfg = replace(CFG, activation=activation, activation_limit=limit, fc1_bias=True)
        inputs = make_inputs(cfg, tokens=[24, 9])
        shift = torch.linspace(-(2**-8), 2**-8, cfg.w13_rows).expand(cfg.num_experts, -1)
        inputs.w13.mul_(2**-9)
        assert inputs.b13 is not None
        biased = replace(inputs, b13=(shift + (limit or 0.0)).contiguous())
        assert max(ratios(cfg, biased).values()) <= 1.0


@pytest.mark.parametrize(
    "fault",
    ["other activation", "no weight", "gate and up swapped", "a slot dropped", "no clamp"],
)
def test_faults_break_it(fault: str) -> None:
    cfg = replace(CFG, activation="swiglu_clamped", activation_limit=0.7)
    inputs = make_inputs(cfg, tokens=[24, 9])
    wrong_cfg, wrong = cfg, inputs
    if fault == "other activation":
        wrong_cfg = replace(cfg, activation="gpt_oss", activation_limit=0.7)
    elif fault == "no weight":
        wrong = replace(inputs, topk_weights=[torch.ones_like(w) for w in inputs.topk_weights])
    elif fault == "gate and up swapped":
        wrong_cfg = replace(cfg, w13_layout="up_gate")
    elif fault == "a slot dropped":
        ids = [ids_TK.clone() for ids_TK in inputs.topk_ids]
        ids[1][4, 1] = -1
        wrong = replace(inputs, topk_ids=ids)
    else:
        wrong_cfg = replace(cfg, activation_limit=7.0)
    assert max(ratios(cfg, inputs).values()) <= 1.0
    found = ratios(cfg, inputs, rounded(wrong_cfg, wrong))
    assert min(found[name] for name in ("dx", "dw13", "dw2")) > 2.0, found


@pytest.mark.parametrize("activation", sorted(CURVATURE))
def test_curvature_is_the_largest(activation: Any) -> None:
    alpha = 1.702 if activation == "gpt_oss" else 1.0
    gate = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    gate = gate[gate != 0] if activation == "relu" else gate
    one = torch.zeros_like(gate) if activation == "gpt_oss" else torch.ones_like(gate)
    limit = 100.0 if activation in CLAMPED else None
    slope = activation_gradients(gate, one, activation=activation, alpha=alpha, limit=limit).by_gate
    change = (slope.diff() / gate.diff()).abs()
    change = change[gate[1:] * gate[:-1] > 0] if activation == "relu" else change
    largest = change.max().item() / alpha
    assert largest <= CURVATURE[activation] + 1e-9
    assert CURVATURE[activation] == 0 or largest > 0.99 * CURVATURE[activation]
