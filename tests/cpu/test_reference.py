"""The oracle itself: against plain loops, and on the inputs that break MoE layers in the field.

Biases, layouts, replicas, residual and the pre-reduced combine: test_reference_features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loops import by_loops

from megamoe import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.verify.inputs import make_inputs

CFG = MoEConfig(
    hidden=64, intermediate=64, num_experts=4, top_k=2, num_pes=2, max_tokens=128, activation="relu"
)


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("weight_at", ["act", "combine"])
def test_oracle_equals_loops(activation: Any, weight_at: Any) -> None:
    cfg = replace(CFG, activation=activation, weight_at=weight_at)
    inputs = make_inputs(cfg, tokens=[3, 2], masked=0.2)
    for pe, y_TH in enumerate(moe_oracle(cfg, **inputs.kwargs)):
        torch.testing.assert_close(y_TH, by_loops(cfg, inputs, pe), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weight_at", ["act", "combine"])
@pytest.mark.parametrize("seed", range(3))
def test_integers_are_exact_in_every_precision(weight_at: Any, seed: int) -> None:
    """fp32 and fp64 agree bit for bit, and the only roundings are those to bf16."""
    cfg = replace(CFG, weight_at=weight_at)
    inputs = make_inputs(cfg, tokens=[17, 33], integers=True, seed=seed)
    exact = torch.cat(moe_oracle(cfg, **inputs.kwargs))
    assert torch.equal(torch.cat(moe_oracle(cfg, **inputs.kwargs, dtype=torch.float32)), exact)
    rounded = {
        dtype: torch.cat(moe_oracle(cfg, **inputs.kwargs, dtype=dtype, rounding="kernel"))
        for dtype in (torch.float32, torch.float64)
    }
    assert rounded[torch.float32].dtype == torch.bfloat16
    assert torch.equal(rounded[torch.float32], rounded[torch.float64])
    assert exact.abs().max() > 256  # large enough that bf16 rounds it
    assert not torch.equal(rounded[torch.float32].double(), exact)


def test_rounding_points_by_hand() -> None:
    """One token, one expert: gate 1, up 257, weight 3 give 771, which bf16 rounds to 772; fc2 of
    factors 1 and 1 (two equal h) gives 1544 -> 1544; with two slots y = 1544 + 1544 = 3088.
    With the weight in the combine: h = 257 -> 256, row 512, y = 3 * 512 * 2 = 3072."""
    x_TH = torch.zeros(1, 64).bfloat16()
    x_TH[0, :2] = torch.tensor([1.0, 256.0])
    w13_EGH, w2_EHI = torch.zeros(1, 128, 64).bfloat16(), torch.zeros(1, 64, 64).bfloat16()
    w13_EGH[0, :2, 0] = 1.0
    w13_EGH[0, 64:66, :2] = 1.0
    w2_EHI[0, 0, :2] = 1.0
    expected = {"act": 3088.0, "combine": 3072.0}
    for weight_at, value in expected.items():
        cfg = replace(CFG, num_experts=2, num_pes=1, weight_at=weight_at)
        y_TH = moe_oracle(
            cfg,
            x=[x_TH],
            topk_ids=[torch.tensor([[1, 1]])],
            topk_weights=[torch.tensor([[3.0, 3.0]])],
            w13=w13_EGH.repeat(2, 1, 1),
            w2=w2_EHI.repeat(2, 1, 1),
            rounding="kernel",
        )[0]
        assert y_TH[0, 0].item() == value
        assert not y_TH[0, 1:].any()


def test_masked_slots_of_the_report() -> None:
    """I1: -1 adds nothing, other slots are whole, the caller's tensors are unchanged."""
    inputs = make_inputs(CFG, tokens=[6, 0], integers=True)
    ids_TK = torch.tensor([[0, 1], [2, -1], [-1, 3], [-1, -1], [3, 0], [1, -7]])
    inputs.topk_ids[0] = ids_TK.clone()
    weights_TK = inputs.topk_weights[0].clone()
    y_TH = moe_oracle(CFG, **inputs.kwargs)[0]
    assert torch.equal(inputs.topk_ids[0], ids_TK)
    assert torch.equal(inputs.topk_weights[0], weights_TK)
    torch.testing.assert_close(y_TH, by_loops(CFG, inputs, 0), rtol=0, atol=0)
    assert not y_TH[3].any() and y_TH[[0, 1, 2, 4, 5]].any(dim=1).all()


@pytest.mark.parametrize("num_tokens", [16, 128])
def test_half_the_tokens_masked(num_tokens: int) -> None:
    """I1 again: live rows have the bits of a run that holds the live tokens only."""
    inputs = make_inputs(CFG, tokens=[num_tokens, 0])
    y_TH = moe_oracle(CFG, **inputs.kwargs)[0]
    live_T = torch.arange(num_tokens) % 2 == 0
    inputs.topk_ids[0][~live_T] = -1
    masked_TH = moe_oracle(CFG, **inputs.kwargs)[0]
    torch.testing.assert_close(masked_TH[live_T], y_TH[live_T], rtol=1e-12, atol=1e-14)
    assert not masked_TH[~live_T].any()


@pytest.mark.parametrize("bad", [4, 5, 2**31 - 1])
def test_ids_past_the_end(bad: int) -> None:
    """I2: refused by name by default, masked in mask mode."""
    mask = replace(CFG, invalid_ids="mask")
    inputs = make_inputs(CFG, tokens=[3, 2], integers=True)
    inputs.topk_ids[1][1, 0] = -1
    expected = moe_oracle(CFG, **inputs.kwargs)
    inputs.topk_ids[1][1, 0] = bad
    for y_TH, expected_TH in zip(moe_oracle(mask, **inputs.kwargs), expected, strict=True):
        assert torch.equal(y_TH, expected_TH)
    with pytest.raises(ValueError, match=rf"topk_ids\[1\]\[1, 0\]={bad}"):
        moe_oracle(CFG, **inputs.kwargs)


def test_repeated_expert_in_one_token_counts_twice() -> None:
    inputs = make_inputs(CFG, tokens=[4, 4], integers=True)
    inputs.topk_ids[0][:] = 2
    y_TH = moe_oracle(CFG, **inputs.kwargs)[0]
    inputs.topk_weights[0] = torch.stack([inputs.topk_weights[0].sum(dim=1), torch.zeros(4)], dim=1)
    assert torch.equal(moe_oracle(CFG, **inputs.kwargs)[0], y_TH) and y_TH.any()


@pytest.mark.parametrize("top_k", [1, 4])
def test_top_k_of_all_experts(top_k: int) -> None:
    """I4: K = E works."""
    cfg = replace(CFG, top_k=top_k, num_pes=4)
    inputs = make_inputs(cfg, tokens=[1, 0, 2, 1], integers=True)
    for pe, y_TH in enumerate(moe_oracle(cfg, **inputs.kwargs)):
        assert torch.equal(y_TH, by_loops(cfg, inputs, pe))


def test_id_dtypes_agree() -> None:
    """I5."""
    inputs = make_inputs(CFG, tokens=[5, 9], masked=0.3)
    y = moe_oracle(CFG, **inputs.kwargs)
    inputs.topk_ids[:] = [ids_TK.long() for ids_TK in inputs.topk_ids]
    for a_TH, b_TH in zip(y, moe_oracle(CFG, **inputs.kwargs), strict=True):
        assert torch.equal(a_TH, b_TH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_dtypes_agree_within_their_own_rounding(dtype: torch.dtype) -> None:
    """I6: K = 8, weights near 1/8 and one of 1e-3; the gradient comes back in the dtype given."""
    cfg = replace(CFG, num_experts=8, top_k=8, activation="silu")
    inputs = make_inputs(cfg, tokens=[6, 6])
    weights_TK = torch.full((6, 8), 0.1249)
    weights_TK[:, 3] = 1e-3
    inputs.topk_weights[:] = [weights_TK, weights_TK]
    full = torch.cat(moe_oracle(cfg, **inputs.kwargs))
    low_TK = weights_TK.to(dtype).requires_grad_()
    inputs.topk_weights[:] = [low_TK, low_TK.detach()]
    low = torch.cat(moe_oracle(cfg, **inputs.kwargs))
    inputs.topk_weights[:] = [low_TK.detach().float()] * 2
    assert torch.equal(torch.cat(moe_oracle(cfg, **inputs.kwargs)), low)
    unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    row_sum = torch.zeros_like(full)
    for slot in range(8):
        only = [torch.zeros(6, 8) for _ in range(2)]
        for weights in only:
            weights[:, slot] = weights_TK[:, slot]
        inputs.topk_weights[:] = only
        row_sum += torch.cat(moe_oracle(cfg, **inputs.kwargs)).abs()
    assert ((low - full).abs() <= unit * row_sum + 1e-12).all() and not torch.equal(low, full)
    low.sum().backward()
    assert low_TK.grad is not None and low_TK.grad.dtype == dtype and low_TK.grad.any()


def test_one_pe_without_tokens() -> None:
    """Z1 with its numbers: PE 0 has none, the others send 4 tokens to PE 0's six experts."""
    cfg = replace(CFG, num_experts=24, top_k=6, num_pes=4)
    inputs = make_inputs(cfg, tokens=[0, 4, 4, 4], integers=True)
    for ids_TK in inputs.topk_ids:
        ids_TK.copy_(torch.arange(6).expand_as(ids_TK))
    y = moe_oracle(cfg, **inputs.kwargs)
    assert y[0].shape == (0, 64)
    assert sum(int((ids < 6).sum()) for ids in inputs.topk_ids) == 72
    for pe in (1, 2, 3):
        assert torch.equal(y[pe], by_loops(cfg, inputs, pe)) and y[pe].any()


@pytest.mark.parametrize("num_tokens", [0, 16])
@pytest.mark.parametrize("rounding", ["none", "kernel"])
def test_nothing_to_do(num_tokens: int, rounding: Any) -> None:
    """Z3: no tokens, or all slots masked: zeros forward, and zero gradients of full shape."""
    inputs = make_inputs(CFG, tokens=[num_tokens, num_tokens], masked=1.0)
    leaves = [*inputs.x, *inputs.topk_weights, inputs.w13, inputs.w2]
    for leaf in leaves:
        leaf.requires_grad_()
    y = moe_oracle(CFG, **inputs.kwargs, rounding=rounding)
    assert [tuple(y_TH.shape) for y_TH in y] == [(num_tokens, 64)] * 2
    assert not torch.cat(y).any()
    torch.cat(y).sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
@pytest.mark.parametrize("rounding", ["none", "kernel"])
def test_garbage_in_masked_tokens_stays_there(garbage: float, rounding: Any) -> None:
    """N1: rows 6, 7 hold NaN or Inf, weights too; rows 0-5 keep their bits, 6 and 7 are 0."""
    inputs = make_inputs(CFG, tokens=[8, 0])
    inputs.topk_ids[0][6:] = -1
    inputs.x[0][6:] = 0
    clean_TH = moe_oracle(CFG, **inputs.kwargs, rounding=rounding)[0]
    inputs.x[0][6:] = garbage
    inputs.topk_weights[0][6:] = garbage
    y_TH = moe_oracle(CFG, **inputs.kwargs, rounding=rounding)[0]
    assert torch.equal(y_TH, clean_TH)
    assert not y_TH[6:].any() and y_TH[:6].any(dim=1).all()


def test_bad_arguments() -> None:
    inputs = make_inputs(CFG, tokens=[1, 1])
    with pytest.raises(ValueError, match="x has 1 entries"):
        moe_oracle(CFG, **{**inputs.kwargs, "x": inputs.x[:1]})
    with pytest.raises(ValueError, match=r"w2 has shape"):
        moe_oracle(CFG, **{**inputs.kwargs, "w2": inputs.w2[:, :32]})
