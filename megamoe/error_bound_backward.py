"""A derived bound on |fused backward - fp64 oracle| for every gradient. No tolerance is guessed.

Continues the derivation and the units of `megamoe.error_bound` (u, v, loss of a WGMMA step); a pair
(a, ea) is an exact value and a bound on how far the kernel's is off, and a product of pairs is off
by at most |a| eb + |b| ea + ea eb. For one row (token, k) of an expert:

1. Saved gate and up: step 1 of the forward, rounded to bf16: (g, dg), (p, dp), each (1 + u) times
   the forward's error plus u |value|. A limit rounded to fp32 adds v/2 L to each.
2. Activation a(g)·q(p) from those, with a' and a'':
       a:  ea = c dg + theta (|a| + c dg)                      c, theta as in the forward
       a': c'' dg + 2 v s̄ ((1 + 2m)(theta/v) + 8m + 1)         c'' = max |a''|
   where a' = s (1 + m (1 - s)), m = g z'(g) taken at |g| + dg, s̄ = sigmoid(z(g + dg)): s has a
   relative error of theta, m one of 4v, 1 - s an absolute one of theta s + v, and s factors out of
   the sum; the factor 2 leaves room for the form s + a (1 - s). (maxima of |a''|: silu 0.5,
   gelu_tanh 0.7979, gpt_oss alpha/2; tests/cpu scans them.) relu2: a' = 2 max(g, 0), off by 2 dg.
   relu' and the derivatives of clamps jump: where a jump is within reach (|g| <= dg, |g - L| <= dg,
   ||p| - L| <= dp) the error is the whole jump, elsewhere none.
3. Products with one operand in exact bf16 and n terms lose, in whatever order the tiles come,
   at most  D = n' 18 v S / (1 - n' 18 v),  S = sum |a_i b_i| of the kernel's own operands, n' =
   8 ceil(n / 128) steps (twice for the two parts of W13), besides P = sum |e_i b_i|.
4. dh = W2ᵀ dy: (dh, D). dg, du: products of (dh), w, (a' or a) and (q or 1), at most 6 fp32
   roundings (3v), then bf16. w·act: likewise.
5. dw = <dh, act> (+ <dy, b2>): the pairs' products, and n v times their absolute sum for the fp32
   sum of n terms in any order.
6. dx rows: step 3 over [dg, du] and W13, then bf16; the sum over slots as in step 5 and 6 of the
   forward, without weights.
7. dW13, dW2: step 3 over the rows of the expert. db13, db2: sums of R terms, (R + 32) v.
   In bf16 one rounding more.

Legend: T tokens, H hidden, K experts per token, I intermediate, G fc1 rows, R rows of a place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megamoe.activations import activation_gradients
from megamoe.checks import FLOAT_DTYPES, check_group, check_residual
from megamoe.config import CLAMPED, MoEConfig
from megamoe.error_bound import (
    LIPSCHITZ,
    MMA_K,
    STEP_LOSS,
    THETA,
    UNDERFLOW,
    V_FP32,
    add_fp32,
    product_and_loss,
    round_bf16,
    sigmoid_argument,
    sum_direct,
    sum_prereduced,
)
from megamoe.reference import pe_of_slots
from megamoe.reference_backward import Gradients, places_of_rows
from megamoe.weights import canonical_weights, stored_gradients

CURVATURE = {"silu": 0.5, "gelu_tanh": 0.798, "relu": 0.0, "swiglu_clamped": 0.5, "gpt_oss": 0.5}
"""c'' of step 2; that of gpt_oss is to be multiplied by alpha."""


class Pair(NamedTuple):
    """An exact value and a bound on its error; elementwise, fp64."""

    value: torch.Tensor
    error: torch.Tensor

    def times(self, other: Pair, *, roundings: float = 0.0) -> Pair:
        """The product, with ``roundings`` fp32 operations of v/2 each."""
        value = self.value * other.value
        error = self.value.abs() * other.error + other.value.abs() * self.error
        error = error + self.error * other.error
        return Pair(value, error + roundings * V_FP32 / 2 * (value.abs() + error))

    def bf16(self) -> Pair:
        return Pair(self.value, round_bf16(self.value, self.error))

    def chosen(self, inside: torch.Tensor, near: torch.Tensor) -> Pair:
        """Times an indicator, which may be wrong where ``near``."""
        zero = torch.zeros_like(self.value)
        jump = torch.where(near, self.value.abs() + self.error, zero)
        return Pair(
            torch.where(inside, self.value, zero),
            torch.maximum(torch.where(inside, self.error, zero), jump),
        )


def exact(value: torch.Tensor) -> Pair:
    return Pair(value, torch.zeros_like(value))


def matmul(a: Pair, b_NM: torch.Tensor, *, parts: int = 1) -> Pair:
    """Step 3: ``a [R, N] @ b [N, M]``, b exact; the N terms come in ``parts`` padded parts."""
    moved_RM = a.error @ b_NM.abs()
    size_RM = a.value.abs() @ b_NM.abs() + moved_RM
    terms = -(-a.value.shape[1] // parts)
    steps = parts * 128 // MMA_K * math.ceil(terms / 128) * STEP_LOSS
    return Pair(a.value @ b_NM, moved_RM + steps / (1.0 - steps) * size_RM)


def _saved(
    cfg: MoEConfig, x_RH: torch.Tensor, w13_GH: torch.Tensor, b13_G: torch.Tensor | None
) -> Pair:
    """Step 1: ``[R, G]``."""
    fc1_RG, loss_RG, s = product_and_loss(x_RH, w13_GH)
    error_RG = loss_RG / (1.0 - s)
    if b13_G is not None:
        fc1_RG = fc1_RG + b13_G
        error_RG = add_fp32(fc1_RG, error_RG)
    return Pair(fc1_RG, error_RG).bf16()


def _plain(gate: Pair) -> tuple[Pair, Pair, None]:
    """Step 2 of relu2: activation, derivative."""
    g, dg = gate.value.clamp(min=0.0), gate.error
    square = g * g
    error = dg * (2.0 * g + dg)
    return Pair(square, error + V_FP32 * (square + error)), Pair(2.0 * g, 2.0 * dg), None


def _gated(cfg: MoEConfig, gate: Pair, up: Pair) -> tuple[Pair, Pair, Pair]:
    """Step 2: activation, derivatives by gate and by up."""
    name, limit = cfg.activation, cfg.activation_limit
    g, p = gate.value, up.value
    near_gate = near_up = None
    if name in CLAMPED and limit is not None:
        gate, up = (Pair(part.value, part.error + V_FP32 / 2 * limit) for part in (gate, up))
        near_gate = (g - limit).abs() <= gate.error
        near_up = (p.abs() - limit).abs() <= up.error
        gate = Pair(g.clamp(max=limit), gate.error)
        up = Pair(p.clamp(min=-limit, max=limit), up.error)
    q = up
    if name == "gpt_oss":
        q = Pair(up.value + 1.0, add_fp32(up.value + 1.0, up.error))
    if name == "relu":
        a = Pair(gate.value.clamp(min=0.0), gate.error)
        slope = exact(torch.ones_like(g)).chosen(g > 0, g.abs() <= gate.error)
    else:
        z = sigmoid_argument(cfg, gate.value)
        s = torch.sigmoid(z)
        constant, factor = THETA[name]
        reach = gate.value.abs() + gate.error
        theta = V_FP32 * (constant + factor * sigmoid_argument(cfg, reach).abs())
        underflow = UNDERFLOW / min(1.0, cfg.activation_alpha)
        ea = LIPSCHITZ[name] * gate.error
        value = gate.value * s
        a = Pair(value, ea + theta * (value.abs() + ea) + underflow)
        m = (3.0 if name == "gelu_tanh" else 1.0) * sigmoid_argument(cfg, reach)
        curvature = CURVATURE[name] * (cfg.activation_alpha if name == "gpt_oss" else 1.0)
        s_most = torch.sigmoid(sigmoid_argument(cfg, gate.value + gate.error))
        evaluated = 2.0 * s_most * ((1.0 + 2.0 * m) * theta + (8.0 * m + 1.0) * V_FP32)
        one = torch.zeros_like(g) if name == "gpt_oss" else torch.ones_like(g)  # q = 1
        by = activation_gradients(
            gate.value, one, activation=name, alpha=cfg.activation_alpha, limit=math.inf
        ).by_gate
        slope = Pair(by, curvature * gate.error + evaluated + underflow)
    act = a.times(q, roundings=2)
    by_gate, by_up = slope.times(q), a
    if near_gate is not None and near_up is not None and limit is not None:
        by_gate = by_gate.chosen(g <= limit, near_gate)
        by_up = by_up.chosen(p.abs() <= limit, near_up)
    return act, by_gate, by_up


class _RowBounds(NamedTuple):
    """Pairs of one place."""

    dx_RH: Pair
    dweight_R: Pair
    dgu_RG: Pair
    wact_RI: Pair


def _rows(
    cfg: MoEConfig,
    *,
    dy_RH: torch.Tensor,
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    w13_GH: torch.Tensor,
    w2_HI: torch.Tensor,
    b13_G: torch.Tensor | None,
    b2_H: torch.Tensor | None,
) -> _RowBounds:
    """Steps 1 to 6 up to the rounding of the row, in fp64."""
    saved = _saved(cfg, x_RH, w13_GH, b13_G)
    if cfg.gated:
        gate, up = (
            Pair(*parts)
            for parts in zip(saved.value.chunk(2, -1), saved.error.chunk(2, -1), strict=True)
        )
        act, by_gate, by_up = _gated(cfg, gate, up)
        slopes = [by_gate, by_up]
    else:
        act, by_gate, _ = _plain(saved)
        slopes = [by_gate]
    weight = exact(weight_R[:, None])
    dh = matmul(exact(dy_RH), w2_HI)
    parts = [dh.times(weight).times(slope, roundings=6).bf16() for slope in slopes]
    dgu = Pair(torch.cat([p.value for p in parts], 1), torch.cat([p.error for p in parts], 1))
    products = dh.times(act)
    terms = cfg.intermediate + 64
    size_R = (products.value.abs() + products.error).sum(1)
    dweight_R = products.value.sum(1)
    if b2_H is not None and cfg.weight_at == "combine":
        terms += cfg.hidden
        size_R = size_R + dy_RH.abs() @ b2_H.abs()
        dweight_R = dweight_R + dy_RH @ b2_H
    return _RowBounds(
        dx_RH=matmul(dgu, w13_GH, parts=len(slopes)).bf16(),
        dweight_R=Pair(dweight_R, products.error.sum(1) + terms * V_FP32 * size_R),
        dgu_RG=dgu,
        wact_RI=act.times(weight, roundings=2).bf16(),
    )


def backward_error_bound(
    cfg: MoEConfig,
    *,
    dy: Sequence[torch.Tensor],
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    residual: Sequence[torch.Tensor] | None = None,
    grad_dtype: torch.dtype = torch.float32,
) -> Gradients:
    """Bounds on |gradient of the kernels - `moe_backward_oracle` in fp64|, elementwise.

    Args: as for `moe_backward_oracle`; dy and x in exact bf16 values.
        grad_dtype: of the weight gradients, fp32 or bf16 (a store; adding to a main_grad rounds
            once more).

    Returns:
        fp64 tensors of the shapes `moe_backward_oracle` returns, >= 0; exactly 0 for dresidual and
        for weight gradients of experts without rows.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_dtypes=FLOAT_DTYPES)
    check_residual(cfg, dy, x=x, dtypes=FLOAT_DTYPES, name="dy")
    weights = canonical_weights(cfg, w13, w2, num_experts=cfg.num_experts, b13=b13, b2=b2)
    x_TH, dy_TH = torch.cat(list(x)).double(), torch.cat(list(dy)).double()
    weights_TK = torch.cat([weights_TK.double() for weights_TK in topk_weights])
    shape = (*weights_TK.shape, cfg.hidden)
    row_TKH, er_TKH = x_TH.new_zeros(shape), x_TH.new_zeros(shape)
    ew_TK = x_TH.new_zeros(weights_TK.shape)
    made: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(cfg.num_pes)]
    with torch.no_grad():
        for place in places_of_rows(cfg, topk_ids):
            at = (place.token_R, place.slot_R)
            dy_RH, x_RH, weight_R = dy_TH[at[0]], x_TH[at[0]], weights_TK[at]
            expert = {
                name: None if t is None else t.double()
                for name, t in weights.of(place.expert, torch.float64).items()
            }
            rows = _rows(cfg, dy_RH=dy_RH, x_RH=x_RH, weight_R=weight_R, **expert)  # type: ignore[arg-type]
            row_TKH[at], er_TKH[at] = rows.dx_RH
            ew_TK[at] = rows.dweight_R.error
            made[place.pe].append(_weights(cfg, rows, dy_RH, x_RH, weight_R, grad_dtype))
        summed = replace(cfg, weight_at="act")  # rows of dx come back without weights
        if cfg.combine_mode == "prereduced":
            ex_TH = sum_prereduced(summed, row_TKH, er_TKH, pe_of_slots(cfg, topk_ids))
        else:
            ex_TH = sum_direct(summed, row_TKH, er_TKH)
        ex_TH = round_bf16(row_TKH.sum(dim=1), ex_TH)
    counts = [x_TH.shape[0] for x_TH in x]
    stored = [stored_gradients(cfg, e, like=x_TH, dtype=torch.float64) for e in made]
    dw13, dw2, db13, db2 = (list(parts) for parts in zip(*stored, strict=True))
    return Gradients(
        dx=list(ex_TH.split(counts)),
        d_topk_weights=list(ew_TK.split(counts)),
        dw13=dw13,
        dw2=dw2,
        db13=db13 if cfg.fc1_bias else None,
        db2=db2 if cfg.fc2_bias else None,
        dresidual=None if residual is None else [torch.zeros_like(t.double()) for t in dy],
    )


def _weights(
    cfg: MoEConfig,
    rows: _RowBounds,
    dy_RH: torch.Tensor,
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    grad_dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Step 7: bounds of dw13 ``[G, H]``, dw2 ``[H, I]``, db13 ``[G]``, db2 ``[H]``."""
    dgu = rows.dgu_RG
    scaled_RH = dy_RH * weight_R[:, None] if cfg.weight_at == "combine" else dy_RH
    adds = (dy_RH.shape[0] + 32) * V_FP32
    pairs = (
        matmul(Pair(dgu.value.T, dgu.error.T), x_RH),
        Pair(*(part.T for part in matmul(Pair(*(p.T for p in rows.wact_RI)), dy_RH))),
        Pair(dgu.value.sum(0), dgu.error.sum(0) + adds * (dgu.value.abs() + dgu.error).sum(0)),
        Pair(scaled_RH.sum(0), adds * scaled_RH.abs().sum(0)),
    )
    has_rows = dy_RH.shape[0] > 0
    if grad_dtype == torch.bfloat16 and has_rows:
        pairs = tuple(pair.bf16() for pair in pairs)  # type: ignore[assignment]
    return tuple(pair.error for pair in pairs)
