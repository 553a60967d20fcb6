"""Synchronisation objects: mbarriers, named barriers, cluster barriers, the register pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.errors import SyncError
from megamoe.runtime.vgpu.ptx_ast import Instruction

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp
    from megamoe.runtime.vgpu.world import Cta, World

MAX_COUNT = (1 << 20) - 1
ALIGNED_WARP = 32


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
def uniform(w: Warp, value: Any) -> int:
    """An operand that must be the same in all active lanes."""
    if type(value) in (int, bool):
        return int(value)
    return int(value[(w.cur.bits & -w.cur.bits).bit_length() - 1])


def lane_values(w: Warp, *values: Any) -> list[tuple]:
    """One tuple of numbers per active lane."""
    bits = w.cur.bits
    lanes = [i for i in range(32) if bits >> i & 1]
    columns: list[Any] = [
        v if type(v) is int else [int(v[i]) for i in lanes] for v in values
    ]  # fmt: skip
    return [tuple(c if type(c) is int else c[k] for c in columns) for k in range(len(lanes))]


def active(w: Warp) -> list[int]:
    """Lane numbers of the current group."""
    bits = w.cur.bits
    return [i for i in range(32) if bits >> i & 1]


def mbarrier_at(w: Warp, ins: Instruction, address: int) -> MBarrier:
    """The mbarrier object at a shared address."""
    cta = w.cta.peer(address >> 24)
    bar = cta.mbarriers.get(address & 0xFFFFFF) if cta is not None else None
    if bar is None:
        raise SyncError(
            f"{w.place()}: {ins.opcode}: no initialised mbarrier at {address:#x} ({w.source(ins)})"
        )
    return bar


def mbar_init(w: Warp, ins: Instruction, address: Any, count: Any) -> None:
    """mbarrier.init."""
    for lane, (addr, n) in zip(active(w), lane_values(w, address, count), strict=True):
        if not 1 <= n <= MAX_COUNT:
            raise SyncError(f"{w.place()}: mbarrier.init with count {n} ({w.source(ins)})")
        if addr & 7:
            raise SyncError(f"{w.place()}: mbarrier.init at {addr:#x} ({w.source(ins)})")
        old = w.cta.mbarriers.get(addr & 0xFFFFFF)
        if old is not None and (old.waiters or old.phase or old.pending != old.expected):
            raise SyncError(
                f"{w.place()}: mbarrier.init over a live {old.describe()} ({w.source(ins)})"
            )
        w.cta.shared_check(w, ins, addr, 8)
        w.cta.mbarriers[addr & 0xFFFFFF] = MBarrier(w.cta, addr & 0xFFFFFF, n)
        w.cta.smem[addr & 0xFFFFFF : (addr & 0xFFFFFF) + 8] = 0
        if w.world.detector is not None:
            w.world.detector.mbarrier_init(w, ins, addr, lane)
    w.world.progress += 1


def mbar_inval(w: Warp, ins: Instruction, address: Any) -> None:
    """mbarrier.inval."""
    for (addr,) in lane_values(w, address):
        bar = mbarrier_at(w, ins, addr)
        if bar.waiters:
            raise SyncError(f"{w.place()}: mbarrier.inval of {bar.describe()} with waiters")
        del w.cta.mbarriers[addr & 0xFFFFFF]


def mbar_arrive(
    w: Warp, ins: Instruction, address: Any, count: Any, expect: Any, no_complete: bool
) -> int:
    """mbarrier.arrive and arrive.expect_tx; the result is the phase's state token."""
    world, state = w.world, 0
    try:
        values = lane_values(w, address, count, expect)
        for lane, (addr, n, tx) in zip(active(w), values, strict=True):
            bar = mbarrier_at(w, ins, addr)
            state = bar.phase << 20 | bar.pending
            if world.detector is not None:
                world.detector.mbarrier_arrive(w, ins, bar, lane, n, tx)
            if no_complete and n >= bar.pending:
                raise SyncError("arrive.noComplete would complete the phase")
            bar.expect(tx)
            bar.arrive(n, world)
    except SyncError as e:
        raise SyncError(f"{w.place()}: {ins.opcode}: {e} ({w.source(ins)})") from None
    return state


def mbar_tx(w: Warp, ins: Instruction, address: Any, amount: Any, sign: int) -> None:
    """mbarrier.expect_tx and complete_tx."""
    for addr, n in lane_values(w, address, amount):
        mbarrier_at(w, ins, addr).transact(sign * n, w.world)


def mbar_drop(w: Warp, ins: Instruction, address: Any, count: Any, expect: Any) -> int:
    """mbarrier.arrive_drop: later phases expect fewer arrivals."""
    state = 0
    values = lane_values(w, address, count, expect)
    for lane, (addr, n, tx) in zip(active(w), values, strict=True):
        bar = mbarrier_at(w, ins, addr)
        state = bar.phase << 20 | bar.pending
        if w.world.detector is not None:
            w.world.detector.mbarrier_arrive(w, ins, bar, lane, n, tx)
        bar.expected -= n
        bar.expect(tx)
        bar.arrive(n, w.world)
    return state


def _completed(bar: MBarrier, token: int, parity: bool) -> bool:
    return (bar.phase & 1) != (token & 1) if parity else bar.phase != token >> 20


def mbar_test(w: Warp, ins: Instruction, address: Any, token: Any, parity: bool, wait: bool) -> Any:
    """test_wait and try_wait: True, False, or None when the group was suspended."""
    g = w.cur
    if type(address) is int and type(token) is int:
        bar = mbarrier_at(w, ins, address)
        done: Any = _completed(bar, token, parity)
        passed = [(bar, g.bits)] if done else []
    else:
        done, passed = np.zeros(32, np.bool_), []
        lanes = np.flatnonzero(g.mask).tolist()
        for lane, (addr, tok) in zip(lanes, lane_values(w, address, token), strict=True):
            bar = mbarrier_at(w, ins, addr)
            if _completed(bar, tok, parity):
                done[lane] = True
                passed.append((bar, 1 << lane))
    if passed:
        g.timed_out = False
        if w.world.detector is not None:
            for bar, bits in passed:
                w.world.detector.mbarrier_wait(w, ins, bar, bits)
        return done
    if not wait:
        w.spin(ins)
        return done
    if g.timed_out:
        g.timed_out = False
        return done
    w.wait_on(bar, ins, timed=True)
    return None


def bar_sync(
    w: Warp, ins: Instruction, number: Any, count: Any, aligned: bool, wait: bool,
    pred: Any = None, op: str = "",
) -> Any:  # fmt: skip
    """bar.sync, bar.arrive, bar.red: None when suspended, else the reduction (or True)."""
    g = w.cur
    if g.token is not None:
        bar, generation = g.token
        if bar.generation == generation:
            w.wait_on(bar, ins)
            return None
        g.token = None
        if w.world.detector is not None:
            w.world.detector.barrier_pass(w, ins, bar, generation)
        return bar.result[op] if op else True
    if aligned and g.bits != 0xFFFFFFFF and w.lanes_missing(0xFFFFFFFF):
        return None
    n = uniform(w, number)
    if not 0 <= n < 16:
        raise SyncError(f"{w.place()}: barrier {n} does not exist ({w.source(ins)})")
    expected = None if count is None else uniform(w, count)
    if expected is not None and (expected % 32 or expected <= 0):
        raise SyncError(f"{w.place()}: {ins.opcode} with {expected} threads ({w.source(ins)})")
    bar = w.cta.barriers[n]
    lanes = g.bits.bit_count()
    threads = ALIGNED_WARP if aligned and expected is not None else lanes
    if op:
        bits = [i for i in range(32) if g.bits >> i & 1]
        bar.values += [bool(pred if type(pred) is bool else pred[i]) for i in bits]
    before = bar.generation
    bar.arrive(w, ins, threads, expected)
    if not wait:
        return True
    if bar.generation != before:
        if w.world.detector is not None:
            w.world.detector.barrier_pass(w, ins, bar, before)
        return bar.result[op] if op else True
    g.token = (bar, before)
    w.wait_on(bar, ins)
    return None


def cluster_arrive(w: Warp, ins: Instruction, aligned: bool) -> bool:
    """barrier.cluster.arrive: True when the group was suspended for missing lanes."""
    if aligned and w.cur.bits != 0xFFFFFFFF and w.lanes_missing(0xFFFFFFFF):
        return True
    bar = w.cta.cluster.barrier
    w.cluster_generation = bar.generation
    if w.world.detector is not None:
        w.world.detector.barrier_arrive(w, ins, bar)
    bar.arrive(w.cur.bits.bit_count(), w.world)
    return False


def cluster_wait(w: Warp, ins: Instruction, aligned: bool) -> bool:
    """barrier.cluster.wait: True when suspended."""
    if aligned and w.cur.bits != 0xFFFFFFFF and w.lanes_missing(0xFFFFFFFF):
        return True
    bar = w.cta.cluster.barrier
    if bar.generation == w.cluster_generation:
        w.wait_on(bar, ins)
        return True
    if w.world.detector is not None:
        w.world.detector.barrier_pass(w, ins, bar, w.cluster_generation)
    return False


def set_max_registers(w: Warp, ins: Instruction, number: int, grow: bool) -> bool:
    """setmaxnreg: True when suspended because the pool has too few registers."""
    if w.cur.bits != 0xFFFFFFFF and w.lanes_missing(0xFFFFFFFF):
        return True
    pool = w.cta.pool
    have = pool.held[w.index]
    if not 24 <= number <= 256 or number % 8:
        raise SyncError(f"{w.place()}: setmaxnreg {number} ({w.source(ins)})")
    if (number > have) != grow and number != have:
        raise SyncError(
            f"{w.place()}: setmaxnreg.{'inc' if grow else 'dec'} from {have} to {number}"
            f" ({w.source(ins)})"
        )
    need = 32 * (number - have)
    if need > pool.free:
        w.wait_on(pool, ins)
        return True
    pool.free -= need
    pool.held[w.index] = number
    w.world.progress += 1
    if need < 0:
        pool.wake(w.world)
    return False


def fence(w: Warp, ins: Instruction, address: Any = None) -> None:
    """All fences: memory is sequentially consistent here, only a detector cares."""
    if w.world.detector is not None:
        w.world.detector.fence(w, ins, address)
