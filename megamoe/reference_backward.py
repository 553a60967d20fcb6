"""The gradients of the layer in plain torch: the oracle of the backward kernels.

With h = w·act(g, u), g and u the fc1 outputs, and y the sum of fc2 rows (`megamoe.reference`), a
row (token, k) of an expert gets from dy, the gradient of its token's y:

    dh = W2ᵀ·dy    d = w·dh    dg = d·∂act/∂g    du = d·∂act/∂u    dx = W13ᵀ·[dg, du]
    dw = ⟨dh, act⟩          with weight_at="combine" and a bias of fc2: + ⟨dy, b2⟩

and an expert, summed over its rows in the order (source PE, token, k):

    dW13 = Σ [dg, du]·xᵀ    dW2 = Σ dy·(w·act)ᵀ    db13 = Σ [dg, du]
    db2 = Σ dy              with weight_at="combine": Σ w·dy

(chain rule; both weight_at give the same dh, d and dW2.) dw uses the unweighted act: a slot with
weight 0 has a gradient, a masked slot has 0. A token's dx is the sum over its slots. Every place of
a replicated expert has gradients of its own; their sum is the gradient of the expert. Gradients are
plain sums over tokens: nothing is divided by tokens, PEs or group sizes.

Legend of shape suffixes:
    T tokens   H hidden   K experts per token   I intermediate   L experts of one PE
    G fc1 rows: the gate rows 0..I-1, then the up rows I..2I-1; only I rows if not gated
    R rows: the (token, k) of one place of an expert
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from megamoe.activations import activation_gradients
from megamoe.checks import FLOAT_DTYPES, check_group, check_residual
from megamoe.config import NON_GATED, MoEConfig
from megamoe.reference import (
    Rounding,
    pe_of_slots,
    router_weights,
    sum_slots,
    sum_slots_by_pe,
)
from megamoe.routes import route_slots
from megamoe.weights import canonical_weights, stored_gradients


class RowGradients(NamedTuple):
    """What dgrad makes of the rows of one place; the last two are operands of `expert_wgrad`."""

    dx_RH: torch.Tensor
    dweight_R: torch.Tensor
    dgu_RG: torch.Tensor
    wact_RI: torch.Tensor


class ExpertGradients(NamedTuple):
    """Gradients of the weights of one place, gate rows first and not transposed."""

    dw13_GH: torch.Tensor
    dw2_HI: torch.Tensor
    db13_G: torch.Tensor
    db2_H: torch.Tensor


def expert_dgrad(
    cfg: MoEConfig,
    *,
    dy_RH: torch.Tensor,
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    w13_GH: torch.Tensor,
    w2_HI: torch.Tensor,
    b13_G: torch.Tensor | None = None,
    b2_H: torch.Tensor | None = None,
    rounding: Rounding = "none",
) -> RowGradients:
    """Gradients of the rows of one expert; see the top of this file.

    Args:
        cfg: activation and ``weight_at``.
        dy_RH: ``[R, H]`` gradient of each row's token; the dtype of the products. R may be 0.
        x_RH: ``[R, H]``, same dtype.
        weight_R: ``[R]`` router weights.
        w13_GH, w2_HI: ``[G, H]`` gate rows first, and ``[H, I]``, same dtype.
        b13_G, b2_H: biases or None, any float dtype.
        rounding: ``"kernel"`` rounds where the kernels do: gate and up (fp32 accumulators, bias
            added in fp32) to bf16, and the activation and its derivatives in fp32 from those; dh to
            fp32; w·act, dg and du to bf16; dx to fp32 and then to bf16.

    Returns:
        ``[R, H]``, ``[R]``, ``[R, G]``, ``[R, I]``: in the dtype of dy, or with kernel rounding
        bf16, fp32, bf16, bf16.

    Worked example, relu: x = 2, gate row 3, up row 5, w2 = 7 give g = 6, u = 10, act = 60; with
    w = 0.5 and dy = 1: dh = 7, dw = 420, dg = 3.5·10, du = 3.5·6, dx = 3·35 + 5·21.

    >>> cfg = MoEConfig(hidden=8, intermediate=8, num_experts=1, top_k=1, num_pes=1, max_tokens=1,
    ...                 activation="relu")
    >>> one = torch.ones(1, 1)
    >>> grads = expert_dgrad(cfg, dy_RH=one, x_RH=2 * one, weight_R=torch.tensor([0.5]),
    ...     w13_GH=torch.tensor([[3.0], [5.0]]), w2_HI=7 * one)
    >>> [part.flatten().tolist() for part in grads]
    [[210.0], [420.0], [35.0, 21.0], [30.0]]
    """
    kernel = rounding == "kernel"
    dtype = dy_RH.dtype
    acc = torch.float32 if kernel else dtype

    fc1_RG = (x_RH @ w13_GH.T).to(acc)
    if b13_G is not None:
        fc1_RG = fc1_RG + b13_G.to(acc)
    if kernel:
        fc1_RG = fc1_RG.bfloat16().to(acc)
    gate_RI, up_RI = (fc1_RG, None) if cfg.activation in NON_GATED else fc1_RG.chunk(2, dim=-1)
    act_RI, by_gate_RI, by_up_RI = activation_gradients(
        gate_RI,
        up_RI,
        activation=cfg.activation,
        alpha=cfg.activation_alpha,
        limit=cfg.activation_limit,
    )
    weight_R = weight_R.to(acc)
    dh_RI = (dy_RH @ w2_HI).to(acc)
    dweight_R = (dh_RI * act_RI).sum(dim=1)
    if b2_H is not None and cfg.weight_at == "combine":
        dweight_R = dweight_R + (dy_RH.to(acc) @ b2_H.to(acc))
    d_RI = weight_R[:, None] * dh_RI
    parts = [d_RI * by_gate_RI] + ([] if by_up_RI is None else [d_RI * by_up_RI])
    dgu_RG, wact_RI = torch.cat(parts, dim=1), weight_R[:, None] * act_RI
    if kernel:
        dgu_RG, wact_RI = dgu_RG.bfloat16(), wact_RI.bfloat16()
    dx_RH = (dgu_RG.to(dtype) @ w13_GH).to(acc)
    return RowGradients(dx_RH.bfloat16() if kernel else dx_RH, dweight_R, dgu_RG, wact_RI)


def expert_wgrad(
    cfg: MoEConfig,
    *,
    dy_RH: torch.Tensor,
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    rows: RowGradients,
    rounding: Rounding = "none",
) -> ExpertGradients:
    """Gradients of the weights of one expert from its rows; exact zeros if R = 0.

    Args:
        dy_RH, x_RH, weight_R: as for `expert_dgrad`.
        rows: its result.
        rounding: ``"kernel"``: the sums are returned in fp32.
    """
    dtype = dy_RH.dtype
    dgu_RG = rows.dgu_RG.to(dtype)
    bias_dy_RH = dy_RH
    if cfg.weight_at == "combine":
        bias_dy_RH = dy_RH * weight_R.to(dtype)[:, None]
    made = ExpertGradients(
        dw13_GH=dgu_RG.T @ x_RH,
        dw2_HI=dy_RH.T @ rows.wact_RI.to(dtype),
        db13_G=dgu_RG.sum(dim=0),
        db2_H=bias_dy_RH.sum(dim=0),
    )
    return ExpertGradients(*(t.float() for t in made)) if rounding == "kernel" else made


class Gradients(NamedTuple):
    """Gradients of one call of the whole group, one entry per PE; as `moe_backward_oracle` says."""

    dx: list[torch.Tensor]
    d_topk_weights: list[torch.Tensor]
    dw13: list[torch.Tensor]
    dw2: list[torch.Tensor]
    db13: list[torch.Tensor] | None
    db2: list[torch.Tensor] | None
    dresidual: list[torch.Tensor] | None


def moe_backward_oracle(
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
    dtype: torch.dtype = torch.float64,
    rounding: Rounding = "none",
) -> Gradients:
    """The gradients of Σ ⟨dy, y⟩ over all PEs: what every PE must get.

    Args:
        cfg: the layer.
        dy: P tensors ``[T_p, H]``, any float dtype: the gradients of y.
        x, topk_ids, topk_weights, w13, w2, b13, b2, residual: as for
            `megamoe.reference.moe_oracle`.
        dtype: of the products.
        rounding: ``"kernel"`` models the kernels' rounding points: those of `expert_dgrad`, then dx
            rows summed as the forward sums fc2 rows (``cfg.combine_mode``, without weights) and
            rounded to bf16. Where every sum before a rounding is exact (small integers) it predicts
            the kernels bit for bit.

    Returns:
        P tensors each: dx ``[T_p, H]`` and dresidual, d_topk_weights ``[T_p, K]``, dw13
        ``[L_p, *cfg.w13_shape]``, dw2 ``[L_p, *cfg.w2_shape]``, db13 ``[L_p, cfg.w13_rows]``, db2
        ``[L_p, H]`` (biases None where there are none; weights in the layout of ``cfg``, by local
        index); in ``dtype``, or with kernel rounding dx bf16 and the others fp32.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_dtypes=FLOAT_DTYPES)
    check_residual(cfg, dy, x=x, dtypes=FLOAT_DTYPES, name="dy")
    check_residual(cfg, residual, x=x, dtypes=FLOAT_DTYPES)
    weights = canonical_weights(cfg, w13, w2, num_experts=cfg.num_experts, b13=b13, b2=b2)
    x_TH, dy_TH = torch.cat(list(x)).to(dtype), torch.cat(list(dy)).to(dtype)
    weights_TK = torch.cat([router_weights(weights_TK) for weights_TK in topk_weights])
    acc = torch.float32 if rounding == "kernel" else dtype
    dx_TKH = torch.zeros(*weights_TK.shape, cfg.hidden, dtype=acc, device=x_TH.device)
    dweight_TK = torch.zeros(weights_TK.shape, dtype=acc, device=x_TH.device)
    made: list[list[ExpertGradients]] = [[] for _ in range(cfg.num_pes)]
    with torch.no_grad():
        for place in places_of_rows(cfg, topk_ids):
            token_R, slot_R = place.token_R, place.slot_R
            operands = {
                "dy_RH": dy_TH[token_R],
                "x_RH": x_TH[token_R],
                "weight_R": weights_TK[token_R, slot_R],
            }
            expert = weights.of(place.expert, dtype)
            rows = expert_dgrad(cfg, **operands, **expert, rounding=rounding)
            dx_TKH[token_R, slot_R] = rows.dx_RH.to(acc)
            dweight_TK[token_R, slot_R] = rows.dweight_R
            grads = expert_wgrad(cfg, **operands, rows=rows, rounding=rounding)
            made[place.pe].append(grads)
    dx_TH = sum_dx(cfg, dx_TKH, pe_TK=pe_of_slots(cfg, topk_ids), rounding=rounding)
    counts = [x_TH.shape[0] for x_TH in x]
    stored = [stored_gradients(cfg, grads, like=x_TH, dtype=acc) for grads in made]
    dw13, dw2, db13, db2 = (list(parts) for parts in zip(*stored, strict=True))
    return Gradients(
        dx=list(dx_TH.split(counts)),
        d_topk_weights=list(dweight_TK.split(counts)),
        dw13=dw13,
        dw2=dw2,
        db13=db13 if cfg.fc1_bias else None,
        db2=db2 if cfg.fc2_bias else None,
        dresidual=None if residual is None else [t.to(acc) for t in dy],
    )


class PlaceRows(NamedTuple):
    """The rows of one place, as (token, k) in the concatenation of all PEs' tokens."""

    pe: int
    expert: int
    token_R: torch.Tensor
    slot_R: torch.Tensor


def places_of_rows(cfg: MoEConfig, topk_ids: Sequence[torch.Tensor]) -> Iterator[PlaceRows]:
    """Every place, PE by PE and by local index, with its rows in pool order; R may be 0."""
    routed = [route_slots(cfg, pe=pe, topk_ids_TK=ids_TK) for pe, ids_TK in enumerate(topk_ids)]
    pe_TK, local_TK = (torch.cat([part[i] for part in routed]) for i in (0, 1))
    for pe in range(cfg.num_pes):
        for local, expert in enumerate(cfg.local_experts(pe)):
            mine_TK = (pe_TK == pe) & (local_TK == local)
            yield PlaceRows(pe, expert, *mine_TK.nonzero(as_tuple=True))


def sum_dx(
    cfg: MoEConfig, dx_TKH: torch.Tensor, *, pe_TK: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """``[T, H]``: a token's dx from its slots' (zero where masked), bf16 with kernel rounding.

    Args:
        pe_TK: the PE that computed each slot, for the pre-reduced combine.
    """
    if rounding != "kernel":
        return sum_slots(dx_TKH)
    if cfg.combine_mode == "prereduced":
        return sum_slots_by_pe(dx_TKH, pe_TK=pe_TK, num_pes=cfg.num_pes).bfloat16()
    return sum_slots(dx_TKH).bfloat16()


def sum_replicas(cfg: MoEConfig, per_pe: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[E, ...]``: gradients of the experts from those of their places.

    Args:
        per_pe: P tensors ``[L_p, ...]``, e.g. ``Gradients.dw13``.
    """
    return torch.stack(
        [
            torch.stack([per_pe[pe][local] for pe, local in places]).sum(dim=0)
            for places in cfg.replicas
        ]
    )
