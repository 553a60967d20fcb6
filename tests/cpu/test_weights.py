"""Weight layouts undone, and every PE's share of the experts (CASES A1, A10)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.verify.inputs import make_inputs
from megamoe.weights import canonical_weights, split_experts, split_per_pe

CFG = MoEConfig(
    hidden=24, intermediate=16, num_experts=4, top_k=2, num_pes=2, max_tokens=64, activation="relu"
)
LAYOUTS = list(product(["gate_up", "up_gate", "interleaved"], [False, True], [False, True]))


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("relu", [10.0, 40.0, 90.0, 160.0]),
        ("silu", [7.310585786, 35.23188312, 85.73166843, 157.1222060]),
    ],
)
def test_numbers_of_the_report(
    layout: Any, transposed: bool, activation: Any, expected: list[float]
) -> None:
    """A1: gate rows 1, 2, 3, 4, up rows 10, 20, 30, 40, x = 1: y_i = act(i)·10 i in any layout.

    The wrong layout is finite and wrong: concatenated read as interleaved pairs 1 with 2.
    """
    cfg = replace(
        CFG,
        hidden=8,
        intermediate=8,
        num_experts=1,
        top_k=1,
        num_pes=1,
        activation=activation,
        w13_layout=layout,
        w13_transposed=transposed,
    )
    gate, up = [1.0, 2.0, 3.0, 4.0, 0, 0, 0, 0], [10.0, 20.0, 30.0, 40.0, 0, 0, 0, 0]
    rows = {
        "gate_up": gate + up,
        "up_gate": up + gate,
        "interleaved": [value for pair in zip(gate, up, strict=True) for value in pair],
    }
    w13 = torch.zeros(1, 16, 8, dtype=torch.bfloat16)
    w13[0, :, 0] = torch.tensor(rows[layout])
    x_TH = torch.zeros(1, 8, dtype=torch.bfloat16)
    x_TH[0, 0] = 1.0
    call: dict[str, Any] = {
        "x": [x_TH],
        "topk_ids": [torch.zeros(1, 1, dtype=torch.int32)],
        "topk_weights": [torch.ones(1, 1)],
        "w13": w13.mT.contiguous() if transposed else w13,
        "w2": torch.eye(8, dtype=torch.bfloat16)[None],
    }
    y_H = moe_oracle(cfg, **call)[0][0]
    torch.testing.assert_close(
        y_H[:4], torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=0
    )
    assert not y_H[4:].any()
    for other in {"gate_up", "up_gate", "interleaved"} - {layout}:
        wrong_H = moe_oracle(replace(cfg, w13_layout=other), **call)[0][0]
        # relu(g)·u does not tell gate from up where both are positive; silu does.
        if activation == "silu" or "interleaved" in (layout, other):
            assert not torch.allclose(wrong_H, y_H)


@pytest.mark.parametrize(("layout", "w13_transposed", "w2_transposed"), LAYOUTS)
def test_every_layout_is_the_same_layer(
    layout: Any, w13_transposed: bool, w2_transposed: bool
) -> None:
    plain = replace(CFG, fc1_bias=True, fc2_bias=True, activation="silu")
    cfg = replace(
        plain, w13_layout=layout, w13_transposed=w13_transposed, w2_transposed=w2_transposed
    )
    base, stored = make_inputs(plain, tokens=[5, 3]), make_inputs(cfg, tokens=[5, 3])
    canonical = canonical_weights(
        cfg, stored.w13, stored.w2, num_experts=4, b13=stored.b13, b2=stored.b2
    )
    for got, want in zip(canonical, (base.w13, base.w2, base.b13, base.b2), strict=True):
        assert got is not None and want is not None and torch.equal(got, want)
    for got_TH, want_TH in zip(
        moe_oracle(cfg, **stored.kwargs), moe_oracle(plain, **base.kwargs), strict=True
    ):
        torch.testing.assert_close(got_TH, want_TH, rtol=1e-13, atol=1e-14)
    if (layout, w13_transposed) != ("gate_up", False):
        assert not torch.equal(stored.w13.flatten(), base.w13.flatten())


def test_a_layout_is_not_undone_twice() -> None:
    """A1: a transposed weight no longer fits, and the result as a whole is no input."""
    cfg = replace(CFG, w13_transposed=True, w13_layout="interleaved")
    data = make_inputs(cfg, tokens=[0, 0])
    once = canonical_weights(cfg, data.w13, data.w2, num_experts=4)
    with pytest.raises(ValueError, match=r"w13 has shape \[4, 32, 24\]: must be \[4, 24, 32\]"):
        canonical_weights(cfg, once.w13_EGH, once.w2_EHI, num_experts=4)
    with pytest.raises(ValueError, match=r"w13 is a CanonicalWeights: must be a torch.Tensor"):
        canonical_weights(cfg, once, once, num_experts=4)  # type: ignore[arg-type]


def test_gradients_come_back_in_the_layout_given() -> None:
    cfg = replace(CFG, w13_layout="interleaved", w13_transposed=True, fc1_bias=True)
    stored = make_inputs(cfg, tokens=[4, 4], integers=True)
    base = make_inputs(replace(CFG, fc1_bias=True), tokens=[4, 4], integers=True)
    assert stored.b13 is not None and base.b13 is not None
    for data, layer in ((stored, cfg), (base, replace(CFG, fc1_bias=True))):
        for leaf in (data.w13, data.b13):
            assert leaf is not None
            leaf.requires_grad_()
        torch.cat(moe_oracle(layer, **data.kwargs)).sum().backward()
    assert stored.w13.grad is not None and base.w13.grad is not None
    assert stored.b13.grad is not None and base.b13.grad is not None
    assert torch.equal(stored.w13.grad[:, :, 0::2], base.w13.grad[:, :16].mT)
    assert torch.equal(stored.w13.grad[:, :, 1::2], base.w13.grad[:, 16:].mT)
    assert torch.equal(stored.b13.grad[:, 1::2], base.b13.grad[:, 16:])
    assert base.b13.grad.any() and base.w13.grad.any()


def test_split_experts_follows_the_map() -> None:
    data = make_inputs(CFG, tokens=[0, 0])
    w13, w2 = split_experts(CFG, data.w13, data.w2)
    assert w13[1].data_ptr() == data.w13[2].data_ptr()  # default placement: views, no copy
    assert torch.equal(torch.cat(w2), data.w2)
    cfg = replace(CFG, expert_map=[(1, 1), (0, 0), (1, 2), (1, 0)])
    w13, w2 = split_experts(cfg, data.w13, data.w2)
    assert torch.equal(w13[0], data.w13[[1]]) and torch.equal(w13[1], data.w13[[3, 0, 2]])
    assert torch.equal(w2[0], data.w2[[1]]) and torch.equal(w2[1], data.w2[[3, 0, 2]])
    empty = replace(CFG, expert_map=[(1, 0), (1, 1), (1, 2), (1, 3)])
    assert split_experts(empty, data.w13, data.w2)[0][0].shape == (0, 32, 24)
    with pytest.raises(ValueError, match=r"w13 has shape \[3, 32, 24\]: must be \[4, 32, 24\]"):
        split_experts(CFG, data.w13[:3], data.w2)
    with pytest.raises(ValueError, match="per_expert has 3 entries: must be num_experts=4"):
        split_per_pe(CFG, data.w13[:3])


def test_split_of_replicas_gives_every_place_its_copy() -> None:
    """A10: expert 0 on PE 0 and twice on PE 1, biases alike, in a transposed layout."""
    cfg = replace(
        CFG,
        expert_map=[[(0, 0), (1, 1), (1, 2)], (0, 1), (0, 2), (1, 0)],
        fc1_bias=True,
        w13_transposed=True,
        w13_layout="interleaved",
    )
    data = make_inputs(cfg, tokens=[0, 0])
    w13, w2 = split_experts(cfg, data.w13, data.w2)
    assert torch.equal(w13[0], data.w13[[0, 1, 2]]) and torch.equal(w13[1], data.w13[[3, 0, 0]])
    assert torch.equal(w2[1], data.w2[[3, 0, 0]])
    assert data.b13 is not None
    assert torch.equal(split_per_pe(cfg, data.b13)[1], data.b13[[3, 0, 0]])
