"""A derived, elementwise bound on |fused kernel - fp64 oracle|. No tolerance is guessed.

Derivation, for one slot (token t, expert e, router weight w; all operands are exact bf16 or fp32
values). Hats mark what the kernel holds; |A| of a matrix is taken elementwise.

Units. Rounding to bf16 (8 significant bits, to nearest) multiplies by 1 + d with |d| <= u = 2^-8.
``v`` = 2^-23 is the spacing of fp32 at 1. One WGMMA step adds 16 exact products to the accumulator;
its alignment may truncate, so each of the 17 addends and the result may lose up to v times the
largest magnitude among them: at most 18 v (|c| + sum |a_i b_i|), c the accumulator before. Steps go
through k in ascending order, so with c known at every 64th k, and all steps of a tile of 64 taken
together, a product over n terms loses at most

    D = (loss + s P) / (1 - s),   loss = sum over tiles of 4 * 18 v (|c| + sum of |a_i b_i| in it),
                                  s = (n / 16) * 18 v

where P bounds how far wrong operands move a partial sum, and 1 / (1 - s) covers that c itself is
the kernel's, off by at most D. (fp64's own error is five hundred million times smaller than v.)

1. fc1:  |ĝ - g| <= dg and |û - p| <= dp, both D with P = 0 (g, p: the exact gate and up values).
2. activation: a(.) is silu or relu with |a'| <= c (c = 1.1 or 1), so before weight and rounding
   |a(ĝ)û - a(g)p| <= da = |a(g)| dp + c dg (|p| + dp).
   The fp32 evaluation of a(ĝ) * û * w has a relative error of at most theta:
   relu: 2 products, theta = v. silu = ĝ * rcp(1 + ex2(-ĝ log2 e)): v|ĝ| for the rounded argument,
   2v for ex2.approx, v/2 for the addition, 2v for the division, 3v/2 for three products: theta =
   (8 + |g| + dg) v. An underflow to zero adds at most 2^-118 |p w|.
3. h = w a(g) p is rounded to bf16 (weight_at="combine": the same with w = 1 here):
   |ĥ - h| <= eh = (1 + u) ea + u |h|,   ea = |w| (da + theta (|a(g) p| + da)) + underflow.
4. fc2 row r = W2 h:  |r̂' - r| <= er' = P + D, P = |W2| eh, and rounded to bf16
   |r̂ - r| <= er = (1 + u) er' + u |r|.
5. sum over k, fp32:  |ŷ' - y| <= ey' = sum_k (er + K v (|r| + er)); with weight_at="combine" every
   term is multiplied by |w| and one product per term adds another v.
6. y is rounded to bf16:  |ŷ - y| <= (1 + u) ey' + u |y|.

Steps 1 to 5 are triangle inequalities, so the bound holds for every input without overflow; on
random data the largest error comes to between a seventh and a half of the bound (tests/cpu).
Assumption on the kernel: silu is not computed with tanh.approx, whose error (2^-11) step 2 does not
cover.

Legend: T tokens, H hidden, E experts, K experts per token, I intermediate, G = 2I, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.checks import check_group, check_weights
from megamoe.config import MoEConfig
from megamoe.reference import FLOAT_DTYPES, activate, slot_rows

U_BF16 = 2.0**-8
V_FP32 = 2.0**-23
MMA_K = 16
STEP_LOSS = (MMA_K + 2) * V_FP32
TILE_K = 64
UNDERFLOW = 2.0**-118
LIPSCHITZ = {"silu": 1.1, "relu": 1.0}


def _product_and_loss(
    a_RN: torch.Tensor, b_MN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """``a @ b.T`` in fp64, ``[R, M]``, with ``loss`` ``[R, M]`` and ``s`` of the derivation."""
    value_RM = a_RN.new_zeros(a_RN.shape[0], b_MN.shape[0])
    loss_RM = torch.zeros_like(value_RM)
    steps = 0
    for a_RC, b_MC in zip(a_RN.split(TILE_K, dim=1), b_MN.split(TILE_K, dim=1), strict=True):
        tile_steps = -(-a_RC.shape[1] // MMA_K)
        magnitude_RM = value_RM.abs() + a_RC.abs() @ b_MC.abs().T
        loss_RM += tile_steps * STEP_LOSS * magnitude_RM
        value_RM += a_RC @ b_MC.T
        steps += tile_steps
    return value_RM, loss_RM, steps * STEP_LOSS


def _round_bf16(value: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Error after rounding to bf16 a number that is within ``error`` of ``value``."""
    return (1.0 + U_BF16) * error + U_BF16 * value.abs() + UNDERFLOW


def _row_and_error(
    cfg: MoEConfig,
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    w13_GH: torch.Tensor,
    w2_HI: torch.Tensor,
) -> torch.Tensor:
    """Steps 1 to 4 in fp64: ``[R, 2, H]``, the exact row and the bound on its error. With
    ``weight_at="combine"`` both are multiplied by the weight."""
    fc1_RG, loss_RG, s = _product_and_loss(x_RH, w13_GH)
    gate_RI, up_RI = fc1_RG.chunk(2, dim=-1)
    dgate_RI, dup_RI = (loss_RG / (1.0 - s)).chunk(2, dim=-1)
    one_RI = torch.ones_like(up_RI)
    act_RI = activate(gate_RI, one_RI, activation=cfg.activation).abs()
    dact_RI = act_RI * dup_RI + LIPSCHITZ[cfg.activation] * dgate_RI * (up_RI.abs() + dup_RI)
    theta = V_FP32 * (8.0 + gate_RI.abs() + dgate_RI) if cfg.activation == "silu" else V_FP32
    product_RI = activate(gate_RI, up_RI, activation=cfg.activation)
    scale_R1 = weight_R[:, None] if cfg.weight_at == "act" else torch.ones_like(weight_R)[:, None]
    h_RI = product_RI * scale_R1
    eh_RI = scale_R1.abs() * (
        dact_RI + theta * (product_RI.abs() + dact_RI) + UNDERFLOW * (up_RI.abs() + dup_RI)
    )
    eh_RI = _round_bf16(h_RI, eh_RI)
    row_RH, loss_RH, s = _product_and_loss(h_RI, w2_HI)
    moved_RH = eh_RI @ w2_HI.abs().T
    er_RH = _round_bf16(row_RH, moved_RH + (loss_RH + s * moved_RH) / (1.0 - s))
    if cfg.weight_at == "combine":
        row_RH = row_RH * weight_R[:, None]
        er_RH = er_RH * weight_R[:, None].abs()
    return torch.stack([row_RH, er_RH], dim=1)


def error_bound(
    cfg: MoEConfig,
    *,
    x: Sequence[torch.Tensor],
    topk_ids: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> list[torch.Tensor]:
    """Bound on |y of the kernel - y of `moe_oracle` in fp64|, for every output element.

    Args: as `megamoe.reference.moe_oracle`.

    Returns:
        P tensors ``[T_p, H]`` fp64, >= 0; (almost) 0 where every slot is masked.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_dtypes=FLOAT_DTYPES)
    check_weights(cfg, w13, w2, num_experts=cfg.num_experts, dtypes=FLOAT_DTYPES)
    x_TH = torch.cat(list(x))
    weights_TK = torch.cat([weights.float() for weights in topk_weights])

    def compute(expert: int, token_R: torch.Tensor, slot_R: torch.Tensor) -> torch.Tensor:
        return _row_and_error(
            cfg,
            x_TH[token_R].double(),
            weights_TK[token_R, slot_R].double(),
            w13[expert].double(),
            w2[expert].double(),
        )

    with torch.no_grad():
        rows = slot_rows(
            topk_ids_TK=torch.cat([ids.long() for ids in topk_ids]),
            num_experts=cfg.num_experts,
            row_shape=(2, cfg.hidden),
            dtype=torch.float64,
            compute=compute,
        )
        row_TKH, er_TKH = rows[:, :, 0], rows[:, :, 1]
        roundings = (cfg.top_k + (1 if cfg.weight_at == "combine" else 0)) * V_FP32
        ey_TH = (er_TKH + roundings * (row_TKH.abs() + er_TKH)).sum(dim=1)
        bound_TH = _round_bf16(row_TKH.sum(dim=1), ey_TH)
    return list(bound_TH.split([x_TH.shape[0] for x_TH in x]))
