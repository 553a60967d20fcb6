"""Which PE and which of its experts computes each slot: `MoEConfig.route_of` for a whole tensor.

Legend: T tokens, K experts per token, E experts, R places of the most replicated expert.
"""

from __future__ import annotations

import torch

from megamoe.config import MoEConfig


def route_slots(
    cfg: MoEConfig, *, pe: int, topk_ids_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The place of every slot of the tokens of ``pe``.

    Args:
        topk_ids_TK: ``[T, K]`` int32 or int64; row t is token t of ``pe``, which the choice among
            replicas depends on.

    Returns:
        ``pe_TK`` and ``local_TK``, int64: PE and local index, both -1 where the slot is masked.

    >>> cfg = MoEConfig(hidden=64, intermediate=64, num_experts=2, top_k=2, num_pes=3,
    ...                 max_tokens=8, expert_map=[[(0, 0), (1, 0)], (1, 1)])
    >>> pe_TK, local_TK = route_slots(cfg, pe=2, topk_ids_TK=torch.tensor([[0, 1], [-1, 0]]))
    >>> pe_TK.tolist(), local_TK.tolist()
    ([[0, 1], [-1, 1]], [[0, 1], [-1, 0]])
    """
    device = topk_ids_TK.device
    most = max(map(len, cfg.replicas))
    # An expert's own place, repeated, or its places in order: indexed by token mod their number.
    chosen = []
    for places in cfg.replicas:
        own = [place for place in places if place[0] == pe]
        chosen.append((min(own),) if own else places)
    count_E = torch.tensor([len(places) for places in chosen], device=device)
    place_ER2 = torch.tensor(
        [[*places, *([(0, 0)] * (most - len(places)))] for places in chosen], device=device
    )
    ids_TK = topk_ids_TK.long()
    valid_TK = (ids_TK >= 0) & (ids_TK < cfg.num_experts)
    ids_TK = torch.where(valid_TK, ids_TK, 0)
    token_T1 = torch.arange(ids_TK.shape[0], device=device)[:, None]
    place_TK2 = place_ER2[ids_TK, token_T1 % count_E[ids_TK]]
    place_TK2 = torch.where(valid_TK[:, :, None], place_TK2, -1)
    return place_TK2[:, :, 0], place_TK2[:, :, 1]
