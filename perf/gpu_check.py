"""Runs the GPU check and writes one JSON file and one Markdown table. See ``gpu_check.sh``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from gpu_backend import Backend, DryBackend, RealBackend
from gpu_steps import STEPS, one_case

from megamoe import __version__
from megamoe.cli.cache import import_images
from megamoe.runtime.cache import ImageCache
from megamoe.runtime.devices.recording import stub_image

HERE = Path(__file__).parent
BUNDLE = HERE.parent / "build" / "gpu_check"
LIMIT_S = 480


def open_images(folder: Path, *, dry: bool) -> ImageCache:
    """The images that ``prepare_images.py`` exported. A dry run does without."""
    if dry:
        return ImageCache(folder / "dry", compile=lambda **what: stub_image())
    cache = ImageCache(folder)
    if (folder / "images.tar").exists():
        print(f"imported {import_images(cache, folder / 'images.tar')} images", flush=True)
    return cache


def run(backend: Backend, expected: dict[str, str]) -> dict[str, Any]:
    """All steps; a failing one is reported and does not hide the others."""
    report: dict[str, Any] = {
        "megamoe": __version__,
        "dry": backend.dry,
        "machine": backend.describe(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "steps": {},
    }
    for name, step, budget in STEPS:
        started = time.perf_counter()
        try:
            result: dict[str, Any] = {"ok": True, "result": step(backend, expected)}
        except Exception as error:
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        seconds = time.perf_counter() - started
        report["steps"][name] = {**result, "seconds": round(seconds, 2), "budget_s": budget}
        state = "ok" if result["ok"] else result["error"]
        print(f"{name:13} {seconds:7.2f} s of {budget:3} s  {state}", flush=True)
    return report


def markdown(report: dict[str, Any]) -> str:
    """The table for people."""
    machine = report["machine"]
    lines = [
        f"# GPU check on {machine['gpu']}",
        "",
        f"megamoe {report['megamoe']}, torch {machine['torch']}, {report['when']}. "
        + ("**Dry run: no figure here was measured.**" if report["dry"] else ""),
        "",
        "| step | result | seconds | budget |",
        "|---|---|---|---|",
    ]
    for name, step in report["steps"].items():
        state = "ok" if step["ok"] else step["error"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {state} | {step['seconds']} | {step['budget_s']} |")
    timings = report["steps"]["timings"]
    if timings["ok"] and not report["dry"]:
        lines += [
            "",
            "| shape | T | µs | TFLOP/s | torch grouped µs | ratio |",
            "|---|---|---|---|---|---|",
        ]
        for row in timings["result"]["shapes"]:
            lines.append(
                f"| {row['shape']} | {row['tokens']} | {row['us']:.0f} | {row['tflops']:.1f} | "
                f"{row['torch_us']:.0f} | {row['speedup']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="everything but the driver's calls")
    parser.add_argument("--images", type=Path, default=BUNDLE, help="folder of prepare_images")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="where results go")
    parser.add_argument("--one-case", action="store_true", help="what compute-sanitizer runs")
    options = parser.parse_args()
    torch.manual_seed(0)
    budget = sum(seconds for _, _, seconds in STEPS)
    assert budget < LIMIT_S
    images = open_images(options.images, dry=options.dry)
    backend: Backend = DryBackend(images) if options.dry else RealBackend(images)
    if options.one_case:
        one_case(backend)
        return 0
    print(f"budget: {', '.join(f'{name} {s} s' for name, _, s in STEPS)}; together {budget} s")
    file = options.images / "expected.json"
    report = run(backend, json.loads(file.read_text()) if file.exists() else {})
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"gpu_check-{'dry' if options.dry else report['when'][:10]}"
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(report))
    print(f"wrote {stem}.json and .md")
    return 0 if all(step["ok"] for step in report["steps"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
