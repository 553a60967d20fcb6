"""The race detector judges litmus programs as the PTX memory model does, under every schedule."""

import litmus_async
import litmus_cta
import litmus_flags
import pytest
from litmus_harness import check

ALL = [*litmus_flags.TABLE, *litmus_cta.TABLE, *litmus_async.TABLE]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_litmus(case):
    check(case)


def test_names_are_unique():
    assert len({case.name for case in ALL}) == len(ALL)
    assert len(ALL) >= 100
