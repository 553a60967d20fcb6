"""Router rules: hand-computed values, gradients, and Hugging Face's own routers (CASES A7, A8)."""

from __future__ import annotations

import pytest
import torch

from megamoe.router import RouterRule, route, router_logits

LOGITS_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def test_softmax_then_topk_with_and_without_renormalisation() -> None:
    """A7, the numbers of the report."""
    plain = route(rule=RouterRule.qwen3(top_k=2, renormalise=False), logits_TE=LOGITS_TE)
    again = route(rule=RouterRule.qwen3(top_k=2), logits_TE=LOGITS_TE)
    chosen = route(
        rule=RouterRule(name="topk then softmax", top_k=2, score="softmax_selected"),
        logits_TE=LOGITS_TE,
    )
    for routing in (plain, again, chosen):
        assert routing.ids_TK.tolist() == [[0, 1]]
    torch.testing.assert_close(plain.weights_TK, torch.tensor([[0.644, 0.237]]), atol=5e-4, rtol=0)
    torch.testing.assert_close(again.weights_TK, torch.tensor([[0.731, 0.269]]), atol=5e-4, rtol=0)
    torch.testing.assert_close(chosen.weights_TK, again.weights_TK)


def test_gradient_reaches_all_logits_or_only_the_selected_ones() -> None:
    """A7: the two definitions differ in gradient exactly as their formulas do."""

    def gradient(rule: RouterRule) -> torch.Tensor:
        logits_TE = LOGITS_TE.clone().requires_grad_()
        weights_TK = route(rule=rule, logits_TE=logits_TE).weights_TK
        (weights_TK * torch.tensor([[1.0, 3.0]])).sum().backward()
        assert logits_TE.grad is not None
        return logits_TE.grad[0]

    p = LOGITS_TE.softmax(dim=-1)[0]
    c = torch.tensor([1.0, 3.0, 0.0, 0.0])
    torch.testing.assert_close(
        gradient(RouterRule.qwen3(top_k=2, renormalise=False)), p * (c - (p * c).sum())
    )
    q = LOGITS_TE[0, :2].softmax(dim=-1)
    selected = torch.cat([q * (c[:2] - (q * c[:2]).sum()), torch.zeros(2)])
    rule = RouterRule(name="topk then softmax", top_k=2, score="softmax_selected")
    torch.testing.assert_close(gradient(rule), selected)
    torch.testing.assert_close(
        gradient(RouterRule.qwen3(top_k=2, renormalise=True)), selected, atol=1e-7, rtol=1e-5
    )


def test_sigmoid_bias_groups_and_scale_by_hand() -> None:
    """Six experts in three groups with the scores [.5, .25 | .125, .75 | .5, .3]. The bias lifts
    expert 1 by .6, so the groups score .5 + .85, .125 + .75 and .5 + .3, and the last one is out.
    By score + bias the best two are 1 (.85) and 3 (.75); their weights are the plain scores .25
    and .75, which already sum to 1, times 2.5."""
    scores_E = torch.tensor([0.5, 0.25, 0.125, 0.75, 0.5, 0.3])
    routing = route(
        rule=RouterRule.deepseek_v3(top_k=2, num_groups=3, top_groups=2),
        logits_TE=torch.logit(scores_E)[None],
        bias_E=torch.tensor([0.0, 0.6, 0.0, 0.0, 0.0, 0.0]),
    )
    assert routing.ids_TK.tolist() == [[1, 3]]
    torch.testing.assert_close(routing.weights_TK, torch.tensor([[0.625, 1.875]]))
    torch.testing.assert_close(routing.scores_TE[0], scores_E)


def test_group_score_max_differs_from_top2_sum() -> None:
    logits_TE = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    kinds = {"max": [[0]], "top2_sum": [[2]]}
    for kind, expected in kinds.items():
        rule = RouterRule(name=kind, top_k=1, score="sigmoid", num_groups=2, group_score=kind)  # type: ignore[arg-type]
        assert route(rule=rule, logits_TE=logits_TE).ids_TK.tolist() == expected


def test_negative_choice_scores_stay_inside_the_chosen_groups() -> None:
    """A bias below -1 makes all choice scores negative: dropped groups must not win as zeros."""
    routing = route(
        rule=RouterRule.deepseek_v3(top_k=2, num_groups=2, top_groups=1),
        logits_TE=torch.tensor([[0.0, 1.0, 2.0, 3.0]]),
        bias_E=torch.full((4,), -5.0),
    )
    assert sorted(routing.ids_TK[0].tolist()) == [2, 3]


def test_equal_scores_go_to_the_lower_id() -> None:
    routing = route(rule=RouterRule.mixtral(top_k=3), logits_TE=torch.zeros(2, 512))
    assert routing.ids_TK.tolist() == [[0, 1, 2]] * 2


def test_low_precision_logits_are_scored_in_fp32() -> None:
    logits_TE = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    low = route(rule=RouterRule.mixtral(top_k=4), logits_TE=logits_TE)
    full = route(rule=RouterRule.mixtral(top_k=4), logits_TE=logits_TE.float())
    assert low.weights_TK.dtype == low.scores_TE.dtype == torch.float32
    assert torch.equal(low.ids_TK, full.ids_TK) and torch.equal(low.weights_TK, full.weights_TK)


def test_bf16_router_products_would_pick_other_experts() -> None:
    """A8: router_logits keeps the fp32 choice where a bf16 product does not, at every T."""
    rng = torch.Generator().manual_seed(0)
    x_TH = torch.randn(1024, 128, generator=rng).bfloat16()
    weight_EH = torch.randn(896, 128, generator=rng).bfloat16()
    rule = RouterRule.qwen3(top_k=16)

    def sets(logits_TE: torch.Tensor) -> torch.Tensor:
        return route(rule=rule, logits_TE=logits_TE).ids_TK.sort(dim=1).values

    exact_TK = sets((x_TH.double() @ weight_EH.double().T).float())
    fp32_TK = sets(router_logits(x_TH=x_TH, weight_EH=weight_EH))
    bf16_TK = sets(x_TH @ weight_EH.T)
    assert (bf16_TK != exact_TK).any(dim=1).float().mean() > 0.01
    assert (fp32_TK != exact_TK).any(dim=1).float().mean() < 0.001
    alone_TK = torch.cat([sets(router_logits(x_TH=x[None], weight_EH=weight_EH)) for x in x_TH[:9]])
    assert torch.equal(alone_TK, fp32_TK[:9])


def test_no_tokens() -> None:
    routing = route(rule=RouterRule.deepseek_v3(), logits_TE=torch.zeros(0, 64))
    assert routing.ids_TK.shape == routing.weights_TK.shape == (0, 8)


@pytest.mark.parametrize(
    ("rule", "logits_TE", "match"),
    [
        (RouterRule.mixtral(top_k=4), torch.zeros(1, 2), "top_k=4: must be <= 2"),
        (RouterRule.deepseek_v3(top_k=5, num_groups=4, top_groups=2), torch.zeros(1, 8), "<= 4"),
        (RouterRule.deepseek_v3(num_groups=3, top_groups=2), torch.zeros(1, 8), "must divide"),
        (RouterRule.deepseek_v3(top_k=1), torch.zeros(1, 8), "needs 2 or more experts in a group"),
        (RouterRule.mixtral(), torch.zeros(8), r"logits_TE has shape \(8,\)"),
        (RouterRule.mixtral(), torch.zeros(1, 8, dtype=torch.int32), "dtype torch.int32"),
    ],
)  # fmt: skip
def test_refused_logits(rule: RouterRule, logits_TE: torch.Tensor, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        route(rule=rule, logits_TE=logits_TE)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"score": "relu"}, "score='relu'"),
        ({"group_score": "mean"}, "group_score='mean'"),
        ({"num_groups": 0}, "num_groups=0"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups=3: must be in 1..num_groups=2"),
    ],
)
def test_refused_rules(change: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RouterRule(**{"name": "bad", "top_k": 1, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bias_E has shape \(3,\): must be \(4,\)"):
        route(rule=RouterRule.mixtral(), logits_TE=LOGITS_TE, bias_E=torch.zeros(3))
