"""The maths of the layer in plain torch: the oracle the fused kernel is tested against.

    y[t] = residual[t] + sum_k ffn_{ids[t,k]}(x[t], w[t,k])
    ffn_e(x, w) = w2[e] @ (w * act(w13[e] @ x + b13[e])) + b2[e]     weight_at="act"
    ffn_e(x, w) = w * (w2[e] @ act(w13[e] @ x + b13[e]) + b2[e])     weight_at="combine"

Slots whose id is < 0 or >= E contribute nothing, whatever x and the weights hold there (a select,
never a product with zero).

Legend of shape suffixes:
    T tokens   H hidden   E experts   K experts per token   I intermediate   L experts of one PE
    G fc1 rows: the gate rows 0..I-1, then the up rows I..2I-1; only I rows if not gated
    R rows: the (token, k) of one expert
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from megamoe.activations import activate
from megamoe.checks import FLOAT_DTYPES, check_group, check_residual
from megamoe.config import GPT_OSS_ALPHA, NON_GATED, Activation, MoEConfig, WeightAt
from megamoe.routes import route_slots
from megamoe.weights import canonical_weights

Rounding = Literal["none", "kernel"]


def expert_ffn(
    *,
    x_RH: torch.Tensor,
    w13_GH: torch.Tensor,
    w2_HI: torch.Tensor,
    b13_G: torch.Tensor | None = None,
    b2_H: torch.Tensor | None = None,
    weight_R: torch.Tensor | None = None,
    activation: Activation = "silu",
    alpha: float = GPT_OSS_ALPHA,
    limit: float | None = None,
    weight_at: WeightAt = "act",
    rounding: Rounding = "none",
) -> torch.Tensor:
    """One expert on its rows.

    Args:
        x_RH: ``[R, H]``; the dtype of the two products. R may be 0.
        w13_GH: ``[2I, H]``, gate rows first, or ``[I, H]`` if not gated; same dtype.
        w2_HI: ``[H, I]``, same dtype.
        b13_G: bias of fc1 in the order of w13's rows, any float dtype, or None.
        b2_H: bias of fc2, any float dtype, or None. Not weighted here.
        weight_R: ``[R]`` router weights, or None for 1.
        activation, alpha, limit: see `megamoe.activations.activate`.
        weight_at: ``"act"`` multiplies the activation, ``"combine"`` leaves the weight to the
            caller.
        rounding: ``"none"``, or ``"kernel"`` to round where the kernel does: the fc1 accumulators
            to fp32, b13 added in fp32, h = act * weight computed in fp32 and rounded to bf16, the
            fc2 row to fp32, b2 added in fp32, and the sum to bf16.

    Returns:
        ``[R, H]`` in the dtype of x, or bf16 with kernel rounding.

    Worked example: x = [1, 2], gate rows [[1, 0], [0, -1]], up rows [[3, 0], [0, 5]] give
    gate = [1, -2], up = [3, 10], relu(gate) * up = [3, 0] and, with w2 = [[1, 1], [2, 0]],
    y = [3, 6].

    >>> expert_ffn(x_RH=torch.tensor([[1.0, 2.0]]),
    ...     w13_GH=torch.tensor([[1.0, 0.0], [0.0, -1.0], [3.0, 0.0], [0.0, 5.0]]),
    ...     w2_HI=torch.tensor([[1.0, 1.0], [2.0, 0.0]]), activation="relu").tolist()
    [[3.0, 6.0]]
    """
    dtype = x_RH.dtype
    accumulator_dtype = torch.float32 if rounding == "kernel" else dtype
    fc1_RG = (x_RH @ w13_GH.T).to(accumulator_dtype)
    if b13_G is not None:
        fc1_RG = fc1_RG + b13_G.to(accumulator_dtype)
    gate_RI, up_RI = (fc1_RG, None) if activation in NON_GATED else fc1_RG.chunk(2, dim=-1)
    h_RI = activate(gate_RI, up_RI, activation=activation, alpha=alpha, limit=limit)
    if weight_R is not None and weight_at == "act":
        h_RI = h_RI * weight_R.to(accumulator_dtype)[:, None]
    if rounding == "kernel":
        h_RI = h_RI.bfloat16().to(dtype)
    row_RH = (h_RI @ w2_HI.T).to(accumulator_dtype)
    if b2_H is not None:
        row_RH = row_RH + b2_H.to(accumulator_dtype)
    return row_RH.bfloat16() if rounding == "kernel" else row_RH


def router_weights(topk_weights_TK: torch.Tensor) -> torch.Tensor:
    """Router weights as the kernel takes them, fp32; fp64 ones stay as they are."""
    exact = topk_weights_TK.dtype == torch.float64
    return topk_weights_TK if exact else topk_weights_TK.float()


def slot_rows(
    *,
    topk_ids_TK: torch.Tensor,
    num_experts: int,
    row_shape: tuple[int, ...],
    dtype: torch.dtype,
    compute: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Fill a ``[T, K, *row_shape]`` tensor expert by expert; masked slots stay zero.

    Args:
        compute: called as ``compute(expert, token_R, slot_R)`` for every expert, also those with
            R = 0 rows (so that every expert's weight is in the autograd graph and its gradient is
            zero instead of None); returns ``[R, *row_shape]``.
    """
    num_tokens, top_k = topk_ids_TK.shape
    tokens, slots, rows = [], [], []
    for expert in range(num_experts):
        token_R, slot_R = (topk_ids_TK == expert).nonzero(as_tuple=True)
        tokens.append(token_R)
        slots.append(slot_R)
        rows.append(compute(expert, token_R, slot_R).to(dtype))
    empty = torch.zeros((num_tokens, top_k, *row_shape), dtype=dtype, device=topk_ids_TK.device)
    return empty.index_put((torch.cat(tokens), torch.cat(slots)), torch.cat(rows))


def sum_slots(slot_TKH: torch.Tensor) -> torch.Tensor:
    """``[T, H]``: the sum over k, one by one in ascending order, in the dtype given."""
    total_TH = torch.zeros_like(slot_TKH[:, 0])
    for slot_TH in slot_TKH.unbind(dim=1):
        total_TH = total_TH + slot_TH
    return total_TH


def sum_slots_by_pe(slot_TKH: torch.Tensor, *, pe_TK: torch.Tensor, num_pes: int) -> torch.Tensor:
    """``[T, H]`` fp32: the pre-reduced combine.

    Every PE sums its slots of a token in ascending k in fp32 and rounds the sum to bf16; the sums
    are added in ascending PE order in fp32.

    Args:
        slot_TKH: ``[T, K, H]`` fp32, already weighted; zero where masked.
        pe_TK: ``[T, K]`` the PE that computes each slot, -1 where masked.
    """
    total_TH = torch.zeros_like(slot_TKH[:, 0])
    for pe in range(num_pes):
        mine_TKH = torch.where((pe_TK == pe)[:, :, None], slot_TKH, 0.0)
        total_TH = total_TH + sum_slots(mine_TKH).bfloat16().float()
    return total_TH


def moe_tokens(
    *,
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w13_EGH: torch.Tensor,
    w2_EHI: torch.Tensor,
    b13_EG: torch.Tensor | None = None,
    b2_EH: torch.Tensor | None = None,
    residual_TH: torch.Tensor | None = None,
    activation: Activation = "silu",
    alpha: float = GPT_OSS_ALPHA,
    limit: float | None = None,
    weight_at: WeightAt = "act",
    dtype: torch.dtype = torch.float64,
    rounding: Rounding = "none",
    prereduced_on: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """The layer on one batch of tokens, all experts at hand. Differentiable; inputs unchanged.

    Args:
        x_TH: ``[T, H]``.
        topk_ids_TK: ``[T, K]`` int32 or int64; < 0 or >= E is masked. An id may repeat in a row.
        topk_weights_TK: ``[T, K]``, any float dtype, converted once.
        w13_EGH, w2_EHI, b13_EG, b2_EH: as `megamoe.weights.canonical_weights` gives them.
        residual_TH: ``[T, H]`` added last, also to tokens whose slots are all masked, or None.
        activation, alpha, limit: see `megamoe.activations.activate`.
        weight_at: see the top of this file.
        dtype: dtype of the products (operands are converted to it).
        rounding: ``"kernel"`` models the kernel's rounding points: those of `expert_ffn`, then with
            ``weight_at="combine"`` the product with the weight rounded to fp32, the sum over k in
            ascending order in fp32, the residual added in fp32, then y in bf16. Where every sum
            before a rounding is exact (small integers) it predicts the kernel bit for bit.
        prereduced_on: for kernel rounding of the pre-reduced combine, ``pe_TK`` and P of
            `sum_slots_by_pe`, which then replaces the sum over k; None is the direct combine.

    Returns:
        ``[T, H]`` in ``dtype``, or bf16 with kernel rounding.

    Worked example, H = I = 1, two experts with gate 1 and up 1, so that relu(gate) * up = x²;
    w2 is 1 for expert 0 and 10 for expert 1. Token 0 (x = 2) goes to both with weights 3 and 1,
    token 1 (x = 1) to expert 1 with weight 2 and to no other (-1):
    y = [3*4*1 + 1*4*10, 2*1*10] = [52, 20].

    >>> moe_tokens(x_TH=torch.tensor([[2.0], [1.0]]),
    ...     topk_ids_TK=torch.tensor([[0, 1], [1, -1]]),
    ...     topk_weights_TK=torch.tensor([[3.0, 1.0], [2.0, 7.0]]),
    ...     w13_EGH=torch.ones(2, 2, 1), w2_EHI=torch.tensor([[[1.0]], [[10.0]]]),
    ...     activation="relu").tolist()
    [[52.0], [20.0]]
    """

    def compute(expert: int, token_R: torch.Tensor, slot_R: torch.Tensor) -> torch.Tensor:
        weight_R = router_weights(topk_weights_TK)[token_R, slot_R].to(dtype)
        row_RH = expert_ffn(
            x_RH=x_TH[token_R].to(dtype),
            w13_GH=w13_EGH[expert].to(dtype),
            w2_HI=w2_EHI[expert].to(dtype),
            b13_G=None if b13_EG is None else b13_EG[expert],
            b2_H=None if b2_EH is None else b2_EH[expert],
            weight_R=weight_R,
            activation=activation,
            alpha=alpha,
            limit=limit,
            weight_at=weight_at,
            rounding=rounding,
        )
        if weight_at == "combine":
            row_RH = row_RH.to(sum_dtype) * weight_R.to(sum_dtype)[:, None]
        return row_RH

    sum_dtype = torch.float32 if rounding == "kernel" else dtype
    slot_TKH = slot_rows(
        topk_ids_TK=topk_ids_TK,
        num_experts=w13_EGH.shape[0],
        row_shape=(x_TH.shape[1],),
        dtype=sum_dtype,
        compute=compute,
    )
    if rounding == "kernel" and prereduced_on is not None:
        pe_TK, num_pes = prereduced_on
        y_TH = sum_slots_by_pe(slot_TKH, pe_TK=pe_TK, num_pes=num_pes)
    else:
        y_TH = sum_slots(slot_TKH)
    if residual_TH is not None:
        y_TH = y_TH + residual_TH.to(sum_dtype)
    return y_TH.bfloat16() if rounding == "kernel" else y_TH


def pe_of_slots(cfg: MoEConfig, topk_ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[sum of T_p, K]`` int64: the PE that computes each slot, -1 where masked."""
    return torch.cat(
        [route_slots(cfg, pe=pe, topk_ids_TK=ids_TK)[0] for pe, ids_TK in enumerate(topk_ids)]
    )


def moe_oracle(
    cfg: MoEConfig,
    *,
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
) -> list[torch.Tensor]:
    """The layer of the whole group: what every PE must get back.

    Args:
        cfg: the layer; placement and ``combine`` matter only for rounding.
        x: P tensors ``[T_p, H]``, any float dtype; T_p may be 0.
        topk_ids: P tensors ``[T_p, K]`` int32 or int64.
        topk_weights: P tensors ``[T_p, K]`` fp32, bf16, fp16 or (for gradient checks) fp64.
        w13: ``[E, *cfg.w13_shape]`` in global expert order and in the layout of ``cfg``.
        w2: ``[E, *cfg.w2_shape]``, likewise.
        b13: ``[E, cfg.w13_rows]`` in the order of the layout, given exactly if ``cfg.fc1_bias``.
        b2: ``[E, H]``, given exactly if ``cfg.fc2_bias``.
        residual: P tensors ``[T_p, H]`` added last, or None.
        dtype, rounding: see `moe_tokens`; kernel rounding follows ``cfg.combine_mode``.

    Returns:
        P tensors ``[T_p, H]`` in ``dtype``, or bf16 with ``rounding="kernel"``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_dtypes=FLOAT_DTYPES)
    check_residual(cfg, residual, x=x, dtypes=FLOAT_DTYPES)
    weights = canonical_weights(cfg, w13, w2, num_experts=cfg.num_experts, b13=b13, b2=b2)
    prereduced = cfg.combine_mode == "prereduced"
    y_TH = moe_tokens(
        x_TH=torch.cat(list(x)),
        topk_ids_TK=torch.cat([ids_TK.long() for ids_TK in topk_ids]),
        topk_weights_TK=torch.cat([router_weights(weights_TK) for weights_TK in topk_weights]),
        w13_EGH=weights.w13_EGH,
        w2_EHI=weights.w2_EHI,
        b13_EG=weights.b13_EG,
        b2_EH=weights.b2_EH,
        residual_TH=None if residual is None else torch.cat(list(residual)),
        activation=cfg.activation,
        alpha=cfg.activation_alpha,
        limit=cfg.activation_limit,
        weight_at=cfg.weight_at,
        dtype=dtype,
        rounding=rounding,
        prereduced_on=(pe_of_slots(cfg, topk_ids), cfg.num_pes) if prereduced else None,
    )
    return list(y_TH.split([x_TH.shape[0] for x_TH in x]))
