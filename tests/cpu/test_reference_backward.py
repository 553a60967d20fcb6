"""The backward oracle against autograd of the forward oracle (CASES B1, B2, B4, B9, A3, A10)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megamoe import MoEConfig
from megamoe.activations import activate, activation_gradients
from megamoe.config import ACTIVATIONS, CLAMPED
from megamoe.reference import moe_oracle
from megamoe.reference_backward import Gradients, moe_backward_oracle, sum_replicas
from megamoe.verify.inputs import Inputs, make_inputs

CFG = MoEConfig(
    hidden=16, intermediate=24, num_experts=4, top_k=2, num_pes=2, max_tokens=64, activation="relu"
)
A10_MAP = ([(0, 0), (1, 1), (1, 2)], (0, 1), (0, 2), (1, 0))


def layer(activation: Any, **more: Any) -> MoEConfig:
    limit = 0.5 if activation in CLAMPED else None
    return replace(CFG, activation=activation, activation_limit=limit, **more)


def output_gradients(inputs: Inputs, seed: int = 5) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(x.shape, dtype=torch.float64, generator=rng) for x in inputs.x]


def doubled(inputs: Inputs) -> dict[str, Any]:
    """The oracle's arguments as fp64 leaves that require gradients; ids as they are."""

    def leaf(tensor: Any) -> Any:
        if tensor is None or (torch.is_tensor(tensor) and not tensor.is_floating_point()):
            return tensor
        if isinstance(tensor, list):
            return [leaf(each) for each in tensor]
        return tensor.double().requires_grad_()

    return {name: leaf(value) for name, value in inputs.kwargs.items()}


def by_autograd(cfg: MoEConfig, inputs: Inputs, dy: list[torch.Tensor]) -> dict[str, Any]:
    leaves = doubled(inputs)
    y = moe_oracle(cfg, **leaves)
    torch.autograd.backward(y, dy)

    def grad(tensor: Any) -> Any:
        if isinstance(tensor, list):
            return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensor]
        return None if tensor is None else tensor.grad

    return {name: grad(leaf) for name, leaf in leaves.items() if name != "topk_ids"}


def assert_equal_to_autograd(cfg: MoEConfig, inputs: Inputs) -> Gradients:
    dy = output_gradients(inputs)
    want = by_autograd(cfg, inputs, dy)
    got = moe_backward_oracle(cfg, dy=dy, **inputs.kwargs)
    close = {"rtol": 1e-11, "atol": 1e-12}
    for pe in range(cfg.num_pes):
        torch.testing.assert_close(got.dx[pe], want["x"][pe], **close)
        torch.testing.assert_close(got.d_topk_weights[pe], want["topk_weights"][pe], **close)
        if got.dresidual is not None:
            torch.testing.assert_close(got.dresidual[pe], want["residual"][pe], **close)
    for name in ("w13", "w2", "b13", "b2"):
        parts = getattr(got, f"d{name}")
        assert (parts is None) == (want[name] is None)
        if parts is not None:
            torch.testing.assert_close(sum_replicas(cfg, parts), want[name], **close)
            assert want[name].abs().max() > 0
    return got


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("weight_at", ["act", "combine"])
@pytest.mark.parametrize("biases", [(False, False), (True, True)])
def test_equals_autograd(activation: Any, weight_at: Any, biases: tuple[bool, bool]) -> None:
    cfg = layer(activation, weight_at=weight_at, fc1_bias=biases[0], fc2_bias=biases[1])
    inputs = make_inputs(cfg, tokens=[5, 4], masked=0.2, repeated=0.3, residual=True)
    got = assert_equal_to_autograd(cfg, inputs)
    ids_TK, dweights_TK = torch.cat(inputs.topk_ids), torch.cat(got.d_topk_weights)
    assert (dweights_TK[ids_TK < 0] == 0).all() and (ids_TK < 0).any()  # B1
    assert (dweights_TK[ids_TK >= 0] != 0).all()


@pytest.mark.parametrize("layout", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_gradients_have_the_layout_of_the_weights(layout: Any, transposed: Any) -> None:
    cfg = layer(
        "gpt_oss",
        w13_layout=layout,
        w13_transposed=transposed[0],
        w2_transposed=transposed[1],
        fc1_bias=True,
        fc2_bias=True,
    )
    got = assert_equal_to_autograd(cfg, make_inputs(cfg, tokens=[7, 4]))
    assert got.dw13[0].is_contiguous() and got.dw2[0].is_contiguous()


def test_every_replica_has_its_own_gradient() -> None:
    """A10: their sum is the expert's."""
    cfg = layer("silu", num_pes=3, expert_map=A10_MAP)
    inputs = make_inputs(cfg, tokens=[6, 5, 17])
    got = assert_equal_to_autograd(cfg, inputs)
    parts = [got.dw13[pe][local] for pe, local in cfg.replicas[0]]
    assert len(parts) == 3 and all(part.abs().max() > 0 for part in parts)
    assert not torch.equal(parts[1], parts[2])


def test_empty_work() -> None:
    """Z1, Z3, Z5: no tokens, no unmasked slot, an expert without rows: exact zeros, full shape."""
    cfg = layer("silu", fc1_bias=True)
    for tokens, masked in (([0, 0], 0.0), ([0, 5], 0.0), ([3, 16], 1.0)):
        inputs = make_inputs(cfg, tokens=tokens, masked=masked)
        got = moe_backward_oracle(cfg, dy=output_gradients(inputs), **inputs.kwargs)
        assert [t.shape for t in got.dx] == [x.shape for x in inputs.x]
        assert [t.shape[0] for t in got.dw13] == list(cfg.experts_per_pe)
        idle = tokens == [0, 0] or masked == 1.0
        assert (torch.cat(got.dw13).abs().max() == 0) == idle
    inputs = make_inputs(cfg, tokens=[6, 6])
    for ids_TK in inputs.topk_ids:
        ids_TK[ids_TK == 2] = -1
    got = moe_backward_oracle(cfg, dy=output_gradients(inputs), **inputs.kwargs)
    for grads in (got.dw13, got.dw2, got.db13):
        per_expert = torch.cat(grads)
        assert (per_expert[2] == 0).all() and all(per_expert[e].abs().max() > 0 for e in (0, 1, 3))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gpt_oss", "relu2"])
def test_gradcheck_of_the_oracle(activation: Any) -> None:
    """Finite differences, a third derivation."""
    cfg = replace(
        layer(activation, weight_at="combine", fc2_bias=True),
        hidden=8,
        intermediate=8,
        activation_limit=7.0 if activation in CLAMPED else None,
    )
    inputs = make_inputs(cfg, tokens=[2, 1])
    leaves = doubled(inputs)
    names = ("x", "topk_weights")

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(leaves)
        given |= {"x": list(tensors[:2]), "topk_weights": list(tensors[2:4])}
        given |= dict(zip(("w13", "w2", "b2"), tensors[4:], strict=True))
        return torch.cat(moe_oracle(cfg, **given))

    flat = [t for name in names for t in leaves[name]]
    flat += [leaves[name] for name in ("w13", "w2", "b2")]
    assert torch.autograd.gradcheck(call, flat, eps=1e-6, atol=1e-6, fast_mode=True)


def test_each_half_of_dx() -> None:
    """B4: dx with the up rows zero, and with the gate rows zero."""
    cfg = layer("silu", fc1_bias=True)
    for half in (slice(0, 24), slice(24, 48)):
        inputs = make_inputs(cfg, tokens=[5, 4])
        inputs.w13[:, half] = 0
        got = assert_equal_to_autograd(cfg, inputs)
        assert torch.cat(got.dx).abs().max() > 0


@pytest.mark.parametrize("num_pes", [2, 4])
def test_gradients_do_not_depend_on_the_number_of_pes(num_pes: int) -> None:
    """B1, B9: the same tokens on one PE or on several; plain sums over tokens."""
    one = layer("silu", num_pes=1)
    inputs = make_inputs(one, tokens=[20], masked=0.2)
    dy = output_gradients(inputs)
    whole = moe_backward_oracle(one, dy=dy, **inputs.kwargs)
    cfg = replace(one, num_pes=num_pes)
    counts = [20 - 5 * (num_pes - 1)] + [5] * (num_pes - 1)

    def split(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(tensors[0].split(counts))

    parts = moe_backward_oracle(
        cfg,
        dy=split(dy),
        x=split(inputs.x),
        topk_ids=split(inputs.topk_ids),
        topk_weights=split(inputs.topk_weights),
        w13=inputs.w13,
        w2=inputs.w2,
    )
    for name in ("dx", "d_topk_weights", "dw13", "dw2"):
        got, want = torch.cat(getattr(parts, name)), getattr(whole, name)[0]
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("combine", ["direct", "prereduced"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("weight_at", ["act", "combine"])
def test_kernel_rounding_is_exact_on_integers(
    combine: Any, activation: Any, weight_at: Any
) -> None:
    cfg = replace(
        layer(activation, weight_at=weight_at, fc2_bias=True), combine=combine, hidden=8,
        intermediate=8,
    )  # fmt: skip
    inputs = make_inputs(cfg, tokens=[6, 5], integers=True, masked=0.2)
    rng = torch.Generator().manual_seed(1)
    dy = [torch.randint(-1, 2, x.shape, generator=rng).bfloat16() for x in inputs.x]
    exact = moe_backward_oracle(cfg, dy=dy, **inputs.kwargs)
    kernel = moe_backward_oracle(
        cfg, dy=dy, **inputs.kwargs, dtype=torch.float32, rounding="kernel"
    )
    assert kernel.dx[0].dtype == torch.bfloat16 and kernel.dw13[0].dtype == torch.float32
    for name in ("dx", "d_topk_weights", "dw13", "dw2", "db2"):
        for got, want in zip(getattr(kernel, name), getattr(exact, name), strict=True):
            # Rows of dx pass 256 and round; the other sums stay exact.
            rtol = 2**-6 if name == "dx" else 0
            torch.testing.assert_close(got.double(), want, rtol=rtol, atol=0)


REPORTED = [6.9, 7.0, 7.1, -7.0, -8.0, 100.0, 0.0, 0.3, -0.3, -30.0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_closed_forms_equal_autograd_at_and_beyond_the_clamp(activation: Any) -> None:
    """A3."""
    how = {"activation": activation, "limit": 7.0 if activation in CLAMPED else None}
    points = torch.cartesian_prod(*[torch.tensor(REPORTED, dtype=torch.float64)] * 2)
    gate, up = (column.clone().requires_grad_() for column in points.unbind(1))
    given = (gate, None if activation == "relu2" else up)
    activate(*given, **how).sum().backward()
    got = activation_gradients(gate.detach(), None if given[1] is None else up.detach(), **how)
    torch.testing.assert_close(got.act, activate(*given, **how).detach(), rtol=0, atol=0)
    torch.testing.assert_close(got.by_gate, gate.grad, rtol=1e-13, atol=1e-13)
    if got.by_up is not None:
        torch.testing.assert_close(got.by_up, up.grad, rtol=1e-13, atol=1e-13)
        if activation in CLAMPED:
            assert (got.by_gate[gate > 7] == 0).all() and (got.by_up[up.abs() > 7] == 0).all()


def test_refused() -> None:
    cfg = layer("silu")
    inputs = make_inputs(cfg, tokens=[3, 2])
    dy = output_gradients(inputs)
    with pytest.raises(ValueError, match=r"dy\[0\] has shape \[2, 16\]: must be \[3, 16\]"):
        moe_backward_oracle(cfg, dy=[dy[1], dy[1]], **inputs.kwargs)
    with pytest.raises(ValueError, match="dy has 1 entries"):
        moe_backward_oracle(cfg, dy=dy[:1], **inputs.kwargs)
