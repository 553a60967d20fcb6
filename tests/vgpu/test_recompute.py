"""``recompute=True``: dgrad computes gate and up again, in the same launch, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from backward_runs import (
    PARTS,
    STEPS,
    WAYS,
    Step,
    layer_of,
    output_gradients,
    train_step,
    with_cfg,
)
from test_backward import small
from test_backward_races import judge

from megamoe.cute_kernels.saved import dgrad_block, saved_block
from megamoe.runtime.errors import MegaMoETimeout
from megamoe.verify.cases import Case
from megamoe.verify.inputs import make_inputs
from megamoe.verify.runs import Run, execute

BLOCKS = replace(
    with_cfg(small(), intermediate=264, max_tokens=160), name="blocks", tokens=(150, 60)
)
"""Several blocks, three tiles that recompute in each, two of dh."""


def gradients(step: Step, **options: object) -> Iterator[tuple[str, int, torch.Tensor]]:
    data = step.inputs(2)
    got = train_step(layer_of(step.config(2), data, **options), data, output_gradients(step, data))
    for name in PARTS:
        for pe, values in enumerate(getattr(got, name) or []):
            yield name, pe, values


def assert_the_same_bits(step: Step, **options: object) -> None:
    kept, again = gradients(step), gradients(step, recompute=True, **options)
    for (name, pe, one), (_, _, other) in zip(kept, again, strict=True):
        assert torch.equal(one, other), (name, pe)


@pytest.mark.parametrize("step", [STEPS[0], STEPS[2]], ids=lambda step: step.name)
def test_the_same_bits(step: Step) -> None:
    assert_the_same_bits(step)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(len(STEPS)), ids=[step.name for step in STEPS])
def test_the_same_bits_for_every_layer(seed: int) -> None:
    """Ways of timing take turns."""
    schedule, completion = WAYS[seed % len(WAYS)]
    grid = 1 + seed % 4
    assert_the_same_bits(
        STEPS[seed], schedule=schedule, completion=completion, seed=seed, grid=grid
    )


def test_several_blocks_are_free_of_races() -> None:
    judge(BLOCKS, recompute=True, grid=3, schedule="random", completion="late")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@pytest.mark.parametrize(
    "step", [BLOCKS, *(s for s in STEPS if s.integers)], ids=lambda step: step.name
)
def test_steps_are_free_of_races(step: Step, way: tuple[str, str]) -> None:
    schedule, completion = way
    judge(
        step, recompute=True, grid=3, schedule=schedule, completion=completion,
        seed=WAYS.index(way),
    )  # fmt: skip


def test_a_saved_state_has_the_rows_of_x_only() -> None:
    step = small()
    data = make_inputs(step.config(2), tokens=[8, 5], integers=True)
    sizes = {}
    for recompute in (False, True):
        moe = layer_of(step.config(2), data, recompute=recompute)
        p = moe.problem
        saved = moe.forward(
            x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights,
            save_for_backward=True,
        ).saved  # fmt: skip
        first = saved[0].nbytes
        moe.backward_dgrad(output_gradients(step, data), saved)
        sizes[recompute] = (first, saved[0].nbytes)
        assert sizes[recompute] == (
            saved_block(p).nbytes, saved_block(p).nbytes + dgrad_block(p).nbytes,
        )  # fmt: skip
    assert sizes[False][0] - sizes[True][0] == 4 * p.intermediate * p.pool_rows
    assert sizes[False][1] == sizes[True][1]


def test_a_peer_that_skips_its_dgrad_is_found_by_name() -> None:
    """Gate and up are there, dy is not: nobody waits for ever, and the rest of the launch ends."""
    step = small()
    data = make_inputs(step.config(2), tokens=[5, 6], integers=True)
    moe = layer_of(step.config(2), data, recompute=True, timeout_s=0.001)
    saved = moe.forward(
        x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights, save_for_backward=True
    ).saved
    session = moe.group.sessions[0]
    session.training.dgrad(
        saved[0],
        dy_TH=torch.ones_like(data.x[0]),
        dx_TH=torch.empty_like(data.x[0]),
        d_topk_TK=torch.empty(5, 2),
    )
    moe.world.run()
    with pytest.raises(MegaMoETimeout, match=r"PE 0, CTA \d, epoch 2: .*peer 1"):
        session.raise_on_status()


@pytest.mark.parametrize("seed", [0, 3])
def test_an_epoch_given_up_reads_nothing_that_nobody_wrote(seed: int) -> None:
    """Gate and up never came: math must not find unwritten bytes in the stages for them."""
    case = Case(
        name="given_up", tokens=(40, 0), route="one", top_k=3, max_tokens=160, grid=3,
        mode="dgrad", recompute=True, fails="hasty", timeout_s=5e-5,
    )  # fmt: skip
    outcome = execute(Run(case=case, seed=seed, schedule="starve", completion="late"))
    assert [defect.text for defect in outcome.defects] == []
    # What a copy brought unwritten is no defect in such an epoch; here nothing was to be brought.
    read = [f.access_2.opcode for f in outcome.report.findings if f.kind == "poison_read"]
    assert not any(opcode.startswith("ldmatrix") for opcode in read)
