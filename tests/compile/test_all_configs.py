"""``megamoe compile --all-configs`` with the real compiler, on one small layer."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from megamoe.cli import all_configs, main
from megamoe.runtime.cache import FOLDER_VARIABLE, default_cache


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    default_cache.cache_clear()
    yield tmp_path
    default_cache.cache_clear()


def test_one_small_layer(fresh_cache, monkeypatch):
    """Compiled in a process of its own, kept in the cache, found there by a second run."""
    monkeypatch.setattr(all_configs, "LAYERS", {"small": ((512, 256, 8, 2), {})})
    file = fresh_cache / "all.json"
    arguments = ["compile", "--all-configs", "--form", "64 rows", "--form", "128 rows",
                 "--workers", "1", "--json", str(file)]  # fmt: skip
    ran = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    found = json.loads(file.read_text())
    assert found["sound"] and found["arch"] == "sm_90a"
    rows = {row["form"]: row for row in found["kernels"]}
    assert [row["setmaxnreg"] for row in rows.values()] == ["kept", "unused"]
    assert [row["threads"] for row in rows.values()] == [384, 256]
    for row in rows.values():
        assert row["spill_bytes"] == 0 and row["notes"] == []
        assert 64 < row["registers"] <= 65536 // row["threads"]
    images = {path: path.stat().st_mtime_ns for path in fresh_cache.rglob("*.mmimage")}
    assert len(images) == 2
    again = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert again.output == ran.output
    assert images == {path: path.stat().st_mtime_ns for path in fresh_cache.rglob("*.mmimage")}
