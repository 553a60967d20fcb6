"""Kernels in the styles of the field run clean under the detector, and planted bugs are found.

The bugs are mutants: one synchronisation instruction of a kernel's PTX weakened or removed.
"""

from __future__ import annotations

import signal
from collections import Counter
from types import FrameType

import pytest
from small_kernels import KERNELS, SmallKernel

from megamoe.runtime.vgpu.errors import VgpuError
from megamoe.runtime.vgpu.mutate import Mutant, mutants_of

BY_NAME = {kernel.name: kernel for kernel in KERNELS}
POLICIES = (
    {"schedule": "round_robin", "completion": "eager"},
    {"schedule": "random", "completion": "late", "seed": 1},
    {"schedule": "starve", "completion": "random", "seed": 2},
)
HANG_S = 120

HARMLESS = {
    # The wait of a producer that has nothing left to load (`producer_tail`): without clusters the
    # consumers' last arrivals need nobody to wait for them; with clusters each of the waits covers
    # a CTA that the other ones cover too.
    "pingpong.py:take_turn:mbarrier.try_wait.parity.shared.b64:skip",
    "gemm.py:math:mbarrier.try_wait.parity.shared.b64:skip",
    # At the end of a CTA only the reads of its shared memory have to be over: the writes are, at
    # the host's next look.
    "gemm.py:math:cp.async.bulk.wait_group:read",
}


def category(mutant: Mutant) -> str:
    """The kind of bug, in the words of the issue."""
    opcode = mutant.opcode
    if opcode.startswith(("fence", "wgmma.fence")):
        return "missing fence"
    if opcode.startswith("mbarrier.init"):
        return "wrong arrival count"
    if "expect_tx" in opcode and mutant.kind in ("more", "less"):
        return "wrong expected bytes"
    if mutant.kind == "scope":
        return "wrong scope"
    if mutant.kind in ("relax", "acquire", "release", "weak"):
        return "missing order"
    if opcode.startswith("wgmma"):
        return "early release"
    if mutant.kind == "skip" or "wait" in opcode:
        return "missing wait"
    return "missing barrier or arrival"


CATEGORIES = (
    "missing fence", "wrong arrival count", "wrong expected bytes", "wrong scope",
    "missing order", "early release", "missing wait", "missing barrier or arrival",
)  # fmt: skip


def _hang(_signal: int, _frame: FrameType | None) -> None:
    raise TimeoutError


def complaint(kernel: SmallKernel, ptx: str) -> str:
    """What is wrong with a version of a kernel, empty if nothing."""
    signal.signal(signal.SIGALRM, _hang)
    for policy in POLICIES[:2]:
        signal.alarm(HANG_S)
        try:
            report = kernel.run(ptx, **policy)
        except (AssertionError, VgpuError, TimeoutError) as error:
            return type(error).__name__
        finally:
            signal.alarm(0)
        if report.findings:
            return report.findings[0].kind
    return ""


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p["schedule"])
@pytest.mark.parametrize("name", BY_NAME)
def test_clean_kernels_raise_no_alarm(name: str, policy: dict) -> None:
    kernel = BY_NAME[name]
    report = kernel.run(kernel.ptx(), **policy)
    assert report.findings == []


@pytest.mark.parametrize("kind", CATEGORIES)
def test_two_planted_bugs_of_each_kind_are_found(kind: str) -> None:
    planted = [
        (kernel, mutant)
        for kernel in KERNELS
        for mutant in mutants_of(kernel.ptx())
        if category(mutant) == kind and mutant.key not in HARMLESS
    ]
    # The first and the last: of different kernels wherever several have such an instruction.
    for kernel, mutant in (planted[0], planted[-1]):
        assert complaint(kernel, mutant.apply(kernel.ptx())), f"{kernel.name}: {mutant.description}"


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_mutant_is_found(name: str) -> None:
    kernel = BY_NAME[name]
    silent: Counter[str] = Counter()
    for mutant in mutants_of(kernel.ptx()):
        if not complaint(kernel, mutant.apply(kernel.ptx())):
            silent[mutant.key] += 1
    assert set(silent) <= HARMLESS
