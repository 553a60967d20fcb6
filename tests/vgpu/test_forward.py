"""The shipped forward kernel on vgpu against the oracle."""

import pytest
import torch
from forward_cases import assert_same_bits

from megamoe.error_bound import error_bound
from megamoe.reference import moe_oracle
from megamoe.runtime.errors import MegaMoETimeout, PoolCapacityError
from megamoe.verify.cases import CASES, Case, call, expected, layer

BY_NAME = {case.name: case for case in CASES}
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@by_case
def test_integers_bit_for_bit(case):
    data = case.inputs()
    result = call(layer(case, data), data)
    assert_same_bits(result.y, expected(case, data))
    assert result.launches == [1] * len(case.tokens)
    slots = sum(int((ids_TK >= 0).sum()) for ids_TK in data.topk_ids)
    assert sum(result.counters["rows"]) == slots


@pytest.mark.parametrize("name", ["ragged", "k8", "half_masked", "odd_tiles"])
@pytest.mark.parametrize("activation", ["silu", "relu"])
def test_random_data_within_the_derived_bound(name, activation):
    case = Case(**(vars(BY_NAME[name]) | {"activation": activation}))
    data = case.inputs(integers=False)
    result = call(layer(case, data), data)
    oracle = moe_oracle(case.cfg, **data.kwargs)
    bound = error_bound(case.cfg, **data.kwargs)
    for pe in range(len(case.tokens)):
        error = (result.y[pe].double() - oracle[pe]).abs()
        assert bool((error <= bound[pe]).all()), (pe, float((error - bound[pe]).max()))


def test_many_calls_with_changing_tokens_on_one_session():
    """Banks, epochs and stale rows: nothing leaks from one call into the next."""
    base = BY_NAME["half_masked"]
    first = base.inputs()
    moe = layer(base, first)
    for seed, tokens in enumerate([(48, 64), (0, 7), (64, 1), (3, 0), (20, 33), (64, 64)]):
        case = Case(**(vars(base) | {"tokens": tokens}))
        data = case.inputs(seed=seed)
        data.w13.copy_(first.w13)
        data.w2.copy_(first.w2)
        result = call(moe, data, in_place=seed % 2 == 1)
        assert_same_bits(result.y, expected(case, data))
        assert result.launches == [1, 1]


def test_weights_are_read_in_place_at_every_call():
    case = BY_NAME["one_pe"]
    data = case.inputs()
    moe = layer(case, data)
    call(moe, data)
    data.w13.mul_(-1)
    data.w2.add_(1)
    assert_same_bits(call(moe, data).y, expected(case, data))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_id_types_agree(dtype):
    case = BY_NAME["half_masked"]
    data = case.inputs()
    want = expected(case, data)
    data.topk_ids[:] = [ids_TK.to(dtype) for ids_TK in data.topk_ids]
    assert_same_bits(call(layer(case, data), data).y, want)


def test_row_strides_of_x():
    """Rows 16-byte aligned with a gap, and rows that are only 2-byte aligned."""
    case = BY_NAME["ragged"]
    data = case.inputs()
    want = expected(case, data)
    moe = layer(case, data)
    for gap, start in ((8, 0), (3, 1)):
        strided = []
        for x_TH in data.x:
            wide = torch.full((x_TH.shape[0], case.hidden + gap + start), 7.0).bfloat16()
            view = wide[:, start : start + case.hidden]
            view.copy_(x_TH)
            strided.append(view)
        result = moe.forward(x=strided, topk_ids=data.topk_ids, topk_weights=data.topk_weights)
        assert_same_bits(result.y, want)


def test_garbage_in_masked_tokens_changes_nothing():
    """CASES N1: NaN and Inf rows whose slots are all masked."""
    case = BY_NAME["k8"]
    data = case.inputs()
    for ids_TK in data.topk_ids:
        ids_TK[-2:] = -1
    want = expected(case, data)
    for poison in (float("nan"), float("inf")):
        for x_TH, weights_TK in zip(data.x, data.topk_weights, strict=True):
            x_TH[-2:] = poison
            weights_TK[-2:] = poison
        result = call(layer(case, data), data)
        assert_same_bits(result.y, want)
        assert all(bool((y_TH[-2:] == 0).all()) for y_TH in result.y)


def test_ids_past_the_end_are_masked_and_reported():
    case = BY_NAME["ragged"]
    data = case.inputs()
    data.topk_ids[2][3, 1] = case.num_experts
    data.topk_ids[3][0, 0] = 2**31 - 1
    want = expected(case, data)
    moe = layer(case, data)
    assert_same_bits(call(moe, data).y, want)
    session = moe.group.sessions[2]
    session.check_invalid_ids = True
    with pytest.raises(
        ValueError, match=r"topk_ids\[3, 1\]=8 on PE 2: must be below num_experts=8"
    ):
        call(moe, data)
    assert_same_bits(call(moe, case.inputs()).y, expected(case, case.inputs()))


def test_a_small_pool_is_the_same_error_on_every_pe():
    """PE 1 owns the expert everybody wants; its pool is too small, so nobody computes."""
    case = Case(name="small", tokens=(96, 96), top_k=1, route="one", capacity=1, max_tokens=96)
    data = case.inputs()
    moe = layer(case, data)
    texts = []
    with pytest.raises(
        PoolCapacityError, match="pool of PE 1 needs 256 rows, available are 128"
    ) as info:
        call(moe, data)
    texts = [str(info.value), *getattr(info.value, "__notes__", [])]
    assert len(texts) == 2
    assert len(set(texts)) == 1
    # The session goes on: a call that fits is computed.
    fits = Case(**(vars(case) | {"tokens": (1, 0)}))
    small = fits.inputs()
    small.w13.copy_(data.w13)
    small.w2.copy_(data.w2)
    assert_same_bits(call(moe, small).y, expected(fits, small))


def test_a_pe_that_does_not_call_is_named_and_poisons_the_session():
    case = Case(name="absent", tokens=(5, 6))
    data = case.inputs()
    moe = layer(case, data, timeout_s=0.001)
    group = moe.group
    y_TH = torch.empty(5, case.hidden, dtype=torch.bfloat16)
    launch = {
        "x_TH": data.x[0],
        "topk_ids_TK": data.topk_ids[0],
        "topk_weights_TK": data.topk_weights[0],
        "y_TH": y_TH,
    }
    group.sessions[0].launch(moe.weights[0], **launch)
    moe.world.run()
    with pytest.raises(MegaMoETimeout, match=r"PE 0, CTA \d, epoch 1: .*route of the peer 1"):
        group.sessions[0].raise_on_status()
    with pytest.raises(MegaMoETimeout, match="rebuild"):
        group.sessions[0].launch(moe.weights[0], **launch)
