"""Expert weights in an engine's layout: what the reference reads, and what each PE holds.

The kernel reads every layout in place; nothing here runs before a launch.

Legend of shape suffixes:
    E experts   H hidden   I intermediate   L experts of one PE, replicas counted
    G fc1 rows: the gate rows 0..I-1, then the up rows I..2I-1; only I rows if not gated
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megamoe.checks import FLOAT_DTYPES, check_weights
from megamoe.config import MoEConfig


class CanonicalWeights(NamedTuple):
    """Weights in the one layout the reference computes in; biases are None where there are none."""

    w13_EGH: torch.Tensor
    w2_EHI: torch.Tensor
    b13_EG: torch.Tensor | None
    b2_EH: torch.Tensor | None

    def of(self, expert: int, dtype: torch.dtype) -> dict[str, Any]:
        """One expert's, matrices in ``dtype``: arguments of `reference_backward.expert_dgrad`."""
        return {
            "w13_GH": self.w13_EGH[expert].to(dtype),
            "w2_HI": self.w2_EHI[expert].to(dtype),
            "b13_G": None if self.b13_EG is None else self.b13_EG[expert],
            "b2_H": None if self.b2_EH is None else self.b2_EH[expert],
        }


def _gate_first(cfg: MoEConfig, rows_EG: torch.Tensor) -> torch.Tensor:
    """``[E, G, ...]`` in the order of ``cfg.w13_layout`` to gate rows first."""
    if cfg.w13_layout == "gate_up":
        return rows_EG
    if cfg.w13_layout == "up_gate":
        up_EI, gate_EI = rows_EG.chunk(2, dim=1)
        return torch.cat([gate_EI, up_EI], dim=1)
    return torch.cat([rows_EG[:, 0::2], rows_EG[:, 1::2]], dim=1)


def canonical_weights(
    cfg: MoEConfig,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    num_experts: int,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
) -> CanonicalWeights:
    """Weights stored as ``cfg`` says, as gate-first ``[E, G, H]`` and ``[E, H, I]``.

    Differentiable; views where the order allows. The result is no input of this function: a layout
    undone twice would be finite and wrong, so a `CanonicalWeights` is refused.

    Args:
        cfg: says layout, transposition and which biases there are.
        w13: ``[num_experts, *cfg.w13_shape]``, any float dtype.
        w2: ``[num_experts, *cfg.w2_shape]``.
        num_experts: E, or L of one PE.
        b13: ``[num_experts, cfg.w13_rows]`` in the order of the layout, given if ``cfg.fc1_bias``.
        b2: ``[num_experts, H]``, given if ``cfg.fc2_bias``.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    >>> cfg = MoEConfig(hidden=8, intermediate=8, num_experts=1, top_k=1, num_pes=1, max_tokens=1,
    ...                 w13_layout="interleaved", fc1_bias=True)
    >>> canonical_weights(cfg, torch.zeros(1, 16, 8), torch.zeros(1, 8, 8), num_experts=1,
    ...                   b13=torch.arange(16.0)[None]).b13_EG.int().tolist()
    [[0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]]
    """
    check_weights(
        cfg,
        w13,
        w2,
        num_experts=num_experts,
        b13=b13,
        b2=b2,
        dtypes=FLOAT_DTYPES,
        bias_dtypes=FLOAT_DTYPES,
    )
    return CanonicalWeights(
        w13_EGH=_gate_first(cfg, w13.mT if cfg.w13_transposed else w13),
        w2_EHI=w2.mT if cfg.w2_transposed else w2,
        b13_EG=None if b13 is None else _gate_first(cfg, b13),
        b2_EH=b2,
    )


def stored_rows(cfg: MoEConfig, rows_LG: torch.Tensor) -> torch.Tensor:
    """Gate-first ``[L, G, ...]`` in the order of ``cfg.w13_layout``."""
    if cfg.w13_layout == "gate_up":
        return rows_LG
    gate_LI, up_LI = rows_LG.chunk(2, dim=1)
    if cfg.w13_layout == "up_gate":
        return torch.cat([up_LI, gate_LI], dim=1)
    return torch.stack([gate_LI, up_LI], dim=2).flatten(1, 2)


def stored_gradients(
    cfg: MoEConfig,
    experts: Sequence[Sequence[torch.Tensor]],
    *,
    like: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Canonical gradients of the experts of one PE, as ``cfg`` stores the weights.

    Args:
        experts: L times (dw13 ``[G, H]`` gate rows first, dw2 ``[H, I]``, db13 ``[G]``, db2
            ``[H]``). L may be 0.
        like: gives the device.

    Returns:
        dw13 ``[L, *cfg.w13_shape]``, dw2 ``[L, *cfg.w2_shape]``, db13 ``[L, G]``, db2 ``[L, H]``,
        contiguous, in ``dtype``.
    """
    tails = ((cfg.w13_rows, cfg.hidden), (cfg.hidden, cfg.intermediate), (cfg.w13_rows,))
    dw13, dw2, db13, db2 = (
        torch.stack([expert[i] for expert in experts]).to(dtype)
        if experts
        else torch.empty(0, *tail, dtype=dtype, device=like.device)
        for i, tail in enumerate((*tails, (cfg.hidden,)))
    )
    dw13, db13 = stored_rows(cfg, dw13), stored_rows(cfg, db13)
    return (
        (dw13.mT if cfg.w13_transposed else dw13).contiguous(),
        (dw2.mT if cfg.w2_transposed else dw2).contiguous(),
        db13,
        db2,
    )


def split_per_pe(cfg: MoEConfig, per_expert: torch.Tensor) -> list[torch.Tensor]:
    """Each PE's part of a tensor that has one entry per expert, in the PE's local order.

    Args:
        per_expert: ``[E, ...]`` in global expert order: weights or biases in any layout.

    Returns:
        P tensors ``[L_p, ...]``: views where a PE's experts are consecutive (the default
        placement), copies elsewhere; a replicated expert is in every place it has. L_p may be 0.

    Raises:
        ValueError: the first dimension is not E.
    """
    if per_expert.shape[0] != cfg.num_experts:
        raise ValueError(
            f"per_expert has {per_expert.shape[0]} entries: must be num_experts={cfg.num_experts}"
        )

    def take(pe: int) -> torch.Tensor:
        experts = cfg.local_experts(pe)
        first = experts[0] if experts else 0
        if experts == tuple(range(first, first + len(experts))):
            return per_expert[first : first + len(experts)]
        return per_expert[list(experts)]

    return [take(pe) for pe in range(cfg.num_pes)]


def split_experts(
    cfg: MoEConfig, w13: torch.Tensor, w2: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each PE's own experts, in its local order and in the layout given (`split_per_pe`).

    Returns:
        P tensors ``[L_p, *cfg.w13_shape]`` and P tensors ``[L_p, *cfg.w2_shape]``.

    Raises:
        ValueError: the tensors are not ``[E, *cfg.w13_shape]`` and ``[E, *cfg.w2_shape]``.
    """
    for name, weight, shape in (("w13", w13, cfg.w13_shape), ("w2", w2, cfg.w2_shape)):
        if tuple(weight.shape) != (cfg.num_experts, *shape):
            raise ValueError(
                f"{name} has shape {list(weight.shape)}: must be {[cfg.num_experts, *shape]}"
            )
    return split_per_pe(cfg, w13), split_per_pe(cfg, w2)
