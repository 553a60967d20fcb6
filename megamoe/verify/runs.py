"""One run of a case under the race detector, and what it found.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megamoe import testing
from megamoe.cute_kernels.image import Image
from megamoe.runtime.devices.vgpu import kernel_of
from megamoe.runtime.errors import (
    InvalidExpertId,
    MegaMoEError,
    MegaMoETimeout,
    PoolCapacityError,
)
from megamoe.runtime.vgpu.errors import Deadlock, MemoryFault, SyncError, VgpuError
from megamoe.runtime.vgpu.findings import Finding, FindingError, Findings
from megamoe.runtime.vgpu.race_detector import RaceDetector
from megamoe.runtime.vgpu.schedule import SCHEDULES
from megamoe.runtime.vgpu.world import COMPLETIONS, World
from megamoe.testing import VgpuMoE
from megamoe.verify.attempts import attempt, expected_outputs
from megamoe.verify.cases import Case, layer
from megamoe.verify.inputs import Inputs
from megamoe.verify.regions import named_finding, region_of

FAILURES: dict[str, type[MegaMoEError]] = {
    "capacity": PoolCapacityError,
    "absent": MegaMoETimeout,
    "hasty": MegaMoETimeout,
    "invalid": InvalidExpertId,
}
_VGPU_KINDS: tuple[tuple[type[VgpuError], str], ...] = (
    (Deadlock, "deadlock"),
    (MemoryFault, "memory_fault"),
    (SyncError, "sync_error"),
)
DRY_DATA = (
    "pool_x",
    "pool_h",
    "row_meta",
    "d_weight",
    *(f"saved.{name}" for name in ("x", "gate", "up")),
    *(f"dgrad.{name}" for name in ("dy", "gate", "up", "dgu", "wact")),
)
"""Once a PE has given up on an epoch, its pipelines run dry over rows that never came
(docs/protocol.md, Errors): what is computed there is sent to nobody, so what is read there does
not count as a defect. Signals, status words, shared memory and peers' memory count as ever."""
STALL_INSTRUCTIONS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """What decides a run completely."""

    case: Case
    seed: int = 0
    schedule: str = "round_robin"
    completion: str = "eager"

    def __str__(self) -> str:
        return f"{self.case.name}, seed {self.seed}, {self.schedule}, {self.completion}"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One thing that is wrong: ``kind`` is a finding's kind, ``deadlock``, ``memory_fault``,
    ``sync_error``, ``wrong_result``, ``wrong_error`` or ``unfinished``."""

    kind: str
    text: str
    finding: Finding | None = None


@dataclass(kw_only=True)
class Outcome:
    """What a run found. ``lines`` are the PTX lines that were executed; ``bytes_by_role`` as in the
    report of vgpu, over all calls."""

    run: Run
    defects: list[Defect] = field(default_factory=list)
    warp_instructions: int = 0
    bytes_by_role: dict[str, Counter[str]] = field(default_factory=dict)
    seconds: float = 0.0
    report: Any = None
    lines: frozenset[int] = frozenset()

    def count(self, *kinds: str) -> int:
        """Defects of some kinds."""
        return sum(defect.kind in kinds for defect in self.defects)


def counts(case: Case, finding: Finding) -> bool:
    """False for what an abandoned epoch may do: touch `DRY_DATA`, or use in shared memory
    never-written bytes that load, which copies nothing else, brought there. The finding is a named
    one."""
    if case.fails not in ("absent", "hasty"):
        return True
    region, source = region_of(finding), finding.access_1
    loaded = source is not None and source.role == "load" and region == "smem"
    return region not in DRY_DATA and not (finding.kind == "poison_read" and loaded)


class _FirstFinding(Findings):
    """Stops the run at the first finding that counts."""

    def __init__(self, case: Case) -> None:
        super().__init__(limit=100)
        self.case = case
        self.problem, self.config = case.kernel

    def add(self, *args: Any, **kwargs: Any) -> None:
        super().add(*args, **kwargs)
        if counts(self.case, named_finding(self.items[-1], self.problem, self.config)):
            raise FindingError(str(self.items[-1]))


@functools.lru_cache(maxsize=64)
def data_of(case: Case, seed: int) -> list[tuple[Inputs, list[torch.Tensor] | None]]:
    """Inputs and expected outputs of each call; all calls use the layer of the first."""
    first = case.inputs(seed=seed)
    calls = []
    for number in range(case.calls):
        layer_of = {name: getattr(first, name) for name in ("w13", "w2", "b13", "b2")}
        data = replace(case.inputs(seed=seed + number), **layer_of)
        wants = case.fails in ("", "invalid")
        calls.append((data, expected_outputs(case, data) if wants else None))
    return calls


def execute(
    run: Run,
    *,
    image: Image | None = None,
    first_only: bool = False,
    detect: bool = True,
    watch: Callable[[World], None] | None = None,
) -> Outcome:
    """Run a case and compare everything with what it should give.

    Args:
        run: what to run.
        image: the kernel; None = the one of the case.
        first_only: stop at the first finding.
        detect: with the race detector.
        watch: gets the world before the first call.
    """
    started = time.perf_counter()
    calls = data_of(run.case, run.seed)
    image = image or testing.compiled(*run.case.kernel)
    moe = layer(
        run.case, calls[0][0], seed=run.seed, schedule=run.schedule, completion=run.completion,
        detect=detect, image=image,
    )  # fmt: skip
    moe.world.stall_instructions = STALL_INSTRUCTIONS
    if first_only and isinstance(moe.world.detector, RaceDetector):
        moe.world.detector.core.findings = _FirstFinding(run.case)
    if watch is not None:
        watch(moe.world)
    outcome = Outcome(run=run)
    for number, (data, want) in enumerate(calls):
        _call(moe, outcome, data, want, in_place=number % 2 == 1)
        if outcome.defects:
            break
    outcome.lines = _executed(image)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _call(
    moe: VgpuMoE, outcome: Outcome, data: Inputs, want: list[torch.Tensor] | None, *, in_place: bool
) -> None:
    case, defects = outcome.run.case, outcome.defects
    failure = FAILURES.get(case.fails)
    reports: list[Any] = []
    try:
        wrong = attempt(moe, case, data, want, in_place=in_place, reports=reports)
        if wrong:
            defects.append(Defect(kind="wrong_result", text=f"{outcome.run}: {wrong}"))
        if failure is not None:
            defects.append(Defect(kind="wrong_error", text=f"no {failure.__name__} was raised"))
    except FindingError as error:
        reports.append(error.report)
    except VgpuError as error:
        kind = next((k for t, k in _VGPU_KINDS if isinstance(error, t)), "sync_error")
        defects.append(Defect(kind=kind, text=f"{type(error).__name__}: {error}"))
        reports.append(error.report)
    except MegaMoEError as error:
        reports.append(moe.group.last_report)
        if failure is None or not isinstance(error, failure):
            kind = "deadlock" if isinstance(error, MegaMoETimeout) else "wrong_error"
            defects.append(Defect(kind=kind, text=f"{type(error).__name__}: {error}"))
    for report in filter(None, reports):
        outcome.report = report
        outcome.warp_instructions += report.warp_instructions
        for role, spaces in report.bytes_by_role.items():
            outcome.bytes_by_role.setdefault(role, Counter()).update(spaces)
        findings = [named_finding(f, *case.kernel) for f in report.findings]
        defects += [
            Defect(kind=f.kind, text=f.message, finding=f) for f in findings if counts(case, f)
        ]


def _executed(image: Image) -> frozenset[int]:
    """PTX lines of the blocks that have run since the kernel was decoded."""
    return frozenset(
        op.ins.line
        for block in kernel_of(image).program.blocks
        for version in (block.full, block.part)
        if version.funcs
        for op in version.ops
    )


def plan_runs(
    cases: Sequence[Case], *, seeds: int, schedule: str | None = None, completion: str | None = None
) -> list[Run]:
    """Every case with every seed; policies that are not given take turns."""
    schedules = SCHEDULES if schedule is None else (schedule,)
    completions = COMPLETIONS if completion is None else (completion,)
    policies = list(itertools.product(schedules, completions))
    return [
        Run(case=case, seed=seed, schedule=policy[0], completion=policy[1])
        for index, case in enumerate(cases)
        for seed in range(seeds)
        for policy in [policies[(index + seed * 2) % len(policies)]]
    ]
