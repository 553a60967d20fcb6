"""The layer in plain torch on one GPU: sort rows by expert, grouped GEMMs, sum. The baseline."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_moe(
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w13_EGH: torch.Tensor,
    w2_EHI: torch.Tensor,
) -> torch.Tensor:
    """silu-gated MoE with ``torch`` grouped GEMMs; all ids valid.

    Args:
        x_TH: ``[T, H]`` bf16; topk_ids_TK ``[T, K]`` int; topk_weights_TK ``[T, K]`` fp32.
        w13_EGH: ``[E, 2I, H]``, gate rows first; w2_EHI ``[E, H, I]``.

    Returns:
        ``[T, H]`` bf16.
    """
    tokens, top_k = topk_ids_TK.shape
    experts = w2_EHI.shape[0]
    flat_N = topk_ids_TK.flatten().long()
    order_N = flat_N.argsort(stable=True)
    ends_E = torch.bincount(flat_N, minlength=experts).cumsum(0).to(torch.int32)
    rows_NH = x_TH[order_N // top_k]
    gate_up_NG = F.grouped_mm(rows_NH, w13_EGH.mT, offs=ends_E)
    gate_NI, up_NI = gate_up_NG.chunk(2, dim=1)
    weight_N1 = topk_weights_TK.flatten()[order_N, None]
    h_NI = (F.silu(gate_NI.float()) * up_NI.float() * weight_N1).to(torch.bfloat16)
    out_NH = F.grouped_mm(h_NI, w2_EHI.mT, offs=ends_E)
    slots_NH = torch.empty_like(out_NH)
    slots_NH[order_N] = out_NH
    return slots_NH.view(tokens, top_k, -1).float().sum(dim=1).to(torch.bfloat16)
