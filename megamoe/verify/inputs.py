"""Seeded inputs for verification and tests: small integers, so that results agree bit for bit, or
random values.

Legend: P PEs, T tokens, H hidden, E experts, K experts per token, I intermediate, G fc1 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megamoe.config import MoEConfig
from megamoe.weights import split_experts, split_per_pe, stored_rows


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call of the whole group; ``kwargs`` fits `moe_oracle` and `error_bound`."""

    x: list[torch.Tensor]
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor
    b13: torch.Tensor | None = None
    b2: torch.Tensor | None = None
    residual: list[torch.Tensor] | None = None

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(vars(self))


def weights_per_pe(cfg: MoEConfig, inputs: Inputs) -> dict[str, Any]:
    """w13, w2, b13 and b2 as lists over PEs, a bias that the layer has not being None: the
    arguments of `megamoe.testing.VgpuMoE`."""
    w13, w2 = split_experts(cfg, inputs.w13, inputs.w2)
    biases = {"b13": inputs.b13, "b2": inputs.b2}
    split = {name: None if b is None else split_per_pe(cfg, b) for name, b in biases.items()}
    return {"w13": w13, "w2": w2, **split}


def stored_weights(
    cfg: MoEConfig, w13_EGH: torch.Tensor, w2_EHI: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate-first, not transposed weights, as an engine with the layout of ``cfg`` stores them."""
    w13 = stored_rows(cfg, w13_EGH)
    return (
        w13.mT.contiguous() if cfg.w13_transposed else w13,
        w2_EHI.mT.contiguous() if cfg.w2_transposed else w2_EHI,
    )


def make_inputs(
    cfg: MoEConfig,
    *,
    tokens: list[int],
    seed: int = 0,
    integers: bool = False,
    masked: float = 0.0,
    repeated: float = 0.0,
    residual: bool = False,
    id_dtype: torch.dtype = torch.int32,
    weight_dtype: torch.dtype = torch.float32,
    bias_dtype: torch.dtype = torch.bfloat16,
) -> Inputs:
    """Random bf16 inputs; one seed gives one layer and one call, whatever the layout of ``cfg``.

    Args:
        tokens: T of every PE.
        integers: every value is a small integer, so that sums are exact in fp32 (with an activation
            that is exact too: relu, relu2).
        masked: share of slots that are -1.
        repeated: share of slots that repeat the expert of their token's first slot; the other ids
            of a token are distinct.
        residual: with a residual.
        id_dtype, weight_dtype, bias_dtype: of ids, router weights and both biases.
    """
    rng = torch.Generator().manual_seed(seed)
    hidden, inter, experts = cfg.hidden, cfg.intermediate, cfg.num_experts

    def values(*shape: int, scale: float) -> torch.Tensor:
        if integers:
            return torch.randint(-1, 2, shape, generator=rng).bfloat16()
        return (torch.randn(*shape, generator=rng) * scale).bfloat16()

    x, ids, weights = [], [], []
    for count in tokens:
        x.append(values(count, hidden, scale=1.0))
        order_TE = torch.rand(count, experts, generator=rng).argsort(dim=1)
        ids_TK = order_TE[:, : cfg.top_k].to(id_dtype)
        drop_TK = torch.rand(count, cfg.top_k, generator=rng) < masked
        if repeated:
            repeat_TK = torch.rand(count, cfg.top_k, generator=rng) < repeated
            ids_TK = torch.where(repeat_TK, ids_TK[:, :1], ids_TK)
        ids.append(torch.where(drop_TK, -1, ids_TK))
        if integers:
            weights_TK = torch.randint(1, 4, (count, cfg.top_k), generator=rng).float()
        else:
            weights_TK = torch.randn(count, cfg.top_k, generator=rng).softmax(dim=-1)
        weights.append(weights_TK.to(weight_dtype))
    w13, w2 = stored_weights(
        cfg,
        values(experts, cfg.w13_rows, hidden, scale=hidden**-0.5),
        values(experts, hidden, inter, scale=inter**-0.5),
    )
    b13_EG = 2 * values(experts, cfg.w13_rows, scale=0.25) if cfg.fc1_bias else None
    b2_EH = 3 * values(experts, hidden, scale=0.1) if cfg.fc2_bias else None
    return Inputs(
        x=x,
        topk_ids=ids,
        topk_weights=weights,
        w13=w13,
        w2=w2,
        b13=None if b13_EG is None else stored_rows(cfg, b13_EG).to(bias_dtype),
        b2=None if b2_EH is None else b2_EH.to(bias_dtype),
        residual=[5 * values(count, hidden, scale=0.1) for count in tokens] if residual else None,
    )
