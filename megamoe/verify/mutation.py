"""Mutation testing: every mutant of the shipped kernels is reported, or known as equivalent.

Mutants run in parallel processes, on the runs that execute the mutated instruction, cheapest
first, and stop at the first defect. `equivalent.json` lists the mutants that change nothing, by
place, opcode and kind, each with a reason that a reader can check in the source; they too run, but
only on the cheapest `SPOT_CHECKS` runs.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megamoe.cute_kernels.image import Image
from megamoe.runtime.vgpu.errors import VgpuError
from megamoe.runtime.vgpu.mutate import Mutant, mutants_of
from megamoe.testing import compiled
from megamoe.verify.mutation_cases import GROUPS, MutationGroup
from megamoe.verify.runs import Outcome, Run, data_of, execute

EQUIVALENT_FILE = Path(__file__).with_name("equivalent.json")
PATIENCE = 10.0
"""A mutant that runs so many times longer than the kernel, plus a margin, hangs."""
MARGIN_S = 60.0
SPOT_CHECKS = 3


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a mutant: ``killed_by`` names the run and defect, empty if nobody saw it;
    ``runs`` are the runs that execute its instruction (for a killed one, those up to the kill);
    ``kernel`` is the group's name."""

    mutant: Mutant
    kernel: str = ""
    killed_by: str = ""
    kind: str = ""
    reason: str = ""
    runs: int = 0

    @property
    def name(self) -> str:
        """Kernel and key, with the number of the copy."""
        return f"{self.kernel}: {self.mutant.key}#{self.mutant.copy}"

    @property
    def state(self) -> str:
        """``killed``, ``equivalent`` or ``survivor``."""
        return "killed" if self.killed_by else "equivalent" if self.reason else "survivor"


@dataclass(kw_only=True)
class MutationResult:
    """All verdicts. ``unused`` are entries of the equivalent list that no mutant needs."""

    verdicts: list[Verdict]
    unused: list[str] = field(default_factory=list)

    def of(self, state: str) -> list[Verdict]:
        """Verdicts of one state."""
        return [v for v in self.verdicts if v.state == state]

    def as_json(self) -> dict[str, Any]:
        """The ``mutation`` object of ``megamoe verify --json``."""
        kernels = Counter(v.kernel for v in self.verdicts)
        return {
            "mutants": len(self.verdicts),
            "killed": len(self.of("killed")),
            "kernels": dict(kernels),
            "equivalent": [
                {"mutant": v.mutant.description, "key": v.name, "reason": v.reason}
                for v in self.of("equivalent")
            ],
            "survivors": [
                {"mutant": v.mutant.description, "key": v.name, "runs": v.runs}
                for v in self.of("survivor")
            ],
            "unused_equivalent": self.unused,
        }


def equivalent_reasons(kernel: str, path: Path = EQUIVALENT_FILE) -> dict[str, str]:
    """Mutant key, or ``key#copy`` where only some copies of an instruction are needless: reason.
    Entries with ``kernels`` are for those only: others number their copies differently."""
    return {
        key: entry["reason"]
        for entry in json.loads(path.read_text())
        if kernel in entry.get("kernels", (kernel,))
        for key in entry["keys"]
    }


def entry_of(mutant: Mutant, reasons: dict[str, str]) -> str:
    """The entry of the equivalent list that names a mutant; empty if none does."""
    names = (mutant.key, f"{mutant.key}#{mutant.copy}")
    return next((name for name in names if name in reasons), "")


def unchanged(run: Run) -> Outcome:
    """Run the unchanged kernel, decoded anew, so that the executed lines are those of this run."""
    image: Image = _SHARED["image"]
    outcome = execute(run, image=replace(image, ptx=f"{image.ptx}\n// {run}\n"))
    outcome.report = None
    return outcome


class _Hang(Exception):
    """A mutant took far longer than the kernel."""


def _alarm(_signal: int, _frame: Any) -> None:
    raise _Hang


# What forked workers inherit: the kernel and the outcomes of the unchanged kernel.
_SHARED: dict[str, Any] = {}


def judge(mutant: Mutant) -> Verdict:
    """Run one mutant until something is wrong with it."""
    image, outcomes = _SHARED["image"], _SHARED["outcomes"]
    mutated = replace(image, ptx=mutant.apply(image.ptx))
    listed = bool(entry_of(mutant, _SHARED["reasons"]))
    covering = [clean for clean in outcomes if mutant.line in clean.lines]
    for done, clean in enumerate(covering[:SPOT_CHECKS] if listed else covering, 1):
        signal.signal(signal.SIGALRM, _alarm)
        signal.alarm(int(MARGIN_S + PATIENCE * clean.seconds))
        try:
            outcome = execute(clean.run, image=mutated, first_only=True)
        except _Hang:
            return Verdict(mutant=mutant, killed_by=f"{clean.run}: hangs", kind="hang", runs=done)
        finally:
            signal.alarm(0)
        if outcome.defects:
            defect = outcome.defects[0]
            text = f"{clean.run}: {defect.text}"
            return Verdict(mutant=mutant, killed_by=text, kind=defect.kind, runs=done)
    return Verdict(mutant=mutant, runs=len(covering))


def fresh(mutants: Sequence[Mutant], known: Counter[str]) -> list[Mutant]:
    """The mutants of instructions of which a kernel has another number than those before it: the
    rest is the same code in the same place, whose mutants have been judged there."""
    counts = Counter(mutant.key for mutant in mutants)
    return [mutant for mutant in mutants if counts[mutant.key] != known[mutant.key]]


def run_mutation(
    *,
    groups: Sequence[MutationGroup] = GROUPS,
    every: bool = False,
    processes: int = 2,
    chosen: Callable[[Mutant], bool] = lambda _: True,
    tick: Callable[[str], None] = lambda _: None,
    total: Callable[[int], None] = lambda _: None,
) -> MutationResult:
    """Judge the mutants of some kernels.

    Args:
        groups: the kernels and their runs.
        every: all mutants of each kernel; else those that are `fresh` after the kernels before it.
        processes: how many at a time.
        chosen: which mutants; the default is all of them.
        tick: told what has just been done; total: told how many ticks there will be.

    Raises:
        VgpuError: an unchanged kernel is not clean.
    """
    plans = []
    known: Counter[str] = Counter()
    for group in groups:
        ((problem, config),) = {run.case.kernel for run in group.runs}
        image = compiled(problem, config)
        mutants = mutants_of(image.ptx)
        wanted = mutants if every else fresh(mutants, known)
        known |= Counter(mutant.key for mutant in mutants)
        plans.append((group, image, [mutant for mutant in wanted if chosen(mutant)]))
    total(sum(len(group.runs) + len(mutants) for group, _, mutants in plans))
    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    verdicts: list[Verdict] = []
    entries: set[tuple[str, str]] = set()
    used: set[tuple[str, str]] = set()
    for group, image, mutants in plans:
        reasons = equivalent_reasons(group.name)
        entries |= set(reasons.items())
        for verdict in _judge_all(group, image, mutants, reasons, processes, tick):
            entry = "" if verdict.killed_by else entry_of(verdict.mutant, reasons)
            if entry:
                used.add((entry, reasons[entry]))
                verdict = replace(verdict, reason=reasons[entry])
            verdicts.append(replace(verdict, kernel=group.name))
    return MutationResult(verdicts=verdicts, unused=sorted(key for key, _ in entries - used))


def _judge_all(
    group: MutationGroup, image: Image, mutants: Sequence[Mutant], reasons: dict[str, str],
    processes: int, tick: Callable[[str], None],
) -> list[Verdict]:  # fmt: skip
    """Verdicts on the mutants of one kernel, in the order of the text."""
    runs = group.runs
    _SHARED.update(image=image, reasons=reasons)
    outcomes: list[Outcome] = []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for outcome in pool.imap_unordered(unchanged, runs):
            tick(f"{group.name}, unchanged: {outcome.run}")
            if outcome.defects:
                raise VgpuError(f"{outcome.run}, unchanged: {outcome.defects[0].text}")
            outcomes.append(outcome)
    for run in runs:
        data_of(run.case, run.seed)
    _SHARED["outcomes"] = sorted(outcomes, key=lambda o: o.warp_instructions)
    verdicts = []
    gc.collect()
    gc.freeze()  # forked workers share these pages as long as nobody counts references anew
    # A worker is replaced now and then: every decoded mutant stays in its memory.
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=16) as pool:
        for verdict in pool.imap_unordered(judge, mutants):
            tick(f"{verdict.state}: {verdict.mutant.key}#{verdict.mutant.copy}")
            verdicts.append(verdict)
    return sorted(verdicts, key=lambda v: (v.mutant.line, v.mutant.kind))
