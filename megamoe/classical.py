"""The unfused way to run the layer over torch.distributed, as frameworks did before fused kernels.

permute -> all-to-all -> grouped GEMM (a loop over experts) -> all-to-all -> unpermute. It is a
second, independent computation to test against, and the baseline a fused kernel has to beat. It
needs the host to know all row counts, so it synchronises once per call, which the fused kernel
never does. Works with any backend that has all_to_all_single, gloo on the CPU among them.

Legend: T tokens, H hidden, K experts per token, P PEs, I intermediate, G fc1 rows, L experts of
this PE, N places of all PEs, S rows this PE sends, R rows this PE receives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megamoe.checks import FLOAT_DTYPES, check_inputs, check_weights
from megamoe.config import MoEConfig
from megamoe.reference import expert_ffn, sum_slots
from megamoe.routes import route_slots
from megamoe.weights import canonical_weights


def place_order(
    cfg: MoEConfig, *, pe: int, topk_ids_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The permutation that groups the rows of ``pe`` by destination PE, local expert, token, slot.

    Returns:
        ``slot_S`` int64, the flat (token * K + k) of every unmasked slot in sending order, and
        ``count_N`` int64 ``[cfg.num_slots]``, rows per place (all places of PE 0, then of
        PE 1, ...).

    Worked example: 4 experts placed on (PE, local) = (1, 0), (0, 0), (1, 1), (0, 1), so the order
    is experts 1, 3, 0, 2. ids [[0, 1], [3, -1], [1, 2]] have the flat slots 0..5; expert 1 is in
    slots 1 and 4, expert 3 in 2, expert 0 in 0, expert 2 in 5.

    >>> cfg = MoEConfig(hidden=64, intermediate=64, num_experts=4, top_k=2, num_pes=2,
    ...                 max_tokens=3, expert_map=[(1, 0), (0, 0), (1, 1), (0, 1)])
    >>> slot_S, count_N = place_order(
    ...     cfg, pe=0, topk_ids_TK=torch.tensor([[0, 1], [3, -1], [1, 2]]))
    >>> slot_S.tolist(), count_N.tolist()
    ([1, 4, 2, 0, 5], [2, 1, 1, 1])
    """
    num_places = cfg.num_slots
    device = topk_ids_TK.device
    sizes = torch.tensor(cfg.experts_per_pe, device=device)
    base_P = sizes.cumsum(0) - sizes
    pe_TK, local_TK = route_slots(cfg, pe=pe, topk_ids_TK=topk_ids_TK)
    pe_S, local_S = pe_TK.flatten(), local_TK.flatten()
    place_S = torch.where(pe_S >= 0, base_P[pe_S.clamp(min=0)] + local_S, num_places)
    order_S = torch.sort(place_S, stable=True).indices
    count_N = torch.bincount(place_S, minlength=num_places + 1)[:num_places]
    return order_S[: int((pe_S >= 0).sum())], count_N


def _all_to_all(
    rows: torch.Tensor, *, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Exchange the first dimension in pieces of the sizes given, one piece per PE."""
    if len(send) == 1:
        return rows
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received


@dataclass(frozen=True)
class Exchange:
    """Who sends which rows to whom in one call; the same for every exchange of the call, in both
    directions. With one PE nothing is sent, and no process group is needed.

    Args:
        slot_S: flat (token * K + k) of the rows this PE sends, in sending order.
        send, receive: rows to and from every PE.
        by_expert_R: order that brings received rows, which come by (source, expert, token), into
            (expert, source, token, k): that of the kernel's pool.
        rows_L: rows of every local expert.
    """

    slot_S: torch.Tensor
    send: list[int]
    receive: list[int]
    by_expert_R: torch.Tensor
    rows_L: list[int]
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        cfg: MoEConfig,
        *,
        pe: int,
        topk_ids_TK: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> Exchange:
        """Tell every owner how many rows each of its experts gets from here. A collective."""
        slot_S, count_N = place_order(cfg, pe=pe, topk_ids_TK=topk_ids_TK)
        num_local, per_pe = cfg.experts_per_pe[pe], list(cfg.experts_per_pe)
        count_PL = _all_to_all(
            count_N, send=per_pe, receive=[num_local] * cfg.num_pes, group=group
        ).view(cfg.num_pes, num_local)
        expert_R = torch.arange(num_local, device=count_N.device).repeat(cfg.num_pes)
        expert_R = expert_R.repeat_interleave(count_PL.flatten())
        return cls(
            slot_S=slot_S,
            send=[int(piece.sum()) for piece in count_N.split(per_pe)],
            receive=count_PL.sum(dim=1).tolist(),
            by_expert_R=torch.sort(expert_R, stable=True).indices,
            rows_L=count_PL.sum(dim=0).tolist(),
            group=group,
        )

    def to_experts(self, rows_S: torch.Tensor) -> torch.Tensor:
        """``[S, ...]`` of this PE's slots to ``[R, ...]`` of its experts. A collective."""
        rows_R = _all_to_all(rows_S, send=self.send, receive=self.receive, group=self.group)
        return rows_R[self.by_expert_R]

    def to_slots(self, rows_R: torch.Tensor) -> torch.Tensor:
        """The way back: ``[R, ...]`` of this PE's experts to ``[S, ...]``. A collective."""
        arrived_R = torch.empty_like(rows_R)
        arrived_R[self.by_expert_R] = rows_R
        return _all_to_all(arrived_R, send=self.receive, receive=self.send, group=self.group)


def moe_classical(
    cfg: MoEConfig,
    *,
    x_TH: torch.Tensor,
    topk_ids_TK: torch.Tensor,
    topk_weights_TK: torch.Tensor,
    w13_LGH: torch.Tensor,
    w2_LHI: torch.Tensor,
    b13_LG: torch.Tensor | None = None,
    b2_LH: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The layer on this PE. A collective: every rank of the group calls it, also with T = 0.

    Args:
        cfg: the layer; ``num_pes`` is the group's size and PE is the rank in the group.
        x_TH: ``[T, H]`` of this PE, any float dtype.
        topk_ids_TK: ``[T, K]`` int32 or int64; < 0 or >= E is masked.
        topk_weights_TK: ``[T, K]`` fp32, bf16 or fp16.
        w13_LGH: ``[L, *cfg.w13_shape]``, this PE's experts (`megamoe.weights.split_experts`).
        w2_LHI: ``[L, *cfg.w2_shape]``.
        b13_LG: ``[L, cfg.w13_rows]``, given exactly if ``cfg.fc1_bias``.
        b2_LH: ``[L, H]``, given exactly if ``cfg.fc2_bias``.
        group: None is the default group.
        dtype: of products, of the rows on the wire and of the result; None is that of x. The
            router weights are converted too, and a token's rows are summed in ascending k.

    Returns:
        ``[T, H]`` in ``dtype``.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """
    pe, group_size = dist.get_rank(group), dist.get_world_size(group)
    if group_size != cfg.num_pes:
        raise ValueError(f"num_pes={cfg.num_pes}: must be the size of the group, {group_size}")
    num_local = cfg.experts_per_pe[pe]
    check_inputs(cfg, x_TH, topk_ids_TK, topk_weights_TK, x_dtypes=FLOAT_DTYPES)
    check_weights(
        cfg,
        w13_LGH,
        w2_LHI,
        num_experts=num_local,
        b13=b13_LG,
        b2=b2_LH,
        dtypes=FLOAT_DTYPES,
        bias_dtypes=FLOAT_DTYPES,
        device=x_TH.device,
    )
    experts = canonical_weights(cfg, w13_LGH, w2_LHI, num_experts=num_local, b13=b13_LG, b2=b2_LH)
    dtype = x_TH.dtype if dtype is None else dtype
    num_tokens = x_TH.shape[0]

    # Permute and dispatch.
    exchange = Exchange.of(cfg, pe=pe, topk_ids_TK=topk_ids_TK, group=group)
    slot_S = exchange.slot_S
    weight_S = topk_weights_TK.flatten()[slot_S].to(dtype)
    rows_RH = exchange.to_experts(x_TH[slot_S // cfg.top_k].to(dtype))
    inputs = rows_RH.split(exchange.rows_L)
    weights = exchange.to_experts(weight_S).split(exchange.rows_L)
    outputs = [
        expert_ffn(
            x_RH=inputs[local],
            w13_GH=experts.w13_EGH[local].to(dtype),
            w2_HI=experts.w2_EHI[local].to(dtype),
            b13_G=None if experts.b13_EG is None else experts.b13_EG[local],
            b2_H=None if experts.b2_EH is None else experts.b2_EH[local],
            weight_R=weights[local],
            activation=cfg.activation,
            alpha=cfg.activation_alpha,
            limit=cfg.activation_limit,
            weight_at=cfg.weight_at,
        )
        for local in range(num_local)
    ]
    # Combine: the same exchange backwards, then every row into its own slot.
    back_SH = exchange.to_slots(torch.cat(outputs) if outputs else rows_RH)
    if cfg.weight_at == "combine":
        back_SH = back_SH * weight_S[:, None]
    slot_NH = back_SH.new_zeros((num_tokens * cfg.top_k, cfg.hidden))
    slot_NH[slot_S] = back_SH
    return sum_slots(slot_NH.view(num_tokens, cfg.top_k, cfg.hidden))
