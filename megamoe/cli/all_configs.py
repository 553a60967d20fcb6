"""``megamoe compile --all-configs``: every form of the forward for the layers of known models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megamoe.cli.common import counter, write_json

if TYPE_CHECKING:
    from megamoe.cute_kernels.image import Image
    from megamoe.cute_kernels.kernel_config import KernelConfig
    from megamoe.cute_kernels.problem import Problem

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
PES = 8
MAX_TOKENS = 4096
PARTS = 4
"""``split_k`` of the forms that split; the code is the same for any number above 1."""
MATH_REGISTERS = {4: 224, 8: 200}
"""By ``service_warps``: what two math warpgroups can have."""


def form_name(config: KernelConfig) -> str:
    """What tells a form from the others of its layer."""
    parts = [f"{config.block_n} rows"]
    if config.split_k > 1:
        parts.append(f"{config.split_k} parts")
    if config.cluster != "none":
        parts.append(f"shared {config.cluster}")
    if config.service_warps == 8:
        parts.append("8 service warps")
    return ", ".join(parts)


def forms_of(problem: Problem) -> dict[str, KernelConfig]:
    """Every form that serves a layer, by name: all values of the fields that change the code's
    structure, each form with the deepest pipeline that fits.

    Raises:
        ValueError: a form that serves the layer fits with no depth.
    """
    from megamoe.cute_kernels.kernel_config import BLOCKS_N, CLUSTERS, check_fits
    from megamoe.cute_kernels.smem import deepest, default_config

    base = default_config(problem)
    found = {}
    for service_warps, block_n, split_k, cluster in itertools.product(
        MATH_REGISTERS, BLOCKS_N, (1, PARTS), CLUSTERS
    ):
        try:
            config = replace(
                base,
                service_warps=service_warps,
                math_registers=MATH_REGISTERS[service_warps],
                block_n=block_n,
                split_k=split_k,
                cluster=cluster,
            )
            check_fits(problem, config)
        except ValueError:
            continue  # refused by rule, not for its size
        found[form_name(config)] = deepest(problem, config)
    return found


def layer_problem(name: str) -> Problem:
    """The problem of a layer of ``LAYERS``."""
    from megamoe.config import MoEConfig
    from megamoe.lowering import kernel_problem

    (hidden, intermediate, experts, top_k), features = LAYERS[name]
    cfg = MoEConfig(
        hidden=hidden,
        intermediate=intermediate,
        num_experts=experts,
        top_k=top_k,
        num_pes=PES,
        max_tokens=MAX_TOKENS,
        **features,
    )
    return kernel_problem(cfg)


def _jobs(forms: tuple[str, ...]) -> Iterator[tuple[str, str, Problem, KernelConfig]]:
    """Layer, form, problem and config; form by form, so that a run cut short saw every layer."""
    problems = {layer: layer_problem(layer) for layer in LAYERS}
    found = [
        (layer, form, problem, config)
        for layer, problem in problems.items()
        for form, config in forms_of(problem).items()
    ]
    names = list(dict.fromkeys(form for _, form, _, _ in found))
    unknown = set(forms) - set(names)
    if unknown:
        raise ValueError(f"form={min(unknown)!r}: must be one of {names}")
    chosen = [job for job in found if not forms or job[1] in forms]
    yield from sorted(chosen, key=lambda job: names.index(job[1]))


def report(layer: str, form: str, image: Image) -> dict[str, Any]:
    """What the compiler said of one kernel, and whether it is sound."""
    return {
        "layer": layer,
        "form": form,
        "config": asdict(image.config),
        "threads": image.threads,
        "registers": image.registers,
        "spill_bytes": image.spill_bytes,
        "smem_bytes": image.smem_bytes,
        "setmaxnreg": image.setmaxnreg_state,
        "wgmma_serialised": image.wgmma_serialised,
        "notes": list(image.notes),
        "compile_seconds": round(image.compile_seconds, 3),
        "sound": image.sound,
    }


def compile_all(
    *, arch: str, workers: int, forms: tuple[str, ...] = (), json_path: Path | None = None
) -> bool:
    """Compile, print one row a kernel, and write the JSON file; True if all are sound.

    Every kernel goes to the image cache as it is ready, so that a run that was cut short goes on
    where it ended.

    Args:
        forms: names of `form_name`; none: all.

    Raises:
        ValueError: no form has such a name.
    """
    from megamoe.runtime.cache import default_cache
    from megamoe.runtime.parallel import compile_many

    jobs = list(_jobs(forms))
    with counter() as (tick, total):
        total(len(jobs))

        def done(index: int, compiled: bool) -> None:
            tick(" ".join(jobs[index][:2]))

        images = compile_many(
            [job[2:] for job in jobs],
            cache=default_cache(),
            arch=arch,
            workers=workers,
            on_done=done,
        )
    rows = [report(*job[:2], image) for job, image in zip(jobs, images, strict=True)]
    click.echo(
        "| layer | form | warps | stages, row slots | registers | spills | smem, bytes "
        "| `setmaxnreg` | notes |"
    )
    click.echo("|---" * 9 + "|")
    for row in rows:
        config = row["config"]
        click.echo(
            f"| {row['layer']} | {row['form']} | {row['threads'] // 32} | {config['stages']}, "
            f"{config['ring_slots']} | {row['registers']} | {row['spill_bytes']} "
            f"| {row['smem_bytes']} | {row['setmaxnreg']} | {'; '.join(row['notes']) or 'none'} |"
        )
    sound = all(row["sound"] for row in rows)
    click.echo(f"{len(rows)} kernels, {sum(not row['sound'] for row in rows)} unsound")
    write_json(
        json_path,
        {"arch": arch, "pes": PES, "max_tokens": MAX_TOKENS, "sound": sound, "kernels": rows},
    )
    return sound
