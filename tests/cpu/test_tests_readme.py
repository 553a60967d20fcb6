"""tests/README.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_of_the_table_exists() -> None:
    sources = {path.stem: path.read_text() for path in TESTS.glob("*/test_*.py")}
    defined = set(re.findall(r"def (test_\w+)", "\n".join(sources.values())))
    named = re.findall(r"`(?:(test_\w+)::)?(test_\w+)`", (TESTS / "README.md").read_text())
    assert len(named) > 40
    for file, test in named:
        if file:
            assert re.search(rf"def {test}\b", sources[file]), f"{file}::{test}"
        else:
            assert test in defined or test in sources, test
