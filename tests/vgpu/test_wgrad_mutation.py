"""Every synchronisation instruction of wgrad is needed, and vgpu notices when one is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from wgrad_harness import WgradCase, image_of, run

from megamoe.cute_kernels.image import Image
from megamoe.runtime.vgpu.errors import VgpuError
from megamoe.runtime.vgpu.mutate import Mutant, mutants_of

CASE = WgradCase(rows=((70, 0, 128, 1), (65, 3, 0, 64)), bias="bf16")
"""Tails, empty experts, two saved calls; the two stages wrap many times."""
RUNS = (("round_robin", "late"), ("random", "eager"))
EQUIVALENT = {
    "wgrad_load.py:acquire_maps:fence.proxy.tensormap::generic.acquire.sys:scope": (
        "The host wrote the maps before the launch; a fence of gpu scope covers what a launch has "
        "ordered before it. The documented pattern for maps of the host has sys scope."
    ),
    "wgrad_load.py:wgrad_load_role:mbarrier.arrive.expect_tx.release.cta.shared::cta.b64:relax": (
        "The arriving lane has written nothing that the waiters read: bytes are ordered by their "
        "completion, and the zeroing of one tail by another warp's next by the barrier of all math "
        "threads."
    ),
}
SAMPLE = (
    ("zero_tail", "fence.proxy.async.shared", "drop"),
    ("zero_tail", "bar.sync", "drop"),
    ("wgrad_math.py", "mbarrier.arrive.release", "drop"),
)


def fate(mutant: Mutant, image: Image) -> str:
    """How a mutant is noticed; empty if it is not."""
    mutated = replace(image, ptx=mutant.apply(image.ptx))
    for seed, (schedule, completion) in enumerate(RUNS):
        try:
            got, want, _ = run(
                CASE, image=mutated, seed=seed, schedule=schedule, completion=completion,
                detect=True, stall_instructions=300_000,
            )  # fmt: skip
        except VgpuError as error:
            return type(error).__name__
        for name, values in got.items():
            if not torch.equal(values.double(), want[name]):
                return f"wrong {name}"
    return ""


def test_a_sample_of_mutants() -> None:
    image = image_of(CASE.problem, CASE.config)
    chosen = [
        mutant
        for mutant in mutants_of(image.ptx)
        if any(
            place in mutant.place and mutant.opcode.startswith(opcode) and mutant.kind == kind
            for place, opcode, kind in SAMPLE
        )
    ]
    assert len(chosen) >= 3
    assert [m.description for m in chosen if not fate(m, image)] == []


@pytest.mark.slow
def test_every_mutant_is_noticed_or_equivalent() -> None:
    image = image_of(CASE.problem, CASE.config)
    mutants = mutants_of(image.ptx)
    assert len(mutants) >= 25
    survivors = {mutant.key: mutant.description for mutant in mutants if not fate(mutant, image)}
    assert survivors.keys() == EQUIVALENT.keys(), survivors
