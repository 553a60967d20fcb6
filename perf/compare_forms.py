"""Compares the forms of the forward, for docs/configs.md: what WGMMA computes and reads, what TMA
reads of L2, instructions of a k-tile. ``python perf/compare_forms.py`` takes some minutes.

Forms that exist are compiled and run on vgpu, and its counters must be what `form_model` says; it
says the same of real layers, and of forms that do not exist. Nothing is timed.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from form_model import FORMS, Form, Traffic, layer, useful_flops
from form_tables import table

from megamoe import MoEConfig
from megamoe.cli.all_configs import LAYERS
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.smem import deepest, default_config
from megamoe.lowering import kernel_problem
from megamoe.testing import VgpuMoE, compiled
from megamoe.verify.inputs import make_inputs, weights_per_pe

HIDDEN, INTERMEDIATE, EXPERTS, MAX_TOKENS, GRID = 1024, 512, 2, 512, 4
RUNS = {"full blocks": (256, 256), "tails": (150, 20)}
"""Rows of each expert: two full blocks, and 128 + 22 and 20 rows."""
REAL = (
    ("Mixtral-8x7B", 4096),
    ("Qwen3-30B-A3B", 4096),
    ("DeepSeek-V3", 4096),
    ("gpt-oss-120b", 512),
    ("Mixtral-8x7B", 64),
    ("Qwen3-30B-A3B", 64),
    ("DeepSeek-V3", 64),
)
"""Layers and tokens of each of 8 PEs."""
PES = 8
STEP_FLOPS = 2 * 256 * 128 * 64
"""One k-tile of 256 x 128."""
_LABEL = re.compile(r"^(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+);")


def small_config() -> MoEConfig:
    """The layer that runs on vgpu."""
    return MoEConfig(
        hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, top_k=1, num_pes=1,
        max_tokens=MAX_TOKENS, activation="relu",
    )  # fmt: skip


def config_of(form: Form) -> KernelConfig:
    """The kernel config of a form that exists."""
    assert form.changes is not None
    problem = kernel_problem(small_config())
    return deepest(problem, replace(default_config(problem), **form.changes))


@dataclass(frozen=True)
class Counted:
    """Counters of one run."""

    flops: int
    operands: int
    l2: int
    tma: int
    math_instructions: int


def count(form: Form, rows: Sequence[int]) -> Counted:
    """Run a form on vgpu. Rows are in the input view, so that TMA is all that loads much."""
    cfg, config = small_config(), config_of(form)
    data = make_inputs(cfg, tokens=[sum(rows)], integers=True)
    chosen = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(rows))
    moe = VgpuMoE(
        cfg, **weights_per_pe(cfg, data), grid=GRID, config=config,
        image=compiled(kernel_problem(cfg), config),
    )  # fmt: skip
    result = moe.forward(
        x=data.x,
        topk_ids=[chosen[:, None].int()],
        topk_weights=data.topk_weights,
        in_place=True,
    )
    report = result.report
    loads = sum(
        n for name, n in report.async_ops.items()
        if name.startswith("cp.async.bulk.tensor") and "complete_tx" in name
    )  # fmt: skip
    return Counted(
        report.wgmma_flops,
        report.wgmma_operand_bytes,
        report.read_by_role["load"],
        loads,
        report.instructions_by_role["math"],
    )


def loop_instructions(ptx: str, width: int = 128) -> int:
    """PTX instructions of one pass of the innermost loop with WGMMA of ``width`` tokens, waits that
    succeed at once."""
    lines = [line.strip() for line in ptx.splitlines()]
    inside = [
        i for i, line in enumerate(lines) if f"wgmma.mma_async.sync.aligned.m64n{width}k" in line
    ]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := _LABEL.match(line))}
    spans = [
        (labels[found[1]], i)
        for i, line in enumerate(lines)
        if (found := _BRANCH.search(line)) and labels.get(found[1], i) < inside[0] <= inside[-1] < i
    ]
    start, end = min(spans, key=lambda span: span[1] - span[0])
    body = lines[start : end + 1]
    # The second branch of a wait's inline loop is taken only if the wait fails.
    return sum(line.endswith(";") and not line.startswith(".") for line in body) - sum(
        line.startswith("bra.uni") and "LAB_WAIT" in line for line in body
    )


def counted_table() -> str:
    """Runs the forms that exist, and compares each counter with the arithmetic.

    Raises:
        AssertionError: they differ.
    """
    rows = []
    for form in FORMS:
        if form.changes is None:
            continue
        cells: list[Any] = [form.name]
        for experts in RUNS.values():
            found = count(form, experts)
            model = layer(form, experts, hidden=HIDDEN, intermediate=INTERMEDIATE)
            assert (found.flops, found.operands) == (model.flops, model.operands), (form, found)
            assert model.l2 <= found.l2 < 1.01 * model.l2, (form, found, model)
            useful = useful_flops(experts, hidden=HIDDEN, intermediate=INTERMEDIATE)
            steps = useful / STEP_FLOPS
            cells += [f"{found.flops / useful:.3f}", f"{found.operands / steps / 1024:.1f}",
                      f"{found.l2 / steps / 1024:.1f}", f"{found.tma / steps:.2f}",
                      f"{found.math_instructions / steps:.0f}"]  # fmt: skip
        config = config_of(form)
        loop = loop_instructions(compiled(kernel_problem(small_config()), config).ptx)
        cells.append(f"{loop}, {loop * config.math_warps * 256 // form.block_n}")
        rows.append(cells)
    one = ("padded", "operands, KB", "L2, KB", "TMA", "math")
    return table(["form", *one, *one, "k-loop"], rows)


@functools.lru_cache
def drawn_rows(name: str, tokens: int) -> tuple[int, ...]:
    """Rows of each expert of PE 0, if every token draws its experts evenly (seeded)."""
    (_, _, experts, top_k), _ = LAYERS[name]
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(PES * tokens, experts, generator=rng)
    chosen = scores.topk(top_k, dim=1).indices.flatten()
    return tuple(torch.bincount(chosen, minlength=experts)[: experts // PES].tolist())


def real_tables() -> str:
    """Padded flops, operand bytes and L2 bytes of real layers: arithmetic."""

    def cells(value: Any) -> list[list[str]]:
        return [[form.name, *(value(form, *each) for each in REAL)] for form in FORMS]

    def per_step(form: Form, name: str, tokens: int) -> tuple[Traffic, float]:
        (hidden, intermediate, *_), _ = LAYERS[name]
        rows = drawn_rows(name, tokens)
        size = {"hidden": hidden, "intermediate": intermediate}
        return layer(form, rows, **size), useful_flops(rows, **size) / STEP_FLOPS

    def padded(form: Form, name: str, tokens: int) -> str:
        found, steps = per_step(form, name, tokens)
        return f"{found.flops / STEP_FLOPS / steps:.3f}"

    def moved(form: Form, name: str, tokens: int) -> str:
        found, steps = per_step(form, name, tokens)
        return f"{found.operands / steps / 1024:.0f}, {found.l2 / steps / 1024:.0f}"

    head = ["form", *(f"{name}, {tokens}" for name, tokens in REAL)]
    return "\n\n".join(
        [
            "Padded flops over useful ones:",
            table(head, cells(padded)),
            "Operand KB and L2 KB per 4.19 useful MFLOP:",
            table(head, cells(moved)),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arithmetic", action="store_true", help="without what must be compiled")
    if not parser.parse_args().arithmetic:
        print(", ".join(f"{name} {rows}" for name, rows in RUNS.items()))
        print(counted_table() + "\n")
    print(real_tables())


if __name__ == "__main__":
    main()
