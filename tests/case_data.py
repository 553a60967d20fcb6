"""Seeded inputs for the tests of the oracle and of everything compared with it.

Legend: P PEs, T tokens, H hidden, E experts, K experts per token, I intermediate, G = 2I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megamoe import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One call of the whole group; ``kwargs`` fits `moe_oracle` and `error_bound`."""

    x: list[torch.Tensor]
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def kwargs(self) -> dict[str, Any]:
        return dict(vars(self))


def make_inputs(
    cfg: MoEConfig,
    *,
    tokens: list[int],
    seed: int = 0,
    integers: bool = False,
    masked: float = 0.0,
) -> Inputs:
    """Random bf16 inputs; ids distinct in a token, a share ``masked`` of them -1.

    With ``integers`` every value is a small integer, so that sums are exact in fp32.
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
        ids_TK = order_TE[:, : cfg.top_k].to(torch.int32)
        drop_TK = torch.rand(count, cfg.top_k, generator=rng) < masked
        ids.append(torch.where(drop_TK, -1, ids_TK))
        if integers:
            weights.append(torch.randint(1, 4, (count, cfg.top_k), generator=rng).float())
        else:
            weights.append(torch.randn(count, cfg.top_k, generator=rng).softmax(dim=-1))
    return Inputs(
        x=x,
        topk_ids=ids,
        topk_weights=weights,
        w13=values(experts, 2 * inter, hidden, scale=hidden**-0.5),
        w2=values(experts, hidden, inter, scale=inter**-0.5),
    )
