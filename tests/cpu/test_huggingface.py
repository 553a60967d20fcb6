"""Routers and oracle against the MoE layers of Hugging Face transformers, a second oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from megamoe import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.router import RouterRule, route, router_logits

HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 64, 128, 8, 3, 37


def block(model: str) -> tuple[Any, RouterRule]:
    """A block with seeded fp64 weights and the rule that its router follows."""
    if model == "mixtral":
        layer = MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=HIDDEN,
                intermediate_size=INTER,
                num_local_experts=EXPERTS,
                num_experts_per_tok=TOP_K,
            )
        )
        rule = RouterRule.mixtral(top_k=TOP_K)
    else:
        renormalise = model == "qwen3, renormalised"
        layer = Qwen3MoeSparseMoeBlock(
            Qwen3MoeConfig(
                hidden_size=HIDDEN,
                moe_intermediate_size=INTER,
                num_experts=EXPERTS,
                num_experts_per_tok=TOP_K,
                norm_topk_prob=renormalise,
            )
        )
        rule = RouterRule.qwen3(top_k=TOP_K, renormalise=renormalise)
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng) * weight.shape[-1] ** -0.5)
    return layer.double().eval(), rule


def tokens(count: int) -> torch.Tensor:
    return torch.randn(
        count, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )


MODELS = ["mixtral", "qwen3", "qwen3, renormalised"]


@pytest.mark.parametrize("model", MODELS)
def test_router(model: str) -> None:
    layer, rule = block(model)
    x_TH = tokens(TOKENS).float()
    logits_TE = router_logits(x_TH=x_TH, weight_EH=layer.gate.weight)
    routing = route(rule=rule, logits_TE=logits_TE)
    hf_logits_TE, hf_weights_TK, hf_ids_TK = layer.gate.float()(x_TH)
    torch.testing.assert_close(logits_TE, hf_logits_TE)
    assert torch.equal(routing.ids_TK, hf_ids_TK)
    torch.testing.assert_close(routing.weights_TK, hf_weights_TK)


def test_router_of_deepseek_v3() -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        n_routed_experts=32,
        num_experts_per_tok=4,
        n_group=8,
        topk_group=3,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    gate = DeepseekV3TopkRouter(config)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(gate.weight.shape, generator=rng) * HIDDEN**-0.5)
        gate.e_score_correction_bias.copy_(torch.randn(32, generator=rng) * 0.2)
    x_TH = tokens(200).float()
    _, hf_weights_TK, hf_ids_TK = gate(x_TH)
    routing = route(
        rule=RouterRule.deepseek_v3(top_k=4, num_groups=8, top_groups=3),
        logits_TE=router_logits(x_TH=x_TH, weight_EH=gate.weight),
        bias_E=gate.e_score_correction_bias,
    )
    # Hugging Face leaves the order inside the top-k open: compare by expert.
    order_TK, hf_order_TK = routing.ids_TK.argsort(dim=1), hf_ids_TK.argsort(dim=1)
    assert torch.equal(routing.ids_TK.gather(1, order_TK), hf_ids_TK.gather(1, hf_order_TK))
    torch.testing.assert_close(
        routing.weights_TK.gather(1, order_TK), hf_weights_TK.gather(1, hf_order_TK)
    )
    unbiased = route(
        rule=RouterRule.deepseek_v3(top_k=4, num_groups=8, top_groups=3),
        logits_TE=router_logits(x_TH=x_TH, weight_EH=gate.weight),
    )
    assert not torch.equal(unbiased.ids_TK.sort(1).values, hf_ids_TK.sort(1).values)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weight_at", ["act", "combine"])
def test_oracle_equals_the_block_and_its_gradients(model: str, weight_at: Any) -> None:
    layer, _ = block(model)
    cfg = MoEConfig(
        hidden=HIDDEN,
        intermediate=INTER,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_pes=2,
        max_tokens=TOKENS,
        weight_at=weight_at,
    )
    x_TH = tokens(TOKENS).requires_grad_()
    y_TH = layer(x_TH[None])[0]
    seed_TH = torch.linspace(-1, 1, y_TH.numel(), dtype=torch.float64).view_as(y_TH)
    w13_EGH, w2_EHI = layer.experts.gate_up_proj, layer.experts.down_proj
    expected = torch.autograd.grad((y_TH * seed_TH).sum(), [x_TH, w13_EGH, w2_EHI])

    _, weights_TK, ids_TK = layer.gate(x_TH)
    # Both routers take the softmax in fp32, so the weights hold fp32 values in any dtype.
    weights_TK = weights_TK.float()
    first = 5
    pieces = [(0, first), (first, TOKENS)]
    ours = moe_oracle(
        cfg,
        x=[x_TH[a:b] for a, b in pieces],
        topk_ids=[ids_TK[a:b] for a, b in pieces],
        topk_weights=[weights_TK[a:b] for a, b in pieces],
        w13=w13_EGH,
        w2=w2_EHI,
    )
    assert [len(y) for y in ours] == [first, TOKENS - first]
    ours_TH = torch.cat(ours)
    torch.testing.assert_close(ours_TH, y_TH, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad((ours_TH * seed_TH).sum(), [x_TH, w13_EGH, w2_EHI])
    for ours_grad, hf_grad in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_grad, hf_grad, rtol=1e-6, atol=1e-8)
