"""Oracle against the expert modules of Hugging Face transformers that are not plain silu: gpt-oss
(interleaved, transposed, biases, clamp), Nemotron-H (relu², not gated), DeepSeek-V4 (clamped
swiglu), with gradients. `test_huggingface` has the plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from megamoe import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.reference_backward import moe_backward_oracle, sum_replicas

HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 40, 24, 6, 3, 23
COMMON: dict[str, Any] = {
    "hidden": HIDDEN,
    "intermediate": INTER,
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "num_pes": 2,
    "max_tokens": TOKENS,
}
SIZES = SimpleNamespace(
    hidden_size=HIDDEN,
    intermediate_size=INTER,
    moe_intermediate_size=INTER,
    moe_latent_size=None,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    swiglu_alpha=1.702,
    swiglu_limit=0.75,  # low, so that many values are clamped
    hidden_act="silu",
    mlp_hidden_act="relu2",
    _experts_implementation="eager",
)


def gpt_oss() -> tuple[Any, MoEConfig, dict[str, str]]:
    cfg = MoEConfig(
        **COMMON,
        activation="gpt_oss",
        activation_limit=0.75,
        w13_layout="interleaved",
        w13_transposed=True,
        w2_transposed=True,
        fc1_bias=True,
        fc2_bias=True,
        weight_at="combine",
    )
    names = {"w13": "gate_up_proj", "b13": "gate_up_proj_bias"}
    return GptOssExperts(SIZES), cfg, {**names, "w2": "down_proj", "b2": "down_proj_bias"}


def nemotron() -> tuple[Any, MoEConfig, dict[str, str]]:
    cfg = MoEConfig(**COMMON, activation="relu2")
    return NemotronHExperts(SIZES), cfg, {"w13": "up_proj", "w2": "down_proj"}


def deepseek() -> tuple[Any, MoEConfig, dict[str, str]]:
    cfg = MoEConfig(**COMMON, activation="swiglu_clamped", activation_limit=0.75)
    return DeepseekV4Experts(SIZES), cfg, {"w13": "gate_up_proj", "w2": "down_proj"}


@pytest.mark.parametrize("build", [gpt_oss, nemotron, deepseek])
def test_oracle_equals_the_module_and_its_gradients(build: Any) -> None:
    module, cfg, names = build()
    module = module.double().eval()
    rng = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=rng) * HIDDEN**-0.5)
    x_TH = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=rng).requires_grad_()
    ids_TK = torch.rand(TOKENS, EXPERTS, generator=rng).argsort(dim=1)[:, :TOP_K]
    weights_TK = torch.rand(TOKENS, TOP_K, generator=rng)
    expected_TH = module(x_TH, ids_TK, weights_TK.double())
    tensors = {name: getattr(module, theirs) for name, theirs in names.items()}
    leaves = [x_TH, *tensors.values()]
    assert len(list(module.parameters())) == len(tensors)
    seed_TH = torch.linspace(-1, 1, expected_TH.numel(), dtype=torch.float64).view_as(expected_TH)
    expected = torch.autograd.grad((expected_TH * seed_TH).sum(), leaves)
    ours_TH = torch.cat(
        moe_oracle(
            cfg,
            x=list(x_TH.split([9, TOKENS - 9])),
            topk_ids=list(ids_TK.split([9, TOKENS - 9])),
            topk_weights=list(weights_TK.split([9, TOKENS - 9])),
            **tensors,
        )
    )
    torch.testing.assert_close(ours_TH, expected_TH, rtol=1e-12, atol=1e-13)
    got = torch.autograd.grad((ours_TH * seed_TH).sum(), leaves)
    for ours_grad, their_grad in zip(got, expected, strict=True):
        torch.testing.assert_close(ours_grad, their_grad, rtol=1e-10, atol=1e-12)
        assert their_grad.any()
    split = {"x": x_TH.detach(), "topk_ids": ids_TK, "topk_weights": weights_TK, "dy": seed_TH}
    grads = moe_backward_oracle(
        cfg,
        **{name: list(tensor.split([9, TOKENS - 9])) for name, tensor in split.items()},
        **{name: tensor.detach() for name, tensor in tensors.items()},
    )
    closed = {"x": torch.cat(grads.dx)}
    for name in tensors:
        closed[name] = sum_replicas(cfg, getattr(grads, f"d{name}"))
    for ours_grad, their_grad in zip(closed.values(), expected, strict=True):
        torch.testing.assert_close(ours_grad, their_grad, rtol=1e-10, atol=1e-12)
