"""The commands' reports and exit codes. What runs the kernel is replaced by the rounded reference
here (tests/vgpu runs the real one), so that a wrong kernel can be played too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_helpers import image_of
from click.testing import CliRunner

from megamoe import testing
from megamoe.cli import main
from megamoe.cli.demo import tokens_per_pe
from megamoe.config import MoEConfig
from megamoe.cute_kernels import build
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.smem import default_config
from megamoe.reference import moe_oracle
from megamoe.timeline import activity_of, draw_timeline, join_spans

DEMO_KEYS = [
    "pes", "launches_per_pe", "max_abs_err", "bound", "within_bound", "rows", "bytes_between_pes",
    "wgmma_flops", "warp_instructions", "row_fetches", "bytes_read_by_role",
    "bytes_written_by_role", "seconds",
]  # fmt: skip
COMPILE_KEYS = [
    "registers", "spill_bytes", "smem_bytes", "setmaxnreg_kept", "mma_instructions",
    "compile_seconds", "config",
]  # fmt: skip
SHAPE = [
    "--hidden", "2048", "--intermediate", "768", "--experts", "128", "--top-k", "8", "--pes", "8",
]  # fmt: skip


def report() -> Any:
    """Two PEs, a load and a math warp each, as vgpu reports them."""
    roles = {(pe, 0, warp): role for pe in range(2) for warp, role in enumerate(("load", "math"))}
    return SimpleNamespace(
        roles=roles, activity={key: [(0, 5, "run"), (5, 9, "poll")] for key in roles}
    )


def stand_in(monkeypatch: pytest.MonkeyPatch, *, fault: str = "") -> list[dict[str, Any]]:
    """Replace the simulation; returns the list of the calls it will get."""
    calls: list[dict[str, Any]] = []

    def run(cfg: MoEConfig, *, w13: Any, w2: Any, seed: int, **group: Any) -> Any:
        calls.append({"cfg": cfg, "w13": w13, "w2": w2, "seed": seed, **group})
        order = [expert for pe in range(cfg.num_pes) for expert in cfg.local_experts(pe)]
        back = torch.tensor(order).argsort()
        if fault == "slot":
            group["topk_ids"][-1][0, 1] = -1
        y = moe_oracle(
            cfg,
            **group,
            w13=torch.cat(w13)[back],
            w2=torch.cat(w2)[back],
            rounding="kernel",
        )
        if fault == "nan":
            y[-1][3, 5] = float("nan")
        return SimpleNamespace(
            y=y,
            launches=[1] * (cfg.num_pes - 1) + [2 if fault == "launch" else 1],
            counters={
                "rows": [10 * (pe + 1) for pe in range(cfg.num_pes)],
                "bytes_between_pes": 1234,
                "wgmma_flops": 5678,
                "warp_instructions": 99,
                "warp_instructions_by_role": {"load": 9, "math": 90},
                "row_fetches": [7] * cfg.num_pes,
                "bytes_read_by_role": {"load": 4321},
                "bytes_written_by_role": {"math": 8765},
            },
            report=report(),
        )

    monkeypatch.setattr(testing, "run_vgpu", run)
    monkeypatch.setattr(testing, "compiled", lambda problem: None)
    return calls


@pytest.mark.parametrize("pes", [1, 2, 4, 8])
def test_demo(pes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = stand_in(monkeypatch)
    out, file = tmp_path / "new" / "out", tmp_path / "other" / "demo.json"
    arguments = ["demo", "--pes", str(pes), "--out", str(out), "--json", str(file), "--seed", "3"]
    ran = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    result = json.loads(file.read_text())
    assert list(result) == DEMO_KEYS
    assert result["pes"] == pes and result["launches_per_pe"] == 1
    assert result["within_bound"] is True
    assert 0 < result["max_abs_err"] <= result["bound"] < 0.5
    assert result["rows"] == 10 * pes * (pes + 1) // 2
    assert (result["bytes_between_pes"], result["wgmma_flops"]) == (1234, 5678)
    assert result["warp_instructions"] == 99
    assert result["row_fetches"] == 7 * pes
    assert result["bytes_read_by_role"] == {"load": 4321}
    assert result["bytes_written_by_role"] == {"math": 8765}
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    for text in (
        "functional simulation",
        "Hugging Face",
        "within its bound",
        "1,234",
        "math",
        "4,321 / 0",
    ):
        assert text in ran.output
    (call,) = calls
    assert call["seed"] == 3
    assert [len(x_TH) for x_TH in call["x"]] == tokens_per_pe(pes)
    assert sum(len(w2_LHI) for w2_LHI in call["w2"]) == call["cfg"].num_experts


@pytest.mark.parametrize("fault", ["slot", "nan", "launch"])
def test_demo_fails_when_the_kernel_is_wrong(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, fault=fault)
    file = tmp_path / "demo.json"
    ran = CliRunner().invoke(main, ["demo", "--pes", "2", "--json", str(file)])
    assert ran.exit_code == 1
    result = json.loads(file.read_text())
    assert result["within_bound"] is (fault == "launch")
    assert result["launches_per_pe"] == (2 if fault == "launch" else 1)
    assert "did not meet its bound in one launch" in ran.output


def test_demo_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = stand_in(monkeypatch)
    for seed in ("0", "0", "1"):
        assert CliRunner().invoke(main, ["demo", "--pes", "1", "--seed", seed]).exit_code == 0
    first, again, other = (torch.cat([c["x"][0].flatten(), c["w2"][0].flatten()]) for c in calls)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("pes", range(1, 9))
def test_demo_tokens(pes: int) -> None:
    counts = tokens_per_pe(pes)
    assert len(counts) == pes and sum(counts) == 96
    assert (min(counts) == 0) == (pes > 2)


def test_compile_reports_the_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def compile_forward(*, problem: Any, config: Any, arch: str) -> Image:
        seen.update(problem=problem, config=config, arch=arch)
        return Image(
            entry="k", arch=arch, ptx="", cubin=b"", parameters=(), threads=384, smem_bytes=1000,
            registers=168, spill_bytes=16, setmaxnreg=(("dec", 40),),
            mma_instructions={"m64n128k16.f32.bf16.bf16": 6, "m64n8k16.f32.bf16.bf16": 2},
            notes=("(C7507) ignored",), compile_seconds=1.23456, config=config,
        )  # fmt: skip

    monkeypatch.setattr(build, "compile_forward", compile_forward)
    file = tmp_path / "compile.json"
    ran = CliRunner().invoke(
        main, ["compile", *SHAPE, "--max-tokens", "64", "--json", str(file)], catch_exceptions=False
    )
    assert ran.exit_code == 1, ran.output
    assert (seen["arch"], seen["problem"].hidden, seen["problem"].max_tokens) == (
        "sm_90a",
        2048,
        64,
    )
    assert seen["problem"].experts_per_pe == 16 and seen["problem"].activation == "silu"
    result = json.loads(file.read_text())
    assert list(result) == COMPILE_KEYS
    assert list(result.values())[:-1] == [168, 16, 1000, False, 8, 1.235]
    assert KernelConfig.from_plain(result["config"]) == seen["config"]
    assert "IGNORED" in ran.output and "C7507" in ran.output


@pytest.mark.parametrize(("sms", "rows"), [(None, 64), (132, 64), (100, 128), (60, 256)])
def test_compile_chooses_for_a_number_of_sms(
    sms: int | None, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_forward(*, problem: Any, config: Any, arch: str) -> Image:
        assert config == default_config(problem, sms=sms or 132)
        return replace(image_of(problem, config, arch), config=config)

    monkeypatch.setattr(build, "compile_forward", compile_forward)
    given = [] if sms is None else ["--sms", str(sms)]
    file = tmp_path / "c.json"
    arguments = ["compile", *SHAPE, "--max-tokens", "4", *given, "--json", str(file)]
    ran = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert ran.exit_code == 0 and f"{rows} weight rows" in ran.output


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (["--hidden", "100"], "hidden=100: must be a multiple of 8"),
        (["--top-k", "33"], "top_k=33: must be an integer in 1..32"),
        (["--kernel", "dgrad", "--ring-rows", "256"], "ring_rows=256: must be None"),
        (["--arch", "sm_80"], "arch='sm_80': no forward kernel; allowed: sm_90a"),
        (["--activation", "gelu"], "Invalid value for '--activation'"),
    ],
)
def test_compile_refuses_in_one_line(change: list[str], match: str, tmp_path: Path) -> None:
    file = tmp_path / "compile.json"
    ran = CliRunner().invoke(main, ["compile", *SHAPE, *change, "--json", str(file)])
    assert ran.exit_code in (1, 2)
    assert match in ran.output and "Traceback" not in ran.output
    assert not file.exists()


def test_timeline(tmp_path: Path) -> None:
    assert join_spans([(5, 6), (0, 2), (1, 1.5), (2.5, 3)], max_gap=0.5) == [(0, 3), (5, 6)]
    draw_timeline(activity_of(report()), tmp_path / "a.png", title="two PEs")
    assert (tmp_path / "a.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="activity is empty"):
        draw_timeline([], tmp_path / "b.png", title="none")
