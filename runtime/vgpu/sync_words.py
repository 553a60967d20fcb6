"""Strong accesses: release and acquire patterns on words of memory, with scopes; fences.

Source: PTX ISA, Memory Consistency Model, "Release and Acquire Patterns", "Synchronizes",
"Morally Strong", "Observation order": an acquire that reads a word synchronises with every release
whose write it observes, directly or through a chain of atomic operations, if each side's scope
includes the other thread. A plain or relaxed store by anybody ends the chain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.clocks import (
    ALL,
    GLOBAL,
    LANES,
    SHARED,
    Clock,
    WarpClock,
)
from megamoe.runtime.vgpu.findings import Touch
from megamoe.runtime.vgpu.happens_before import Core
from megamoe.runtime.vgpu.shadow import Shadow, Word

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.access import Access
    from megamoe.runtime.vgpu.memory import Region
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Warp

SCOPES = {"cta": 0, "cluster": 1, "gpu": 2, "sys": 3}
_ACQUIRES = ("acquire", "acq_rel")
_RELEASES = ("release", "acq_rel")


def includes(scope: str, a: Warp, b: Warp) -> bool:
    """Does a scope of ``a``'s thread include ``b``'s?"""
    if scope == "sys":
        return True
    if scope == "gpu":
        return a.pe == b.pe
    if scope == "cluster":
        return a.cta.cluster is b.cta.cluster
    return a.cta is b.cta


class SyncWords:
    """Strong loads, stores and atomics; memory fences."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.parsed: dict[str, tuple[str, Any]] = {}

    # -- accesses ----------------------------------------------------------------------------
    def access(self, w: Warp, a: Access, region: Region, offsets: Any, lanes: Any) -> None:
        """A strong load, store or atomic by some lanes."""
        if type(offsets) is int:
            self.one(w, a, region, offsets, w.cur.bits)
            return
        numbers = range(LANES) if lanes is None else lanes.tolist()
        for off, lane in zip(offsets.tolist(), numbers, strict=True):
            self.one(w, a, region, off, 1 << lane)

    def one(self, w: Warp, a: Access, region: Region, offset: int, bits: int) -> None:
        """Lanes ``bits`` access one word."""
        sh: Shadow = region.shadow
        hb: WarpClock = w.hb
        word = sh.word(offset)
        writes, reads = a.kind != "ld", a.kind != "st"
        observes = a.kind in ("ld", "atom")
        cells = sh.span(offset, a.size * a.count)
        index = np.arange(cells.start, cells.stop)
        what = {"ld": "read", "st": "write", "atom": "atomic", "red": "atomic"}[a.kind]
        touch = Touch(w, a.ins, f"{a.sem}.{a.scope} {what}", bits, scope=a.scope)
        lane = bits.bit_length() - 1 if not bits & (bits - 1) else ALL
        rec = self.core.records.add(hb.base, hb.time, touch)
        for part, clock in hb.lookup(bits):
            self.conflicts(sh, index, touch, part, clock, lane, reads, writes)
        if observes and word.entries:
            if a.sem in _ACQUIRES:
                self.acquire(w, hb, word, a.scope, bits)
            else:
                hb.pending[id(word), bits] = (word, a.scope, dict(word.entries))
        if writes:
            self.release(w, hb, word, a, bits)
            sh.writes[cells] = rec | lane
        else:
            ids = rec | lane
            self.core.note_reads(sh, index, ids, hb.lookup(bits)[0][1], -1, touch)

    def conflicts(
        self, sh: Shadow, index: Any, touch: Touch, bits: int, clock: Clock, lane: int,
        reads: bool, writes: bool,
    ) -> None:  # fmt: skip
        """Races with plain accesses and with strong ones of insufficient scope."""
        core, hb = self.core, touch.warp.hb  # type: ignore[union-attr]
        own = hb.base + lane if lane != ALL else -1
        before = sh.writes.take(index)
        if reads and before.min() <= 0:
            core.poison(sh, index, before, touch)
        self.check(sh, index, np.abs(before), touch, bits, clock, own)
        if writes:
            self.check(sh, index, sh.reads.take(index), touch, bits, clock, own)
            if sh.overflow:
                for _, cells, ids in sh.overflowing(slice(int(index[0]), int(index[-1]) + 1)):
                    self.check(sh, cells, ids, touch, bits, clock, own)

    def check(
        self, sh: Shadow, cells: Any, before: Any, touch: Touch, bits: int, clock: Clock, own: int
    ) -> None:
        """Races of one strong access with what is in these cells."""
        core = self.core
        bad = core.records.unordered(before, clock, own)
        if bad is None:
            return
        for k in np.flatnonzero(bad).tolist():
            if self.morally_strong(core.records.of(int(before[k])), touch):
                bad[k] = False
        if bad.any():
            core.races(sh, cells, before, bad, clock, touch, bits, own=own)

    @staticmethod
    def morally_strong(first: Touch, then: Touch) -> bool:
        """Both strong, and each scope includes the other's thread."""
        if not first.scope or first.warp is None or then.warp is None:
            return False
        return includes(first.scope, first.warp, then.warp) and includes(
            then.scope, then.warp, first.warp
        )

    # -- edges -------------------------------------------------------------------------------
    def acquire(self, w: Warp, hb: WarpClock, word: Word, scope: str, bits: int) -> None:
        """Learn what the observed releases made known."""
        self.learn(w, hb, scope, bits, word.entries)

    def learn(self, w: Warp, hb: WarpClock, scope: str, bits: int, entries: dict) -> None:
        """Learn from those entries whose scope and ours fit."""
        for (released, _), (other, clock) in entries.items():
            if includes(released, other, w) and includes(scope, w, other):
                hb.learn(bits, clock, other.cta.cluster is w.cta.cluster)
            else:
                side = "release" if not includes(released, other, w) else "acquire"
                small = released if side == "release" else scope
                self.core.scope_notes[id(other.cta), id(w.cta)] = (
                    f"a {side} with .{small} scope was seen: it does not reach the other side"
                )

    def release(self, w: Warp, hb: WarpClock, word: Word, a: Access, bits: int) -> None:
        """A strong write: starts or continues a release sequence."""
        entries = word.entries
        if a.kind == "st":
            entries.clear()
        elif entries:
            # An atomic carries on only what is morally strong with it.
            for key, (other, _) in list(entries.items()):
                if not (includes(key[0], other, w) and includes(a.scope, w, other)):
                    del entries[key]
        if a.sem in _RELEASES:
            self.add(entries, w, a.scope, hb.publish(bits))
        for lanes, scope, clock in hb.fences:
            if lanes & bits:
                smaller = scope if SCOPES[scope] < SCOPES[a.scope] else a.scope
                self.add(entries, w, smaller, clock)

    def add(self, entries: dict, w: Warp, scope: str, clock: Clock) -> None:
        """Add a clock to a release sequence."""
        key = (scope, id(w.cta))
        old = entries.get(key)
        entries[key] = (w, clock if old is None else self.core.agents.joined(old[1], clock))

    # -- fences ------------------------------------------------------------------------------
    def fence(self, w: Warp, ins: Instruction) -> None:
        """Any fence, membar or proxy fence."""
        kind, what = self.parsed.get(ins.opcode) or self.parse(ins)
        hb: WarpClock = w.hb
        bits = w.cur.bits
        if kind == "proxy":
            hb.proxy_fence(bits, what)
        elif kind == "memory":
            self.memory_fence(w, hb, what, bits)
        elif kind == "mbarrier_init":
            for bar in w.cta.mbarriers.values():
                if bar.hb is not None and bar.hb.by_lane(w, bits):
                    bar.hb.visible = True

    def parse(self, ins: Instruction) -> tuple[str, Any]:
        """(kind, rows or scope) of a fence."""
        words = ins.opcode.split(".")
        found: tuple[str, Any] = ("none", None)
        if "proxy" in words:
            if any(x.startswith("async") for x in words):
                rows: tuple[int, ...] = (GLOBAL, SHARED)
                if "global" in words:
                    rows = (GLOBAL,)
                elif any("shared::" in x for x in words):
                    rows = (SHARED,)
                found = ("proxy", rows)
        elif "mbarrier_init" in words:
            found = ("mbarrier_init", None)
        elif words[0] == "membar":
            found = ("memory", {"cta": "cta", "gl": "gpu", "sys": "sys"}[words[1]])
        elif words[0] == "fence":
            found = ("memory", next((x for x in words if x in SCOPES), "sys"))
        self.parsed[ins.opcode] = found
        return found

    def memory_fence(self, w: Warp, hb: WarpClock, scope: str, bits: int) -> None:
        """fence.acq_rel or .sc: ends acquire patterns and begins release patterns."""
        for key, (_, read_scope, entries) in list(hb.pending.items()):
            if key[1] & bits:
                smaller = scope if SCOPES[scope] < SCOPES[read_scope] else read_scope
                self.learn(w, hb, smaller, key[1] & bits, entries)
                if not key[1] & ~bits:
                    del hb.pending[key]
        hb.fences = [
            (b & ~bits if SCOPES[s] <= SCOPES[scope] else b, s, c) for b, s, c in hb.fences
        ]
        hb.fences = [f for f in hb.fences if f[0]]
        for part, _ in hb.lookup(bits):
            hb.fences.append((part, scope, hb.publish(part)))
