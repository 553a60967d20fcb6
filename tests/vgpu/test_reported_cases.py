"""Faults that users of other MoE kernels have reported, on vgpu: each test is named in the table of
tests/README.md, beside the tests that cover the rest.

Legend: P PEs, T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from dataclasses import replace

import pytest
import torch
from forward_cases import assert_same_bits

from megamoe.runtime.errors import MegaMoETimeout, PoolCapacityError
from megamoe.verify.cases import Case, call, expected, layer

SMALL = {"hidden": 64, "intermediate": 64, "max_tokens": 16}
MODES = {
    "direct": (),
    "prereduced": (("combine", "prereduced"),),
    "ring": (("ring_rows", 256),),
}
by_mode = pytest.mark.parametrize("mode", MODES)


def some(quick: set, values: list) -> list:
    """Parameters of which only those in ``quick`` are run every time: each compiles a kernel."""
    return [v if v in quick else pytest.param(v, marks=pytest.mark.slow) for v in values]


def check(case: Case, data=None, **options):
    """One call, bit for bit; the result."""
    data = case.inputs() if data is None else data
    result = call(layer(case, data), data, **options)
    assert_same_bits(result.y, expected(case, data))
    return result


@by_mode
def test_a_pe_without_tokens_serves_the_others(mode):
    """Z1: PE 0 brings nothing and owns every expert that is asked for: 3 PEs · 4 tokens · 6."""
    case = Case(name="z1", tokens=(0, 4, 4, 4), num_experts=24, top_k=6, features=MODES[mode],
                **SMALL)  # fmt: skip
    data = case.inputs()
    for pe, ids_TK in enumerate(data.topk_ids):
        for t in range(len(ids_TK)):
            ids_TK[t] = torch.arange(6).roll(t + pe)
    result = check(case, data)
    assert result.y[0].shape == (0, case.hidden)
    assert result.counters["rows"] == [72, 0, 0, 0]


def test_a_pe_that_drifted_by_one_call_is_named():
    """Z7: PE 0 calls three times, PE 1 twice, then both with another T."""
    case = Case(name="z7", tokens=(5, 6), timeout_s=1e-3, **SMALL)
    data = case.inputs()
    moe = layer(case, data)
    for _ in range(2):
        call(moe, data)

    def launch(pe: int, tokens: int) -> None:
        moe.group.sessions[pe].launch(
            moe.weights[pe],
            x_TH=data.x[pe][:tokens],
            topk_ids_TK=data.topk_ids[pe][:tokens],
            topk_weights_TK=data.topk_weights[pe][:tokens],
            y_TH=torch.empty(tokens, case.hidden, dtype=torch.bfloat16),
        )

    launch(0, 5)
    moe.world.run()
    with pytest.raises(MegaMoETimeout, match=r"PE 0, CTA \d, epoch 3: .*route of the peer 1"):
        moe.group.sessions[0].raise_on_status()
    with pytest.raises(MegaMoETimeout, match="rebuild"):
        launch(0, 2)


@by_mode
def test_what_buffers_held_changes_nothing(mode):
    """N2, N7, T5: unused rows and slots hold NaN and huge counts before each call; results and the
    work that is done stay those of clean memory."""
    case = Case(name="n2", tokens=(17, 40), top_k=4, masked=0.3, features=MODES[mode])
    data = case.inputs()
    moe = layer(case, data)
    clean = call(moe, data)
    want = expected(case, data)
    assert_same_bits(clean.y, want)
    flops = clean.counters["wgmma_flops"]
    local = ["pool_x", "pool_h", "row_meta", "histogram"]
    local += ["pool_y", "token_rows"] if mode == "prereduced" else []
    for byte in (0xFF, 0x7F, 0x00):
        for session in moe.group.sessions:
            views = [session.local_view(name) for name in local]
            views += [session.symmetric_view(name) for name in ("x", "comb", "route")]
            for view in views:
                view.view(torch.uint8).fill_(byte)
        dirty = call(moe, data)
        assert_same_bits(dirty.y, want)
        assert dirty.counters["wgmma_flops"] == flops


@by_mode
def test_masked_slots_of_the_report(mode):
    """I1: -1 in every place of a token; the caller's tensors stay as they are."""
    case = Case(name="i1", tokens=(6, 6), num_experts=4, features=MODES[mode], **SMALL)
    data = case.inputs()
    ids_TK = torch.tensor([[0, 1], [2, -1], [-1, 3], [-1, -1], [3, 0], [1, -1]])
    for own_TK in data.topk_ids:
        own_TK.copy_(ids_TK)
    before = [[t.clone() for t in part] for part in (data.x, data.topk_ids, data.topk_weights)]
    result = check(case, data)
    assert bool((result.y[0][3] == 0).all())
    for old, new in zip(before, (data.x, data.topk_ids, data.topk_weights), strict=True):
        assert all(bool((a == b).all()) for a, b in zip(old, new, strict=True))


@pytest.mark.parametrize("tokens", [16, 128])
def test_half_of_the_tokens_masked(tokens):
    """I1: few tokens are counted by one CTA, many by several."""
    case = Case(name="half", tokens=(tokens, tokens), masked=0.5, grid=3,
                **(SMALL | {"max_tokens": 128}))  # fmt: skip
    check(case)


@pytest.mark.parametrize("top_k", [2, 4])
@pytest.mark.parametrize("mode", ["direct", "prereduced"])
def test_more_slots_than_local_experts(mode, top_k):
    """I4: one expert on each of four PEs; K = 2, and K = E."""
    case = Case(name="i4", tokens=(3, 8, 0, 5), num_experts=4, top_k=top_k, features=MODES[mode],
                **SMALL)  # fmt: skip
    check(case)


SIZES = {
    "one_expert": {"tokens": (17, 4), "num_experts": 1, "top_k": 1},
    "experts_512": {"tokens": (17,), "num_experts": 512, "top_k": 10},
    "experts_1024": {"tokens": (3, 2), "num_experts": 1024, "top_k": 10},
    "uneven_10_on_4": {"tokens": (5, 6, 7, 8), "num_experts": 10},
    "two_experts_on_4": {"tokens": (5, 6, 7, 8), "num_experts": 2},
    "pes_33": {"tokens": (1,) * 33, "num_experts": 33, "grid": 1},
}


@pytest.mark.parametrize("name", some({"uneven_10_on_4", "pes_33", "one_expert"}, list(SIZES)))
def test_sizes_of_the_report(name):
    """I8, I9: rows past one block of 16, 512 and 1024 experts, more PEs than a warp has lanes."""
    result = check(Case(name=name, **(SMALL | {"max_tokens": 17} | SIZES[name])))
    assert all(bool((y_TH != 0).any()) for y_TH in result.y)


@pytest.mark.parametrize("hidden", some({96, 2880}, [64, 96, 192, 320, 2880, 3584, 7168]))
def test_hidden_sizes_of_the_report(hidden):
    """S1: never zeros in the tail."""
    result = check(Case(name="s1", tokens=(5,), **(SMALL | {"hidden": hidden})))
    assert bool((result.y[0][:, -8:] != 0).any())


@pytest.mark.parametrize("intermediate", some({224}, [96, 224, 448, 704]))
def test_intermediate_sizes_of_the_report(intermediate):
    """S2: the last columns of h count, and nothing past them."""
    check(Case(name="s2", tokens=(5,), **(SMALL | {"intermediate": intermediate})))


@by_mode
@pytest.mark.parametrize("top_k", some({1}, [1, 2]))
def test_everything_to_one_pe_fits_by_construction(mode, top_k):
    """X4: T = Tmax everywhere, and every slot goes to one expert of one PE."""
    tokens = (64, 64, 64, 64)
    case = Case(name="x4", tokens=tokens, route="one", top_k=top_k, features=MODES[mode],
                **(SMALL | {"max_tokens": 64}))  # fmt: skip
    result = check(case)
    assert sorted(result.counters["rows"]) == [0, 0, 0, 256 * top_k]


def test_more_than_the_maximum_is_refused():
    """X4: T = Tmax + 1 on one PE, before anything is launched; then a call that fits."""
    case = Case(name="x4", tokens=(16, 16), **SMALL)
    data = case.inputs()
    moe = layer(case, data)
    over = replace(case, tokens=(16, 17)).inputs()
    with pytest.raises(ValueError, match=r"17.*max_tokens|max_tokens.*17"):
        call(moe, over)
    assert_same_bits(call(moe, data).y, expected(case, data))


def test_a_pool_that_is_too_small_is_never_a_silent_drop():
    """X4: with a capacity the error comes on all PEs, and names needed and available rows."""
    case = Case(name="x4", tokens=(90, 90, 90), route="one", top_k=1, capacity=1, max_tokens=96,
                hidden=64, intermediate=64)  # fmt: skip
    data = case.inputs()
    with pytest.raises(PoolCapacityError, match="needs 384 rows, available are 128") as info:
        call(layer(case, data), data)
    assert len(getattr(info.value, "__notes__", [])) == 2


@by_mode
def test_survivors_of_a_pe_that_dies_between_dispatch_and_combine(mode):
    """X8: PE 2 sends its routes and rows, and then nothing more (as after an abort). Others end
    within the deadline, each with an error that names what it waited for."""
    case = Case(name="x8", tokens=(8, 8, 8, 8), timeout_s=1e-3, features=MODES[mode], **SMALL)
    data = case.inputs()
    moe = layer(case, data)
    call(moe, data)
    moe.group.sessions[2].local_view("abort").fill_(1)
    with pytest.raises(MegaMoETimeout) as info:
        call(moe, data)
    texts = [str(info.value), *getattr(info.value, "__notes__", [])]
    for pe in (0, 1, 3):
        assert any(f"PE {pe}, " in text and "expert outputs of a token" in text for text in texts)
    with pytest.raises(MegaMoETimeout, match="rebuild"):
        call(moe, data)


def test_identical_inputs_on_two_pes_are_counted_twice():
    """X20: rows processed are part of the result, so a replicated input shows."""
    case = Case(name="x20", tokens=(8, 8), **SMALL)
    data = case.inputs()
    for part in (data.x, data.topk_ids, data.topk_weights):
        part[1].copy_(part[0])
    result = check(case, data)
    assert sum(result.counters["rows"]) == 2 * 8 * case.top_k
    assert_same_bits([result.y[1]], [result.y[0]])


@by_mode
def test_a_residual_is_added_once(mode):
    """A6: routed weights 0 and x as the residual (a shared expert): y is x on every PE."""
    case = Case(name="a6", tokens=(5, 9, 0, 7), features=MODES[mode], **SMALL)
    data = case.inputs()
    for weights_TK in data.topk_weights:
        weights_TK.zero_()
    result = call(layer(case, data), data, residual=[x_TH.clone() for x_TH in data.x])
    # -0 + 0 is +0: compare values.
    assert all(torch.equal(y_TH, x_TH) for y_TH, x_TH in zip(result.y, data.x, strict=True))
