"""Who runs next: round robin, seeded random, or starvation of one warp."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp

SCHEDULES = ("round_robin", "random", "starve")
QUANTUM = 64
_SPIN_EVERY = 16
PATIENCE = 4
"""Rounds of polling without effect after which a starved warp gets a turn."""


class Scheduler:
    """Ready warps, and warps that poll in vain, in round-robin order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ready: deque[Warp] = deque()
        self.spinners: deque[Warp] = deque()
        self.turns = 0

    def add(self, w: Warp) -> None:
        """A warp can run."""
        if not w.queued:
            w.queued = True
            (self.spinners if w.spinning else self.ready).append(w)

    def next(self) -> tuple[Warp, int] | None:
        """The next ready warp and its quantum in blocks; None if only spinners are left."""
        self.turns += 1
        if self.spinners and self.turns % _SPIN_EVERY == 0:
            self.ready.append(self.spinners.popleft())
        if not self.ready:
            return None
        w = self.ready.popleft()
        w.queued = False
        return w, QUANTUM

    def take_spinners(self) -> list[Warp]:
        """All spinning warps, for one round of polling."""
        out = list(self.spinners)
        self.spinners.clear()
        for w in out:
            w.queued = False
        return out


class RandomScheduler(Scheduler):
    """Any ready warp, for a random number of blocks."""

    def next(self) -> tuple[Warp, int] | None:
        """A random ready warp."""
        if self.spinners and self.random.random() < 1 / _SPIN_EVERY:
            i = self.random.randrange(len(self.spinners))
            self.spinners.rotate(-i)
            self.ready.append(self.spinners.popleft())
        if not self.ready:
            return None
        i = self.random.randrange(len(self.ready))
        self.ready.rotate(-i)
        w = self.ready.popleft()
        w.queued = False
        return w, self.random.choice((1, 1, 2, 4, 16, QUANTUM))


class StarveScheduler(Scheduler):
    """Priorities: one seeded warp of every CTA runs only while no other gets anywhere, not even
    after some rounds of polling; the rest by rank."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.victim = self.random.randrange(1 << 16)
        self.salt = self.random.randrange(1 << 30)
        self.patience = PATIENCE

    def rank(self, w: Warp) -> tuple[bool, int]:
        """Lower runs first."""
        starved = w.index == self.victim % len(w.cta.warps)
        key = hash((w.pe, w.cta.number, w.index, self.salt))
        return starved, key

    def next(self) -> tuple[Warp, int] | None:
        """The ready warp of highest priority, spinners every now and then; None while the starved
        ones have to be patient."""
        self.turns += 1
        if self.spinners and self.turns % (4 * _SPIN_EVERY) == 0:
            self.ready.append(self.spinners.popleft())
        if not self.ready:
            return None
        w = min(self.ready, key=self.rank)
        if not self.rank(w)[0]:
            self.patience = PATIENCE
        elif self.patience > 0:
            self.patience -= 1
            return None
        else:
            self.patience = PATIENCE
        self.ready.remove(w)
        w.queued = False
        return w, QUANTUM


def make_scheduler(name: str, seed: int) -> Scheduler:
    """The scheduler of a name."""
    kinds = {"round_robin": Scheduler, "random": RandomScheduler, "starve": StarveScheduler}
    if name not in kinds:
        raise ValueError(f"schedule={name!r}: allowed are {', '.join(SCHEDULES)}")
    return kinds[name](seed)
