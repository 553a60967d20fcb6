"""The GPU check runs dry, its baseline is right, and a wrong result would be seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))

import gpu_cases  # noqa: E402
import gpu_steps  # noqa: E402
from baseline import grouped_moe  # noqa: E402
from gpu_backend import DryBackend  # noqa: E402
from gpu_check import LIMIT_S, markdown, open_images  # noqa: E402

from megamoe import Session  # noqa: E402
from megamoe.reference import moe_oracle  # noqa: E402
from megamoe.runtime.cache import ImageCache  # noqa: E402
from megamoe.runtime.devices.recording import stub_image  # noqa: E402


def test_dry_run_goes_through_everything(tmp_path):
    ran = subprocess.run(
        [str(PERF / "gpu_check.sh"), "--dry", "--out", str(tmp_path / "out"), "--images",
         str(tmp_path / "images")],
        capture_output=True, text=True, timeout=200, check=False,
        env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    report = json.loads((tmp_path / "out" / "gpu_check-dry.json").read_text())
    assert report["dry"] and len(report["steps"]) == 6
    for name, step in report["steps"].items():
        assert step["ok"], (name, step)
        assert f"{name} {step['budget_s']} s" in ran.stdout
    assert sum(step["budget_s"] for step in report["steps"].values()) < LIMIT_S
    assert len(report["steps"]["correctness"]["result"]["cases"]) == 48
    assert len(report["steps"]["timings"]["result"]["shapes"]) == 6
    assert report["steps"]["soak"]["result"]["calls"] == 1000
    text = (tmp_path / "out" / "gpu_check-dry.md").read_text()
    assert "no figure here was measured" in text and "Mixtral" not in text
    shapes = report["steps"]["timings"]["result"]["shapes"]
    assert all(row["us"] is None and row["tokens"] for row in shapes)
    report["steps"]["graph"] = {"ok": False, "error": "a|b", "seconds": 0, "budget_s": 1}
    report["dry"] = False
    for row in shapes:
        row |= {"us": 2.0, "tflops": 3.0, "torch_us": 4.0, "speedup": 2.0}
    assert "| graph | a/b |" in markdown(report)
    assert "| Mixtral-8x7B | 64 | 2 | 3.0 | 4 | 2.00 |" in markdown(report)


def test_the_baseline_computes_the_layer():
    case = gpu_cases.Case(name="b", activation="silu", tokens=(23,), hidden=128, top_k=3)
    call = case.call(1)
    y = grouped_moe(call.x[0], call.topk_ids[0], call.topk_weights[0], call.w13, call.w2)
    (want,) = moe_oracle(call.cfg, **call.oracle, rounding="kernel")
    scale = want.abs().max()
    assert scale > 0.1 and (y.float() - want.float()).abs().max() < 0.02 * scale


def test_images_are_listed_once_and_cover_every_case():
    jobs = gpu_cases.problems()
    assert len(jobs) == len(set(jobs)) > 20
    assert len(gpu_cases.CASES) == 12


def test_the_prepared_images_are_those_that_are_asked_for(tmp_path):
    """By P PEs that share the GPU, and by sessions of few and of all SMs."""
    asked = []

    def compile(*, problem, config, arch):
        asked.append((problem, config))
        return stub_image()

    backend = DryBackend(ImageCache(tmp_path, compile=compile))
    for case in gpu_cases.CASES[-3:]:
        for pes in gpu_cases.PES:
            gpu_steps.layer_for(backend, case.call(pes)).close()
    for num_sms in (*gpu_cases.FEW_SMS, None):
        device = backend.whole_device()
        cfg = gpu_cases.SMALL.config(1)
        with Session(cfg, device=device, cache=backend.images, num_sms=num_sms) as session:
            session.warmup()
    assert len(asked) == len(set(asked)) >= 13
    assert set(asked) <= set(gpu_cases.problems())
    assert {config.block_n for _, config in asked} >= {64, 256}


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_wrong_value_fails_the_check(activation, tmp_path):
    backend = DryBackend(open_images(tmp_path, dry=True))
    backend.dry = False  # judge as on a GPU
    case = gpu_cases.Case(name="c", activation=activation, tokens=(5,))
    call = case.call(1)
    y = [t.bfloat16() for t in moe_oracle(call.cfg, **call.oracle, rounding="kernel")]
    gpu_steps.judge(backend, case, call, y)
    y[0][2, 7] += 1 + y[0].abs().max()
    with pytest.raises(gpu_steps.CheckFailed, match="c, 1 PEs"):
        gpu_steps.judge(backend, case, call, y)


def test_the_overhead_of_a_call_is_reported(record_property):
    """Reported, not judged: other work on the machine decides the wall time."""
    from forward_overhead import measure

    found = measure(calls=200)
    assert found["forward_us"] > found["empty_module_us"] > 0
    for name, value in found.items():
        record_property(name, round(value, 2))
