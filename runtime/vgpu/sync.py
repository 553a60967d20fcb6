"""Instructions on the synchronisation objects of ``barriers.py``, and fences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.barriers import MAX_COUNT, MBarrier
from megamoe.runtime.vgpu.errors import SyncError
from megamoe.runtime.vgpu.ptx_ast import Instruction

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp

ALIGNED_WARP = 32


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
