"""The same inputs give the same bits whatever the schedule and the completion of copies."""

import pytest
from forward_cases import assert_same_bits

from megamoe.verify.cases import CASES, Case, call, layer

SEEDS = 20
RAGGED = next(case for case in CASES if case.name == "ragged")
SMALL = Case(name="small", tokens=(3, 20), top_k=3, num_experts=8, activation="silu")


@pytest.mark.parametrize("schedule", ["round_robin", "random", "starve"])
@pytest.mark.parametrize("completion", ["eager", "late", "random"])
def test_bits_do_not_depend_on_timing(schedule, completion):
    data = SMALL.inputs(integers=False)
    want = call(layer(SMALL, data), data).y
    for seed in range(SEEDS):
        moe = layer(SMALL, data, seed=seed, schedule=schedule, completion=completion)
        assert_same_bits(call(moe, data).y, want)


@pytest.mark.parametrize("schedule", ["random", "starve"])
def test_four_pes_under_random_timing(schedule):
    data = RAGGED.inputs(integers=False)
    want = call(layer(RAGGED, data), data).y
    for seed in range(2):
        moe = layer(RAGGED, data, seed=seed, schedule=schedule, completion="random")
        assert_same_bits(call(moe, data).y, want)
