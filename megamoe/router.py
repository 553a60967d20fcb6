"""Router rules in plain torch: from logits to expert ids and weights.

The fused kernel takes ids and weights as they are; this module is a helper whose rule has a name,
so that "softmax, then top-k" is never mistaken for "top-k, then softmax". Scores are always
computed in fp32, and gradients flow to the logits through the weights (never through the choice).

Legend: T tokens, E experts, K experts per token, H hidden size, N groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

RENORMALISE_EPS = 1e-20  # keeps 0/0 out of the renormalisation when every chosen score underflows


class Routing(NamedTuple):
    """What `route` returns."""

    ids_TK: torch.Tensor  # int64, distinct in every row, best first
    weights_TK: torch.Tensor  # fp32
    scores_TE: torch.Tensor  # fp32, before bias, selection and scaling


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """One definition of routing.

    Args:
        name: shown to users; the class methods give the names of known models.
        top_k: K.
        score: ``"softmax"`` or ``"sigmoid"`` over **all** experts, or ``"softmax_selected"``:
            choose by logit and take the softmax of the K chosen logits only. The last one equals
            ``"softmax"`` with ``renormalise``.
        renormalise: divide the K weights by their sum.
        num_groups: N equal groups of consecutive experts; only the best ``top_groups`` groups of
            a token take part in its top-k. 1 switches this off.
        top_groups: groups that stay.
        group_score: a group's score is its ``"max"`` (DeepSeek-V2) or the sum of its two best,
            ``"top2_sum"`` (DeepSeek-V3).
        scale: multiplies the weights, after renormalisation.

    Raises:
        ValueError: names the argument, its value and what is allowed.
    """

    name: str
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_selected"] = "softmax"
    renormalise: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: must be >= 1")
        if self.score not in ("softmax", "sigmoid", "softmax_selected"):
            raise ValueError(
                f"score={self.score!r}: must be 'softmax', 'sigmoid' or 'softmax_selected'"
            )
        if self.group_score not in ("max", "top2_sum"):
            raise ValueError(f"group_score={self.group_score!r}: must be 'max' or 'top2_sum'")
        if self.num_groups < 1:
            raise ValueError(f"num_groups={self.num_groups}: must be >= 1")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"top_groups={self.top_groups}: must be in 1..num_groups={self.num_groups}"
            )

    @classmethod
    def mixtral(cls, *, top_k: int = 2) -> RouterRule:
        """Softmax over all experts, top-k, renormalised."""
        return cls(name="mixtral", top_k=top_k, renormalise=True)

    @classmethod
    def qwen3(cls, *, top_k: int = 8, renormalise: bool = True) -> RouterRule:
        """Softmax over all experts, top-k; ``renormalise`` is ``norm_topk_prob`` of the model."""
        return cls(name="qwen3", top_k=top_k, renormalise=renormalise)

    @classmethod
    def deepseek_v3(
        cls,
        *,
        top_k: int = 8,
        num_groups: int = 8,
        top_groups: int = 4,
        renormalise: bool = True,
        scale: float = 2.5,
    ) -> RouterRule:
        """Sigmoid scores, selection bias, group-limited top-k, renormalised, scaled (section 2.1.2
        of the DeepSeek-V3 report, arXiv:2412.19437). The bias goes to `route`."""
        return cls(
            name="deepseek_v3",
            top_k=top_k,
            score="sigmoid",
            renormalise=renormalise,
            num_groups=num_groups,
            top_groups=top_groups,
            scale=scale,
        )


def router_logits(*, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """``[T, E]`` logits in fp32. Operands are converted first: a bf16 product picks other experts
    for a few per cent of the tokens."""
    return x_TH.float() @ weight_EH.float().T


def _limit_to_groups(rule: RouterRule, choice_TE: torch.Tensor) -> torch.Tensor:
    """``choice_TE`` with -inf outside the best ``top_groups`` groups of each token."""
    num_tokens, num_experts = choice_TE.shape
    group_size = num_experts // rule.num_groups
    choice_TNS = choice_TE.view(num_tokens, rule.num_groups, group_size)
    if rule.group_score == "max":
        group_TN = choice_TNS.amax(dim=-1)
    else:
        group_TN = choice_TNS.topk(2, dim=-1).values.sum(dim=-1)
    best_TN = torch.sort(group_TN, dim=-1, descending=True, stable=True).indices
    dropped_TN = torch.ones_like(group_TN, dtype=torch.bool)
    dropped_TN.scatter_(1, best_TN[:, : rule.top_groups], False)
    return choice_TNS.masked_fill(dropped_TN[:, :, None], float("-inf")).view_as(choice_TE)


def route(
    *, rule: RouterRule, logits_TE: torch.Tensor, bias_E: torch.Tensor | None = None
) -> Routing:
    """Choose K experts per token and weigh them by ``rule``.

    Args:
        rule: see `RouterRule`.
        logits_TE: ``[T, E]``, any float dtype; converted to fp32 before anything else. T may be 0.
        bias_E: ``[E]``, added to the scores for the choice only (auxiliary-loss-free balancing);
            the weights come from the scores without it.

    Returns:
        `Routing`. Ids are ordered by falling choice score; ties go to the lower id.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    Worked example: logits [2, 1, 0, -1] and K = 2 have the softmax [.644, .237, .087, .032].
    Without renormalisation the weights are [.644, .237]; with it [.731, .269], which is also the
    softmax of [2, 1].

    >>> logits_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    >>> rule = RouterRule.qwen3(top_k=2, renormalise=False)
    >>> [round(w, 3) for w in route(rule=rule, logits_TE=logits_TE).weights_TK[0].tolist()]
    [0.644, 0.237]
    >>> [round(w, 3) for w in route(
    ...     rule=RouterRule.mixtral(top_k=2), logits_TE=logits_TE).weights_TK[0].tolist()]
    [0.731, 0.269]
    """
    if logits_TE.ndim != 2 or not logits_TE.is_floating_point():
        raise ValueError(
            f"logits_TE has shape {tuple(logits_TE.shape)} and dtype {logits_TE.dtype}: "
            "must be a floating point [T, E]"
        )
    num_experts = logits_TE.shape[1]
    if num_experts % rule.num_groups:
        raise ValueError(f"num_groups={rule.num_groups}: must divide the {num_experts} experts")
    group_size = num_experts // rule.num_groups
    if rule.num_groups > 1 and rule.group_score == "top2_sum" and group_size < 2:
        raise ValueError(
            f"num_groups={rule.num_groups}: group_score='top2_sum' needs 2 or more experts in a "
            f"group, {num_experts} experts give {group_size}"
        )
    if rule.top_k > group_size * rule.top_groups:
        raise ValueError(
            f"top_k={rule.top_k}: must be <= {group_size * rule.top_groups}, the experts in "
            f"{rule.top_groups} of {rule.num_groups} groups"
        )
    if bias_E is not None and tuple(bias_E.shape) != (num_experts,):
        raise ValueError(f"bias_E has shape {tuple(bias_E.shape)}: must be ({num_experts},)")

    logits_TE = logits_TE.float()
    if rule.score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
    else:
        scores_TE = logits_TE.softmax(dim=-1)
    choice_TE = logits_TE if rule.score == "softmax_selected" else scores_TE
    choice_TE = choice_TE.detach()
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.detach().float()
    if rule.num_groups > 1:
        choice_TE = _limit_to_groups(rule, choice_TE)

    # A stable sort, unlike topk, promises which of two equal scores wins.
    order_TE = torch.sort(choice_TE, dim=-1, descending=True, stable=True).indices
    ids_TK = order_TE[:, : rule.top_k].contiguous()
    if rule.score == "softmax_selected":
        weights_TK = logits_TE.gather(1, ids_TK).softmax(dim=-1)
    else:
        weights_TK = scores_TE.gather(1, ids_TK)
    if rule.renormalise:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + RENORMALISE_EPS)
    return Routing(ids_TK, weights_TK * rule.scale, scores_TE)
