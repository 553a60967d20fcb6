"""The shipped forward kernel under the race detector: no race, no read of never-written bytes."""

from __future__ import annotations

import time

import pytest
from forward_cases import assert_same_bits

from megamoe.verify.cases import CASES, Case, call, expected, layer
from megamoe.verify.runs import Run, execute

BY_NAME = {case.name: case for case in CASES}
WAYS = [("round_robin", "eager", 0), ("random", "late", 1), ("starve", "random", 2)]
QUICK = ("one_pe", "ragged", "k8")


def judge(case, schedule, completion, seed):
    """Two calls, so that banks and epochs turn over; the second writes x in place."""
    data = case.inputs(seed=seed)
    want = expected(case, data)
    moe = layer(case, data, schedule=schedule, completion=completion, seed=seed, detect=True)
    for in_place in (False, True):
        result = call(moe, data, in_place=in_place)
        assert [str(f) for f in result.report.findings] == []
        assert_same_bits(result.y, want)


@pytest.mark.parametrize("name", QUICK)
def test_clean(name):
    judge(BY_NAME[name], *WAYS[QUICK.index(name)])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_clean(case, way):
    judge(case, *way)


def test_a_pe_that_gives_up_counting_lets_nobody_read_its_records():
    """Its peer got counts without records, and fetched rows by whatever lay there."""
    case = Case(name="gives_up", tokens=(150, 0), route="one", top_k=3, max_tokens=160, grid=3,
                fails="hasty", timeout_s=1e-6)  # fmt: skip
    outcome = execute(Run(case=case, seed=3, schedule="starve", completion="late"))
    assert [d.text for d in outcome.defects] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one_pe", "ragged"])
def test_cost_is_at_most_fourfold(name):
    case = BY_NAME[name]
    data = case.inputs()
    seconds = {}
    for detect in (False, True):
        moe = layer(case, data, detect=detect)
        call(moe, data)
        times = []
        for _ in range(3):
            start = time.process_time()
            call(moe, data)
            times.append(time.process_time() - start)
        seconds[detect] = min(times)
    ratio = seconds[True] / seconds[False]
    print(f"{name}: {seconds[False]:.2f} s plain, {seconds[True]:.2f} s detecting: {ratio:.2f}x")
    assert ratio <= 4
