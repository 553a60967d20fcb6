"""dgrad and wgrad as compiled, on vgpu, against the oracle of the backward (issue: cases x PEs;
CASES B1, B2, B4, B5, B9, B12, Z1, Z3, Z5, N1, N2, N7, A10, I1)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backward_runs import (
    STEPS,
    Step,
    assert_same,
    check,
    layer_of,
    output_gradients,
    train_step,
    with_cfg,
)

from megamoe.reference_backward import moe_backward_oracle, sum_replicas
from megamoe.runtime.errors import MegaMoETimeout, PoolCapacityError
from megamoe.runtime.saved import Saved
from megamoe.testing import VgpuMoE
from megamoe.verify.inputs import Inputs, make_inputs


@pytest.mark.parametrize("step", STEPS[:4], ids=lambda step: step.name)
def test_gradients_on_two_pes(step: Step) -> None:
    check(step, 2)


@pytest.mark.slow
@pytest.mark.parametrize("num_pes", [1, 2, 4])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_gradients(step: Step, num_pes: int) -> None:
    check(step, num_pes)


INTEGERS = STEPS[1]


def small(num_pes: int = 2, **more: object) -> Step:
    """Integers, sizes that compile once for the tests below."""
    return with_cfg(INTEGERS, hidden=64, intermediate=64, num_experts=4, max_tokens=64, **more)


def model(step: Step, data: Inputs, dy: list[torch.Tensor], num_pes: int = 2):
    return moe_backward_oracle(
        step.config(num_pes), dy=dy, **data.kwargs, dtype=torch.float32, rounding="kernel"
    )


def test_masked_tokens_with_garbage_and_gradients_of_masked_slots() -> None:
    """N1, B1, I1: NaN and Inf in masked tokens, in their weights and in their dy."""
    step = small()
    data = make_inputs(step.config(2), tokens=[8, 5], integers=True, masked=0.2)
    dy = output_gradients(step, data)
    for junk in (float("nan"), float("inf")):
        for pe in range(2):
            data.topk_ids[pe][-2:] = -1
            data.x[pe][-2:] = junk
            data.topk_weights[pe][data.topk_ids[pe] < 0] = junk
            dy[pe][-2:] = junk
        got = train_step(layer_of(step.config(2), data), data, dy)
        clean = replace(
            data,
            x=[torch.where(x.isfinite(), x, 0) for x in data.x],
            topk_weights=[torch.where(w.isfinite(), w, 0) for w in data.topk_weights],
        )
        want = model(step, clean, [torch.where(t.isfinite(), t, 0) for t in dy])
        for name in ("dx", "d_topk_weights", "dw13", "dw2"):
            assert_same(getattr(got, name), getattr(want, name))
        for pe in range(2):
            assert not got.dx[pe][-2:].any()
            assert not got.d_topk_weights[pe][data.topk_ids[pe] < 0].any()


def test_types_of_ids_and_router_weights() -> None:
    """I5, I6: int64 ids and bf16 weights give the bits of int32 and fp32."""
    step = small()
    data = make_inputs(step.config(2), tokens=[8, 5], integers=True, masked=0.2)
    dy = output_gradients(step, data)
    other = replace(
        data,
        topk_ids=[ids.long() for ids in data.topk_ids],
        topk_weights=[w.bfloat16() for w in data.topk_weights],
    )
    moe = layer_of(step.config(2), data)
    first, second = train_step(moe, data, dy), train_step(moe, other, dy)
    for name in ("dx", "d_topk_weights", "dw13", "dw2"):
        assert_same(getattr(first, name), getattr(second, name))
        assert any(part.any() for part in getattr(first, name))


def test_ids_beyond_the_experts_are_masked_in_the_backward_too() -> None:
    """I2."""
    step = small(invalid_ids="mask")
    data = make_inputs(step.config(2), tokens=[8, 5], integers=True)
    for ids, bad in zip(data.topk_ids, (4, 2**31 - 1), strict=True):
        ids[::2, 1] = bad
    dy = output_gradients(step, data)
    got, want = train_step(layer_of(step.config(2), data), data, dy), model(step, data, dy)
    for name in ("dx", "d_topk_weights", "dw13", "dw2"):
        assert_same(getattr(got, name), getattr(want, name))
    assert not got.d_topk_weights[0][::2, 1].any() and got.d_topk_weights[0][1::2, 1].any()


def test_a_zero_weight_has_a_gradient() -> None:
    step = small()
    data = make_inputs(step.config(2), tokens=[8, 5], integers=True)
    for router in data.topk_weights:
        router.zero_()
    dy = output_gradients(step, data)
    got, want = train_step(layer_of(step.config(2), data), data, dy), model(step, data, dy)
    assert_same(got.d_topk_weights, want.d_topk_weights)
    assert all(part.any() for part in got.d_topk_weights)
    assert not any(part.any() for part in (*got.dx, *got.dw13, *got.dw2))


def test_a_pe_that_skips_its_dgrad_is_found_by_name() -> None:
    """Z7: the bounded wait says who was waited for, in which call."""
    step = small()
    data = make_inputs(step.config(2), tokens=[5, 6], integers=True)
    moe = layer_of(step.config(2), data, timeout_s=0.001)
    saved = moe.forward(
        x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights, save_for_backward=True
    ).saved
    session = moe.group.sessions[0]
    call = {
        "dy_TH": torch.ones_like(data.x[0]),
        "dx_TH": torch.empty_like(data.x[0]),
        "d_topk_TK": torch.empty(5, 2),
    }
    session.training.dgrad(saved[0], **call)
    moe.world.run()
    with pytest.raises(MegaMoETimeout, match=r"PE 0, CTA \d, epoch 2: .*peer 1"):
        session.raise_on_status()
    with pytest.raises(MegaMoETimeout, match="rebuild"):
        moe.backward_wgrad(saved)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forwards_outstanding(order: tuple[int, int]) -> None:
    """B12: fwd, fwd, bwd, bwd, in both orders, and a plain forward in between."""
    step = small()
    calls = [
        make_inputs(step.config(2), tokens=tokens, integers=True, seed=7)
        for tokens in ([6, 3], [0, 40])
    ]
    moe = layer_of(step.config(2), calls[0])
    given = [{"x": d.x, "topk_ids": d.topk_ids, "topk_weights": d.topk_weights} for d in calls]
    saved = [moe.forward(**each, save_for_backward=True).saved for each in given]
    for data in calls:
        for x in data.x:
            x.fill_(float("nan"))  # rows were kept
    fresh = [
        make_inputs(step.config(2), tokens=tokens, integers=True, seed=7)
        for tokens in ([6, 3], [0, 40])
    ]
    for i in order:
        given = {
            "x": fresh[1 - i].x,
            "topk_ids": fresh[1 - i].topk_ids,
            "topk_weights": fresh[1 - i].topk_weights,
        }
        moe.forward(**given)
        dy = output_gradients(step, fresh[i])
        back = moe.backward_dgrad(dy, saved[i])
        want = model(step, replace(fresh[i], w13=calls[0].w13, w2=calls[0].w2), dy)
        assert_same(back.dx, want.dx)
        assert_same(back.d_topk_weights, want.d_topk_weights)
        made = moe.backward_wgrad(saved[i])
        assert_same([g["w13"] for g in made.grads], want.dw13)
        assert_same([g["w2"] for g in made.grads], want.dw2)


def test_many_steps_of_changing_tokens_stay_right() -> None:
    """B5, N2, N7, Z1: ragged T, blocks used again with what the last step left in them."""
    step = small()
    layer, moe = None, None
    for seed, tokens in enumerate([[1, 17], [40, 0], [0, 0], [3, 64], [64, 5], [0, 2]]):
        data = make_inputs(step.config(2), tokens=tokens, integers=True, masked=0.1, seed=seed)
        if layer is None:
            layer = data
            moe = layer_of(step.config(2), layer)
        data = replace(data, w13=layer.w13, w2=layer.w2)
        dy = output_gradients(step, data)
        got, want = train_step(moe, data, dy), model(step, data, dy)
        for name in ("dx", "d_topk_weights", "dw13", "dw2"):
            assert_same(getattr(got, name), getattr(want, name))


def test_gradients_accumulate_over_calls_in_one_launch() -> None:
    """B8, Z5: three calls added to fp32 main_grad; an expert without rows keeps its bits."""
    step = small()
    datas = [
        make_inputs(step.config(2), tokens=[5, 4], integers=True, seed=seed) for seed in range(3)
    ]
    for data in datas:
        for ids in data.topk_ids:
            ids[ids == 2] = 1
    datas = [replace(data, w13=datas[0].w13, w2=datas[0].w2) for data in datas]
    moe = layer_of(step.config(2), datas[0])
    saved, totals = [], None
    for data in datas:
        dy = output_gradients(step, data)
        done = moe.forward(
            x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights,
            save_for_backward=True,
        )  # fmt: skip
        moe.backward_dgrad(dy, done.saved)
        saved.append(done.saved)
        want = model(step, data, dy)
        parts = [*want.dw13, *want.dw2]
        totals = parts if totals is None else [a + b for a, b in zip(totals, parts, strict=True)]
    odd = -0.0
    into = [
        {"w13": torch.full_like(want.dw13[pe], odd), "w2": torch.full_like(want.dw2[pe], 0.5)}
        for pe in range(2)
    ]
    made = moe.backward_wgrad(saved, accumulate_into=into)
    assert made.launches == [1, 1] and made.grads == into
    assert_same([g["w2"] for g in into], [t + 0.5 for t in totals[2:]])
    for pe in range(2):
        torch.testing.assert_close(into[pe]["w13"], totals[pe], rtol=0, atol=0)
    idle = into[1]["w13"][0]  # expert 2 is PE 1's first
    assert bool((idle == 0).all()) and bool(idle.signbit().all())


@pytest.mark.slow
def test_every_replica_has_its_own_gradient() -> None:
    """A10: replicas on both PEs, one PE twice; their sum is the expert's."""
    places = ([(0, 0), (1, 1), (1, 2)], (0, 1), (0, 2), (1, 0))
    step = small(expert_map=places)
    cfg, data = step.config(3), make_inputs(step.config(3), tokens=[6, 5, 9], integers=True)
    dy = output_gradients(step, data)
    got, want = train_step(layer_of(cfg, data), data, dy), model(step, data, dy, 3)
    for name in ("dx", "dw13", "dw2"):
        assert_same(getattr(got, name), getattr(want, name))
    single = model(small(), data, dy, 3)
    assert_same([sum_replicas(cfg, got.dw13)], [torch.cat(single.dw13)])


@pytest.mark.slow
@pytest.mark.parametrize("num_pes", [2, 4])
def test_gradients_do_not_depend_on_the_number_of_pes(num_pes: int) -> None:
    """B1, B2, B9: the same tokens on one PE and on several, bit for bit."""
    step = small()
    one = step.config(1)
    whole = make_inputs(one, tokens=[20], integers=True, masked=0.2)
    dy = output_gradients(step, whole)
    counts = [20 - 5 * (num_pes - 1)] + [5] * (num_pes - 1)
    parts = replace(
        whole,
        x=list(whole.x[0].split(counts)),
        topk_ids=list(whole.topk_ids[0].split(counts)),
        topk_weights=list(whole.topk_weights[0].split(counts)),
    )
    alone = train_step(layer_of(one, whole), whole, dy)
    many = train_step(layer_of(step.config(num_pes), parts), parts, list(dy[0].split(counts)))
    for name in ("dx", "d_topk_weights", "dw13", "dw2"):
        assert_same([torch.cat(getattr(many, name))], getattr(alone, name))


def test_a_pool_that_overflows_is_reported_in_both_directions_and_the_session_goes_on() -> None:
    step = with_cfg(small(), capacity=1, top_k=1, max_tokens=96)
    cfg = step.config(2)
    data = make_inputs(cfg, tokens=[96, 96], integers=True)
    for ids in data.topk_ids:
        ids.fill_(2)
    moe = layer_of(cfg, data)
    with pytest.raises(PoolCapacityError, match="pool of PE 1 needs 256 rows, available are 128"):
        _overflow(moe, data)
    saved = _overflow(moe, data, forget=True)
    dy = output_gradients(step, data)
    with pytest.raises(PoolCapacityError, match="pool of PE 1 needs"):
        moe.backward_dgrad(dy, saved)
    fits = make_inputs(cfg, tokens=[3, 2], integers=True)
    fits = replace(fits, w13=data.w13, w2=data.w2)
    for ids in fits.topk_ids:
        ids.fill_(2)
    dy = output_gradients(step, fits)
    got, want = train_step(moe, fits, dy), model(step, fits, dy)
    for name in ("dx", "d_topk_weights", "dw13", "dw2"):
        assert_same(getattr(got, name), getattr(want, name))


def _overflow(moe: VgpuMoE, data: Inputs, *, forget: bool = False) -> list[Saved]:
    """A forward that saves; with ``forget`` nobody looks at what it reports."""
    call = {"x": data.x, "topk_ids": data.topk_ids, "topk_weights": data.topk_weights}
    if not forget:
        return moe.forward(**call, save_for_backward=True).saved or []
    saved = [
        session.training.save(
            moe.weights[pe],
            x_TH=data.x[pe],
            topk_ids_TK=data.topk_ids[pe],
            topk_weights_TK=data.topk_weights[pe],
            y_TH=torch.empty_like(data.x[pe]),
        )
        for pe, session in enumerate(moe.group.sessions)
    ]
    moe.world.run()
    for session in moe.group.sessions:
        session.clear_status()
    return saved
