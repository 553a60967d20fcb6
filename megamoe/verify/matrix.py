"""Many runs in parallel processes, and their sum."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.testing import compiled
from megamoe.verify.runs import Outcome, Run, execute


@dataclass(frozen=True, kw_only=True)
class MatrixResult:
    """Outcomes in the order of the runs."""

    outcomes: list[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """Runs with a defect."""
        return [o for o in self.outcomes if o.defects]

    def count(self, *kinds: str) -> int:
        """Defects of some kinds over all runs."""
        return sum(outcome.count(*kinds) for outcome in self.outcomes)

    def bytes_by_role(self) -> dict[str, dict[str, int]]:
        """Bytes of global memory by role and space (``vgpu.report.Report``), over all runs."""
        sums: dict[str, Counter[str]] = {}
        for outcome in self.outcomes:
            for role, spaces in outcome.bytes_by_role.items():
                sums.setdefault(role, Counter()).update(spaces)
        return {role: dict(sorted(spaces.items())) for role, spaces in sorted(sums.items())}

    def as_json(self) -> dict[str, Any]:
        """The counts of ``megamoe verify --json``."""
        return {
            "cases": len({o.run.case.name for o in self.outcomes}),
            "runs": len(self.outcomes),
            "races": self.count("race", "register_race", "transaction", "lifetime"),
            "poison_reads": self.count("poison_read"),
            "deadlocks": self.count("deadlock"),
            "wrong_results": self.count("wrong_result", "wrong_error"),
            "other_errors": self.count("memory_fault", "sync_error"),
            "warp_instructions": sum(o.warp_instructions for o in self.outcomes),
            "bytes": self.bytes_by_role(),
            "findings": [
                {"run": str(o.run), "kind": d.kind, "text": d.text}
                for o in self.outcomes
                for d in o.defects
            ],
        }


def _one(run: Run) -> Outcome:
    outcome = execute(run)
    if not outcome.defects:
        outcome.report = None
    outcome.lines = frozenset()
    return outcome


def run_matrix(
    runs: Sequence[Run],
    *,
    processes: int = 2,
    tick: Callable[[str], None] = lambda _: None,
) -> MatrixResult:
    """Execute runs, ``processes`` at a time; kernels are compiled beforehand, once each."""
    kernels = {kernel: None for run in runs for kernel in run.case.kernels.values()}
    for problem, config in kernels:
        tick("")
        compiled(problem, config)
    torch.set_num_threads(1)  # forked workers must not inherit a pool of threads
    outcomes = []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for outcome in pool.imap(_one, runs):
            tick(str(outcome.run))
            outcomes.append(outcome)
    return MatrixResult(outcomes=outcomes)
