"""Synchronisation objects: mbarriers, named barriers, cluster barriers, the register pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megamoe.runtime.vgpu.errors import SyncError
from megamoe.runtime.vgpu.ptx_ast import Instruction

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp
    from megamoe.runtime.vgpu.world import Cta, World

MAX_COUNT = (1 << 20) - 1


class Waitable:
    """Something groups of lanes can be suspended on."""

    def __init__(self) -> None:
        self.waiters: list[Any] = []
        self.hb: Any = None  # of a detector

    def wake(self, world: World) -> None:
        """Let every suspended group look again."""
        if self.waiters:
            waiting, self.waiters = self.waiters, []
            for group in waiting:
                world.wake(group)

    def describe(self) -> str:
        """The object's state for a deadlock report."""
        return type(self).__name__


class MBarrier(Waitable):
    """An mbarrier: arrivals and transaction bytes of the current phase.

    ``phase`` counts completed phases. The transaction count may be negative for a while: bytes
    can arrive before the expect.
    """

    def __init__(self, cta: Cta, offset: int, count: int) -> None:
        super().__init__()
        self.cta, self.offset = cta, offset
        self.expected = self.pending = count
        self.tx = self.phase = 0

    def describe(self) -> str:
        """Phase, arrivals still missing, bytes still expected."""
        return (
            f"mbarrier smem+{self.offset:#x}: phase {self.phase} (parity {self.phase & 1}), "
            f"{self.pending} of {self.expected} arrivals pending, tx {self.tx} bytes"
        )

    def arrive(self, count: int, world: World) -> None:
        """Count arrivals; the phase completes with the last one and no bytes outstanding."""
        if count > self.pending:
            raise SyncError(f"{count} arrivals on {self.describe()}: more than pending")
        self.pending -= count
        world.progress += 1
        if not self.pending and not self.tx:
            self.flip(world)

    def transact(self, delta: int, world: World) -> None:
        """Expect (positive) or complete (negative) transaction bytes."""
        self.tx += delta
        if not -MAX_COUNT <= self.tx <= MAX_COUNT:
            raise SyncError(f"transaction count out of range on {self.describe()}")
        world.progress += 1
        if not self.pending and not self.tx:
            self.flip(world)

    def expect(self, nbytes: int) -> None:
        """Expect bytes as part of an arrival, which comes next."""
        self.tx += nbytes
        if not -MAX_COUNT <= self.tx <= MAX_COUNT:
            raise SyncError(f"transaction count out of range on {self.describe()}")

    def flip(self, world: World) -> None:
        """Complete the phase and start the next."""
        self.phase += 1
        self.pending = self.expected
        if world.detector is not None:
            world.detector.mbarrier_phase(self)
        self.wake(world)


class NamedBarrier(Waitable):
    """One of a CTA's 16 barriers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.arrived = self.generation = 0
        self.expected: int | None = None
        self.values: list[bool] = []
        self.result: dict[str, int | bool] = {}

    def describe(self) -> str:
        """Arrivals so far."""
        want = "all threads" if self.expected is None else f"{self.expected} threads"
        return f"barrier {self.number}: {self.arrived} arrived of {want}"

    def arrive(self, w: Warp, ins: Instruction, threads: int, expected: int | None) -> None:
        """Count arriving threads; completes the barrier with the last."""
        if self.arrived and {expected, self.expected} == {None, w.cta.threads}:
            # Naming all threads is the same as naming no count.
            expected = self.expected = None
        if self.arrived and expected != self.expected:
            raise SyncError(
                f"{w.place()}: {ins.opcode} expects {expected} threads, others "
                f"{self.expected} on barrier {self.number} ({w.source(ins)})"
            )
        self.expected = expected
        self.arrived += threads
        if w.world.detector is not None:
            w.world.detector.barrier_arrive(w, ins, self)
        self.check(w.cta, w.world, w, ins)

    def check(self, cta: Cta, world: World, w: Warp | None = None, ins: Any = None) -> None:
        """Complete the barrier if everybody expected is there."""
        want = cta.alive_threads() if self.expected is None else self.expected
        if not self.arrived or self.arrived < want:
            return
        if self.arrived > want and self.expected is not None:
            where = f"{w.place()}: {ins.opcode}: " if w is not None else ""
            raise SyncError(f"{where}{self.arrived} threads on {self.describe()}")
        self.result = {
            "popc": sum(self.values), "and": all(self.values), "or": any(self.values)
        }  # fmt: skip
        self.arrived, self.values = 0, []
        self.generation += 1
        world.progress += 1
        self.wake(world)


class ClusterBarrier(Waitable):
    """The barrier of a cluster; exited threads count as arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived = self.generation = 0
        self.ctas: list[Cta] = []

    def describe(self) -> str:
        """Arrivals so far."""
        want = sum(c.alive_threads() for c in self.ctas)
        return f"cluster barrier: {self.arrived} arrived of {want} threads"

    def arrive(self, threads: int, world: World) -> None:
        """Count arriving threads."""
        self.arrived += threads
        self.check(world)

    def check(self, world: World) -> None:
        """Complete the phase if all live threads have arrived."""
        if self.arrived and self.arrived >= sum(c.alive_threads() for c in self.ctas):
            self.arrived = 0
            self.generation += 1
            world.progress += 1
            self.wake(world)


class RegisterPool(Waitable):
    """The register file of an SM as one CTA sees it, for ``setmaxnreg``."""

    def __init__(self, total: int, per_thread: int, warps: int) -> None:
        super().__init__()
        self.total = total
        self.free = total - 32 * per_thread * warps
        self.held = [per_thread] * warps

    def describe(self) -> str:
        """Registers left."""
        return f"register pool: {self.free} of {self.total} free"


# -- called from generated code ----------------------------------------------------------------
