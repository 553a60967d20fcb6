"""A training session on a recording device: images, memory of saved states, refusals, autograd
(CASES B12, G3, X6)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api_helpers import config, inputs, recording_session, weights
from recorded import recording_api
from torch import nn

from megamoe import MegaMoE, Session
from megamoe.cute_kernels.abi import PARAMETERS, WGRAD_PARAMETERS
from megamoe.planning import plan
from megamoe.runtime.errors import MegaMoEError, SavedStateError
from megamoe.runtime.saved import Saved

CFG = config(max_tokens=64)


@pytest.fixture
def ready(tmp_path):
    session, api = recording_session(CFG, tmp_path, training=True)
    return session.warmup(), api, session.bind(*weights(CFG))


def save(ready: Any, *, tokens: int = 5, **options: Any) -> tuple[torch.Tensor, Saved]:
    session, _, bound = ready
    return session.forward(bound, *inputs(CFG, tokens), save_for_backward=True, **options)


def rows(tokens: int = 5) -> torch.Tensor:
    return torch.ones(tokens, CFG.hidden, dtype=torch.bfloat16)


def values(launch: Any) -> dict[str, int]:
    table = WGRAD_PARAMETERS if launch.entry == "megamoe_wgrad" else PARAMETERS
    return {
        name: int.from_bytes(data, "little")
        for (name, _, _), data in zip(table, launch.parameters, strict=True)
    }


def test_one_launch_each(ready):
    session, api, bound = ready
    assert [launch.entry for launch in api.launches] == [
        "megamoe_forward", "megamoe_save", "megamoe_dgrad",
    ]  # fmt: skip
    del api.launches[:]
    session.forward(bound, *inputs(CFG))
    y, saved = save(ready)
    dx, d_router = session.backward_dgrad(rows(), saved)
    grads = session.backward_wgrad(saved)
    assert [launch.entry.removeprefix("megamoe_") for launch in api.launches] == [
        "forward", "save", "dgrad", "wgrad",
    ]  # fmt: skip
    assert (y.shape, dx.shape, d_router.shape) == ((5, 128), (5, 128), (5, 2))
    assert dx.dtype == torch.bfloat16 and d_router.dtype == torch.float32
    assert {name: tuple(t.shape) for name, t in grads.items()} == {
        "w13": (8, 128, 128), "w2": (8, 128, 64),
    }  # fmt: skip
    forward, kept, dgrad = (values(launch) for launch in api.launches[:3])
    assert forward["saved"] == forward["dgrad"] == forward["d_topk"] == 0
    assert kept["saved"] and not kept["dgrad"] and not kept["d_topk"]
    assert dgrad["saved"] == kept["saved"] and dgrad["dgrad"] and dgrad["d_topk"]
    assert dgrad["y"] == dx.data_ptr() and dgrad["d_topk"] == d_router.data_ptr()
    assert dgrad["ids"] == kept["ids"] and dgrad["tokens"] == kept["tokens"]
    assert len({each["maps"] for each in (forward, kept, dgrad)}) == 3
    assert {each["symmetric"] for each in (forward, kept, dgrad)} == {forward["symmetric"]}
    assert {each["local"] for each in (forward, kept, dgrad)} == {forward["local"]}


def test_a_saved_state_says_its_bytes_and_gives_them_back(ready):
    session, _, _ = ready
    planned = plan(CFG, training=True)
    _, saved = save(ready)
    assert saved.state == "forward" and saved.nbytes == planned.saved_bytes > 0
    session.backward_dgrad(rows(), saved)
    assert saved.state == "dgrad"
    assert saved.nbytes == planned.saved_bytes + planned.dgrad_bytes
    session.backward_wgrad(saved)
    assert saved.state == "wgrad" and saved.nbytes == 0
    rows_each = planned.problem.pool_rows
    per_row = 2 * CFG.hidden + 4 * CFG.intermediate
    assert 0 <= planned.saved_bytes - rows_each * per_row < rows_each * per_row / 4


def test_a_steady_loop_allocates_and_encodes_nothing(ready):
    session, api, _ = ready

    def schedule() -> None:
        calls = [save(ready)[1] for _ in range(3)]
        for saved in reversed(calls):
            session.backward_dgrad(rows(), saved)
        session.backward_wgrad(calls)

    schedule()
    held, counts = list(session.device._allocations), api.counts.copy()
    for _ in range(4):
        schedule()
    new = api.counts - counts
    assert new["cuLaunchKernelEx"] == 4 * 7
    assert not {name for name in new if not name.startswith(("cuLaunch", "cuCtx"))}
    assert new["cuCtxSynchronize"] == 0
    assert session.device._allocations == held


def test_forgotten_states_give_their_memory_back(ready):
    session, _, _ = ready
    pool = session._pe_session.training.pool
    for _ in range(3):
        save(ready)
        before = pool.nbytes
    _, saved = save(ready)
    saved.free()
    saved.free()
    assert pool.nbytes == before and saved.nbytes == 0 and saved.state == "freed"
    first, second = save(ready)[1], save(ready)[1]
    assert first.block("saved").address != second.block("saved").address


def test_refused_uses_by_name(ready, tmp_path):
    session, api, _ = ready
    _, saved = save(ready)
    with pytest.raises(SavedStateError, match=r"backward_wgrad: .*'forward': backward_dgrad comes"):
        session.backward_wgrad(saved)
    session.backward_dgrad(rows(), saved)
    with pytest.raises(SavedStateError, match=r"backward_dgrad: .*'dgrad': .*only backward_wgrad"):
        session.backward_dgrad(rows(), saved)
    with pytest.raises(ValueError, match="saved holds one saved state twice"):
        session.backward_wgrad([saved, saved])
    with pytest.raises(ValueError, match="saved is empty"):
        session.backward_wgrad([])
    session.backward_wgrad(saved)
    for use in (session.backward_wgrad, lambda each: session.backward_dgrad(rows(), each)):
        with pytest.raises(SavedStateError, match="'wgrad': both backward passes were called"):
            use(saved)
    _, freed = save(ready)
    freed.free()
    with pytest.raises(SavedStateError, match=r"'freed': free\(\) was called"):
        session.backward_dgrad(rows(), freed)
    other, _ = recording_session(CFG, tmp_path, training=True)
    other.warmup()
    _, mine = save(ready)
    with pytest.raises(SavedStateError, match="belongs to another session"):
        other.backward_dgrad(rows(), mine)
    for dy, text in (
        (rows(4), r"dy is torch.bfloat16 \[4, 128\].*must be bfloat16 \[5, 128\]"),
        (rows().float(), "dy is torch.float32"),
    ):
        with pytest.raises(ValueError, match=text):
            session.backward_dgrad(dy, mine)
    launches = len(api.launches)
    session.backward_dgrad(rows(), mine)  # a refusal used nothing up
    assert len(api.launches) == launches + 1
    twice = session.bind(*weights(CFG))
    _, third = session.forward(twice, *inputs(CFG), save_for_backward=True)
    session.backward_dgrad(None, third)
    with pytest.raises(ValueError, match="calls with the same bound weights"):
        session.backward_wgrad([mine, third])


@pytest.mark.parametrize("name", ["topk_ids", "topk_weights", "num_tokens"])
def test_inputs_that_changed_since_the_forward_are_refused(ready, name):
    """A PE that routed differently would be waited for in vain."""
    session, _, bound = ready
    x, ids, router = inputs(CFG, CFG.max_tokens)
    count = torch.tensor([3], dtype=torch.int32)
    call = {"topk_ids": ids, "topk_weights": router, "num_tokens": count}
    _, saved = session.forward(bound, x, ids, router, num_tokens=count, save_for_backward=True)
    x.zero_()
    call[name].add_(0)
    with pytest.raises(SavedStateError, match=f"{name} was modified in place after the forward"):
        session.backward_dgrad(rows(CFG.max_tokens), saved)


def test_rows_beyond_the_token_count_are_zeros(ready):
    session, _, _ = ready
    count = torch.tensor([3], dtype=torch.int32)
    y, saved = save(ready, tokens=CFG.max_tokens, num_tokens=count)
    dx, d_router = session.backward_dgrad(rows(CFG.max_tokens), saved)
    assert not y.any() and not dx.any() and not d_router.any()  # nothing runs here


def test_gradients_of_any_strides_are_copied_once(ready, monkeypatch):
    session, api, _ = ready
    expanded = torch.ones((), dtype=torch.bfloat16).expand(5, CFG.hidden)
    _, saved = save(ready)
    session.backward_dgrad(expanded, saved)
    given = values(api.launches[-1])
    assert given["x_stride"] == 2 * CFG.hidden and given["x"] != expanded.data_ptr()
    straight = rows()
    _, saved = save(ready)
    session.backward_dgrad(straight, saved)
    assert values(api.launches[-1])["x"] == straight.data_ptr()


def test_where_gradients_of_weights_may_go(ready):
    session, api, _ = ready

    def after_dgrad() -> Saved:
        _, saved = save(ready)
        session.backward_dgrad(rows(), saved)
        return saved

    shapes = {"w13": (8, 128, 128), "w2": (8, 128, 64)}
    for dtype in (torch.float32, torch.bfloat16):
        whole = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        assert session.backward_wgrad(after_dgrad(), accumulate_into=whole) is whole
        given = values(api.launches[-1])
        assert given["accumulate"] == 1 and given["w2"] == whole["w2"].data_ptr()
        lists = {"w13": [torch.zeros(128, 128, dtype=dtype) for _ in range(8)]}
        session.backward_wgrad(after_dgrad(), out=lists)
        given = values(api.launches[-1])
        assert given["accumulate"] == 0 and given["w13_stride"] == 0 and given["w2"] == 0
        maps = api.counts["cuCtxSynchronize"]
        session.backward_wgrad(after_dgrad(), out=lists)
        assert api.counts["cuCtxSynchronize"] == maps  # the table is there already
    saved = after_dgrad()
    mixed = {"w13": torch.zeros(shapes["w13"]), "w2": torch.zeros(shapes["w2"]).bfloat16()}
    for options, text in (
        ({"out": mixed}, "gradients of w13 and w2 are .*one type"),
        ({"out": {"w13": torch.zeros(3)}}, r"w13: torch.float32 \(3,\), must be"),
        ({"out": {"w2": torch.zeros(shapes["w2"]).double()}}, "gradients of torch.float64"),
        ({"out": {}, "accumulate_into": {}}, "must be one of them"),
    ):
        with pytest.raises(ValueError, match=text):
            session.backward_wgrad(saved, **options)
    assert saved.state == "dgrad"


def test_nine_calls_take_two_launches(ready):
    session, api, _ = ready
    calls = [save(ready)[1] for _ in range(9)]
    for saved in calls:
        session.backward_dgrad(rows(), saved)
    session.backward_wgrad(calls)
    first, second = (values(launch) for launch in api.launches[-2:])
    assert (first["num_saved"], first["accumulate"]) == (8, 0)
    assert (second["num_saved"], second["accumulate"]) == (1, 1)


def test_a_forward_session_refuses_by_name(tmp_path):
    session, _ = recording_session(CFG, tmp_path)
    bound = session.warmup().bind(*weights(CFG))
    with pytest.raises(MegaMoEError, match="build the session with training=True"):
        session.forward(bound, *inputs(CFG), save_for_backward=True)
    with pytest.raises(ValueError, match="ring_rows=256: must be None with training=True"):
        recording_session(config(max_tokens=512, ring_rows=256), tmp_path, training=True)


def test_nothing_is_made_inside_a_capture(ready, monkeypatch):
    session, _, _ = ready
    _, saved = save(ready)
    session.backward_dgrad(rows(), saved)
    session.backward_wgrad(saved)
    monkeypatch.setattr(Session, "capturing", lambda self: True)
    _, saved = save(ready)
    session.backward_dgrad(rows(), saved)
    with pytest.raises(MegaMoEError, match=r"warm up first: .*one more saved state"):
        save(ready)


def test_closing_frees_everything(ready):
    session, _, _ = ready
    _, saved = save(ready)
    session.backward_dgrad(rows(), saved)
    session.backward_wgrad(saved, out={"w13": [torch.zeros(128, 128)] * 8})
    _, open_one = save(ready)
    session.close()
    assert session.device._allocations == []
    open_one.free()


# --- autograd -----------------------------------------------------------------------------------


def trained(session: Session, **options: Any) -> MegaMoE:
    return MegaMoE(CFG, *map(nn.Parameter, weights(CFG)), session=session, **options)


def entries(api: Any) -> list[str]:
    return [launch.entry.removeprefix("megamoe_") for launch in api.launches[3:]]


@pytest.mark.parametrize("delay", [False, True])
def test_a_layer_runs_one_launch_each(tmp_path, delay):
    session, api = recording_session(CFG, tmp_path, training=True)
    layer = trained(session, delay_wgrad=delay)
    x, ids, router = inputs(CFG)
    y = layer(x.requires_grad_(), ids, router.requires_grad_())
    assert entries(api) == ["save"]
    y.sum().backward()
    assert entries(api) == ["save", "dgrad"] + ([] if delay else ["wgrad"])
    if delay:
        layer(x, ids, router).sum().backward()
        layer.backward_dw()
        assert entries(api)[2:] == ["save", "dgrad", "wgrad"]
        assert values(api.launches[-1])["num_saved"] == 2
    assert layer.w13.grad.shape == layer.w13.shape and layer.w13.grad.dtype == torch.bfloat16
    with torch.no_grad():
        layer(x, ids, router)
    assert entries(api)[-1] == "forward"


def test_frozen_weights_skip_wgrad_and_give_their_memory_back(tmp_path):
    session, api = recording_session(CFG, tmp_path, training=True)
    layer = trained(session).requires_grad_(False)
    x, ids, router = inputs(CFG)
    for _ in range(3):
        layer(x.requires_grad_(), ids, router).sum().backward()
    assert entries(api) == ["save", "dgrad"] * 3
    planned = plan(CFG, training=True)
    pool = session._pe_session.training.pool
    assert pool.nbytes == planned.saved_bytes + planned.dgrad_bytes


def test_main_grad_is_where_the_kernel_adds(tmp_path):
    session, api = recording_session(CFG, tmp_path, training=True)
    layer = trained(session)
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    layer(*inputs(CFG)).sum().backward()
    given = values(api.launches[-1])
    assert given["accumulate"] == 1 and given["w13"] == layer.w13.main_grad.data_ptr()
    assert layer.w13.grad_added_to_main_grad and not layer.w13.grad.any()


def test_a_graph_that_is_dropped_gives_its_memory_back(tmp_path):
    session, _ = recording_session(CFG, tmp_path, training=True)
    layer = trained(session)
    for _ in range(4):
        layer(*inputs(CFG))
    planned = plan(CFG, training=True)  # warm-up left one block of each kind
    held = session._pe_session.training.pool.nbytes
    assert held == planned.saved_bytes + planned.dgrad_bytes


def test_a_device_of_its_own_kind_is_needed(tmp_path):
    """Warm-up compiles every kernel once and shares the files."""
    api = recording_api()
    for _ in range(2):
        session, _ = recording_session(CFG, tmp_path, api, training=True)
        session.warmup()
        compiles = session._cache.compiles
        session.close()
    assert compiles == 0
