"""``megamoe demo``: the MoE block of a real architecture through the fused kernel, on vgpu.

Legend: T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from megamoe.cli.common import JSON_OPTION, Steps, plain_errors, steps, write_json
from megamoe.config import MoEConfig

if TYPE_CHECKING:
    import torch

    from megamoe.testing import VgpuResult

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 16, 4
TOKENS = 96  # of the whole group
NOTICE = (
    "This is a functional simulation: the compiled sm_90a kernel's PTX, interpreted on the CPU. "
    "It shows that results and synchronisation are right; it says nothing about speed."
)


@dataclass(frozen=True, kw_only=True)
class DemoInputs:
    """Inputs of every PE, weights in global expert order, and the output of Hugging Face."""

    x: list[torch.Tensor]
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor
    expected: list[torch.Tensor]  # fp64


def tokens_per_pe(num_pes: int) -> list[int]:
    """Split `TOKENS` unevenly; from three PEs on, PE 0 brings none.

    >>> tokens_per_pe(4)
    [0, 16, 32, 48]
    """
    shares = range(num_pes) if num_pes > 2 else range(1, num_pes + 1)
    counts = [TOKENS * share // sum(shares) for share in shares]
    counts[-1] += TOKENS - sum(counts)
    return counts


def build_inputs(cfg: MoEConfig, *, tokens: list[int], seed: int) -> DemoInputs:
    """A Qwen3-MoE block with seeded random bf16 weights, run by transformers in fp64.

    Router, experts and tokens hold bf16 values; ids and weights come from the block's own router.
    """
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    block = Qwen3MoeSparseMoeBlock(
        Qwen3MoeConfig(
            hidden_size=cfg.hidden,
            moe_intermediate_size=cfg.intermediate,
            num_experts=cfg.num_experts,
            num_experts_per_tok=cfg.top_k,
            norm_topk_prob=True,
            hidden_act="silu",
            experts_implementation="eager",
        )
    ).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in block.parameters():
            scale = weight.shape[-1] ** -0.5  # keeps activations near 1
            weight.copy_((torch.randn(weight.shape, generator=rng) * scale).bfloat16())
        x_TH = torch.randn(sum(tokens), cfg.hidden, generator=rng).bfloat16()
        block = block.double()
        _, weights_TK, ids_TK = block.gate(x_TH.double())
        expected_TH = block(x_TH.double()[None])[0]
    return DemoInputs(
        x=list(x_TH.split(tokens)),
        topk_ids=list(ids_TK.split(tokens)),
        topk_weights=list(weights_TK.float().split(tokens)),  # the router's softmax is fp32
        w13=block.experts.gate_up_proj.detach().bfloat16(),
        w2=block.experts.down_proj.detach().bfloat16(),
        expected=list(expected_TH.split(tokens)),
    )


def _count(value: float) -> str:
    return f"{value:,.0f}"


@dataclass(frozen=True, kw_only=True)
class DemoRun:
    """``result`` has the keys of the JSON file."""

    result: dict[str, Any]
    tokens: list[int]
    run: VgpuResult


def _print(demo: DemoRun) -> None:
    """The table on stdout."""
    result, counters = demo.result, demo.run.counters
    table = Table(
        title=(
            f"Qwen3-MoE block, H {HIDDEN}, I {INTERMEDIATE}, {EXPERTS} experts, top-{TOP_K}, "
            f"on {result['pes']} PEs"
        ),
        show_header=False,
    )
    verdict = "[green]within[/]" if result["within_bound"] else "[bold red]NOT within[/]"
    table.add_row("largest error against Hugging Face, fp64", f"{result['max_abs_err']:.3e}")
    table.add_row("derived bound, largest", f"{result['bound']:.3e}")
    table.add_row("every element", f"{verdict} its bound")
    table.add_row("kernel launches per PE", str(result["launches_per_pe"]))
    table.add_row("tokens of each PE", ", ".join(map(str, demo.tokens)))
    table.add_row("rows of each PE's experts", ", ".join(map(str, counters["rows"])))
    table.add_row("rows that each PE pulled", ", ".join(map(str, counters["row_fetches"])))
    table.add_row("bytes between PEs", _count(result["bytes_between_pes"]))
    table.add_row("WGMMA flops", _count(result["wgmma_flops"]))
    table.add_row("warp instructions", _count(result["warp_instructions"]))
    roles = counters["warp_instructions_by_role"]
    for role, count in sorted(roles.items(), key=lambda item: -item[1]):
        table.add_row(f"  {role}", _count(count))
    table.add_row("bytes of global memory, read / written", "")
    read, written = counters["bytes_read_by_role"], counters["bytes_written_by_role"]
    for role in sorted(read | written):
        table.add_row(f"  {role}", f"{_count(read.get(role, 0))} / {_count(written.get(role, 0))}")
    table.add_row("simulation", f"{result['seconds']:.1f} s")
    Console().print(table)


def run_demo(*, pes: int, seed: int, progress: Steps) -> DemoRun:
    """Build the block, run it fused, compare every output element with its bound."""
    progress.begin("building the Qwen3-MoE block")
    import torch

    from megamoe import testing
    from megamoe.error_bound import error_bound
    from megamoe.lowering import kernel_problem
    from megamoe.weights import split_experts

    tokens = tokens_per_pe(pes)
    cfg = MoEConfig(
        hidden=HIDDEN,
        intermediate=INTERMEDIATE,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_pes=pes,
        max_tokens=max(tokens),
    )
    inputs = build_inputs(cfg, tokens=tokens, seed=seed)
    group: dict[str, Any] = {
        "x": inputs.x,
        "topk_ids": inputs.topk_ids,
        "topk_weights": inputs.topk_weights,
    }
    bound_TH = torch.cat(error_bound(cfg, **group, w13=inputs.w13, w2=inputs.w2))

    progress.begin("compiling the kernel for sm_90a")
    testing.compiled(kernel_problem(cfg))

    progress.begin(f"simulating {pes} PEs")
    started = time.perf_counter()
    w13, w2 = split_experts(cfg, inputs.w13, inputs.w2)
    run = testing.run_vgpu(cfg, **group, w13=w13, w2=w2, seed=seed)
    seconds = time.perf_counter() - started

    error_TH = (torch.cat(run.y).double() - torch.cat(inputs.expected)).abs()
    result = {
        "pes": pes,
        "launches_per_pe": max(run.launches),
        "max_abs_err": float(error_TH.max()),
        "bound": float(bound_TH.max()),
        "within_bound": bool((error_TH <= bound_TH).all()),
        "rows": sum(run.counters["rows"]),
        "bytes_between_pes": int(run.counters["bytes_between_pes"]),
        "wgmma_flops": int(run.counters["wgmma_flops"]),
        "warp_instructions": int(run.counters["warp_instructions"]),
        "row_fetches": sum(run.counters["row_fetches"]),
        "bytes_read_by_role": run.counters["bytes_read_by_role"],
        "bytes_written_by_role": run.counters["bytes_written_by_role"],
        "seconds": round(seconds, 3),
    }
    return DemoRun(result=result, tokens=tokens, run=run)


@click.command("demo")
@click.option("--pes", type=click.IntRange(1, 8), default=4, show_default=True, help="PEs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and tokens.")
@click.option(
    "--out",
    "out_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write timeline.png into this folder.",
)
@JSON_OPTION
def demo_command(pes: int, seed: int, out_dir: Path | None, json_path: Path | None) -> None:
    """Run a Qwen3-MoE block through the fused kernel, simulated, and compare with Hugging Face.

    Needs no GPU. Exits with 1 if an element is outside its derived error bound or a PE needed
    more than one kernel launch.
    """
    Console().print(NOTICE, style="dim")
    with plain_errors(), steps(4) as progress:
        demo = run_demo(pes=pes, seed=seed, progress=progress)
        write_json(json_path, demo.result)
        if out_dir is not None:
            progress.begin("drawing timeline.png")
            from megamoe.timeline import activity_of, draw_timeline

            out_dir.mkdir(parents=True, exist_ok=True)
            draw_timeline(
                activity_of(demo.run.report),
                out_dir / "timeline.png",
                title=f"One fused forward on {pes} PEs (functional simulation)",
            )
    _print(demo)
    if out_dir is not None:
        Console().print(f"wrote {out_dir / 'timeline.png'}")
    if not demo.result["within_bound"] or set(demo.run.launches) != {1}:
        raise click.ClickException("the fused forward did not meet its bound in one launch per PE")
