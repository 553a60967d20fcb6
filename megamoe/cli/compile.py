"""``megamoe compile``: compile the forward kernel for a shape, no GPU needed, and report on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

from megamoe.cli.common import JSON_OPTION, plain_errors, steps, write_json
from megamoe.config import MoEConfig


@click.command("compile")
@click.option("--arch", default="sm_90a", show_default=True, help="GPU architecture.")
@click.option("--hidden", type=int, required=True, help="H, the hidden size.")
@click.option("--intermediate", type=int, required=True, help="I, of one expert.")
@click.option("--experts", type=int, required=True, help="E, over all PEs.")
@click.option("--top-k", type=int, required=True, help="K, experts per token.")
@click.option("--pes", type=int, required=True, help="P, PEs of the expert-parallel group.")
@click.option("--max-tokens", type=int, default=4096, show_default=True, help="Per PE and call.")
@click.option(
    "--activation", type=click.Choice(["silu", "relu"]), default="silu", show_default=True
)
@JSON_OPTION
def compile_command(
    arch: str,
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    pes: int,
    max_tokens: int,
    activation: Literal["silu", "relu"],
    json_path: Path | None,
) -> None:
    """Compile the forward kernel for a shape and report registers, spills and shared memory."""
    with plain_errors(), steps(2) as progress:
        progress.begin("loading the compiler")
        from megamoe.cute_kernels.build import compile_forward
        from megamoe.lowering import kernel_problem

        cfg = MoEConfig(
            hidden=hidden,
            intermediate=intermediate,
            num_experts=experts,
            top_k=top_k,
            num_pes=pes,
            max_tokens=max_tokens,
            activation=activation,
        )
        progress.begin(f"compiling for {arch}")
        image = compile_forward(problem=kernel_problem(cfg), arch=arch)
    result: dict[str, Any] = {
        "registers": image.registers,
        "spill_bytes": image.spill_bytes,
        "smem_bytes": image.smem_bytes,
        "setmaxnreg_kept": image.setmaxnreg_kept,
        "mma_instructions": sum(image.mma_instructions.values()),
        "compile_seconds": round(image.compile_seconds, 3),
    }
    write_json(json_path, result)

    table = Table(
        title=f"forward, {arch}: H {hidden}, I {intermediate}, E {experts}, K {top_k}, P {pes}",
        show_header=False,
    )
    registers = ", ".join(f"{way} {count}" for way, count in image.setmaxnreg)
    shapes = ", ".join(f"{n} x {shape}" for shape, n in image.mma_instructions.items())
    table.add_row("registers at launch", f"{image.registers} a thread, {image.threads} threads")
    table.add_row("spills", f"{image.spill_bytes} bytes")
    table.add_row("shared memory", f"{image.smem_bytes} bytes")
    table.add_row("setmaxnreg", f"{'kept' if image.setmaxnreg_kept else 'IGNORED'} ({registers})")
    table.add_row("MMA instructions", f"{result['mma_instructions']} ({shapes})")
    table.add_row("compile time", f"{image.compile_seconds:.1f} s")
    for note in image.notes:
        table.add_row("ptxas note", note)
    Console().print(table)
