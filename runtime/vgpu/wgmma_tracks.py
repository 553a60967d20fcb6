"""wgmma in the race detector: operand reads of shared memory, and register accesses.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions", "wgmma.fence",
"wgmma.wait_group". Operands in shared memory are read through the asynchronous proxy by the
warpgroup's agent; its time is the commit group. Each warp is checked with its own knowledge:
operand B and, of operand A, the rows that its quarter of the product uses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu import wgmma as wg
from megamoe.runtime.vgpu.clocks import SHARED, Clock, WarpClock
from megamoe.runtime.vgpu.findings import Touch
from megamoe.runtime.vgpu.footprints import cells_of, distinct_of
from megamoe.runtime.vgpu.happens_before import Core
from megamoe.runtime.vgpu.register_fences import unfenced
from megamoe.runtime.vgpu.shadow import Shadow

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Warp
    from megamoe.runtime.vgpu.warpgroup import Wgmma

# (first 16-byte chunk, one past the last) runs of an operand
Runs = tuple[tuple[int, int], ...]


def operand_index(desc: int, rows: int, mn_major: bool) -> Any:
    """16-byte chunk numbers [rows or groups of 8 rows, k] that an operand slab reads."""
    flat = wg.operand_addresses(desc, rows, mn_major) // 16
    if mn_major:
        return flat.reshape(16, rows // 8).T
    return flat.reshape(rows, -1)


@lru_cache(maxsize=4096)
def runs_of(slabs: tuple[tuple[int, int, bool, int], ...]) -> Runs:
    """Contiguous runs of chunks that slabs (desc, rows, mn_major, quarter or -1) read together."""
    parts = []
    for desc, rows, mn_major, quarter in slabs:
        index = operand_index(desc, rows, mn_major)
        if quarter >= 0:
            n = len(index) // 4
            index = index[quarter * n : (quarter + 1) * n]
        parts.append(index.ravel())
    chunks = np.unique(np.concatenate(parts))
    cuts = np.flatnonzero(np.diff(chunks) != 1) + 1
    starts = chunks[np.r_[0, cuts]]
    ends = chunks[np.r_[cuts - 1, len(chunks) - 1]] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))


class WgmmaTracks:
    """Checks of wgmma operands at commit; completion at wait_group."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def column(self, w: Warp) -> int:
        """The warpgroup's agent."""
        group = w.warpgroup()
        if group.hb is None:
            cta = w.cta
            column = self.core.agents.column(
                ("wgmma", w.pe, cta.number, w.index >> 2), cluster=cta.cluster.uid
            )
            group.hb = (column, self.core.agents.times[column], {})
        return group.hb[0]

    def issue(self, w: Warp, m: Wgmma) -> None:
        """One wgmma.mma_async: operands are checked at the commit with what is known now."""
        batch = w.hb_batch
        hb: WarpClock = w.hb
        if batch and batch[-1][1] is not hb.parts[0][1]:
            self.check(w)
        batch.append((w.wgmma_open[-1], hb.parts[0][1]))
        late = unfenced(w.program)
        if late and m.ins.index in late:
            self.register_race(w, m, late[m.ins.index])

    def register_race(self, w: Warp, m: Wgmma, writer: Instruction) -> None:
        """Registers were touched after the last wgmma.fence."""
        if not self.core.findings.new("register_race", writer.line, m.ins.line):
            return
        first = Touch(w, writer, "register write", w.cur.bits)
        then = Touch(w, m.ins, "wgmma register access", w.cur.bits)
        self.core.findings.add(
            "register_race", first.place(), then.place(),
            "wgmma.fence between the register access and the wgmma", "registers of the wgmma",
            w.pe,
        )  # fmt: skip

    def commit(self, w: Warp) -> None:
        """wgmma.commit_group, before it is counted."""
        self.check(w)

    def check(self, w: Warp) -> None:
        """Check and remember the operand reads issued since the last check."""
        batch, w.hb_batch = w.hb_batch, []
        if not batch:
            return
        column = self.column(w)
        _, start, seen = w.warpgroup().hb
        time = start + w.wgmma_committed + 1
        clock = w.hb.weakest(w.cur.bits)
        a_slabs: list[tuple] = []
        b_slabs: list[tuple] = []
        for (m, desc_a, desc_b, *_), _ in batch:
            if desc_a is not None:
                a_slabs.append((desc_a, 64, m.trans_a, w.index & 3))
            b_slabs.append((desc_b, m.n, m.trans_b, -1))
        touch = Touch(w, batch[0][0][0].ins, "asynchronous read", w.cur.bits)
        rec = self.core.records.add(column, time, touch)
        whole = True
        if a_slabs:
            whole = self.operand(w, tuple(a_slabs), clock, rec, touch)[1]
        # Operand B is one read of the whole warpgroup: entered by the first warp, checked by all.
        key = (time, tuple(b_slabs))
        found = seen.get(key)
        if found is None:
            if len(seen) > 16:
                seen.clear()
            found, written = self.operand(w, key[1], clock, rec, touch)
            seen[key] = found
            whole = whole and written
        else:
            for where, distinct in found:
                self.reads(w, where, distinct, clock, touch)
        if not whole:
            self.unwritten(w, batch, touch)

    def operand(
        self, w: Warp, slabs: tuple, clock: Clock, rec: int, touch: Touch
    ) -> tuple[list, bool]:
        """One operand of the batch: check it, remember the read; its distinct writes by run, and
        whether all of it was written."""
        sh: Shadow = w.cta.region.shadow
        records = self.core.records
        found = []
        whole = True
        for where in self.cells(w, slabs):
            ids = sh.writes[where]
            if np.minimum.reduce(ids) <= 0:
                whole = False
                ids = np.abs(ids)
            distinct = distinct_of(ids)
            self.reads(w, where, distinct, clock, touch)
            found.append((where, distinct))
            before = sh.reads[where]
            if np.count_nonzero(before != before[0]) or before[0]:
                late = records.unordered(before, clock, -1)
                if late is not None:
                    late &= before != rec
                    if np.count_nonzero(late):
                        sh.displace(cells_of(where)[late], before[late], records)
            sh.reads[where] = rec
        return found, whole

    def reads(self, w: Warp, where: slice, distinct: Any, clock: Clock, touch: Touch) -> None:
        """Races of operand reads with the writes of a run of cells."""
        sh: Shadow = w.cta.region.shadow
        uid = w.cta.cluster.uid
        bad = self.core.records.unordered_async(distinct, clock, SHARED, -1, uid)
        if bad is not None:
            ids = np.abs(sh.writes[where])
            hit = np.isin(ids, distinct[bad])
            self.core.races(sh, cells_of(where), ids, hit, clock, touch, touch.bits, row=SHARED)

    @staticmethod
    def cells(w: Warp, slabs: tuple) -> list[slice]:
        """The runs of cells of an operand."""
        region = w.cta.region
        first, shift = (region.base - w.cta.smem_base) >> 4, 4 - region.shadow.grain
        return [slice(a - first << shift, b - first << shift) for a, b in runs_of(slabs)]

    def unwritten(self, w: Warp, batch: list, touch: Touch) -> None:
        """Never-written operand bytes: whole rows only spoil rows of the product that nobody has
        to use, but a row that is written in part is used in part. Instructions with the same
        accumulators follow each other along k."""
        sh: Shadow = w.cta.region.shadow
        first = (w.cta.region.base - w.cta.smem_base) >> 4
        shift = 4 - sh.grain
        rows: dict[tuple, list] = {}
        for (m, desc_a, desc_b, *_), _ in batch:
            if desc_a is not None:
                index = operand_index(desc_a, 64, m.trans_a)
                n, q = len(index) // 4, w.index & 3
                rows.setdefault((m.key, "a"), []).append(index[q * n : (q + 1) * n])
            rows.setdefault((m.key, "b"), []).append(operand_index(desc_b, m.n, m.trans_b))
        for parts in rows.values():
            cells = (np.concatenate(parts, axis=1) - first) << shift
            marks = sh.writes[cells[..., None] + np.arange(1 << shift)] <= 0
            partial = marks.any(axis=(1, 2)) & ~marks.all(axis=(1, 2))
            if partial.any():
                row = int(np.argmax(partial))
                k = int(np.argmax(marks[row].any(axis=1)))
                cell = cells[row, k] + np.flatnonzero(marks[row, k])[:1]
                self.core.poison(sh, cell, sh.writes[cell], touch)
                return

    def retire(self, w: Warp) -> None:
        """wait_group covered commit groups: the warp learns that their reads are over."""
        column = self.column(w)
        start = w.warpgroup().hb[1]
        w.hb.column(w.cur.bits, column, start + w.wgmma_retired)

    def all_done(self, w: Warp, clock: Clock) -> None:
        """A kernel's end completes everything."""
        group = w.cta.warpgroups.get(w.index >> 2)
        if group is not None and group.hb is not None:
            column, start, _ = group.hb
            time = start + w.wgmma_committed
            clock[0, column] = max(int(clock[0, column]), time)
            self.core.agents.times[column] = max(self.core.agents.times[column], time)
