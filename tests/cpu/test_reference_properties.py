"""Properties of the oracle, the bound and the routes over drawn layers and calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from strategies import Call, calls, layers

from megamoe import MoEConfig
from megamoe.checks import check_kernel_support
from megamoe.error_bound import error_bound
from megamoe.reference import moe_oracle, moe_tokens
from megamoe.routes import route_slots
from megamoe.verify.inputs import Inputs, weights_per_pe


def examples(count: int) -> Callable[[Any], Any]:
    """Fixed examples, so that every run of CI is the same run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


small_calls = functools.partial(calls, max_size=104)
"""Two tiles of 64 and a tail at most: fp64 on one core."""


def kernel_model(cfg: MoEConfig, inputs: Inputs, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(moe_oracle(cfg, **inputs.kwargs, dtype=dtype, rounding="kernel"))


@examples(40)
@given(call=small_calls(integers=True))
def test_integer_data_is_exact(call: Call) -> None:
    """fp32 and fp64 products give the same bits: what makes bit-for-bit comparison possible."""
    inputs = call.inputs()
    assert torch.equal(
        kernel_model(call.cfg, inputs, torch.float32), kernel_model(call.cfg, inputs, torch.float64)
    )


@examples(40)
@given(call=small_calls(integers=False))
def test_the_rounding_model_stays_within_the_bound(call: Call) -> None:
    inputs = call.inputs()
    exact = torch.cat(moe_oracle(call.cfg, **inputs.kwargs))
    bound = torch.cat(error_bound(call.cfg, **inputs.kwargs))
    error = (kernel_model(call.cfg, inputs, torch.float32).double() - exact).abs()
    assert (error <= bound).all()


@examples(40)
@given(call=small_calls(integers=True))
def test_layout_is_storage_only(call: Call) -> None:
    """One seed, any layout: the same bits as gate first and not transposed."""
    plain = replace(call.cfg, w13_layout="gate_up", w13_transposed=False, w2_transposed=False)
    base = replace(call, cfg=plain).inputs()
    assert torch.equal(
        kernel_model(call.cfg, call.inputs(), torch.float32),
        kernel_model(plain, base, torch.float32),
    )


@examples(20)
@given(call=small_calls(integers=True, residual=False))
def test_every_pe_with_its_own_experts_gives_the_whole(call: Call) -> None:
    """Rows sent where the routes say, computed with what `split_experts` puts there, and summed:
    y. So placement, replicas and routes fit together, and every slot is counted once."""
    cfg, inputs = call.cfg, call.inputs()
    weights = weights_per_pe(cfg, inputs)
    want = moe_oracle(cfg, **inputs.kwargs)
    for source in range(cfg.num_pes):
        pe_TK, local_TK = route_slots(cfg, pe=source, topk_ids_TK=inputs.topk_ids[source])
        got = torch.zeros_like(want[source])
        for pe in (pe for pe in range(cfg.num_pes) if cfg.experts_per_pe[pe]):
            experts = cfg.experts_per_pe[pe]
            local = replace(cfg, num_experts=max(experts, cfg.top_k), expert_map=None, num_pes=1)
            pad = functools.partial(padded, experts=local.num_experts)
            got += moe_oracle(
                local,
                x=[inputs.x[source]],
                topk_ids=[torch.where(pe_TK == pe, local_TK, -1)],
                topk_weights=[inputs.topk_weights[source]],
                **{name: None if w is None else pad(w[pe]) for name, w in weights.items()},
            )[0]
        assert torch.equal(got, want[source])


def padded(per_expert: torch.Tensor, *, experts: int) -> torch.Tensor:
    """With experts of zeros behind, as a config needs at least K; nothing routes to them."""
    return torch.cat([per_expert, per_expert.new_zeros(experts, *per_expert.shape[1:])])[:experts]


@examples(40)
@given(cfg=layers())
def test_routes_of_a_tensor_are_the_routes_of_its_slots(cfg: MoEConfig) -> None:
    ids_TK = torch.arange(cfg.num_experts).repeat(7, 1)
    for pe in range(cfg.num_pes):
        pe_TK, local_TK = route_slots(cfg, pe=pe, topk_ids_TK=ids_TK)
        for token, expert in torch.cartesian_prod(*map(torch.arange, ids_TK.shape)).tolist():
            place = (int(pe_TK[token, expert]), int(local_TK[token, expert]))
            assert place == cfg.route_of(pe, token, expert)
            assert cfg.local_experts(place[0])[place[1]] == expert


@examples(40)
@given(cfg=layers(kernel=True))
def test_kernel_layers_are_what_the_kernel_runs(cfg: MoEConfig) -> None:
    check_kernel_support(cfg)


@examples(25)
@given(call=small_calls(integers=False, residual=False))
def test_garbage_in_masked_slots_changes_no_bit(call: Call) -> None:
    """N1: NaN in x and weights of tokens without slots, NaN weights of masked slots."""
    inputs = call.inputs()
    clean = kernel_model(call.cfg, inputs, torch.float32)
    for x_TH, ids_TK, weights_TK in zip(
        inputs.x, inputs.topk_ids, inputs.topk_weights, strict=True
    ):
        x_TH[(ids_TK < 0).all(dim=1)] = float("nan")
        weights_TK[ids_TK < 0] = float("nan")
    assert torch.equal(kernel_model(call.cfg, inputs, torch.float32), clean)


def test_the_strategies_reach_every_feature() -> None:
    """A strategy that silently stopped drawing something would make the tests above weaker."""
    seen: set[Any] = set()

    @examples(300)
    @given(call=calls(integers=False))
    def collect(call: Call) -> None:
        cfg = call.cfg
        for name in ("activation", "w13_layout", "w13_transposed", "w2_transposed", "fc1_bias",
                     "fc2_bias", "weight_at", "combine", "replicated", "num_pes"):  # fmt: skip
            seen.add((name, getattr(cfg, name)))
        for name in ("masked", "repeated", "residual", "id_dtype", "weight_dtype", "bias_dtype"):
            seen.add((name, getattr(call, name)))
        seen.add(("odd hidden", cfg.hidden % 64 != 0))
        seen.add(("an idle PE", 0 in call.tokens))
        seen.add(("a PE without experts", 0 in cfg.experts_per_pe))
        seen.add(("an expert twice on a PE", any(
            len({pe for pe, _ in places}) < len(places) for places in cfg.replicas
        )))  # fmt: skip

    collect()
    counts = {name: sum(1 for key, _ in seen if key == name) for name, _ in seen}
    assert counts == {
        "activation": 6, "w13_layout": 3, "w13_transposed": 2, "w2_transposed": 2, "fc1_bias": 2,
        "fc2_bias": 2, "weight_at": 2, "combine": 3, "replicated": 2, "num_pes": 4, "masked": 4,
        "repeated": 4, "residual": 2, "id_dtype": 2, "weight_dtype": 3, "bias_dtype": 2,
        "odd hidden": 2, "an idle PE": 2, "a PE without experts": 2, "an expert twice on a PE": 2,
    }  # fmt: skip


def test_moe_tokens_needs_no_group() -> None:
    """Without a config: the plain maths that the group's oracle is made of."""
    y_TH = moe_tokens(
        x_TH=torch.tensor([[2.0]]),
        topk_ids_TK=torch.tensor([[0]]),
        topk_weights_TK=torch.tensor([[3.0]]),
        w13_EGH=torch.ones(1, 1, 1),
        w2_EHI=torch.full((1, 1, 1), 5.0),
        b13_EG=torch.ones(1, 1),
        b2_EH=torch.full((1, 1), 0.5),
        residual_TH=torch.tensor([[100.0]]),
        activation="relu2",
    )
    assert y_TH.tolist() == [[3 * 9 * 5 + 0.5 + 100]]
