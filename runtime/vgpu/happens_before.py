"""The core of the race detector: checks of plain accesses against shadow memory, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.clocks import ALL, GENERIC, LANES, TENSORMAP, Agents, Clock, lane_array
from megamoe.runtime.vgpu.findings import Findings, Touch
from megamoe.runtime.vgpu.missing_edge import explain
from megamoe.runtime.vgpu.shadow import LANE_BITS, LANE_MASK, Records, Shadow

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.access import Access
    from megamoe.runtime.vgpu.clocks import WarpClock
    from megamoe.runtime.vgpu.memory import Region
    from megamoe.runtime.vgpu.warp import Warp

_EVERY = np.arange(LANES, dtype=np.int64)
_STEPS = [np.arange(n, dtype=np.int64) for n in range(65)]
_READ, _WRITE = "weak read", "weak write"


class Core:
    """Agents, records, findings, and what all parts of the detector do with shadow memory."""

    def __init__(self, limit: int) -> None:
        self.agents = Agents()
        self.records = Records(self.agents)
        self.findings = Findings(limit)
        # (releasing CTA, acquiring CTA) → why a release seen there made no edge.
        self.scope_notes: dict[tuple[int, int], str] = {}

    # -- plain accesses ----------------------------------------------------------------------
    def plain(self, w: Warp, a: Access, region: Region, offsets: Any, lanes: Any) -> None:
        """A weak load or store by some lanes of a warp."""
        sh: Shadow = region.shadow
        hb: WarpClock = w.hb
        total = a.size * a.count
        write = a.kind == "st"
        what = _WRITE if write else _READ
        if type(offsets) is int:
            bits = w.cur.bits
            if total < 1 << sh.grain:
                sh.refine(total.bit_length() - 1)
            cells = (offsets >> sh.grain) + _steps(total >> sh.grain)
            touch = Touch(w, a.ins, what, bits, total=total)
            rec = self.records.add(hb.base, hb.time, touch)
            lane = bits.bit_length() - 1 if not bits & (bits - 1) else ALL
            own = hb.base + lane if lane != ALL else -1
            for part, clock in hb.lookup(bits):
                (self.write if write else self.read)(sh, cells, rec | lane, clock, own, touch, part)
            return
        if lanes is None:
            lanes = _EVERY
        if total < 1 << sh.grain:
            sh.refine(total.bit_length() - 1)
        n = total >> sh.grain
        touch = Touch(w, a.ins, what, 0, lanes, offsets, total)
        rec = self.records.add(hb.base, hb.time, touch)
        if len(hb.parts) > 1:
            for part, clock in hb.lookup((1 << LANES) - 1):
                some = np.flatnonzero(part >> lanes & 1)
                if len(some):
                    self._lanes(sh, offsets[some], lanes[some], n, rec, clock, hb, touch, write)
            return
        clock = hb.lookup(1)[0][1]
        self._lanes(sh, offsets, lanes, n, rec, clock, hb, touch, write)

    def _lanes(
        self, sh: Shadow, offsets: Any, lanes: Any, n: int, rec: int, clock: Clock, hb: WarpClock,
        touch: Touch, write: bool,
    ) -> None:  # fmt: skip
        cells = offsets >> sh.grain
        if n > 1:
            cells = (cells[:, None] + _steps(n)).ravel()
            lanes = np.repeat(lanes, n)
        ids = (lanes + rec).astype(np.int32)
        own = lanes + hb.base
        (self.write if write else self.read)(sh, cells, ids, clock, own, touch, 0)

    def read(
        self, sh: Shadow, cells: Any, ids: Any, clock: Clock, own: Any, touch: Touch, bits: int
    ) -> None:
        """A generic read of cells: race with writers, poison; then it is remembered."""
        before = sh.writes.take(cells)
        if np.minimum.reduce(before) <= 0:
            self.poison(sh, cells, before, touch)
            before = np.abs(before)
        bad = self.records.unordered(before, clock, own)
        if bad is not None:
            self.races(sh, cells, before, bad, clock, touch, bits)
        self.note_reads(sh, cells, ids, clock, own, touch)

    def note_reads(
        self, sh: Shadow, cells: Any, ids: Any, clock: Clock, own: Any, touch: Touch
    ) -> None:
        """Remember reads; unordered ones that they displace go to the overflow."""
        assert touch.warp is not None
        hb: WarpClock = touch.warp.hb
        reads = sh.reads
        before = reads.take(cells)
        reads[cells] = ids
        if type(ids) is not int and np.count_nonzero(reads.take(cells) != ids):
            # Several lanes read one cell: the record knows which.
            reads[cells] = int(ids[0]) & ~LANE_MASK | ALL
        if np.count_nonzero(before):
            bad = self.records.unordered(before, clock, own)
            if bad is not None:
                bad &= before != ids
                if type(ids) is int and touch.bits == hb.full:
                    # All lanes of the warp read it again: the later read stands for both, but
                    # a strong one not for a weak one, with which strong writes race.
                    same = self.records.column.take(before >> LANE_BITS) == hb.base
                    if touch.scope:
                        same &= [bool(self.records.of(int(x)).scope) for x in before]
                    bad &= ~same
                if np.count_nonzero(bad):
                    sh.displace(cells[bad], before[bad], self.records)

    def write(
        self, sh: Shadow, cells: Any, ids: Any, clock: Clock, own: Any, touch: Touch, bits: int
    ) -> None:
        """A generic write of cells: race with writers and readers; then it is remembered."""
        before = np.abs(sh.writes.take(cells))
        bad = self.records.unordered(before, clock, own)
        if bad is not None:
            self.races(sh, cells, before, bad, clock, touch, bits)
        readers = sh.reads.take(cells)
        if np.count_nonzero(readers):
            bad = self.records.unordered(readers, clock, own)
            if bad is not None:
                self.races(sh, cells, readers, bad, clock, touch, bits)
            sh.reads[cells] = 0
        if sh.overflow:
            for key, some, readers in sh.overflowing(cells):
                bad = self.records.unordered(readers, clock, -1)
                if bad is not None:
                    self.races(sh, some, readers, bad, clock, touch, bits)
                sh.forget(key, some)
        sh.writes[cells] = ids
        if sh.words:
            sh.break_words(int(np.minimum.reduce(cells)), int(np.maximum.reduce(cells)) + 1)

    # -- from a suspicion to a report --------------------------------------------------------
    def races(
        self, sh: Shadow, cells: Any, before: Any, bad: Any, clock: Clock, touch: Touch,
        bits: int, row: int = GENERIC, own: int = -1,
    ) -> None:  # fmt: skip
        """Report the suspicious accesses that are really unordered."""
        suspects, where = before[bad], cells[bad]
        for id_ in np.unique(suspects).tolist():
            first = self.records.of(id_)
            if first is touch or (first.reduce and touch.reduce and _same_pe(first, touch)):
                continue
            at = where[suspects == id_]
            for cell in at[:64].tolist():
                lanes2 = bits or touch.bits or touch.lanes_at(cell, sh.grain)
                lanes1 = 1 << (id_ & LANE_MASK)
                if id_ & LANE_MASK == ALL:
                    lanes1 = self.unordered_lanes(id_, cell, sh, clock, touch, lanes2, row)
                elif lanes1 == lanes2 and row == GENERIC and self.same_lane(id_, touch, lanes2):
                    continue
                if lanes1:
                    self.race(sh, cell, id_, first, lanes1, touch, lanes2, clock, row, own)
                    break

    def same_lane(self, id_: int, touch: Touch, bits: int) -> bool:
        """An access by the very lane, which program order covers."""
        column, _ = self.records.agent(id_)
        return touch.warp is not None and column == touch.warp.hb.base + bits.bit_length() - 1

    def unordered_lanes(
        self, id_: int, cell: int, sh: Shadow, clock: Clock, touch: Touch, bits: int, row: int
    ) -> int:
        """Lanes of an all-lanes record that touched the cell and that nothing orders."""
        first = self.records.of(id_)
        column, time = self.records.agent(id_)
        if self.agents.key(column)[0] != "warp":
            return 1
        base = column - ALL
        lanes = first.lanes_at(cell, sh.grain)
        if first.warp is touch.warp and row == GENERIC:
            single = not bits & (bits - 1)
            if single or "read" not in first.what or "read" in touch.what:
                lanes &= ~bits
        index = base + lane_array(lanes)
        late = clock[GENERIC].take(index) < time
        if row == TENSORMAP:
            return lanes
        if row != GENERIC:
            late |= clock[row].take(index) < time
        out = 0
        for lane in lane_array(lanes)[late].tolist():
            out |= 1 << lane
        return out

    def race(
        self, sh: Shadow, cell: int, id_: int, first: Touch, lanes1: int, touch: Touch,
        lanes2: int, clock: Clock, row: int, own: int,
    ) -> None:  # fmt: skip
        """Describe a race, once for each pair of instructions."""
        line1 = first.ins.line if first.ins is not None else 0
        line2 = touch.ins.line if touch.ins is not None else 0
        if not self.findings.new("race", line1, line2, first.what[-5:] + touch.what[-5:]):
            return
        column, time = self.records.agent(id_)
        key = self.agents.key(column)
        host_pe = key[1] if key[0] == "host_pe" else -1
        place1 = first.place(lanes1 if key[0] == "warp" else first.bits, host_pe)
        place2 = touch.place(lanes2, sh.region.pe)
        crossed = int(clock[GENERIC, column]) >= time or column == own
        missing = explain(key, time, first, touch, row if crossed else GENERIC)
        if not crossed and touch.warp is not None and touch.warp is not first.warp:
            knows = 0
            for bits, other in touch.warp.hb.parts:
                if column < other.shape[1] and other[GENERIC, column] >= time:
                    knows |= bits
            if knows & ~lanes2:
                missing = (
                    f"bar.warp.sync after the acquire: lanes {knows & ~lanes2:#x} of this warp are"
                    " ordered after the first access, this lane is not"
                )
        if first.warp is not None and touch.warp is not None:
            note = self.scope_notes.get((id(first.warp.cta), id(touch.warp.cta)))
            if note and not crossed:
                missing += f" ({note})"
        self.findings.add("race", place1, place2, missing, sh.where(cell), sh.region.pe)

    def poison(self, sh: Shadow, cells: Any, before: Any, touch: Touch) -> None:
        """Report a use of bytes that nobody wrote."""
        k = int(np.argmax(before <= 0))
        cell, id_ = int(cells[k]), int(before[k])
        line2 = touch.ins.line if touch.ins is not None else 0
        if not self.findings.new("poison_read", 0, line2):
            return
        lanes = touch.bits or touch.lanes_at(cell, sh.grain)
        first = None
        missing = "a write of these bytes"
        if id_ < 0:
            first = self.records.of(id_).place()
            missing = "a write of the bytes that this copy brought here"
        self.findings.add(
            "poison_read", first, touch.place(lanes), missing, sh.where(cell), sh.region.pe
        )


def _steps(n: int) -> Any:
    return _STEPS[n] if n < 65 else np.arange(n, dtype=np.int64)


def _same_pe(a: Touch, b: Touch) -> bool:
    return a.warp is not None and b.warp is not None and a.warp.pe == b.warp.pe
