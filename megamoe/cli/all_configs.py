"""``megamoe compile --all-configs``: every form of the kernel for the layers of known models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

GPT_OSS: dict[str, Any] = {
    "activation": "gpt_oss",
    "activation_limit": 7.0,
    "w13_layout": "interleaved",
    "w13_transposed": True,
    "w2_transposed": True,
    "fc1_bias": True,
    "fc2_bias": True,
}
LAYERS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "Mixtral-8x7B": ((4096, 14336, 8, 2), {}),
    "Qwen3-30B-A3B": ((2048, 768, 128, 8), {}),
    "Qwen3-235B-A22B": ((4096, 1536, 128, 8), {}),
    "DeepSeek-V2-Lite": ((2048, 1408, 64, 6), {}),
    "DeepSeek-V3": ((7168, 2048, 256, 8), {}),
    "4096/2048/256/6": ((4096, 2048, 256, 6), {}),
    "7168/3072/384/6": ((7168, 3072, 384, 6), {}),
    "gpt-oss-20b": ((2880, 2880, 32, 4), GPT_OSS),
    "gpt-oss-120b": ((2880, 2880, 128, 4), GPT_OSS),
    "GLM-4.5": ((5120, 1536, 160, 8), {}),
    "Kimi-K2": ((7168, 2048, 384, 8), {}),
}
"""H, I, E, K, and what differs from the defaults."""
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "16 warps": {"service_warps": 8, "math_registers": 200},
    "128 rows": {"block_n": 128},
    "64 rows": {"block_n": 64},
    "64 rows, 4 parts": {"block_n": 64, "split_k": 4},
    "shared weights": {"cluster": "weights"},
    "shared tokens": {"cluster": "tokens"},
}
"""Fields that differ from the layer's default config."""
PES = 8
MAX_TOKENS = 4096


def forms_of(problem: Any) -> dict[str, Any]:
    """The forms that serve a layer, each with the deepest pipeline that fits.

    Raises:
        ValueError: a form fits with no depth.
    """
    from megamoe.cute_kernels.kernel_config import check_fits
    from megamoe.cute_kernels.smem import SharedMap, default_config

    found = {}
    for name, changes in FORMS.items():
        config = replace(default_config(problem), **changes)
        check_fits(problem, config)
        for stages, ring_slots in ((s, r) for s in (config.stages, 3, 2) for r in (4, 3, 2)):
            deepest = replace(config, stages=stages, ring_slots=ring_slots)
            try:
                SharedMap.of(problem, deepest)
            except ValueError:
                continue
            found[name] = deepest
            break
        else:
            raise ValueError(f"{name}: no depth fits")
    return found


def compile_all(context: click.Context, _: click.Parameter, chosen: bool) -> None:
    """Compile, print one row a kernel, and leave the command; an unsound one ends it with 1."""
    if not chosen:
        return
    from megamoe.config import MoEConfig
    from megamoe.lowering import kernel_problem
    from megamoe.runtime.cache import default_cache
    from megamoe.runtime.parallel import compile_many

    jobs, names = [], []
    for layer, ((hidden, intermediate, experts, top_k), features) in LAYERS.items():
        problem = kernel_problem(
            MoEConfig(
                hidden=hidden,
                intermediate=intermediate,
                num_experts=experts,
                top_k=top_k,
                num_pes=PES,
                max_tokens=MAX_TOKENS,
                **features,
            )
        )
        for form, config in forms_of(problem).items():
            jobs.append((problem, config))
            names.append((layer, form))
    images = compile_many(jobs, cache=default_cache(), workers=2)
    click.echo("| layer | form | registers | spills | smem, bytes | `setmaxnreg` | notes |")
    click.echo("|---|---|---|---|---|---|---|")
    unsound = 0
    for (layer, form), (_problem, config), image in zip(names, jobs, images, strict=True):
        kept = "kept" if image.setmaxnreg_kept else "IGNORED" if config.reallocates else "unused"
        unsound += image.spill_bytes > 0 or image.wgmma_serialised or kept == "IGNORED"
        click.echo(
            f"| {layer} | {form} | {image.registers} | {image.spill_bytes} | {image.smem_bytes} "
            f"| {kept} | {'; '.join(image.notes) or 'none'} |"
        )
    context.exit(1 if unsound else 0)
