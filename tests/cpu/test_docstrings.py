"""The worked examples in the docstrings of the package are run as they stand."""

from __future__ import annotations

import doctest
import importlib

import pytest

EXAMPLES = {  # module -> examples it has, so that a lost example is noticed
    "megamoe.config": 4,
    "megamoe.expert_map": 4,
    "megamoe.router": 4,
    "megamoe.activations": 2,
    "megamoe.weights": 2,
    "megamoe.routes": 3,
    "megamoe.reference": 2,
    "megamoe.reference_backward": 4,
    "megamoe.classical": 3,
    "megamoe.timeline": 1,
    "megamoe.cli.demo": 1,
    "megamoe.cli.plan": 1,
    "megamoe.cli.cache": 1,
    "megamoe.planning": 5,
    "megamoe.runtime.launch": 3,
    "megamoe.verify.cases": 1,
    "megamoe.verify.regions": 2,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert result.attempted == EXAMPLES[name]
