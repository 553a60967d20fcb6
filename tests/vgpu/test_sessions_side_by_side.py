"""Session rules: overlapping sessions, layers that share a workspace, calls of changing shape."""

import pytest
import torch
from feature_runs import check
from forward_cases import assert_same_bits
from strategies import Call

from megamoe import MoEConfig
from megamoe.cute_kernels.roles import roles_of
from megamoe.reference import moe_oracle
from megamoe.runtime.devices.vgpu import VgpuDevice
from megamoe.runtime.local_group import LocalGroup
from megamoe.testing import VgpuMoE
from megamoe.verify.inputs import Inputs, weights_per_pe


def call_of(tokens: tuple[int, ...], *, seed: int, masked: float = 0.0, **features) -> Call:
    sizes = {"hidden": 256, "intermediate": 128, "num_experts": 8, "top_k": 2, "max_tokens": 64}
    cfg = MoEConfig(**(sizes | {"num_pes": len(tokens), "activation": "relu"} | features))
    return Call(
        cfg=cfg,
        tokens=tokens,
        integers=True,
        seed=seed,
        masked=masked,
        repeated=0.0,
        residual=False,
        id_dtype=torch.int32,
        weight_dtype=torch.float32,
        bias_dtype=torch.bfloat16,
    )


def second_group(moe: VgpuMoE, *, timeout_s: float = 300.0) -> LocalGroup:
    """Another session on the PEs of ``moe``, with a workspace of its own."""
    pes = range(moe.cfg.num_pes)
    return LocalGroup(
        problem=moe.problem,
        image=moe.image,
        devices=[VgpuDevice(moe.world, pe, roles_of(moe.image.config)) for pe in pes],
        run=moe.world.run,
        replicas=moe.cfg.replicas,
        grid=2,
        timeout_s=timeout_s,
    )


def launch(group: LocalGroup, weights, data: Inputs) -> list[torch.Tensor]:
    """Enqueue one call on every PE; the next run of the world fills the outputs."""
    y = [torch.full_like(x_TH, float("nan")) for x_TH in data.x]
    for pe, session in enumerate(group.sessions):
        session.launch(
            weights[pe],
            x_TH=data.x[pe],
            topk_ids_TK=data.topk_ids[pe],
            topk_weights_TK=data.topk_weights[pe],
            y_TH=y[pe],
        )
    return y


@pytest.mark.parametrize("schedule", ["round_robin", "random"])
@pytest.mark.parametrize("combine", ["direct", "prereduced"])
def test_two_sessions_overlap(schedule, combine):
    """Two launches a PE at once, in the same order on every PE, each with its own workspace."""
    first = call_of((33, 20), seed=1, combine=combine)
    second = call_of((7, 64), seed=2, combine=combine)
    moe = VgpuMoE(first.cfg, **weights_per_pe(first.cfg, first.inputs()), schedule=schedule, seed=3)
    other = second_group(moe)
    bound = other.bind_weights(**weights_per_pe(second.cfg, second.inputs()))
    inputs = [first.inputs(), second.inputs()]
    outputs = [launch(moe.group, moe.weights, inputs[0]), launch(other, bound, inputs[1])]
    moe.world.run()
    check(first, outputs[0])
    check(second, outputs[1])


def test_layers_share_one_workspace():
    """Two layers' weights bound to one session, called in turn with changing T."""
    calls = [call_of(tokens, seed=seed) for seed, tokens in enumerate([(30, 5), (0, 64), (9, 9)])]
    moe = VgpuMoE(calls[0].cfg, **weights_per_pe(calls[0].cfg, calls[0].inputs()))
    layers = [call.inputs() for call in calls[:2]]
    bound = [moe.weights, moe.group.bind_weights(**weights_per_pe(moe.cfg, layers[1]))]
    for turn in range(4):
        call = calls[turn % 3]
        data, layer = call.inputs(), layers[turn % 2]
        y = [torch.full_like(x_TH, float("nan")) for x_TH in data.x]
        moe.group.forward(
            bound[turn % 2],
            x=data.x,
            topk_ids=data.topk_ids,
            topk_weights=data.topk_weights,
            y=y,
        )
        inputs = data.kwargs | {"w13": layer.w13, "w2": layer.w2}
        assert_same_bits(y, moe_oracle(moe.cfg, **inputs, rounding="kernel"))


@pytest.mark.parametrize("features", [{}, {"combine": "prereduced"}, {"ring_rows": 256}])
def test_many_calls_leak_nothing(features):
    """CASES X2 on one session: T and masks change at every call; each result is checked."""
    base = call_of((40, 40), seed=0, **features)
    weights = base.inputs()
    moe = VgpuMoE(base.cfg, **weights_per_pe(base.cfg, weights))
    for seed, (tokens, masked) in enumerate(
        [
            ((64, 1), 0.0),
            ((0, 0), 0.0),
            ((13, 64), 0.5),
            ((1, 0), 0.0),
            ((33, 47), 1.0),
            ((64, 64), 0.1),
        ]
    ):
        data = call_of(tokens, seed=seed, masked=masked, **features).inputs()
        got = moe.forward(x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights)
        inputs = data.kwargs | {"w13": weights.w13, "w2": weights.w2}
        assert_same_bits(got.y, moe_oracle(base.cfg, **inputs, rounding="kernel"))
