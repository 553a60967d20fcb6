"""The oracle with biases, layouts, replicas, residual and both combines (CASES A10, I4, I9, S1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from loops import by_loops

from megamoe import MoEConfig
from megamoe.config import ACTIVATIONS
from megamoe.reference import moe_oracle, sum_slots_by_pe
from megamoe.routes import route_slots
from megamoe.verify.inputs import Inputs, make_inputs

CFG = MoEConfig(
    hidden=16, intermediate=24, num_experts=4, top_k=2, num_pes=2, max_tokens=64, activation="relu"
)
A10_MAP = ([(0, 0), (1, 1), (1, 2)], (0, 1), (0, 2), (1, 0))


def layer(activation: Any, **more: Any) -> MoEConfig:
    limit = 0.5 if activation in ("gpt_oss", "swiglu_clamped") else None
    return replace(CFG, activation=activation, activation_limit=limit, **more)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight_at", ["act", "combine"])
@pytest.mark.parametrize("biases", [(True, False), (False, True), (True, True)])
def test_oracle_equals_loops(activation: Any, weight_at: Any, biases: tuple[bool, bool]) -> None:
    cfg = layer(activation, weight_at=weight_at, fc1_bias=biases[0], fc2_bias=biases[1])
    inputs = make_inputs(cfg, tokens=[3, 2], masked=0.2, repeated=0.3, residual=True)
    for pe, y_TH in enumerate(moe_oracle(cfg, **inputs.kwargs)):
        torch.testing.assert_close(y_TH, by_loops(cfg, inputs, pe), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("transposed", [(False, True), (True, False), (True, True)])
def test_layouts_equal_loops(layout: Any, transposed: tuple[bool, bool]) -> None:
    """`by_loops` indexes the stored weights itself."""
    cfg = layer(
        "gpt_oss",
        w13_layout=layout,
        w13_transposed=transposed[0],
        w2_transposed=transposed[1],
        fc1_bias=True,
        fc2_bias=True,
    )
    inputs = make_inputs(cfg, tokens=[2, 2], bias_dtype=torch.float32)
    for pe, y_TH in enumerate(moe_oracle(cfg, **inputs.kwargs)):
        torch.testing.assert_close(y_TH, by_loops(cfg, inputs, pe), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("hidden", [64, 96, 192, 320, 2880, 3584, 7168])
def test_hidden_sizes_of_the_report(hidden: int) -> None:
    """S1 with T = 5: every column is there, none stays zero."""
    cfg = replace(CFG, hidden=hidden, intermediate=8, num_experts=2, activation="silu")
    inputs = make_inputs(cfg, tokens=[5, 0])
    y_TH = moe_oracle(cfg, **inputs.kwargs)[0]
    torch.testing.assert_close(y_TH, by_loops(cfg, inputs, 0), rtol=1e-11, atol=1e-12)
    assert (y_TH != 0).all()


@pytest.mark.parametrize("inter", [8, 96, 224, 448, 704])
def test_intermediate_sizes_of_the_report(inter: int) -> None:
    """S2: the last column of I counts."""
    cfg = replace(CFG, intermediate=inter, num_experts=2, activation="silu")
    inputs = make_inputs(cfg, tokens=[2, 0])
    y_TH = moe_oracle(cfg, **inputs.kwargs)[0]
    torch.testing.assert_close(y_TH, by_loops(cfg, inputs, 0), rtol=1e-12, atol=1e-13)
    inputs.w2[:, :, -1] = 0
    assert (moe_oracle(cfg, **inputs.kwargs)[0] != y_TH).any()


def single(cfg: MoEConfig, **more: Any) -> Inputs:
    """One token on PE 0, two slots on expert 0: x = e0 + 256 e1; gate 1, up 257 in two columns of
    h; w2 adds both into y0. Weights 3."""
    x_TH = torch.zeros(1, cfg.hidden).bfloat16()
    x_TH[0, :2] = torch.tensor([1.0, 256.0])
    w13 = torch.zeros(cfg.num_experts, 2 * cfg.intermediate, cfg.hidden).bfloat16()
    w13[:, :2, 0] = 1.0
    w13[:, cfg.intermediate : cfg.intermediate + 2, :2] = 1.0
    w2 = torch.zeros(cfg.num_experts, cfg.hidden, cfg.intermediate).bfloat16()
    w2[:, 0, :2] = 1.0
    none = torch.zeros(0, cfg.hidden).bfloat16()
    return Inputs(
        x=[x_TH, none],
        topk_ids=[torch.tensor([[0, 0]]), torch.zeros(0, 2, dtype=torch.int64)],
        topk_weights=[torch.tensor([[3.0, 3.0]]), torch.zeros(0, 2)],
        w13=w13,
        w2=w2,
        **more,
    )


def first_value(cfg: MoEConfig, inputs: Inputs) -> float:
    y_TH = moe_oracle(cfg, **inputs.kwargs, rounding="kernel")[0]
    return y_TH[0, 0].item()


def replace_weights(inputs: Inputs, weights: list[float]) -> Inputs:
    return replace(inputs, topk_weights=[torch.tensor([weights]), inputs.topk_weights[1]])


def test_bias_rounding_points_by_hand() -> None:
    """Values of bf16 are 4 apart from 512, 8 from 1024, 16 from 2048; ties go to even.

    No bias: h = 3·257 = 771 -> 772, row 2·772 = 1544, two slots: y = 3088.
    fc1: the bias joins up in fp32: up = 258, h = 774 -> 776, row 1552, y = 3104. Rounding 257 first
    would give 256 + 1, h = 772 and y = 3088.
    fc2, weights 3 and 1, b2 = 7: rows 1544 + 7 = 1551 -> 1552 and 512 + 7 = 519 -> 520, y = 2072 ->
    2080. Added after the rows are rounded, 1551 + 519 = 2070 -> 2064.
    Residual 8: 3088 + 8 = 3096 -> 3104.
    """
    assert first_value(CFG, single(CFG)) == 3088.0
    cfg = replace(CFG, fc1_bias=True)
    b13 = torch.zeros(4, 48).bfloat16()
    b13[0, 24:26] = 1.0
    assert first_value(cfg, single(cfg, b13=b13)) == 3104.0
    cfg = replace(CFG, fc2_bias=True)
    inputs = replace_weights(single(cfg, b2=torch.full((4, 16), 7.0)), [3.0, 1.0])
    assert first_value(cfg, inputs) == 2080.0
    residual = [torch.full((1, 16), 8.0).bfloat16(), torch.zeros(0, 16).bfloat16()]
    assert first_value(CFG, single(CFG, residual=residual)) == 3104.0


def test_weight_of_the_bias_of_fc2() -> None:
    """ "act" leaves b2 unweighted, "combine" weights it: 2·b2 against 2·3·b2."""
    b2 = torch.full((4, 16), 4.0)
    for weight_at, factor in (("act", 2), ("combine", 6)):
        cfg = replace(CFG, fc2_bias=True, weight_at=weight_at)
        inputs = single(cfg, b2=b2)
        without = moe_oracle(cfg, **{**inputs.kwargs, "b2": torch.zeros_like(b2)})[0]
        assert torch.equal(moe_oracle(cfg, **inputs.kwargs)[0] - without, factor * b2[:1].double())


def test_a_row_s_bias_needs_a_row() -> None:
    """Masked slots add no bias; a token without slots is its residual, or zero."""
    cfg = replace(CFG, fc1_bias=True, fc2_bias=True)
    inputs = make_inputs(cfg, tokens=[4, 3], masked=1.0, residual=True)
    assert inputs.residual is not None
    for rounding in ("none", "kernel"):
        y = moe_oracle(cfg, **inputs.kwargs, rounding=rounding)  # type: ignore[arg-type]
        assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(y, inputs.residual, strict=True))
        y = moe_oracle(cfg, **{**inputs.kwargs, "residual": None}, rounding=rounding)  # type: ignore[arg-type]
        assert not torch.cat(y).any()


def test_combine_weight_is_rounded_before_the_sum() -> None:
    """Row 1544 twice, weights 1 + 2^-23 and -1: the product 1544 + 1544·2^-23 is rounded to fp32,
    1.508 steps of 2^-13 to 2, and -1544 is added: 2^-12. A fused multiply-add would keep
    1544·2^-23."""
    cfg = replace(CFG, weight_at="combine")
    inputs = single(cfg)
    inputs.w13[:, 24:26, 1] = 3.015625  # up = 1 + 772 -> h = 772, row 1544
    assert first_value(cfg, replace_weights(inputs, [1.0, 0.0])) == 1544.0
    assert first_value(cfg, replace_weights(inputs, [1.0 + 2.0**-23, -1.0])) == 2.0**-12


def test_prereduced_sum_by_hand() -> None:
    """Slots 1, 256, 256 on PEs 1, 0, 1: PE 0 sends 256, PE 1 sends 1 + 256 = 257 -> 256: 512.
    Directly: 513. A masked slot holds nothing."""
    slot_TKH = torch.tensor([[[1.0], [256.0], [256.0], [0.0]]])
    pe_TK = torch.tensor([[1, 0, 1, -1]])
    assert sum_slots_by_pe(slot_TKH, pe_TK=pe_TK, num_pes=2).tolist() == [[512.0]]
    assert sum_slots_by_pe(slot_TKH, pe_TK=torch.tensor([[1, 0, 0, -1]]), num_pes=2).item() == 513
    # Order: inside a PE ascending k in fp32, then ascending PE; 2^24 + 1 is lost, 1 + 1 first not.
    big = torch.tensor([[[2.0**24], [1.0], [1.0]]])
    assert sum_slots_by_pe(big, pe_TK=torch.tensor([[0, 1, 1]]), num_pes=2).item() == 2**24 + 2
    assert sum_slots_by_pe(big, pe_TK=torch.tensor([[2, 0, 1]]), num_pes=3).item() == 2**24 + 2
    assert sum_slots_by_pe(big, pe_TK=torch.tensor([[0, 1, 2]]), num_pes=3).item() == 2**24


def test_prereduced_follows_the_placement() -> None:
    """The oracle's PEs are those of the map: other maps, other roundings, the same layer."""
    cfg = replace(CFG, top_k=4, combine="prereduced", weight_at="combine", num_pes=4)
    cfg = replace(cfg, hidden=64, intermediate=256)  # sums that bf16 rounds
    inputs = make_inputs(cfg, tokens=[9, 3, 0, 8], integers=True)
    one_pe = replace(cfg, expert_map=[(2, 0), (2, 1), (2, 2), (2, 3)])
    direct = replace(cfg, combine="direct")
    results = {
        name: torch.cat(moe_oracle(layer, **inputs.kwargs, rounding="kernel"))
        for name, layer in {"spread": cfg, "one": one_pe, "direct": direct}.items()
    }
    # All slots on one PE: one sum, rounded once, as the direct sum is at the end.
    assert torch.equal(results["one"], results["direct"])
    assert not torch.equal(results["spread"], results["direct"])
    exact = {
        torch.cat(moe_oracle(layer, **inputs.kwargs)).sum().item()
        for layer in (cfg, one_pe, direct, replace(cfg, combine="auto"))
    }
    assert len(exact) == 1
    # I = 256 is bound by NVLink: "auto" sums where the experts are.
    auto = moe_oracle(replace(cfg, combine="auto"), **inputs.kwargs, rounding="kernel")
    assert torch.equal(torch.cat(auto), results["spread"])


@pytest.mark.parametrize("combine", ["direct", "prereduced"])
def test_redundant_experts_change_nothing(combine: Any) -> None:
    """A10: y with the map of the report is y without redundant experts."""
    inputs = make_inputs(CFG, tokens=[17, 16], integers=True, repeated=0.2)
    cfg = replace(CFG, expert_map=A10_MAP, combine=combine)
    for got, want in zip(
        moe_oracle(cfg, **inputs.kwargs), moe_oracle(CFG, **inputs.kwargs), strict=True
    ):
        assert torch.equal(got, want) and got.any()
    if combine == "direct":
        rounded = moe_oracle(cfg, **inputs.kwargs, rounding="kernel")
        assert torch.equal(
            torch.cat(rounded), torch.cat(moe_oracle(CFG, **inputs.kwargs, rounding="kernel"))
        )


def test_every_row_of_a_replicated_expert_is_counted_once() -> None:
    """A10: the places of all slots, counted, are the slots; both ways to ask agree."""
    cfg = replace(CFG, num_pes=3, expert_map=[[(0, 0), (2, 0), (2, 2)], (0, 1), (2, 1), (0, 2)])
    inputs = make_inputs(cfg, tokens=[30, 31, 7], masked=0.2, repeated=0.2)
    counts = {place: 0 for places in cfg.replicas for place in places}
    for pe, ids_TK in enumerate(inputs.topk_ids):
        pe_TK, local_TK = route_slots(cfg, pe=pe, topk_ids_TK=ids_TK)
        for t, k in torch.cartesian_prod(
            torch.arange(ids_TK.shape[0]), torch.arange(cfg.top_k)
        ).tolist():
            place = (int(pe_TK[t, k]), int(local_TK[t, k]))
            if ids_TK[t, k] < 0:
                assert place == (-1, -1)
                continue
            assert place == cfg.route_of(pe, t, int(ids_TK[t, k]))
            counts[place] += 1
    assert sum(counts.values()) == sum(int((ids_TK >= 0).sum()) for ids_TK in inputs.topk_ids)
    assert counts[0, 0] and counts[2, 0] and counts[2, 2]  # PE 1 holds no copy: it goes round


def test_capacity_formulas_hold_at_equality() -> None:
    """I4 and I9: all tokens together fill the fullest PE exactly, also uneven and with K > L."""
    for experts, top_k, num_pes in ((4, 2, 4), (4, 4, 4), (10, 4, 4), (2, 2, 4)):
        cfg = replace(CFG, num_experts=experts, top_k=top_k, num_pes=num_pes, max_tokens=3)
        most = min(top_k, max(cfg.experts_per_pe))
        ids_TK = torch.arange(top_k).expand(3, -1)  # the first experts are those of PE 0
        rows = sum(
            int((route_slots(cfg, pe=pe, topk_ids_TK=ids_TK)[0] == 0).sum())
            for pe in range(num_pes)
        )
        assert rows == cfg.worst_case_distinct_rows == num_pes * 3 * most
        same_TK = torch.zeros_like(ids_TK)  # every slot names expert 0
        rows = sum(
            int((route_slots(cfg, pe=pe, topk_ids_TK=same_TK)[0] == 0).sum())
            for pe in range(num_pes)
        )
        assert rows == cfg.worst_case_rows


def test_bad_arguments() -> None:
    cfg = replace(CFG, fc1_bias=True, fc2_bias=True)
    good = make_inputs(cfg, tokens=[1, 2], residual=True).kwargs
    moe_oracle(cfg, **good)
    for change, match in (
        ({"b13": None}, "b13 is None: must be a tensor, as fc1_bias=True"),
        ({"b2": None}, "b2 is None: must be a tensor, as fc2_bias=True"),
        ({"b13": good["b13"][:, :-8]}, r"b13 has shape \[4, 40\]: must be \[4, 48\]"),
        ({"b2": good["b2"][:2]}, r"b2 has shape \[2, 16\]: must be \[4, 16\]"),
        ({"residual": good["residual"][:1]}, "residual has 1 entries: must be a list of num_pes=2"),
        ({"residual": good["residual"][::-1]}, r"residual\[0\] has shape \[2, 16\]: .*\[1, 16\]"),
    ):
        with pytest.raises(ValueError, match=match):
            moe_oracle(cfg, **{**good, **change})
    with pytest.raises(ValueError, match="b2 is given: must be None, as fc2_bias=False"):
        moe_oracle(CFG, **{**good, "b13": None})
