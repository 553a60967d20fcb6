"""``MegaMoE`` under autograd on CPU tensors: gradients, hooks, main_grad, delayed wgrad
(CASES B6, B8, B12, I6, N1, N7, S, Z1, Z3, Z4, Z5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from api_helpers import config, inputs, weights
from torch import nn

from megamoe import MegaMoE, MoEConfig
from megamoe.reference_backward import Gradients, moe_backward_oracle
from megamoe.runtime.errors import MegaMoEError, SavedStateError


def trained(cfg: MoEConfig, **options: Any) -> MegaMoE:
    given = dict(zip(("w13", "w2"), map(nn.Parameter, weights(cfg)), strict=True))
    if cfg.fc1_bias:
        given["b13"] = nn.Parameter(torch.zeros(cfg.num_experts, cfg.w13_rows).bfloat16())
    return MegaMoE(cfg, **given, **options)


def leaves(cfg: MoEConfig, tokens: int = 5, seed: int = 0) -> tuple[torch.Tensor, ...]:
    x, ids, router = inputs(cfg, tokens, seed)
    return x.requires_grad_(), ids, router.requires_grad_()


def oracle(layer: MegaMoE, x: Any, ids: Any, router: Any, dy: torch.Tensor) -> Gradients:
    return moe_backward_oracle(
        layer.cfg,
        dy=[dy],
        x=[x.detach()],
        topk_ids=[ids],
        topk_weights=[router.detach()],
        **{name: t.detach() for name, t in layer._weights().items()},
        dtype=torch.float32,
        rounding="kernel",
    )


def close(got: torch.Tensor | None, want: torch.Tensor) -> None:
    assert got is not None
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-5)


def test_gradients_are_those_of_the_oracle() -> None:
    layer = trained(config(fc1_bias=True, weight_at="combine"))
    x, ids, router = leaves(layer.cfg)
    dy = torch.randn(5, layer.cfg.hidden).bfloat16()
    layer(x, ids, router).backward(dy)
    want = oracle(layer, x, ids, router, dy)
    assert torch.equal(x.grad, want.dx[0]) and torch.equal(router.grad, want.d_topk_weights[0])
    for name in ("w13", "w2", "b13"):
        parameter, grads = getattr(layer, name), getattr(want, f"d{name}")
        assert parameter.grad.dtype == parameter.dtype
        assert torch.equal(parameter.grad, grads[0].bfloat16()) and parameter.grad.any()


def test_the_gradient_of_a_sum_has_no_strides() -> None:
    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    layer(x, ids, router).sum().backward()
    close(x.grad, oracle(layer, x, ids, router, torch.ones(5, layer.cfg.hidden).bfloat16()).dx[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_router_gradients_have_the_type_of_the_weights(dtype: torch.dtype) -> None:
    """I6."""
    layer = trained(config())
    x, ids, router = inputs(layer.cfg)
    router = router.to(dtype).requires_grad_()
    layer(x, ids.long(), router).sum().backward()
    assert router.grad is not None and router.grad.dtype == dtype and router.grad.all()


@pytest.mark.parametrize("frozen", ["x", "router", "w13", "weights", "all but w2"])
def test_what_needs_no_gradient_gets_none(frozen: str, monkeypatch: Any) -> None:
    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    off = {"x": [x], "router": [router], "w13": [layer.w13], "weights": [layer.w13, layer.w2]}
    off["all but w2"] = [x, router, layer.w13]
    for tensor in off[frozen]:
        tensor.requires_grad_(False)
    asked: list[set[str]] = []
    from megamoe import reference_engine

    real = reference_engine.ReferenceEngine.wgrad

    def noted(self: Any, saved: Any, grads: Any, *, accumulate: bool) -> None:
        asked.extend(set(each) for each in grads)
        real(self, saved, grads, accumulate=accumulate)

    monkeypatch.setattr(reference_engine.ReferenceEngine, "wgrad", noted)
    layer(x, ids, router).sum().backward()
    for tensor in (x, router, layer.w13, layer.w2):
        assert (tensor.grad is None) == (not tensor.requires_grad)
    wanted = {name for name in ("w13", "w2") if getattr(layer, name).requires_grad}
    assert asked == ([wanted] if wanted else [])


def test_one_layer_used_twice_in_one_graph() -> None:
    """B12: the second call's state does not replace the first's."""
    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    _, other_ids, other_router = inputs(layer.cfg, seed=1)
    first = layer(x, ids, router)
    second = layer(first, other_ids, other_router)
    dy = torch.randn(5, layer.cfg.hidden).bfloat16()
    second.backward(dy)
    outer = oracle(layer, first, other_ids, other_router, dy)
    inner = oracle(layer, x, ids, router, outer.dx[0])
    close(x.grad, inner.dx[0])
    close(layer.w2.grad, inner.dw2[0].bfloat16() + outer.dw2[0].bfloat16())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_forwards_outstanding(order: tuple[int, int]) -> None:
    """B12: fwd, fwd, bwd, bwd equals separate pairs, two layers besides."""
    layers = [trained(config()), trained(config())]
    calls = [[leaves(layer.cfg, seed=s) for s in (0, 1)] for layer in layers]
    y = [[layer(*call) for call in calls[i]] for i, layer in enumerate(layers)]
    for i, layer in enumerate(layers):
        for s in order:
            y[i][s].sum().backward()
        x, ids, router = calls[i][0]
        want = oracle(layer, x, ids, router, torch.ones_like(y[i][0]))
        assert torch.equal(x.grad, want.dx[0])


def test_a_backward_again_or_after_a_change_is_an_error() -> None:
    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    y = layer(x, ids, router)
    y.sum().backward(retain_graph=True)
    with pytest.raises(SavedStateError, match="had its backward"):
        y.sum().backward()
    for change in (ids, router, layer.w13):
        y = layer(x, ids, router)
        with torch.no_grad():
            change.mul_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = layer(x, ids, router)
    with torch.no_grad():
        x.zero_()
    x.grad = None
    y.sum().backward()  # x may change: its rows are kept
    assert x.grad is not None and x.grad.any()


def test_masked_tokens_with_garbage_change_nothing() -> None:
    """N1: NaN and Inf in masked tokens."""
    layer = trained(config())
    grads = []
    for junk in (0.0, float("nan"), float("inf")):
        x, ids, router = (t.clone() for t in inputs(layer.cfg, tokens=8))
        x[6:], router[6:], ids[6:] = junk, junk, -1
        x.requires_grad_(), router.requires_grad_()
        layer.zero_grad()
        layer(x, ids, router)[:6].sum().backward()
        assert not x.grad[6:].any() and not router.grad[6:].any()
        grads.append((x.grad, router.grad, layer.w13.grad, layer.w2.grad))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_two_steps_with_dirty_memory_stay_finite() -> None:
    """N7: half of the slots are sentinels."""
    layer = trained(config(hidden=8, intermediate=8, num_experts=4))
    for _ in range(3):
        torch.full((1 << 16,), float("nan"))  # what the allocator hands out next
        x, ids, router = leaves(layer.cfg, tokens=8)
        ids[4:] = -1
        layer.zero_grad()
        layer(x, ids, router).sum().backward()
        want = oracle(layer, x, ids, router, torch.ones(8, 8).bfloat16())
        assert torch.equal(x.grad, want.dx[0]) and torch.equal(router.grad, want.d_topk_weights[0])
        close(layer.w13.grad, want.dw13[0])
        close(layer.w2.grad, want.dw2[0])


@pytest.mark.parametrize(("tokens", "masked"), [(0, False), (4, True)])
def test_no_work_gives_zero_gradients_and_hooks_fire(tokens: int, masked: bool) -> None:
    """Z1, Z3, Z4, Z5."""
    layer = trained(config(fc1_bias=True))
    fired: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x, ids, router = leaves(layer.cfg, tokens)
    if masked:
        ids.fill_(-1)
    y = layer(x, ids, router)
    assert y.shape == x.shape and not y.any()
    y.sum().backward()
    assert sorted(fired) == ["b13", "w13", "w2"]
    for tensor in (x, router, layer.w13, layer.w2, layer.b13):
        assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == tensor.dtype
        assert not tensor.grad.any()


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_added_to_once(delay: bool, dtype: torch.dtype) -> None:
    """B6, B8: four micro-batches; fp32 all the way, the flag, and a dummy of zeros."""
    layer = trained(config(), delay_wgrad=delay)
    for parameter in layer.parameters():
        parameter.main_grad = torch.full(parameter.shape, 0.25, dtype=dtype)
        parameter.grad_added_to_main_grad = False
    total = [torch.full(p.shape, 0.25) for p in (layer.w13, layer.w2)]
    for seed in range(4):
        x, ids, router = leaves(layer.cfg, seed=seed)
        layer(x, ids, router).sum().backward()
        want = oracle(layer, x, ids, router, torch.ones(5, layer.cfg.hidden).bfloat16())
        total = [t + g[0] for t, g in zip(total, (want.dw13, want.dw2), strict=True)]
        if delay:
            assert all(p.grad is None for p in layer.parameters())
            assert layer.w13.grad_added_to_main_grad == (seed > 0)
            layer.backward_dw()
        else:
            assert all(p.grad.shape == p.shape and not p.grad.any() for p in layer.parameters())
        assert layer.w13.grad_added_to_main_grad and layer.w2.grad_added_to_main_grad
        if dtype == torch.float32:
            for parameter, sum_so_far in zip((layer.w13, layer.w2), total, strict=True):
                torch.testing.assert_close(parameter.main_grad, sum_so_far, rtol=1e-6, atol=1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(layer.w2.main_grad.float(), total[1], rtol=tolerance, atol=tolerance)


def test_the_dummy_gradient_is_zero_whoever_wrote_to_the_last_one() -> None:
    layer = trained(config())
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    x, ids, router = leaves(layer.cfg)
    layer(x, ids, router).sum().backward()
    with torch.no_grad():
        layer.w13.grad.add_(1)
    layer.w13.grad = layer.w2.grad = None
    layer(x, ids, router).sum().backward()
    assert not layer.w13.grad.any()


def test_main_grad_of_the_wrong_kind_is_refused() -> None:
    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    layer.w13.main_grad = torch.zeros(3)
    with pytest.raises(ValueError, match=r"main_grad is torch.float32 \[3\].*must be a contiguous"):
        layer(x, ids, router).sum().backward()


def test_delayed_gradients() -> None:
    """Three calls, one ``backward_dw``: as without delay; hooks fire there and only there."""
    plain, delayed = trained(config()), trained(config(), delay_wgrad=True)
    called: list[int] = []
    delayed.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))
    for seed in range(3):
        for layer in (plain, delayed):
            layer(*leaves(layer.cfg, seed=seed)).sum().backward()
    assert delayed.w13.grad is None and called == []
    delayed.backward_dw()
    assert called == [1]
    for name in ("w13", "w2"):
        # The plain sum is rounded to bf16 after every call.
        want = getattr(plain, name).grad.float()
        torch.testing.assert_close(
            getattr(delayed, name).grad.float(), want, rtol=2**-6, atol=2**-6
        )
    before = delayed.w13.grad.clone()
    delayed.backward_dw()
    assert torch.equal(delayed.w13.grad, before)
    delayed(*leaves(delayed.cfg)).sum().backward()
    delayed.backward_dw()
    assert not torch.equal(delayed.w13.grad, before)
    with pytest.raises(MegaMoEError, match="delay_wgrad=True"):
        plain.backward_dw()


def test_residual_out_and_token_count() -> None:
    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    residual = torch.randn(5, layer.cfg.hidden).bfloat16().requires_grad_()
    dy = torch.randn(5, layer.cfg.hidden).bfloat16()
    layer(x, ids, router, residual=residual).backward(dy)
    assert torch.equal(residual.grad, dy)
    with pytest.raises(ValueError, match="out is given: must be None where a gradient"):
        layer(x, ids, router, out=torch.empty_like(dy))
    whole = x.grad.clone()
    x.grad = None
    y = layer(x, ids, router, num_tokens=torch.tensor([3], dtype=torch.int32))
    assert y.shape == x.shape and not y[3:].any()
    y.backward(dy)
    assert torch.equal(x.grad[:3], whole[:3]) and not x.grad[3:].any()


def test_gradients_under_checkpointing() -> None:
    """Recompute: the forward runs again before its backward."""
    from torch.utils.checkpoint import checkpoint

    layer = trained(config())
    x, ids, router = leaves(layer.cfg)
    layer(x, ids, router).sum().backward()
    once = [x.grad, router.grad, layer.w13.grad, layer.w2.grad]
    x.grad = router.grad = layer.w13.grad = layer.w2.grad = None
    checkpoint(layer, x, ids, router, use_reentrant=False).sum().backward()
    again = [x.grad, router.grad, layer.w13.grad, layer.w2.grad]
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
