"""``megamoe compile``: compile a kernel for a shape, no GPU needed, and report on it."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from megamoe.cli.all_configs import compile_all
from megamoe.cli.common import JSON_OPTION, plain_errors, steps, write_json
from megamoe.cli.layer import SMS_OPTION, layer_config, layer_options, require_sizes

if TYPE_CHECKING:
    from megamoe.cute_kernels.kernel_config import KernelConfig

KERNELS = ("forward", "save", "dgrad", "wgrad")


@click.command("compile")
@click.option("--arch", default="sm_90a", show_default=True, help="GPU architecture.")
@click.option("--kernel", type=click.Choice(KERNELS), default="forward", show_default=True,
              help="save: the forward of training.")  # fmt: skip
@click.option("--grad", type=click.Choice(["f32", "bf16"]), default="f32", show_default=True,
              help="Type of the gradients of wgrad.")  # fmt: skip
@click.option("--recompute", is_flag=True, help="Of save, dgrad and wgrad: fc1 is computed again.")
@click.option("--all-configs", is_flag=True,
              help="Instead: every form of the forward for known models, as a table.")  # fmt: skip
@click.option("--form", "forms", multiple=True, help="With --all-configs: only this form, ...")
@click.option("--workers", default=2, show_default=True,
              help="With --all-configs: compilations at once.")  # fmt: skip
@partial(layer_options, required=False)
@SMS_OPTION
@JSON_OPTION
def compile_command(
    *,
    arch: str,
    kernel: str,
    grad: str,
    recompute: bool,
    all_configs: bool,
    forms: tuple[str, ...],
    workers: int,
    sms: int,
    json_path: Path | None,
    **layer: Any,
) -> None:
    """Compile a kernel for a shape and report registers, spills and shared memory.

    The exit status is 1 if it, or one of --all-configs, spills, serialises WGMMA or loses
    setmaxnreg.
    """
    if all_configs:
        with plain_errors():
            sound = compile_all(arch=arch, workers=workers, forms=forms, json_path=json_path)
        raise SystemExit(0 if sound else 1)
    require_sizes(**layer)
    with plain_errors(), steps(2) as progress:
        progress.begin("loading the compiler")
        from megamoe.checks import check_kernel_support, check_training_support
        from megamoe.cute_kernels.build import compile_forward, compile_wgrad
        from megamoe.cute_kernels.smem import default_config
        from megamoe.cute_kernels.wgrad_tables import default_wgrad_config
        from megamoe.lowering import kernel_problem

        cfg = layer_config(**layer)
        check_kernel_support(cfg)
        if kernel != "forward":
            check_training_support(cfg)
        elif recompute:
            raise ValueError("--recompute: must not be given with --kernel forward")
        progress.begin(f"compiling for {arch}")
        problem = replace(kernel_problem(cfg), recompute=recompute)
        if kernel == "wgrad":
            config = default_wgrad_config(problem, grad=grad, bias_grad=grad)
            image = compile_wgrad(problem=problem, config=config, arch=arch)
        else:
            problem = replace(problem, mode=kernel)
            chosen = default_config(problem, sms=sms)
            image = compile_forward(problem=problem, config=chosen, arch=arch)
    result: dict[str, Any] = {
        "registers": image.registers,
        "spill_bytes": image.spill_bytes,
        "smem_bytes": image.smem_bytes,
        "setmaxnreg_kept": image.setmaxnreg_kept,
        "mma_instructions": sum(image.mma_instructions.values()),
        "compile_seconds": round(image.compile_seconds, 3),
    }
    tiles: KernelConfig | None = None if kernel == "wgrad" else image.config
    if tiles is not None:
        result["config"] = asdict(tiles)
    write_json(json_path, result)

    table = Table(
        title=f"{kernel}, {arch}: H {cfg.hidden}, I {cfg.intermediate}, E {cfg.num_experts}, "
        f"K {cfg.top_k}, P {cfg.num_pes}",
        show_header=False,
    )
    registers = ", ".join(f"{way} {count}" for way, count in image.setmaxnreg)
    shapes = ", ".join(f"{n} x {shape}" for shape, n in image.mma_instructions.items())
    if tiles is not None:
        parts = f", fc2 in {tiles.split_k} parts over K" if tiles.split_k > 1 else ""
        depth = f"{tiles.stages} stages, {tiles.ring_slots} row slots"
        table.add_row(f"tiles for {sms} SMs", f"{tiles.block_n} weight rows{parts}; {depth}")
    table.add_row("registers at launch", f"{image.registers} a thread, {image.threads} threads")
    table.add_row("spills", f"{image.spill_bytes} bytes")
    table.add_row("shared memory", f"{image.smem_bytes} bytes")
    table.add_row("setmaxnreg", f"{image.setmaxnreg_state} ({registers or 'none'})")
    table.add_row("MMA instructions", f"{result['mma_instructions']} ({shapes})")
    table.add_row("compile time", f"{image.compile_seconds:.1f} s")
    for note in image.notes:
        table.add_row("ptxas note", note)
    Console().print(table)
    if not image.sound:
        raise SystemExit(1)
