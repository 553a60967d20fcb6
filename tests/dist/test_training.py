"""``MegaMoE`` trains over gloo on CPU tensors: every rank's gradients are the oracle's, hooks fire
everywhere, also on ranks without tokens (CASES B1, B2, B9, Z1, Z4)."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from megamoe import MegaMoE, MoEConfig
from megamoe.reference_backward import moe_backward_oracle
from megamoe.verify.inputs import make_inputs, weights_per_pe


def config(num_pes: int, **more: Any) -> MoEConfig:
    sizes: dict[str, Any] = {
        "hidden": 32, "intermediate": 16, "num_experts": 8, "top_k": 2, "max_tokens": 32,
    }  # fmt: skip
    return MoEConfig(**(sizes | {"num_pes": num_pes} | more))


BIASED = {"fc1_bias": True, "fc2_bias": True, "weight_at": "combine", "activation": "gpt_oss"}
CASES: list[tuple[str, dict[str, Any], list[int], float]] = [
    ("ragged", {}, [9, 4, 17, 1], 0.2),
    ("idle ranks, biases", BIASED, [12, 0, 0, 3], 0.0),
    ("no tokens at all", {}, [0, 0, 0, 0], 0.0),
    ("all masked", {}, [4, 4, 4, 4], 1.0),
    ("transposed, summed before", {"w13_transposed": True, "combine": "prereduced"}, [5] * 4, 0.1),
]


def run_case(cfg: MoEConfig, tokens: list[int], masked: float, rank: int) -> None:
    data = make_inputs(cfg, tokens=tokens, masked=masked, seed=3)
    rng = torch.Generator().manual_seed(1)
    dy = [torch.randn(x.shape, generator=rng).bfloat16() for x in data.x]
    mine = {
        name: nn.Parameter(each[rank].clone())
        for name, each in weights_per_pe(cfg, data).items()
        if each is not None
    }
    layer = MegaMoE(cfg, **mine)
    fired: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    x, router = data.x[rank].requires_grad_(), data.topk_weights[rank].requires_grad_()
    layer(x, data.topk_ids[rank], router).backward(dy[rank])
    with torch.no_grad():
        for tensor in data.x + data.topk_weights:
            tensor.requires_grad_(False)
        want = moe_backward_oracle(
            cfg, dy=dy, **data.kwargs, dtype=torch.float32, rounding="kernel"
        )
    assert sorted(fired) == sorted(mine)
    got = {"dx": x.grad, "d_topk_weights": router.grad}
    got |= {f"d{name}": parameter.grad for name, parameter in layer.named_parameters()}
    for name, grad in got.items():
        expected = getattr(want, name)[rank]
        assert grad is not None and grad.shape == expected.shape, name
        torch.testing.assert_close(grad, expected.to(grad.dtype), rtol=2**-7, atol=1e-5, msg=name)
        assert grad.any() or sum(tokens) == 0 or masked == 1.0 or not grad.numel(), name
    if tokens[rank]:
        assert not router.grad[data.topk_ids[rank] < 0].any()


def worker(rank: int, num_pes: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_pes
    )
    for name, more, tokens, masked in CASES:
        try:
            run_case(config(num_pes, **more), tokens[:num_pes], masked, rank)
        except Exception:
            raise AssertionError(f"{name}, PE {rank}:\n{traceback.format_exc()}") from None
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize("num_pes", [2, 4])
def test_gradients_over_gloo(num_pes: int, tmp_path: Path) -> None:
    mp.spawn(worker, args=(num_pes, str(tmp_path)), nprocs=num_pes)
