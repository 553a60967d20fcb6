"""``megamoe plan``: the numbers a session allocates."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from megamoe import MoEConfig, plan
from megamoe.cli import main

SHAPE = ["--hidden", "7168", "--intermediate", "2048", "--experts", "256", "--top-k", "8"]


def run(*arguments: str, code: int = 0) -> str:
    ran = CliRunner().invoke(main, ["plan", *SHAPE, *arguments])
    assert ran.exit_code == code, ran.output
    return ran.output


def test_the_table_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = run("--pes", "8", "--json", str(file))
    cfg = MoEConfig(
        hidden=7168, intermediate=2048, num_experts=256, top_k=8, num_pes=8, max_tokens=4096
    )
    planned, found = plan(cfg), json.loads(file.read_text())
    assert found["symmetric_bytes"] == planned.symmetric_bytes
    assert found["local_bytes"] == planned.local_bytes
    assert len(found["regions"]) == len(planned.regions)
    pool = next(region for region in found["regions"] if region["name"] == "pool_x")
    assert pool["bytes"] == 2 * pool["shape"][0] * 7168
    assert "GiB" in text and "pool_h" in text


def test_sms_decide_on_a_split_and_its_memory(tmp_path: Path) -> None:
    """One token: fc2 of its experts has few tiles, so that more SMs split it."""
    found = {}
    for sms in (8, 700):
        run("--pes", "8", "--max-tokens", "1", "--sms", str(sms), "--json", str(tmp_path / "f"))
        found[sms] = json.loads((tmp_path / "f").read_text())
    names = {sms: {region["name"] for region in each["regions"]} for sms, each in found.items()}
    assert names[700] - names[8] == {"parts", "partial"}
    assert found[700]["local_bytes"] > found[8]["local_bytes"]


def test_a_capacity_lowers_it_and_bad_sizes_are_refused(tmp_path: Path) -> None:
    sizes = []
    for extra in ([], ["--capacity", "20000"]):
        run("--pes", "8", *extra, "--json", str(tmp_path / "f"))
        sizes.append(json.loads((tmp_path / "f").read_text())["local_bytes"])
    assert sizes[1] < sizes[0] / 4
    assert "num_pes=65" in run("--pes", "65", code=1)


def test_what_training_takes(tmp_path: Path) -> None:
    """The share of a row in both blocks: 2H + 4I, then 2H + 2I bytes, and little else."""
    run("--pes", "8", "--capacity", "65536", "--json", str(tmp_path / "f"))
    forward = json.loads((tmp_path / "f").read_text())
    assert forward["saved_bytes"] == forward["dgrad_bytes"] == 0
    text = run("--pes", "8", "--capacity", "65536", "--training", "--json", str(tmp_path / "f"))
    found = json.loads((tmp_path / "f").read_text())
    assert "each forward" in text
    rows = next(r for r in found["regions"] if r["name"] == "pool_x")["shape"][0]
    assert 1 <= found["saved_bytes"] / (rows * (2 * 7168 + 4 * 2048)) < 1.02
    assert 1 <= found["dgrad_bytes"] / (rows * (2 * 7168 + 2 * 2048)) < 1.001
    assert found["local_bytes"] >= forward["local_bytes"]
    run("--pes", "8", "--capacity", "65536", "--training", "--recompute",
        "--json", str(tmp_path / "f"))  # fmt: skip
    again = json.loads((tmp_path / "f").read_text())
    assert 1 <= again["saved_bytes"] / (rows * 2 * 7168) < 1.03
    assert sum(again[k] - found[k] for k in ("saved_bytes", "dgrad_bytes")) == 0
    assert "--recompute: needs --training" in run("--pes", "8", "--recompute", code=1)
    assert "ring_rows=256" in run("--pes", "8", "--training", "--ring-rows", "256", code=1)
