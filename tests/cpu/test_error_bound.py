"""The derived bound holds, is not loose, and is broken by the faults it is there to find (A4)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from case_data import make_inputs

from megamoe import MoEConfig
from megamoe.error_bound import error_bound
from megamoe.reference import moe_oracle

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=8, top_k=4, num_pes=2, max_tokens=128)

SHAPES = [
    {},
    {"hidden": 64, "intermediate": 64, "top_k": 1},
    {"hidden": 128, "intermediate": 512, "top_k": 8},
    {"hidden": 2048, "intermediate": 128, "num_experts": 2, "top_k": 2},
]


def ratio(cfg: MoEConfig, **more: Any) -> torch.Tensor:
    """|rounded model - oracle| / bound, per output element."""
    inputs = make_inputs(cfg, tokens=[24, 9], **more)
    exact = torch.cat(moe_oracle(cfg, **inputs.kwargs))
    model = torch.cat(
        moe_oracle(cfg, **inputs.kwargs, dtype=torch.float32, rounding="kernel")
    ).double()
    return (model - exact).abs() / torch.cat(error_bound(cfg, **inputs.kwargs))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("weight_at", ["act", "combine"])
def test_holds_and_is_not_loose(shape: dict[str, int], activation: Any, weight_at: Any) -> None:
    cfg = replace(CFG, activation=activation, weight_at=weight_at, **shape)
    largest = ratio(cfg).max().item()
    assert 0.1 < largest <= 1.0


def test_holds_on_data_far_from_random() -> None:
    """Cancellation: every weight row appears with both signs next to each other, outputs near 0;
    and values of very different size."""
    cfg = replace(CFG, hidden=128, intermediate=64)
    inputs = make_inputs(cfg, tokens=[16, 3])
    inputs.w13[:, :, 1::2] = -inputs.w13[:, :, ::2]
    for x_TH in inputs.x:
        x_TH[:, 1::2] = x_TH[:, ::2]
        x_TH[:, 0] *= 1.0 + 2.0**-7
        x_TH[::2] *= 64.0
    exact = torch.cat(moe_oracle(cfg, **inputs.kwargs))
    model = torch.cat(moe_oracle(cfg, **inputs.kwargs, dtype=torch.float32, rounding="kernel"))
    bound = torch.cat(error_bound(cfg, **inputs.kwargs))
    assert ((model.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("seed", range(3))
def test_worst_case_roundings_stay_inside(seed: int) -> None:
    """h and every fc2 row pushed by a whole unit roundoff in the direction that hurts most."""
    cfg = replace(CFG, hidden=64, intermediate=128, num_experts=1, top_k=1, num_pes=1)
    inputs = make_inputs(cfg, tokens=[8], seed=seed)
    x_TH, w13, w2 = inputs.x[0].double(), inputs.w13[0].double(), inputs.w2[0].double()
    gate_TI, up_TI = (x_TH @ w13.T).chunk(2, dim=1)
    h_TI = torch.nn.functional.silu(gate_TI) * up_TI * inputs.topk_weights[0].double()
    exact_TH = h_TI @ w2.T
    worst_TH = (h_TI.abs() @ w2.abs().T) * 2.0**-8 * torch.sign(exact_TH) + exact_TH
    worst_TH = worst_TH * (1 + 2.0**-8) * (1 + 2.0**-8)
    bound_TH = error_bound(cfg, **inputs.kwargs)[0]
    error_TH = (worst_TH - exact_TH).abs()
    assert (error_TH <= bound_TH).all()
    assert (error_TH / bound_TH).median() > 0.8


def faulty(inputs: Any, fault: str) -> None:
    """Change the inputs so that the oracle computes what a broken kernel would."""
    inter = inputs.w2.shape[2]
    if fault == "one slot dropped":
        inputs.topk_ids[0][3, -1] = -1
    elif fault == "gate and up swapped":
        inputs.w13.copy_(torch.cat([inputs.w13[:, inter:], inputs.w13[:, :inter]], dim=1))
    elif fault == "two experts of one token swapped":
        inputs.topk_ids[1][0, :2] = inputs.topk_ids[1][0, [1, 0]]
    elif fault == "last k tile of fc1 skipped":
        inputs.w13[:, :, -64:] = 0
    elif fault == "last k tile of fc2 skipped":
        inputs.w2[:, :, -64:] = 0
    elif fault == "row of another token":
        inputs.x[0][5] = inputs.x[0][6]
    elif fault == "weights not applied":
        inputs.topk_weights[0][2] = 1.0


@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "one slot dropped",
        "gate and up swapped",
        "two experts of one token swapped",
        "last k tile of fc1 skipped",
        "last k tile of fc2 skipped",
        "row of another token",
        "weights not applied",
    ],
)
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3]])
def test_faults_break_it(fault: str, shape: dict[str, int]) -> None:
    cfg = replace(CFG, **shape)
    inputs = make_inputs(cfg, tokens=[9, 2])
    exact = torch.cat(moe_oracle(cfg, **inputs.kwargs))
    bound = torch.cat(error_bound(cfg, **inputs.kwargs))
    faulty(inputs, fault)
    broken = torch.cat(moe_oracle(cfg, **inputs.kwargs, dtype=torch.float32, rounding="kernel"))
    inside = ((broken.double() - exact).abs() <= bound).all()
    assert inside == (fault == "none")


def test_no_rows_need_no_error() -> None:
    inputs = make_inputs(CFG, tokens=[0, 4], masked=1.0)
    inputs.x[1][:] = float("nan")
    bound = error_bound(CFG, **inputs.kwargs)
    assert bound[0].shape == (0, 512) and bound[1].shape == (4, 512)
    assert bound[1].max() < 1e-30
