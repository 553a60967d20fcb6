"""The maths of the layer in plain torch: the oracle the fused kernel is tested against.

    y[t] = sum_k w[t,k] * w2[e] @ (act(w_gate[e] @ x[t]) * (w_up[e] @ x[t])),   e = ids[t,k]

Slots whose id is < 0 or >= E contribute nothing, whatever x and the weights hold there (a select,
never a product with zero).

Legend of shape suffixes:
    T tokens   H hidden   E experts   K experts per token   I intermediate   L experts of one PE
    G 2*I: the gate rows 0..I-1, then the up rows I..2I-1     R rows: the (token, k) of one expert
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from megamoe.checks import X_DTYPES, check_group, check_weights
from megamoe.config import Activation, MoEConfig, WeightAt

Rounding = Literal["none", "kernel"]
FLOAT_DTYPES = (*X_DTYPES, torch.float16, torch.float32, torch.float64)


def activate(
    gate: torch.Tensor, up: torch.Tensor, *, activation: Activation = "silu"
) -> torch.Tensor:
    """``silu(gate) * up`` or ``relu(gate) * up``, in the dtype of the operands."""
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "relu":
        return torch.relu(gate) * up
    raise ValueError(f"activation={activation!r}: must be one of 'silu', 'relu'")


def expert_ffn(
    *,
    x_RH: torch.Tensor,
    w13_GH: torch.Tensor,
    w2_HI: torch.Tensor,
    weight_R: torch.Tensor | None = None,
    activation: Activation = "silu",
    weight_at: WeightAt = "act",
    rounding: Rounding = "none",
) -> torch.Tensor:
    """One expert on its rows.

    Args:
        x_RH: ``[R, H]``; the dtype of the two products. R may be 0.
        w13_GH: ``[2I, H]``, gate rows first, same dtype.
        w2_HI: ``[H, I]``, same dtype.
        weight_R: ``[R]`` router weights, or None for 1.
        activation: see `activate`.
        weight_at: ``"act"`` multiplies the activation, ``"combine"`` leaves the weight to the
            caller.
        rounding: ``"none"``, or ``"kernel"`` to round where the kernel does: the fc1 accumulators
            to fp32, h = (act(gate) * up) * weight computed in fp32 and rounded to bf16, and the
            fc2 row rounded to fp32 and then to bf16.

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
    gate_RI, up_RI = (x_RH @ w13_GH.T).chunk(2, dim=-1)
    if rounding == "kernel":
        gate_RI, up_RI = gate_RI.float(), up_RI.float()
    h_RI = activate(gate_RI, up_RI, activation=activation)
    if weight_R is not None and weight_at == "act":
        h_RI = h_RI * weight_R.to(h_RI.dtype)[:, None]
    if rounding == "kernel":
        row_RH = h_RI.bfloat16().to(x_RH.dtype) @ w2_HI.T
        return row_RH.float().bfloat16()
    return h_RI @ w2_HI.T


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


def moe_tokens(
    *,
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w13_EGH: torch.Tensor,
    w2_EHI: torch.Tensor,
    activation: Activation = "silu",
    weight_at: WeightAt = "act",
    dtype: torch.dtype = torch.float64,
    rounding: Rounding = "none",
) -> torch.Tensor:
    """The layer on one batch of tokens, all experts at hand. Differentiable; inputs unchanged.

    Args:
        x_TH: ``[T, H]``.
        topk_ids_TK: ``[T, K]`` int32 or int64; < 0 or >= E is masked. An id may repeat in a row.
        topk_weights_TK: ``[T, K]``, any float dtype, converted once.
        w13_EGH: ``[E, 2I, H]``, gate rows first.
        w2_EHI: ``[E, H, I]``.
        activation: see `activate`.
        weight_at: see `expert_ffn`; without rounding it changes nothing but the order of products.
        dtype: dtype of the products (operands are converted to it).
        rounding: ``"kernel"`` models the kernel's rounding points: those of `expert_ffn`, then the
            sum over k in ascending order in fp32, then y in bf16. Where every sum before a
            rounding is exact (small integers) it predicts the kernel bit for bit.

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
        weight_R = topk_weights_TK[token_R, slot_R].float().to(dtype)
        row_RH = expert_ffn(
            x_RH=x_TH[token_R].to(dtype),
            w13_GH=w13_EGH[expert].to(dtype),
            w2_HI=w2_EHI[expert].to(dtype),
            weight_R=weight_R,
            activation=activation,
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
    y_TH = sum_slots(slot_TKH)
    return y_TH.bfloat16() if rounding == "kernel" else y_TH


def moe_oracle(
    cfg: MoEConfig,
    *,
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    rounding: Rounding = "none",
) -> list[torch.Tensor]:
    """The layer of the whole group: what every PE must get back.

    Args:
        cfg: the layer; placement does not matter here.
        x: P tensors ``[T_p, H]``, any float dtype; T_p may be 0.
        topk_ids: P tensors ``[T_p, K]`` int32 or int64.
        topk_weights: P tensors ``[T_p, K]`` fp32, bf16 or fp16.
        w13: ``[E, 2I, H]`` in global expert order, gate rows first.
        w2: ``[E, H, I]`` in global expert order.
        dtype, rounding: see `moe_tokens`.

    Returns:
        P tensors ``[T_p, H]`` in ``dtype``, or bf16 with ``rounding="kernel"``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_dtypes=FLOAT_DTYPES)
    check_weights(cfg, w13, w2, num_experts=cfg.num_experts, dtypes=FLOAT_DTYPES)
    y_TH = moe_tokens(
        x_TH=torch.cat(list(x)),
        topk_ids_TK=torch.cat([ids_TK.long() for ids_TK in topk_ids]),
        topk_weights_TK=torch.cat([weights_TK.float() for weights_TK in topk_weights]),
        w13_EGH=w13,
        w2_EHI=w2,
        activation=cfg.activation,
        weight_at=cfg.weight_at,
        dtype=dtype,
        rounding=rounding,
    )
    return list(y_TH.split([x_TH.shape[0] for x_TH in x]))


def split_experts(
    cfg: MoEConfig, w13_EGH: torch.Tensor, w2_EHI: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each PE's own experts, in its local order.

    Returns:
        P tensors ``[L_p, 2I, H]`` and P tensors ``[L_p, H, I]``: views where a PE's experts are
        consecutive (the default placement), copies elsewhere. L_p may be 0.

    Raises:
        ValueError: the tensors are not ``[E, 2I, H]`` and ``[E, H, I]``.
    """
    check_weights(cfg, w13_EGH, w2_EHI, num_experts=cfg.num_experts, dtypes=FLOAT_DTYPES)

    def take(weight: torch.Tensor, pe: int) -> torch.Tensor:
        experts = cfg.local_experts(pe)
        first = experts[0] if experts else 0
        if experts == tuple(range(first, first + len(experts))):
            return weight[first : first + len(experts)]
        return weight[list(experts)]

    pes = range(cfg.num_pes)
    return [take(w13_EGH, pe) for pe in pes], [take(w2_EHI, pe) for pe in pes]
