"""``megamoe.MegaMoE``: weights by reference, the reference on the CPU, else one driver call."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from api_helpers import config, inputs, recording_layer, recording_session, weights
from torch import nn

import megamoe
from megamoe import MegaMoE, module
from megamoe.reference import moe_oracle
from megamoe.runtime.errors import MegaMoEError


def oracle(cfg, w13, w2, x, ids, router):
    return moe_oracle(
        cfg, x=[x], topk_ids=[ids], topk_weights=[router], w13=w13, w2=w2, rounding="kernel"
    )[0]


def test_cpu_tensors_are_computed_with_the_reference_and_it_is_said_once(caplog):
    cfg = config()
    w13, w2 = weights(cfg)
    layer, given = MegaMoE(cfg, w13, w2), inputs(cfg)
    with caplog.at_level(logging.INFO, "megamoe"):
        y, again = layer(*given), layer(*given)
    assert torch.equal(y, again) and y.dtype == torch.bfloat16
    torch.testing.assert_close(y, oracle(cfg, w13, w2, *given), rtol=2**-7, atol=1e-3)
    assert y.abs().max() > 0.01
    assert [r.message for r in caplog.records if "reference" in r.message] == [
        "MegaMoE: CPU tensors are computed with the reference, not with the kernel"
    ]
    assert layer(*inputs(cfg, tokens=0)).shape == (0, cfg.hidden)
    with pytest.raises(ValueError, match="17 tokens: must be <= max_tokens=16"):
        layer(*inputs(cfg, tokens=17))


def test_any_placement_computes_the_same_on_the_cpu():
    cfg = config()
    w13, w2 = weights(cfg)
    order = [5, 2, 7, 0, 1, 3, 6, 4]
    placed = config(expert_map=[(0, order.index(expert)) for expert in range(8)])
    given = inputs(cfg)
    straight = MegaMoE(cfg, w13, w2)(*given)
    assert torch.equal(MegaMoE(placed, w13[order], w2[order])(*given), straight)


def test_output_residual_and_token_count_on_the_cpu():
    cfg = config()
    layer, given = MegaMoE(cfg, *weights(cfg)), inputs(cfg)
    y, out = layer(*given), torch.empty(5, cfg.hidden, dtype=torch.bfloat16)
    assert layer(*given, out=out) is out and torch.equal(out, y)
    count = torch.tensor([3], dtype=torch.int32)
    assert torch.equal(layer(*given, num_tokens=count)[:3], y[:3])
    plus = layer(*given, residual=torch.ones_like(y))
    torch.testing.assert_close(plus, y + 1, rtol=2**-6, atol=0.02)


def test_weights_are_held_by_reference():
    cfg = config()
    w13, w2 = weights(cfg)
    parameter = nn.Parameter(w13)
    layer, given = MegaMoE(cfg, parameter, w2), inputs(cfg)
    assert layer.w13 is parameter and layer.w2.data_ptr() == w2.data_ptr()
    assert list(layer.state_dict()) == ["w13"]
    before = layer(*given).clone()
    w2.mul_(2)
    torch.testing.assert_close(layer(*given), 2 * before, rtol=0, atol=0)
    assert "H=128, I=64, E=8, K=2, P=1" in repr(layer)


def test_refused_at_construction(tmp_path):
    cfg = config()
    w13, w2 = weights(cfg)
    with pytest.raises(ValueError, match="w13 has shape"):
        MegaMoE(cfg, w13[:, :-1], w2)
    with pytest.raises(ValueError, match="b2 is given"):
        MegaMoE(cfg, w13, w2, b2=torch.zeros(8, cfg.hidden))
    session, _ = recording_session(config(top_k=1), tmp_path)
    with pytest.raises(ValueError, match="session was built for"):
        MegaMoE(cfg, w13, w2, session=session)
    session, _ = recording_session(cfg, tmp_path, training=True, recompute=True)
    with pytest.raises(ValueError, match="session was built with recompute=True: must be False"):
        MegaMoE(cfg, w13, w2, session=session)
    with pytest.raises(ValueError, match="recompute=True: must be False without training=True"):
        recording_session(cfg, tmp_path, recompute=True)


def test_several_pes_on_the_cpu_need_a_group():
    cfg = config(num_pes=2)
    with pytest.raises(MegaMoEError, match=r"num_pes=2: call init_process_group\('gloo'\)"):
        MegaMoE(cfg, *weights(cfg))(*inputs(cfg))


@torch.inference_mode()
def test_one_call_is_one_launch(tmp_path):
    cfg = config()
    layer, api = recording_layer(cfg, tmp_path)
    x, ids, router = inputs(cfg)
    y = layer(x, ids, router)
    assert y.shape == x.shape and layer.session.warm
    launches = len(api.launches)
    layer(x, ids, router)
    layer(x.new_empty(0, cfg.hidden), ids[:0], router[:0])
    out = torch.empty_like(y)
    assert layer(x, ids, router.bfloat16(), out=out) is out
    assert len(api.launches) == launches + 3


@torch.inference_mode()
def test_nothing_is_allocated_loaded_or_compiled_in_steady_state(tmp_path):
    cfg = config()
    layer, api = recording_layer(cfg, tmp_path)
    calls = [inputs(cfg, tokens) for tokens in (5, 0, 16, 1)]
    layer(*calls[0])
    session = layer.session
    before, held = api.counts.copy(), list(session.device._allocations)
    compiles = session._cache.compiles
    for _ in range(10):
        for given in calls:
            layer(*given)
    new = api.counts - before
    assert new["cuLaunchKernelEx"] == 40
    assert not {name for name in new if not name.startswith(("cuLaunch", "cuCtx"))}
    assert new["cuCtxSynchronize"] == 0
    assert session.device._allocations == held and session._cache.compiles == compiles == 1


@torch.inference_mode()
def test_weights_that_moved_are_bound_anew(tmp_path):
    cfg = config()
    layer, api = recording_layer(cfg, tmp_path)
    given = inputs(cfg)
    layer(*given)
    maps = api.counts["cuTensorMapEncodeTiled"]
    layer.w13.mul_(2)
    layer(*given)
    assert api.counts["cuTensorMapEncodeTiled"] == maps
    layer.w13 = layer.w13.clone()
    layer(*given)
    assert api.counts["cuTensorMapEncodeTiled"] > maps
    assert len(layer.session._pe_session._bound) == 1


@torch.inference_mode()
def test_layers_share_a_workspace(tmp_path):
    cfg = config()
    session, api = recording_session(cfg, tmp_path)
    layers = [MegaMoE(cfg, *weights(cfg, seed=i), session=session) for i in range(3)]
    for layer in layers:
        layer(*inputs(cfg))
    blocks = api.launches[-3:]
    names = [parameter.name for parameter in session._pe_session.image.parameters]
    for name, differ in (("local", False), ("symmetric", False), ("maps", True)):
        values = {launch.parameters[names.index(name)] for launch in blocks}
        assert len(values) == (3 if differ else 1), name


def test_gradients_are_refused_not_lost(tmp_path):
    cfg = config()
    session, _ = recording_session(cfg, tmp_path)
    w13, w2 = weights(cfg)
    layer = MegaMoE(cfg, nn.Parameter(w13), w2, session=session)
    with pytest.raises(MegaMoEError, match=r"training=True.*no_grad"):
        layer(*inputs(cfg))
    with torch.no_grad():
        layer(*inputs(cfg))


@torch.inference_mode()
def test_copies_and_pickles(tmp_path):
    cfg = config()
    layer, api = recording_layer(cfg, tmp_path)
    given = inputs(cfg)
    layer(*given)
    twin = copy.deepcopy(layer)
    assert twin.session is layer.session and twin._bound is None
    launches = len(api.launches)
    twin(*given)
    assert len(api.launches) == launches + 1
    back = pickle.loads(pickle.dumps(layer))
    assert back.session is None and torch.equal(back.w13, layer.w13)


@torch.inference_mode()
def test_the_function_form(tmp_path):
    cfg = config()
    session, api = recording_session(cfg, tmp_path)
    bound = session.warmup().bind(*weights(cfg))
    y = megamoe.forward(*inputs(cfg), weights=bound, session=session)
    assert y.shape == (5, cfg.hidden) and len(api.launches) == 2


def test_a_tensor_elsewhere_is_refused(tmp_path):
    cfg = config()
    layer, api = recording_layer(cfg, tmp_path)
    given = [tensor.to("meta") for tensor in inputs(cfg)]
    with torch.inference_mode(), pytest.raises(ValueError, match="x is on meta: must be on cpu"):
        layer(*given)
    assert api.launches == []


def test_layers_without_a_session_share_one(monkeypatch):
    """Built at the first call on a device, and again only after it was closed."""
    cfg, made = config(), []

    class Stand:
        def __init__(self, cfg, *, group, device, training, recompute):
            self.training, self.recompute = training, recompute
            self.cfg, self.tensor_device, self.closed = cfg, device, False
            made.append(self)

        def warmup(self):
            return self

        def capturing(self):
            return False

        def bind(self, **weights):
            return type("Bound", (), {"still_there": lambda self, tensors: True})()

        def forward(self, bound, x, ids, weights, **how):
            return self

    monkeypatch.setattr(module, "Session", Stand)
    monkeypatch.setattr(module, "_SHARED", {})
    given = [tensor.to("meta") for tensor in inputs(cfg)]
    layers = [MegaMoE(cfg, *weights(cfg, seed=seed)) for seed in range(3)]
    other = config(top_k=1)
    with torch.inference_mode():
        used = [layer(*given) for layer in layers]
        assert used == [made[0]] * 3
        assert MegaMoE(other, *weights(other))(*[t.to("meta") for t in inputs(other)]) is made[1]
        made[0].closed = True
        assert MegaMoE(cfg, *weights(cfg))(*given) is made[2]
        # Without gradients there is nothing to compute again.
        assert MegaMoE(cfg, *weights(cfg), recompute=True)(*given) is made[2]
    assert len(made) == 3
    for number, recompute in enumerate((False, True), 3):
        x, ids, router = given
        layer = MegaMoE(cfg, *weights(cfg), recompute=recompute)
        monkeypatch.setattr(layer, "_differentiable", lambda engine, side: engine.session)
        assert layer(x.clone().requires_grad_(), ids, router) is made[number]
        assert (made[number].training, made[number].recompute) == (True, recompute)
