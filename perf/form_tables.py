"""Prints the tables of docs/configs.md on the forms of the forward.

    megamoe compile --all-configs --workers 1 --json all.json
    python perf/form_tables.py all.json

Without a file only the table of the tiles that the rule chooses, which needs no compiler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megamoe.cli.all_configs import LAYERS, layer_problem
from megamoe.cute_kernels.kernel_config import DEFAULT_SMS, tiles_for

TOKENS = (1, 8, 64, 512, 4096)


def table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [list(head), *rows]]
    lines.insert(1, "|" + "---|" * (lines[0].count("|") - 1))
    return "\n".join(lines)


def chosen_tiles(sms: int = DEFAULT_SMS) -> str:
    """By layer and Tmax: weight rows of a tile, and parts of fc2 if it is split."""

    def tiles(layer: str, tokens: int) -> str:
        block_n, parts = tiles_for(replace(layer_problem(layer), max_tokens=tokens), sms)
        return f"{block_n}, {parts} parts" if parts > 1 else f"{block_n}"

    rows = [[layer, *(tiles(layer, tokens) for tokens in TOKENS)] for layer in LAYERS]
    return table(["layer", *TOKENS], rows)


def forms(kernels: list[dict[str, Any]]) -> str:
    """What does not depend on the layer, or its range over the layers."""
    rows = []
    for form in dict.fromkeys(kernel["form"] for kernel in kernels):
        mine = [kernel for kernel in kernels if kernel["form"] == form]
        registers = sorted({kernel["registers"] for kernel in mine})
        notes = sorted({note for kernel in mine for note in kernel["notes"]})
        config = mine[0]["config"]
        states = {kernel["setmaxnreg"] for kernel in mine}
        budget = f" ({config['service_registers']}/{config['math_registers']})"
        rows.append(
            [
                form,
                len(mine),
                mine[0]["threads"] // 32,
                " to ".join(map(str, dict.fromkeys((registers[0], registers[-1])))),
                max(kernel["spill_bytes"] for kernel in mine),
                ", ".join(sorted(states)) + (budget if states == {"kept"} else ""),
                "; ".join(notes) or "none",
            ]
        )
    head = ("form", "layers", "warps", "registers at launch", "spills", "`setmaxnreg`", "notes")
    return table(head, rows)


def depths(kernels: list[dict[str, Any]]) -> str:
    """Stages, row slots and bytes of shared memory: the layer and two fields decide them.

    Raises:
        ValueError: kernels that agree in these differ.
    """
    found: dict[tuple[str, tuple[int, int]], str] = {}
    for kernel in kernels:
        config = kernel["config"]
        key = (kernel["layer"], (config["block_n"], config["service_warps"]))
        text = f"{config['stages']}, {config['ring_slots']}: {kernel['smem_bytes']}"
        if found.setdefault(key, text) != text:
            raise ValueError(f"{key}: {found[key]} and {text}")
    columns = list(dict.fromkeys(column for _, column in found))
    head = ["layer", *(f"{rows} rows, {warps}" for rows, warps in columns)]
    layers = dict.fromkeys(layer for layer, _ in found)
    return table(head, [[layer, *(found[layer, each] for each in columns)] for layer in layers])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="what --json of the command wrote")
    options = parser.parse_args()
    print(chosen_tiles())
    if options.file is not None:
        kernels = json.loads(options.file.read_text())["kernels"]
        seconds = [kernel["compile_seconds"] for kernel in kernels]
        print(
            f"\n{len(kernels)} kernels, {min(seconds):.0f} to {max(seconds):.0f} s each, ", end=""
        )
        print(f"together {sum(seconds) / 60:.0f} min\n")
        print(forms(kernels), depths(kernels), sep="\n\n")


if __name__ == "__main__":
    main()
