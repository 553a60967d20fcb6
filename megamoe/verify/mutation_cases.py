"""What mutants of a kernel have to survive: runs small enough for hundreds of mutants, which
together execute every synchronising instruction where it matters.

All cases of one kernel share its compilation: only what a call brings differs. With one expert for
all slots, 3 · (all tokens) rows make few tiles of a chosen width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megamoe.cute_kernels.arith import round_up
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.verify.cases import Case
from megamoe.verify.runs import Run

MAX_CASE_TOKENS = 160
POLICIES = (("round_robin", "eager"), ("random", "late"))
"""The detector judges what is not ordered, whatever order a run took: policies only take turns."""

CASES: tuple[dict[str, Any], ...] = (
    {"name": "absent", "tokens": (20, 6), "fails": "absent", "timeout_s": 1e-3},
    {"name": "width_32", "tokens": (3, 5), "route": "one", "grid": 1},
    {"name": "width_8", "tokens": (1, 1), "route": "one", "grid": 1},
    {"name": "width_16", "tokens": (2, 3), "route": "one", "grid": 1},
    {"name": "width_64", "tokens": (10, 8), "route": "one", "grid": 1},
    {"name": "width_128", "tokens": (50, 10), "route": "one", "grid": 1},
    {"name": "invalid", "tokens": (100, 3), "fails": "invalid", "route": "none", "grid": 3},
    {"name": "routes", "tokens": (150, 3), "route": "one", "masked": 0.8, "grid": 1},
    {"name": "blocks", "tokens": (150, 3), "route": "one", "grid": 1},
    {"name": "blocks_of_two", "tokens": (150, 120), "route": "one", "grid": 2},
    {"name": "several_ctas", "tokens": (60, 40), "route": "one", "grid": 3},
    {"name": "two_calls", "tokens": (70, 5), "route": "pair", "calls": 2},
)
"""One run each."""

RING_CASES = (*CASES, {"name": "late_block", "tokens": (120, 0), "route": "crowd", "grid": 6})
"""The first block is free again before the second is full: who places the third one's rows finds
it free at the first look."""

PREREDUCED_CASES = (
    *CASES,
    {"name": "pairs", "tokens": (90, 60), "route": "pair", "grid": 4},
    {"name": "pairs_of_two", "tokens": (60, 60), "route": "pair", "grid": 2},
)
"""Tokens whose rows lie in blocks of two CTAs."""

MORE_RUNS = {
    "two_calls": (("starve", "eager", 6), ("starve", "eager", 3)),
    "blocks": (("starve", "eager", 0), ("starve", "eager", 3), ("random", "eager", 2)),
    "blocks_of_two": (("starve", "eager", 0), ("starve", "eager", 3)),
    "late_block": (("random", "late", 1),),
    "pairs": (("starve", "eager", 3),),
}
"""Case → policies and seeds in which a wait finds its word at the first look, or never in time:
load, a reduce warp, combine-send and recv-and-place starve; where combine-send does, math warps
send."""

HASTY: tuple[dict[str, Any], ...] = (
    {"name": "hasty_counts", "tokens": (150, 150), "masked": 0.8},
    {"name": "hasty_peer", "tokens": (40, 0), "route": "one"},
    {"name": "hasty_pair", "tokens": (60, 60), "route": "pair"},
    {"name": "hasty_rows", "tokens": (150, 0), "route": "one"},
)
"""Calls with deadlines so short that somebody gives up. Every wait has a copy of the code that
does, and each has to be the first to pass its deadline somewhere, in several CTAs of a PE at once:
that is what the deadlines and schedules below are spread over."""

PREREDUCED_HASTY = (
    *HASTY,
    {"name": "hasty_few", "tokens": (4, 0), "grid": 2},
    {"name": "hasty_tail", "tokens": (150, 0), "route": "one", "grid": 2},
)
"""On a PE without tokens of its own, whose combine-send warp starves: math warps without a tile
left wait for fc2 tiles of a slower CTA when nobody else waits for anything."""

DEADLINES = {
    "hasty_counts": (2e-9, 2e-6),
    "hasty_peer": (2e-5, 5e-5),
    "hasty_pair": (2e-5, 5e-5, 1e-4),
    "hasty_rows": (1e-6, 1e-5, 5e-5),
    "hasty_few": (4e-5,),
    "hasty_tail": (4e-5,),
}
HASTY_POLICIES = (
    ("round_robin", "eager", 1),
    ("random", "late", 0),
    ("starve", "late", 0),
    ("starve", "random", 1),
    ("starve", "late", 3),
)
SENDER_STARVES = (("starve", "eager", 8),)
MORE_HASTY_POLICIES = {"hasty_few": SENDER_STARVES, "hasty_tail": SENDER_STARVES}


@dataclass(frozen=True, kw_only=True)
class MutationGroup:
    """A kernel and what its mutants run.

    Args:
        name: of the kernel.
        features: further arguments of `MoEConfig`, which make it that kernel.
        config: what differs from the default `KernelConfig`.
        cases, hasty: what it runs.
    """

    name: str
    features: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    cases: tuple[dict[str, Any], ...] = CASES
    hasty: tuple[dict[str, Any], ...] = HASTY

    def case(self, **options: Any) -> Case:
        """A case of this kernel; its grid is whole clusters."""
        options["grid"] = round_up(options.get("grid", 2), self.cluster_size)
        return Case(
            top_k=3,
            max_tokens=MAX_CASE_TOKENS,
            features=self.features,
            config=self.config,
            **options,
        )

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster."""
        return KernelConfig(**dict(self.config)).cluster_size

    @property
    def runs(self) -> list[Run]:
        """All runs, in no particular order."""
        runs = []
        for number, options in enumerate(self.cases):
            case = self.case(**options)
            schedule, completion = POLICIES[number % 2]
            runs.append(Run(case=case, seed=1, schedule=schedule, completion=completion))
            for schedule, completion, seed in MORE_RUNS.get(case.name, ()):
                runs.append(Run(case=case, seed=seed, schedule=schedule, completion=completion))
        for options in self.hasty:
            for deadline in DEADLINES[options["name"]]:
                name = f"{options['name']}_{deadline:g}"
                hurry = {"name": name, "fails": "hasty", "timeout_s": deadline}
                case = self.case(**{"grid": 3, **options, **hurry})
                policies = MORE_HASTY_POLICIES.get(options["name"], HASTY_POLICIES)
                for schedule, completion, seed in policies:
                    runs.append(Run(case=case, seed=seed, schedule=schedule, completion=completion))
        return runs


GROUPS = (
    MutationGroup(name="direct"),
    MutationGroup(
        name="prereduced",
        features=(("combine", "prereduced"),),
        config=(("lag_waves", 8),),
        cases=PREREDUCED_CASES,
        hasty=PREREDUCED_HASTY,
    ),
    MutationGroup(name="ring", features=(("ring_rows", 256),), cases=RING_CASES),
)
"""Kernels in the order in which they are mutated. A ring of two blocks is the smallest there is;
with eight waves of fc1 ahead, CTAs end fc2 far apart."""
