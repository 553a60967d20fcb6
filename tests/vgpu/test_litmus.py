"""The race detector judges litmus programs as the PTX memory model does, under every schedule."""

from pathlib import Path

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


def test_docs_list_every_program():
    text = (Path(__file__).parents[2] / "docs" / "verification.md").read_text()
    table = text[text.index("| about | clean | reported |") :]
    for case in ALL:
        end = "" if case.verdict in ("clean", "race") else f" ({case.verdict})"
        assert f"`{case.name}`{end}" in table, case.name
