"""Clocks of synchronisation objects: mbarriers, named barriers, cluster barriers.

Source: PTX ISA, "mbarrier.arrive" (release), "mbarrier.try_wait" (acquire), "barrier", "bar.warp.
sync", "barrier.cluster". Completion of an asynchronous copy on an mbarrier makes the copy's own
writes visible to whoever observes the phase, nothing else of the issuing thread.

An ``arrive`` or wait without a written scope counts as cluster scope when the barrier is another
CTA's: the ISA's default is ``.cta``, yet kernels in use rely on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.clocks import GENERIC, SHARED, Agents, Clock, WarpClock
from megamoe.runtime.vgpu.findings import Touch
from megamoe.runtime.vgpu.happens_before import Core
from megamoe.runtime.vgpu.shadow import Shadow
from megamoe.runtime.vgpu.sync_words import SCOPES

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.barriers import MBarrier
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Warp

_EXPLICIT_CTA = (".release.cta", ".acquire.cta")


class MBarrierClock:
    """The detector's side of an mbarrier.

    ``column``: agent of the copies that complete on it; phase p has time ``start`` + p + 1;
    ``last_copy`` is the last of them. Two clocks collect arrivals: of the own CTA and of others.
    """

    __slots__ = (
        "bits",
        "column",
        "done",
        "known",
        "last_copy",
        "others",
        "others_done",
        "own",
        "start",
        "visible",
        "warp",
    )  # fmt: skip

    def __init__(self, agents: Agents, column: int, w: Warp, bits: int) -> None:
        self.column, self.warp, self.bits = column, w, bits
        self.start = agents.times[column]
        self.own, self.others = agents.empty(), agents.empty()
        self.done, self.others_done = self.own, self.others
        self.known: set[tuple[int, int, bool]] = set()
        self.visible = False
        self.last_copy: tuple[int, Touch] | None = None

    def by_lane(self, w: Warp, bits: int) -> bool:
        """True if one of these lanes initialised the barrier."""
        return self.warp is w and bool(self.bits & bits)

    def stamp(self, phase: int) -> int:
        """Time of copies that complete in a phase."""
        return self.start + phase + 1


class BarrierClocks:
    """Edges through barriers."""

    def __init__(self, core: Core) -> None:
        self.core = core

    # -- mbarriers ---------------------------------------------------------------------------
    def init(self, w: Warp, ins: Instruction, address: int, lane: int) -> None:
        """mbarrier.init: a plain write of the object."""
        core, cta = self.core, w.cta
        offset = address & 0xFFFFFF
        bar = cta.mbarriers[offset]
        column = core.agents.column(("mbarrier", w.pe, cta.number, offset), cluster=cta.cluster.uid)
        bar.hb = MBarrierClock(core.agents, column, w, 1 << lane)
        hb: WarpClock = w.hb
        sh: Shadow = cta.region.shadow
        cells = sh.span(address - cta.region.base, 8)
        index = np.arange(cells.start, cells.stop)
        touch = Touch(w, ins, "mbarrier.init", 1 << lane)
        rec = core.records.add(hb.base, hb.time, touch)
        clock = hb.lookup(1 << lane)[0][1]
        core.write(sh, index, rec | lane, clock, hb.base + lane, touch, 1 << lane)

    def initialised(
        self, w: Warp, ins: Instruction, bar: MBarrier, bits: int, copies: bool = False
    ) -> None:
        """Using an mbarrier has to come after its initialisation; for the copies that complete on
        it, a fence (mbarrier_init or proxy.async) by the initialising lane or later too."""
        key = (id(w), bits, copies)
        if key in bar.hb.known:
            return
        bar.hb.known.add(key)
        if bar.hb.visible and w.cta.cluster.barrier.generation:
            return  # fence.mbarrier_init, then any cluster barrier, relaxed or not
        sh: Shadow = bar.cta.region.shadow
        cell = (bar.offset + bar.cta.smem_base - bar.cta.region.base) >> sh.grain
        index = np.array([cell])
        touch = Touch(w, ins, "mbarrier operation", bits)
        hb: WarpClock = w.hb
        before = np.abs(sh.writes.take(index))
        own = hb.base + bits.bit_length() - 1 if not bits & (bits - 1) else -1
        fenced = not copies or bar.hb.visible
        row, uid = GENERIC if fenced else SHARED, w.cta.cluster.uid
        records = self.core.records
        for part, clock in hb.lookup(bits):
            if fenced:
                bad = records.unordered(before, clock, own)
            else:
                bad = records.unordered_async(before, clock, SHARED, own, uid)
            if bad is not None:
                self.core.races(sh, index, before, bad, clock, touch, part, row=row, own=own)

    def arrive(
        self, w: Warp, ins: Instruction, bar: MBarrier, lane: int, count: int, expect: int
    ) -> None:
        """An arrival of one lane, before it is counted."""
        bits, hb = 1 << lane, w.hb
        self.initialised(w, ins, bar, bits)
        if count >= bar.pending and bar.tx + expect < 0:
            self.bytes_left(w, ins, bar, bits, -(bar.tx + expect))
        outside = bar.cta is not w.cta
        if outside and ".release.cta" in ins.opcode:
            self.core.scope_notes[id(w.cta), id(bar.cta)] = (
                "an mbarrier arrive with .cta scope was seen: it does not reach another CTA"
            )
            return
        if ".relaxed" in ins.opcode:
            for lanes, scope, clock in hb.fences:
                if lanes & bits and (not outside or SCOPES[scope] > 0):
                    self.collect(bar, clock, outside)
            return
        self.collect(bar, hb.publish(bits), outside)

    def collect(self, bar: MBarrier, clock: Clock, outside: bool) -> None:
        """Add an arrival's clock to the present phase."""
        hb = bar.hb
        if outside:
            hb.others = self.core.agents.joined(hb.others, clock)
        else:
            hb.own = self.core.agents.joined(hb.own, clock)

    def phase(self, bar: MBarrier) -> None:
        """A phase completed: what has arrived becomes what waiters learn."""
        hb = bar.hb
        done = self.core.agents.fit(hb.own).copy()
        done[GENERIC, hb.column] = hb.start + bar.phase
        hb.done, hb.others_done = done, hb.others
        self.core.agents.times[hb.column] = hb.stamp(bar.phase)

    def wait(self, w: Warp, ins: Instruction, bar: MBarrier, bits: int) -> None:
        """A successful test or wait."""
        self.initialised(w, ins, bar, bits)
        hb: WarpClock = w.hb
        clock = bar.hb.done
        if ".relaxed" in ins.opcode:
            own = self.core.agents.fit(clock)
            hb.column(bits, bar.hb.column, int(own[GENERIC, bar.hb.column]))
            return
        if bar.hb.others_done.any() and not any(x in ins.opcode for x in _EXPLICIT_CTA):
            clock = self.core.agents.joined(clock, bar.hb.others_done)
        hb.learn(bits, clock)

    def bytes_left(self, w: Warp, ins: Instruction, bar: MBarrier, bits: int, n: int) -> None:
        """The last arrival of a phase comes with more bytes completed than expected."""
        if self.core.findings.new("transaction", 0, ins.line):
            touch = Touch(w, ins, "last arrival of the phase", bits)
            self.core.findings.add(
                "transaction", None, touch.place(),
                f"mbarrier.expect_tx of {n} more bytes before this arrival",
                f"mbarrier smem+{bar.offset:#x}", w.pe,
            )  # fmt: skip

    # -- bar, barrier.cluster ----------------------------------------------------------------
    def barrier_arrive(self, w: Warp, ins: Instruction, bar: Any) -> None:
        """An arrival of the current lanes."""
        if bar.hb is None:
            bar.hb = {}
        if ".relaxed" in ins.opcode:
            return
        clock = w.hb.publish(w.cur.bits)
        old = bar.hb.get(bar.generation)
        bar.hb[bar.generation] = clock if old is None else self.core.agents.joined(old, clock)
        bar.hb.pop(bar.generation - 2, None)

    def barrier_pass(self, w: Warp, ins: Instruction, bar: Any, generation: int) -> None:
        """A wait for a generation ended."""
        clock = None if bar.hb is None else bar.hb.get(generation)
        if clock is None:
            return
        hb: WarpClock = w.hb
        if "cluster" in ins.opcode:
            hb.learn(w.cur.bits, clock)
        else:
            hb.unify(w.cur.bits, clock)
