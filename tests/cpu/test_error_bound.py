"""The derived bound holds, is not loose, and is broken by the faults it is there to find (A4)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.activations import activate
from megamoe.config import CLAMPED
from megamoe.error_bound import LIPSCHITZ, _activation_and_error, error_bound
from megamoe.reference import moe_oracle
from megamoe.verify.inputs import make_inputs

CFG = MoEConfig(hidden=512, intermediate=256, num_experts=8, top_k=4, num_pes=2, max_tokens=128)

SHAPES = [
    {},
    {"hidden": 64, "intermediate": 64, "top_k": 1},
    {"hidden": 128, "intermediate": 512, "top_k": 8},
    {"hidden": 2048, "intermediate": 128, "num_experts": 2, "top_k": 2},
]


def ratio(cfg: MoEConfig, **more: Any) -> torch.Tensor:
    """|rounded model - oracle| / bound, per output element."""
    inputs = make_inputs(cfg, **{"tokens": [24, 9], **more})
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


FEATURES: list[dict[str, Any]] = [
    {"activation": "gelu_tanh"},
    {"activation": "gpt_oss"},
    {"activation": "gpt_oss", "activation_limit": 0.5, "activation_alpha": 0.25},
    {"activation": "swiglu_clamped", "activation_limit": 0.7},
    {"activation": "relu2"},
    {"fc1_bias": True, "fc2_bias": True},
    {"fc1_bias": True, "fc2_bias": True, "activation": "relu2", "weight_at": "combine"},
    {"combine": "prereduced"},
    {"combine": "prereduced", "num_pes": 1},
    {"combine": "prereduced", "weight_at": "combine", "fc2_bias": True, "num_pes": 4},
    {"combine": "prereduced", "expert_map": [[(0, 0), (1, 7)], *((1, i) for i in range(7))]},
    {"w13_layout": "interleaved", "w13_transposed": True, "w2_transposed": True, "fc1_bias": True},
    {"hidden": 72, "intermediate": 200},
    {"hidden": 8, "intermediate": 8, "activation": "gpt_oss", "fc1_bias": True},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_holds_and_is_not_loose_with_every_feature(
    features: dict[str, Any], residual: bool
) -> None:
    cfg = replace(CFG, **features)
    tokens = [24, 9, 0, 5][: cfg.num_pes]
    largest = ratio(cfg, tokens=tokens, residual=residual).max().item()
    assert 0.1 < largest <= 1.0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu", "gpt_oss"])
def test_lipschitz_constants(activation: Any) -> None:
    """c of step 2 is above the largest slope and within a percent of it; of every alpha."""
    gate = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    for alpha in (0.25, 1.702, 4.0) if activation == "gpt_oss" else (1.702,):
        up = torch.full_like(gate, 0.0 if activation == "gpt_oss" else 1.0)
        values = activate(gate, up, activation=activation, alpha=alpha, limit=30.0)
        (slope,) = torch.autograd.grad(values.sum(), gate)
        assert 0.99 * LIPSCHITZ[activation] < slope.abs().max() <= LIPSCHITZ[activation]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gpt_oss", "swiglu_clamped", "relu2"])
def test_fp32_evaluation_stays_within_theta(activation: Any) -> None:
    """Step 2 alone: a wide range of exact gates, no error before; products and sums rounded as the
    kernel does, ex2 and rcp pushed a whole unit of their documented error up or down."""
    limit = 7.0 if activation in CLAMPED else None
    cfg = replace(CFG, activation=activation, activation_limit=limit)
    gate = torch.linspace(-60, 20, 3001)
    weight = torch.tensor(0.3)
    if activation == "relu2":
        fc1_RG = gate[None].double()
        exact, bound = _activation_and_error(cfg, fc1_RG, torch.zeros_like(fc1_RG))
        model = torch.relu(gate).square() * weight
        error = (model.double() - exact[0] * weight.double()).abs()
        assert (error <= weight.double() * bound[0]).all() and error.any()
        return
    up = torch.full_like(gate, 1.7)
    fc1_RG = torch.cat([gate, up])[None].double()
    exact, bound = _activation_and_error(cfg, fc1_RG, torch.zeros_like(fc1_RG))
    if limit is not None:
        gate = gate.clamp(max=limit)
    log2_e = math.log2(math.e)
    if activation == "gelu_tanh":
        scale = torch.tensor(-2.0 * math.sqrt(2.0 / math.pi) * log2_e)
        cubic = torch.tensor(-2.0 * math.sqrt(2.0 / math.pi) * log2_e * 0.044715)
        exponent = gate * (scale + cubic * (gate * gate))
    elif activation == "gpt_oss":
        exponent = (gate * torch.tensor(1.702)) * torch.tensor(-log2_e)
    else:
        exponent = gate * torch.tensor(-log2_e)
    worst = torch.zeros_like(gate, dtype=torch.float64)
    for ex2_sign, rcp_sign in itertools.product((-1, 1), repeat=2):
        power = (torch.exp2(exponent.double()) * (1 + ex2_sign * 2.0**-22.5)).float()
        sigmoid = ((1 / (1.0 + power).double()) * (1 + rcp_sign * 2.0**-23)).float()
        q = up + 1.0 if activation == "gpt_oss" else up
        model = gate * sigmoid * q * weight
        worst = worst.maximum((model.double() - exact[0] * weight.double()).abs())
    allowed = weight.double() * bound[0]
    assert (worst <= allowed + 1e-37).all()
    assert (worst / allowed).max() > 0.1


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


RICH = MoEConfig(
    hidden=192,
    intermediate=136,
    num_experts=6,
    top_k=4,
    num_pes=2,
    max_tokens=64,
    activation="gpt_oss",
    activation_limit=1.5,
    w13_layout="interleaved",
    fc1_bias=True,
    fc2_bias=True,
    weight_at="combine",
    combine="prereduced",
)
WRONG: dict[str, dict[str, Any]] = {
    "none": {},
    "alpha left out": {"activation_alpha": 1.0},
    "limit of another model": {"activation_limit": 7.0},
    "up + 1 and alpha left out": {"activation": "swiglu_clamped", "activation_alpha": 1.702},
    "interleaved read as concatenated": {"w13_layout": "gate_up"},
    "bias of fc2 not weighted": {"weight_at": "act"},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_kernel_of_another_config_breaks_it(fault: str) -> None:
    inputs = make_inputs(RICH, tokens=[9, 4], residual=True)
    exact = torch.cat(moe_oracle(RICH, **inputs.kwargs))
    bound = torch.cat(error_bound(RICH, **inputs.kwargs))
    other = replace(RICH, **WRONG[fault])
    got = torch.cat(moe_oracle(other, **inputs.kwargs, dtype=torch.float32, rounding="kernel"))
    assert ((got.double() - exact).abs() <= bound).all() == (fault == "none")


@pytest.mark.parametrize(
    "fault",
    [
        "none",
        "one bias of fc1 missing",
        "biases of fc1 of neighbours swapped",
        "biases of fc2 of two experts swapped",
        "residual of another token",
        "residual missing in one token",
        "one slot of a PE's sum dropped",
        "last column of I",
        "last columns of H",
    ],
)
def test_faults_of_the_features_break_it(fault: str) -> None:
    inputs = make_inputs(RICH, tokens=[9, 4], residual=True)
    exact = torch.cat(moe_oracle(RICH, **inputs.kwargs))
    bound = torch.cat(error_bound(RICH, **inputs.kwargs))
    assert inputs.b13 is not None and inputs.b2 is not None and inputs.residual is not None
    if fault == "one bias of fc1 missing":
        inputs.b13[:, 5] = 0
    elif fault == "biases of fc1 of neighbours swapped":
        inputs.b13.copy_(inputs.b13.unflatten(1, (-1, 2)).flip(2).flatten(1))
    elif fault == "biases of fc2 of two experts swapped":
        inputs.b2[:2] = inputs.b2[:2].flip(0)
    elif fault == "residual of another token":
        inputs.residual[0][0] = inputs.residual[0][1]
    elif fault == "residual missing in one token":
        inputs.residual[1][2] = 0
    elif fault == "one slot of a PE's sum dropped":
        inputs.topk_ids[1][1, 2] = -1
    elif fault == "last column of I":
        inputs.w2[:, :, -1] = 0
    elif fault == "last columns of H":
        inputs.w2[:, -8:] = 0
    got = torch.cat(moe_oracle(RICH, **inputs.kwargs, dtype=torch.float32, rounding="kernel"))
    assert ((got.double() - exact).abs() <= bound).all() == (fault == "none")


def test_prereducing_costs_at_most_one_more_rounding() -> None:
    cfg = replace(CFG, weight_at="combine", combine="prereduced", top_k=8, hidden=64)
    inputs = make_inputs(cfg, tokens=[64, 64])
    pre = torch.cat(error_bound(cfg, **inputs.kwargs))
    direct = torch.cat(error_bound(replace(cfg, combine="direct"), **inputs.kwargs))
    assert (pre > direct).all() and (pre < 2 * direct).all()


def test_no_rows_need_no_error() -> None:
    inputs = make_inputs(CFG, tokens=[0, 4], masked=1.0)
    inputs.x[1][:] = float("nan")
    bound = error_bound(CFG, **inputs.kwargs)
    assert bound[0].shape == (0, 512) and bound[1].shape == (4, 512)
    assert bound[1].max() < 1e-30
