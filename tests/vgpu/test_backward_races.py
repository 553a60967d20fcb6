"""A training step under the race detector, and its bits under any timing (issue: 20 seeds)."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from backward_runs import (
    STEPS,
    WAYS,
    Step,
    assert_same,
    layer_of,
    output_gradients,
    train_step,
    with_cfg,
)
from test_backward import model, small

from megamoe.reference_backward import Gradients


def judge(step: Step, **options: object) -> None:
    """Two steps, so that blocks of memory are used again, one launch of dgrad a PE and step; no
    race, no read of unwritten bytes, and the model's gradients. ``options`` as for ``VgpuMoE``."""
    data = step.inputs(2)
    dy = output_gradients(step, data)
    want = model(step, data, dy)
    moe = layer_of(step.config(2), data, detect=True, **options)
    given = {"x": data.x, "topk_ids": data.topk_ids, "topk_weights": data.topk_weights}
    for _ in range(2):
        done = moe.forward(**given, save_for_backward=True)
        back = moe.backward_dgrad(dy, done.saved)
        made = moe.backward_wgrad(done.saved)
        assert [str(f) for each in (done, back, made) for f in each.report.findings] == []
        assert back.launches == [1, 1]
        assert_same(back.dx, want.dx)
        assert_same(back.d_topk_weights, want.d_topk_weights)
        assert_same([each["w13"] for each in made.grads], want.dw13)
        assert_same([each["w2"] for each in made.grads], want.dw2)


def test_a_step_is_free_of_races() -> None:
    judge(small(), schedule="random", completion="random")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize("step", [s for s in STEPS if s.integers], ids=lambda step: step.name)
def test_steps_are_free_of_races(step: Step, way: tuple[str, str]) -> None:
    schedule, completion = way
    for seed in range(2):
        judge(step, schedule=schedule, completion=completion, seed=seed)


@pytest.mark.parametrize("schedule", ["random", "starve"])
def test_bits_do_not_depend_on_timing(schedule: str) -> None:
    """Not integers: another order of a sum would show."""
    step = STEPS[0]
    data = step.inputs(2)
    dy = output_gradients(step, data)
    want = train_step(layer_of(step.config(2), data), data, dy)
    for seed in range(10):
        moe = layer_of(
            step.config(2), data, schedule=schedule,
            completion=("eager", "late", "random")[seed % 3], seed=seed, grid=1 + seed % 3,
        )  # fmt: skip
        got = train_step(moe, data, dy)
        for name in ("dx", "d_topk_weights", "dw13", "dw2"):
            for a, b in zip(getattr(got, name), getattr(want, name), strict=True):
                assert torch.equal(a, b), (name, seed)


SEVERAL_BLOCKS = replace(
    with_cfg(STEPS[0], num_experts=3, intermediate=264, max_tokens=160), tokens=(150, 60)
)
"""Every expert has two blocks, so wgrad sums over blocks; dgrad has several tiles a block."""


@functools.cache
def gradients_of_several_blocks() -> Gradients:
    data = SEVERAL_BLOCKS.inputs(2)
    dy = output_gradients(SEVERAL_BLOCKS, data)
    return train_step(layer_of(SEVERAL_BLOCKS.config(2), data), data, dy)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_twenty_timings_give_the_same_bits(seed: int) -> None:
    """dgrad and wgrad, not integers, under every pair of policies; some with the detector."""
    want = gradients_of_several_blocks()
    data = SEVERAL_BLOCKS.inputs(2)
    moe = layer_of(
        SEVERAL_BLOCKS.config(2), data, seed=seed, grid=1 + seed % 4, detect=seed % 4 == 1,
        schedule=("round_robin", "random", "starve")[seed % 3],
        completion=("eager", "late", "random")[seed // 3 % 3],
    )  # fmt: skip
    done = moe.forward(
        x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights, save_for_backward=True
    )
    assert done.saved is not None
    back = moe.backward_dgrad(output_gradients(SEVERAL_BLOCKS, data), done.saved)
    made = moe.backward_wgrad(done.saved)
    assert [str(f) for each in (done, back, made) for f in each.report.findings] == []
    for got, kept in (
        (back.dx, want.dx),
        (back.d_topk_weights, want.d_topk_weights),
        ([each["w13"] for each in made.grads], want.dw13),
        ([each["w2"] for each in made.grads], want.dw2),
    ):
        assert all(torch.equal(a, b) for a, b in zip(got, kept, strict=True))
