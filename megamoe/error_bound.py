"""A derived, elementwise bound on |fused kernel - fp64 oracle|. No tolerance is guessed.

Derivation, for one slot (token t, expert e, router weight w; all operands are exact bf16 or fp32
values). Hats mark what the kernel holds; |A| of a matrix is taken elementwise.

Units. Rounding to bf16 (8 significant bits, to nearest) multiplies by 1 + d with |d| <= u = 2^-8.
``v`` = 2^-23 is the spacing of fp32 at 1; one rounded fp32 operation multiplies by 1 + d, |d| <=
v/2. One WGMMA step adds 16 exact products to the accumulator; its alignment may truncate, so each
of the 17 addends and the result may lose up to v times the largest magnitude among them: at most
18 v (|c| + sum |a_i b_i|), c the accumulator before. Steps go through k in ascending order, so with
c known at every 64th k, and all steps of a tile of 64 taken together (a last, shorter tile takes as
many steps, the rest zeros), a product over n terms loses at most

    D = (loss + s P) / (1 - s),   loss = sum over tiles of 4 * 18 v (|c| + sum of |a_i b_i| in it),
                                  s = 4 * ceil(n / 64) * 18 v

where P bounds how far wrong operands move a partial sum, and 1 / (1 - s) covers that c itself is
the kernel's, off by at most D. (fp64's own error is five hundred million times smaller than v.)

1. fc1:  |ĝ - g| <= dg and |û - p| <= dp, both D with P = 0 (g, p: the exact gate and up values).
   A bias is added in fp32: g and p now include it, dg <- dg + v/2 (|g| + dg), dp likewise.
2. activation: a(g) q(p), where a has |a'| <= c and q is p, or p + 1 in gpt_oss. Clamps are
   1-Lipschitz, so they leave dg and dp as they are; a limit L rounded to fp32 adds v/2 L to each.
       silu: c = 1.1    gelu_tanh: c = 1.13    relu: c = 1
       gpt_oss: a(g) = silu(alpha g) / alpha, so c = 1.1 for every alpha
   (maxima of |a'|: 1.0998, 1.1290, 1; tests/cpu scans them). Before weight and rounding
       |a(ĝ)q̂ - a(g)q| <= da = |a(g)| dp + c dg (|q| + dp);
   relu2 has no up:  |max(ĝ,0)² - max(g,0)²| <= da = dg (2 max(g,0) + dg).
   The fp32 evaluation of a(ĝ) * q̂ * w has a relative error of at most theta. relu and relu2: 2
   products, theta = v. The others are ĝ * rcp(1 + ex2(-z log2 e)) with z = ĝ, alpha ĝ, or for gelu
   2 sqrt(2/pi) (ĝ + 0.044715 ĝ³), whose two terms have one sign: 2v for ex2.approx, v/2 for the
   addition, 2v for the division, 3v/2 for three products, v/2 for p + 1, and |z| times the relative
   error of the argument: v (silu: a constant and a product), 2v (gpt_oss: alpha besides) or 4v
   (gelu: 3 constants, 3 products, a sum). So theta = (8 + |z|) v, (9 + 2|z|) v, (8 + 4|z|) v, with
   |z| at |g| + dg. An underflow to zero adds at most 2^-118 |q w| / min(1, alpha).
3. h = w a(g) q is rounded to bf16 (weight_at="combine": the same with w = 1 here):
   |ĥ - h| <= eh = (1 + u) ea + u |h|,   ea = |w| (da + theta (|a(g) q| + da)) + underflow.
4. fc2 row r = W2 h:  |r̂' - r| <= er' = P + D, P = |W2| eh. A bias, added in fp32, makes it
   er' + v/2 (|r| + er') with r including it. Rounded to bf16:  |r̂ - r| <= er = (1 + u) er' + u |r|.
5. combine.
   direct, a sum over k in fp32:  |ŷ' - y| <= ey' = sum_k (er + K v (|r| + er)); with
   weight_at="combine" every term is multiplied by |w| and one product per term adds another v.
   prereduced: the same bound es'_p for the sum s_p over the slots of one PE p; s_p is rounded to
   bf16, es_p = (1 + u) es'_p + u |s_p|, unless it is one bf16 row (a single slot, no weight in the
   combine), which passes unchanged; and over PEs in fp32  ey' = sum_p (es_p + P v (|s_p| + es_p)).
   A residual added in fp32:  ey' + v/2 (|y| + ey') with y including it.
6. y is rounded to bf16:  |ŷ - y| <= (1 + u) ey' + u |y|.

Steps 1 to 5 are triangle inequalities, so the bound holds for every input without overflow; on
random data the largest error comes to between a seventh and a half of the bound (tests/cpu).
Assumptions on the kernel: no tanh.approx, whose error (2^-11) step 2 does not cover; gelu as
g * sigmoid(z), as 1 + tanh cancels; one accumulator per product over all of k (a split over k adds
partial sums that are larger than the running sum where terms cancel).

Legend: T tokens, H hidden, E experts, K experts per token, I intermediate, G fc1 rows, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megamoe.activations import activate
from megamoe.checks import FLOAT_DTYPES, check_group, check_residual
from megamoe.config import CLAMPED, MoEConfig
from megamoe.reference import pe_of_slots, slot_rows
from megamoe.weights import canonical_weights

U_BF16 = 2.0**-8
V_FP32 = 2.0**-23
MMA_K = 16
STEP_LOSS = (MMA_K + 2) * V_FP32
TILE_K = 64
UNDERFLOW = 2.0**-118
LIPSCHITZ = {"silu": 1.1, "gelu_tanh": 1.13, "relu": 1.0, "gpt_oss": 1.1, "swiglu_clamped": 1.1}
"""c of step 2, of the gated activations."""
THETA = {
    "silu": (8.0, 1.0),
    "gelu_tanh": (8.0, 4.0),
    "relu": (1.0, 0.0),
    "gpt_oss": (9.0, 2.0),
    "swiglu_clamped": (8.0, 1.0),
}
"""theta / v of step 2 as (constant, factor of |z|)."""


def product_and_loss(
    a_RN: torch.Tensor, b_MN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """``a @ b.T`` in fp64, ``[R, M]``, with ``loss`` ``[R, M]`` and ``s`` of the derivation."""
    value_RM = a_RN.new_zeros(a_RN.shape[0], b_MN.shape[0])
    loss_RM = torch.zeros_like(value_RM)
    tile_loss = TILE_K // MMA_K * STEP_LOSS
    s = 0.0
    for a_RC, b_MC in zip(a_RN.split(TILE_K, dim=1), b_MN.split(TILE_K, dim=1), strict=True):
        loss_RM += tile_loss * (value_RM.abs() + a_RC.abs() @ b_MC.abs().T)
        value_RM += a_RC @ b_MC.T
        s += tile_loss
    return value_RM, loss_RM, s


def add_fp32(total: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Error after a rounded fp32 addition whose exact result is within ``error`` of ``total``."""
    return error + V_FP32 / 2 * (total.abs() + error)


def round_bf16(value: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Error after rounding to bf16 a number that is within ``error`` of ``value``."""
    return (1.0 + U_BF16) * error + U_BF16 * value.abs() + UNDERFLOW


def sigmoid_argument(cfg: MoEConfig, gate: torch.Tensor) -> torch.Tensor:
    """z of step 2."""
    if cfg.activation == "gelu_tanh":
        return 2.0 * math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return (cfg.activation_alpha if cfg.activation == "gpt_oss" else 1.0) * gate


def _activation_and_error(
    cfg: MoEConfig, fc1_RG: torch.Tensor, dfc1_RG: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps 2 and 3 before w and the rounding: ``[R, I]`` exact a(g)·q, and ea / |w|."""
    if not cfg.gated:
        act_RI = activate(fc1_RG, None, activation=cfg.activation)
        dact_RI = dfc1_RG * (2.0 * fc1_RG.clamp(min=0.0) + dfc1_RG)
        return act_RI, dact_RI + V_FP32 * (act_RI + dact_RI)
    (gate_RI, up_RI), (dgate_RI, dup_RI) = fc1_RG.chunk(2, dim=-1), dfc1_RG.chunk(2, dim=-1)
    limit = cfg.activation_limit
    if cfg.activation in CLAMPED and limit is not None:
        gate_RI, up_RI = gate_RI.clamp(max=limit), up_RI.clamp(min=-limit, max=limit)
        dgate_RI, dup_RI = dgate_RI + V_FP32 / 2 * limit, dup_RI + V_FP32 / 2 * limit
    q_RI = up_RI + 1.0 if cfg.activation == "gpt_oss" else up_RI
    if cfg.activation == "relu":
        a_RI = gate_RI.clamp(min=0.0)
    else:
        a_RI = gate_RI * torch.sigmoid(sigmoid_argument(cfg, gate_RI))
    act_RI, spread_RI = a_RI * q_RI, q_RI.abs() + dup_RI
    dact_RI = a_RI.abs() * dup_RI + LIPSCHITZ[cfg.activation] * dgate_RI * spread_RI
    constant, factor = THETA[cfg.activation]
    z_RI = sigmoid_argument(cfg, gate_RI.abs() + dgate_RI)
    theta_RI = V_FP32 * (constant + factor * z_RI)
    underflow = UNDERFLOW / min(1.0, cfg.activation_alpha)
    return act_RI, dact_RI + theta_RI * (act_RI.abs() + dact_RI) + underflow * spread_RI


def _row_and_error(
    cfg: MoEConfig,
    *,
    x_RH: torch.Tensor,
    weight_R: torch.Tensor,
    w13_GH: torch.Tensor,
    w2_HI: torch.Tensor,
    b13_G: torch.Tensor | None,
    b2_H: torch.Tensor | None,
) -> torch.Tensor:
    """Steps 1 to 4 in fp64: ``[R, 2, H]``, the exact row and the bound on its error. With
    ``weight_at="combine"`` both are multiplied by the weight."""
    fc1_RG, loss_RG, s = product_and_loss(x_RH, w13_GH)
    dfc1_RG = loss_RG / (1.0 - s)
    if b13_G is not None:
        fc1_RG = fc1_RG + b13_G
        dfc1_RG = add_fp32(fc1_RG, dfc1_RG)
    act_RI, ea_RI = _activation_and_error(cfg, fc1_RG, dfc1_RG)
    scale_R1 = weight_R[:, None] if cfg.weight_at == "act" else torch.ones_like(weight_R)[:, None]
    h_RI = act_RI * scale_R1
    eh_RI = round_bf16(h_RI, ea_RI * scale_R1.abs())
    row_RH, loss_RH, s = product_and_loss(h_RI, w2_HI)
    moved_RH = eh_RI @ w2_HI.abs().T
    er_RH = moved_RH + (loss_RH + s * moved_RH) / (1.0 - s)
    if b2_H is not None:
        row_RH = row_RH + b2_H
        er_RH = add_fp32(row_RH, er_RH)
    er_RH = round_bf16(row_RH, er_RH)
    if cfg.weight_at == "combine":
        row_RH = row_RH * weight_R[:, None]
        er_RH = er_RH * weight_R[:, None].abs()
    return torch.stack([row_RH, er_RH], dim=1)


def sum_direct(cfg: MoEConfig, row_TKH: torch.Tensor, er_TKH: torch.Tensor) -> torch.Tensor:
    """Step 5, direct: ``[T, H]`` error of the fp32 sum over the slots given."""
    roundings = (cfg.top_k + (1 if cfg.weight_at == "combine" else 0)) * V_FP32
    return (er_TKH + roundings * (row_TKH.abs() + er_TKH)).sum(dim=1)


def sum_prereduced(
    cfg: MoEConfig, row_TKH: torch.Tensor, er_TKH: torch.Tensor, pe_TK: torch.Tensor
) -> torch.Tensor:
    """Step 5, prereduced: ``[T, H]``; ``pe_TK`` is the PE of each slot."""
    total_TH = torch.zeros_like(row_TKH[:, 0])
    for pe in range(cfg.num_pes):
        mine_TK1 = (pe_TK == pe)[:, :, None]
        row_pe_TKH, er_pe_TKH = row_TKH * mine_TK1, er_TKH * mine_TK1
        sum_TH = row_pe_TKH.sum(dim=1)
        es_TH = sum_direct(cfg, row_pe_TKH, er_pe_TKH)
        count_T1 = mine_TK1.sum(dim=1)
        rounded_T1 = count_T1 > (0 if cfg.weight_at == "combine" else 1)
        es_TH = torch.where(rounded_T1, round_bf16(sum_TH, es_TH), es_TH)
        total_TH += es_TH + cfg.num_pes * V_FP32 * (sum_TH.abs() + es_TH)
    return total_TH


def error_bound(
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
) -> list[torch.Tensor]:
    """Bound on |y of the kernel - y of `moe_oracle` in fp64|, for every output element.

    Args: as `megamoe.reference.moe_oracle`; the combine is ``cfg.combine_mode``.

    Returns:
        P tensors ``[T_p, H]`` fp64, >= 0; (almost) 0 where every slot is masked and there is no
        residual.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    check_group(cfg, x=x, topk_ids=topk_ids, topk_weights=topk_weights, x_dtypes=FLOAT_DTYPES)
    check_residual(cfg, residual, x=x, dtypes=FLOAT_DTYPES)
    weights = canonical_weights(cfg, w13, w2, num_experts=cfg.num_experts, b13=b13, b2=b2)
    x_TH = torch.cat(list(x))
    weights_TK = torch.cat([weights_TK.float() for weights_TK in topk_weights])

    def compute(expert: int, token_R: torch.Tensor, slot_R: torch.Tensor) -> torch.Tensor:
        return _row_and_error(
            cfg,
            x_RH=x_TH[token_R].double(),
            weight_R=weights_TK[token_R, slot_R].double(),
            w13_GH=weights.w13_EGH[expert].double(),
            w2_HI=weights.w2_EHI[expert].double(),
            b13_G=None if weights.b13_EG is None else weights.b13_EG[expert].double(),
            b2_H=None if weights.b2_EH is None else weights.b2_EH[expert].double(),
        )

    with torch.no_grad():
        rows = slot_rows(
            topk_ids_TK=torch.cat([ids_TK.long() for ids_TK in topk_ids]),
            num_experts=cfg.num_experts,
            row_shape=(2, cfg.hidden),
            dtype=torch.float64,
            compute=compute,
        )
        row_TKH, er_TKH = rows[:, :, 0], rows[:, :, 1]
        if cfg.combine_mode == "prereduced":
            ey_TH = sum_prereduced(cfg, row_TKH, er_TKH, pe_of_slots(cfg, topk_ids))
        else:
            ey_TH = sum_direct(cfg, row_TKH, er_TKH)
        y_TH = row_TKH.sum(dim=1)
        if residual is not None:
            y_TH = y_TH + torch.cat(list(residual)).double()
            ey_TH = add_fp32(y_TH, ey_TH)
        bound_TH = round_bf16(y_TH, ey_TH)
    return list(bound_TH.split([x_TH.shape[0] for x_TH in x]))
