"""The layer on CPU tensors, forward and backward: for models that are built and tested anywhere.

With one PE `megamoe.reference` computes, with several the unfused path over torch.distributed
(gloo). The backward rounds where the kernels do (`megamoe.reference_backward`); its two passes are
those of the kernels: dgrad exchanges rows with the other PEs, wgrad is local.

Legend: T tokens, H hidden, K top-k, L local experts, S slots this PE sends, R rows of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.autograd import Side
from megamoe.classical import Exchange, moe_classical
from megamoe.config import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.reference_backward import RowGradients, expert_dgrad, expert_wgrad, sum_dx
from megamoe.routes import route_slots
from megamoe.runtime.errors import MegaMoEError, SavedStateError
from megamoe.weights import canonical_weights, stored_gradients

DTYPE = torch.float32  # of the products


@dataclass
class _Rows:
    """One expert's rows after dgrad."""

    dy_RH: torch.Tensor
    x_RH: torch.Tensor
    weight_R: torch.Tensor
    made: RowGradients


@dataclass
class ReferenceSaved:
    """What a call keeps for its backward: copies of its inputs, then the rows of dgrad."""

    side: Side
    rows: list[_Rows] | None = None
    used: bool = False


class ReferenceEngine:
    """Computes for this process's PE (see ``autograd.Engine``; lists have one entry).

    Args:
        cfg: the layer.
        group: ``torch.distributed`` group of the PEs; unused if there is one PE.
    """

    def __init__(self, cfg: MoEConfig, *, group: Any = None):
        self.cfg, self.group = cfg, group

    @property
    def pe(self) -> int:
        """This PE.

        Raises:
            MegaMoEError: there are several PEs and torch.distributed is not initialised.
        """
        if self.cfg.num_pes == 1:
            return 0
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise MegaMoEError(
                f"CPU tensors and num_pes={self.cfg.num_pes}: call init_process_group('gloo') "
                "first, or use a config with num_pes=1"
            )
        return dist.get_rank(self.group)

    # --- forward --------------------------------------------------------------------------------

    def forward(self, side: Side) -> torch.Tensor:
        """``[T, H]`` bf16."""
        pe = self.pe
        return (self._one_pe if self.cfg.num_pes == 1 else self._several_pes)(side, pe)

    def _one_pe(self, side: Side, pe: int) -> torch.Tensor:
        cfg = self.cfg
        local = cfg.local_experts(pe)
        order = [local.index(expert) for expert in range(cfg.num_experts)]
        in_order = order == list(range(len(local)))
        tensors: dict[str, Any] = {
            name: tensor if in_order else tensor[order] for name, tensor in side.weights.items()
        }
        return moe_oracle(
            cfg,
            x=[side.x],
            topk_ids=[side.topk_ids],
            topk_weights=[side.topk_weights],
            residual=None if side.residual is None else [side.residual],
            dtype=DTYPE,
            rounding="kernel",
            **tensors,
        )[0]

    def _several_pes(self, side: Side, pe: int) -> torch.Tensor:
        y = moe_classical(
            self.cfg,
            x_TH=side.x,
            topk_ids_TK=side.topk_ids,
            topk_weights_TK=side.topk_weights,
            w13_LGH=side.weights["w13"],
            w2_LHI=side.weights["w2"],
            b13_LG=side.weights.get("b13"),
            b2_LH=side.weights.get("b2"),
            group=self.group,
            dtype=DTYPE,
        )
        return (y if side.residual is None else y + side.residual.float()).to(torch.bfloat16)

    # --- training -------------------------------------------------------------------------------

    def save(self, sides: Sequence[Side]) -> tuple[list[torch.Tensor], ReferenceSaved]:
        (side,) = sides
        y = self.forward(side)
        x, ids, router = (t.clone() for t in (side.x, side.topk_ids, side.topk_weights))
        return [y], ReferenceSaved(Side(x, ids, router, None, side.weights))

    def dgrad(
        self, dy: Sequence[torch.Tensor], saved: ReferenceSaved
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A collective with several PEs.

        Raises:
            SavedStateError: the call had its backward already.
        """
        if saved.used:
            raise SavedStateError("this forward had its backward already: run the forward again")
        saved.used = True
        cfg, side, pe = self.cfg, saved.side, self.pe
        tokens, top_k = side.topk_ids.shape
        exchange = Exchange.of(cfg, pe=pe, topk_ids_TK=side.topk_ids, group=self.group)
        slot_S = exchange.slot_S

        def at_experts(rows_SX: torch.Tensor) -> list[torch.Tensor]:
            return list(exchange.to_experts(rows_SX).split(exchange.rows_L))

        dy_L = at_experts(dy[0].to(DTYPE)[slot_S // top_k])
        x_L = at_experts(side.x.to(DTYPE)[slot_S // top_k])
        weight_L = at_experts(side.topk_weights.flatten()[slot_S].float())
        num_local = cfg.experts_per_pe[pe]
        experts = canonical_weights(cfg, **_named(side.weights), num_experts=num_local)
        saved.rows = []
        for local in range(num_local):
            operands = {"dy_RH": dy_L[local], "x_RH": x_L[local], "weight_R": weight_L[local]}
            made = expert_dgrad(cfg, **operands, **experts.of(local, DTYPE), rounding="kernel")
            saved.rows.append(_Rows(**operands, made=made))
        none_R = torch.zeros(0)
        dx_RH = torch.cat([none_R.view(0, cfg.hidden), *(r.made.dx_RH.float() for r in saved.rows)])
        dweight_R = torch.cat([none_R, *(r.made.dweight_R for r in saved.rows)])
        dx_NH = torch.zeros(tokens * top_k, cfg.hidden)
        dx_NH[slot_S] = exchange.to_slots(dx_RH)
        dweight_N = torch.zeros(tokens * top_k)
        dweight_N[slot_S] = exchange.to_slots(dweight_R)
        pe_TK, _ = route_slots(cfg, pe=pe, topk_ids_TK=side.topk_ids)
        dx_TKH = dx_NH.view(tokens, top_k, cfg.hidden)
        dx_TH = sum_dx(cfg, dx_TKH, pe_TK=pe_TK, rounding="kernel")
        return [dx_TH.to(dy[0].dtype)], [dweight_N.view(tokens, top_k)]

    def wgrad(
        self,
        saved: Sequence[ReferenceSaved],
        grads: Sequence[dict[str, torch.Tensor]],
        *,
        accumulate: bool,
    ) -> None:
        cfg, (into,) = self.cfg, grads
        totals: list[torch.Tensor] | None = None
        for call in saved:
            if call.rows is None:
                raise SavedStateError("wgrad comes after dgrad of the same call")
            made = [
                expert_wgrad(
                    cfg,
                    dy_RH=r.dy_RH,
                    x_RH=r.x_RH,
                    weight_R=r.weight_R,
                    rows=r.made,
                    rounding="kernel",
                )
                for r in call.rows
            ]
            stored = stored_gradients(cfg, made, like=call.side.x, dtype=torch.float32)
            if totals is None:
                totals = list(stored)
            else:
                totals = [a + b for a, b in zip(totals, stored, strict=True)]
            call.rows = None
        assert totals is not None
        for name, total in zip(("w13", "w2", "b13", "b2"), totals, strict=True):
            if name in into:
                # One addition in fp32 and one rounding, as the kernel does.
                old = into[name].float() if accumulate else 0.0
                into[name].copy_(total + old)

    def free(self, saved: ReferenceSaved) -> None:
        saved.rows = None


def _named(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.detach() for name, tensor in weights.items()}
