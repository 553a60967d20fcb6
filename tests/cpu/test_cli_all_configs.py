"""``megamoe compile --all-configs``: what it compiles, what it reports, how it ends.

The compiler is replaced here; ``tests/compile`` runs the real one.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cache_helpers import image_of, problem
from click.testing import CliRunner

from megamoe.cli import all_configs, main
from megamoe.cli.all_configs import LAYERS, forms_of, layer_problem
from megamoe.cute_kernels.smem import SharedMap

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))

import form_tables  # noqa: E402

WIDE = [(256, 1, "none"), (256, 1, "weights"), (256, 1, "tokens"), (256, 4, "none")]
NARROW = [(128, 1, "none"), (128, 4, "none"), (64, 1, "none"), (64, 4, "none")]
FAULTS: dict[str, dict[str, Any]] = {
    "spill": {"spill_bytes": 8},
    "setmaxnreg": {"notes": ("(C7507) setmaxnreg ignored",)},
    "serialised": {"notes": ("(C7511) wgmma serialised",)},
}


def structures(forms: dict[str, Any]) -> list[tuple[int, int, int, str]]:
    return [(c.service_warps, c.block_n, c.split_k, c.cluster) for c in forms.values()]


@pytest.mark.parametrize("layer", LAYERS)
def test_every_valid_form_of_a_layer_is_compiled(layer):
    p = layer_problem(layer)
    forms = forms_of(p)
    assert structures(forms) == [(warps, *form) for warps in (4, 8) for form in WIDE + NARROW]
    assert len(set(forms.values())) == 16
    for config in forms.values():
        SharedMap.of(p, config)
        deeper = replace(config, ring_slots=config.ring_slots + 1)
        if config.ring_slots < 4:
            with pytest.raises(ValueError, match="fewer stages or ring slots"):
                SharedMap.of(p, deeper)


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({"w13_transposed": True, "w2_transposed": True}, WIDE),
        ({"ring_blocks": 5}, WIDE[:1] + WIDE[2:] + NARROW),
        ({"intermediate": 128}, [*WIDE[:3], NARROW[0], NARROW[2]]),
        ({"mode": "save"}, WIDE[:1]),
    ],
    ids=["transposed", "ring", "two k-tiles", "saving"],
)
def test_forms_that_a_layer_refuses_are_left_out(changes, valid):
    found = structures(forms_of(problem(**changes)))
    assert found == [(warps, *form) for warps in (4, 8) for form in valid]


def stand_in(monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any] | None = None) -> list[Any]:
    """Two small layers and a compiler whose last image has the fault; returns its jobs."""
    jobs: list[Any] = []

    def compile_many(wanted: Any, *, cache: Any, arch: str, workers: int, on_done: Any) -> Any:
        jobs.extend(wanted)
        images = []
        for layer, config in wanted:
            image = replace(image_of(layer, config, arch), config=config, notes=())
            images.append(image if config.reallocates else replace(image, setmaxnreg=()))
        images[-1] = replace(images[-1], **(fault or {}))
        for index in range(len(wanted)):
            on_done(index, True)
        return images

    small = {"a": ((512, 256, 8, 2), {}), "b": ((1024, 512, 16, 4), {"activation": "relu"})}
    monkeypatch.setattr(all_configs, "LAYERS", small)
    monkeypatch.setattr("megamoe.runtime.parallel.compile_many", compile_many)
    return jobs


def run(*arguments: object) -> Any:
    found = CliRunner().invoke(main, ["compile", "--all-configs", *map(str, arguments)])
    assert "Traceback" not in found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found


def test_sound_kernels_end_with_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = stand_in(monkeypatch)
    file = tmp_path / "all.json"
    ran = run("--json", file)
    assert ran.exit_code == 0, ran.output
    assert "32 kernels, 0 unsound" in ran.output
    assert "| a | 64 rows | 12 | 8, 4 | 168 | 0 | 1000 | unused | none |" in ran.output
    assert "| b | 256 rows | 12 | 4, 4 | 168 | 0 | 1000 | kept | none |" in ran.output
    found = json.loads(file.read_text())
    assert {name: found[name] for name in ("arch", "pes", "max_tokens", "sound")} == {
        "arch": "sm_90a", "pes": 8, "max_tokens": 4096, "sound": True,
    }  # fmt: skip
    rows = found["kernels"]
    assert len(rows) == len(jobs) == 32
    # Form by form: a run that is cut short saw every layer.
    assert [(row["layer"], row["form"]) for row in rows[:3]] == [
        ("a", "256 rows"), ("b", "256 rows"), ("a", "256 rows, shared weights"),
    ]  # fmt: skip
    for row, (compiled, config) in zip(rows, jobs, strict=True):
        assert compiled.hidden == {"a": 512, "b": 1024}[row["layer"]]
        assert row["config"] == json.loads(json.dumps(vars(config)))
        assert row["setmaxnreg"] == ("unused" if config.block_n == 64 else "kept")
    last = {name: value for name, value in rows[-1].items() if name != "config"}
    assert last == {
        "layer": "b", "form": "64 rows, 4 parts, 8 service warps", "threads": 384,
        "registers": 168, "spill_bytes": 0, "smem_bytes": 1000, "setmaxnreg": "unused",
        "wgmma_serialised": False, "notes": [], "compile_seconds": 1.5, "sound": True,
    }  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_one_unsound_kernel_ends_with_1(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, FAULTS[fault])
    file = tmp_path / "all.json"
    ran = run("--form", "128 rows", "--form", "256 rows", "--json", file)
    assert ran.exit_code == 1
    assert "4 kernels, 1 unsound" in ran.output
    found = json.loads(file.read_text())
    assert found["sound"] is False
    assert [row["sound"] for row in found["kernels"]] == [True, True, True, False]
    bad = found["kernels"][-1]
    assert (bad["layer"], bad["form"]) == ("b", "128 rows")
    assert bad["setmaxnreg"] == ("IGNORED" if fault == "setmaxnreg" else "kept")
    assert bad["wgmma_serialised"] == (fault == "serialised")


def test_a_form_without_setmaxnreg_cannot_lose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, {"setmaxnreg": ()})
    assert run("--form", "64 rows").exit_code == 0
    stand_in(monkeypatch, {"setmaxnreg": ()})
    assert run("--form", "256 rows").exit_code == 1


def test_unknown_forms_and_missing_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = stand_in(monkeypatch)
    ran = run("--form", "96 rows")
    assert ran.exit_code == 1 and "form='96 rows': must be one of" in ran.output
    assert not jobs
    ran = CliRunner().invoke(main, ["compile", "--hidden", "512"])
    assert ran.exit_code == 2 and "Missing option '--intermediate'" in ran.output


def test_the_tables_of_the_docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tiles that the rule chooses are those that are written down; the tables of the compile
    report show an unsound kernel."""
    docs = (PERF.parent / "docs" / "configs.md").read_text()
    assert form_tables.chosen_tiles() in docs
    stand_in(monkeypatch, FAULTS["setmaxnreg"] | {"registers": 200})
    run("--json", tmp_path / "all.json")
    kernels = json.loads((tmp_path / "all.json").read_text())["kernels"]
    lines = form_tables.forms(kernels).splitlines()
    assert len(lines) == 2 + 16
    assert lines[2] == "| 256 rows | 2 | 12 | 168 | 0 | kept (56/224) | none |"
    assert lines[-1].endswith("| 2 | 12 | 168 to 200 | 0 | unused | (C7507) setmaxnreg ignored |")
    lines = form_tables.depths(kernels).splitlines()
    assert len(lines) == 2 + 2 and lines[2].startswith("| a | 4, 4: 1000 | 6, 4: 1000 | 8, 4: 1000")
    kernels[-1]["smem_bytes"] = 7
    with pytest.raises(ValueError, match="8, 4: 1000 and 8, 4: 7"):
        form_tables.depths(kernels)
