"""Asynchronous copies in the race detector: bulk, tensor, cp.async, st.async.

Source: PTX ISA, "Asynchronous Operations", "Async proxy", "cp.async.bulk", "cp.async". Both sides
of a copy are entered into shadow memory at its issue, stamped with the agent whose completion the
program can observe: the mbarrier, or the issuing lane's groups (reads and writes apart, because
``wait_group.read`` frees the source only). So it does not matter when the completion policy
really moves the bytes.

Bulk and tensor copies and wgmma go through the asynchronous proxy; ``cp.async`` and ``st.async``
are generic. A read that is over needs no proxy fence before somebody overwrites its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.barrier_clocks import BarrierClocks
from megamoe.runtime.vgpu.clocks import (
    GENERIC,
    GLOBAL,
    SHARED,
    TENSORMAP,
    Clock,
    WarpClock,
    lane_array,
)
from megamoe.runtime.vgpu.findings import Touch
from megamoe.runtime.vgpu.footprints import by_piece, cells_of, distinct_of, pieces, spread
from megamoe.runtime.vgpu.happens_before import Core
from megamoe.runtime.vgpu.shadow import Shadow
from megamoe.runtime.vgpu.tensormap import ENCODED

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.asyncops import AsyncOp
    from megamoe.runtime.vgpu.memory import Region
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Warp


class LaneOps:
    """Group-completed operations of one lane: how many, how many at each commit, and the last one
    that reads shared memory."""

    __slots__ = ("commits", "count", "last_read", "read_column", "write_column")

    def __init__(self, read_column: int, write_column: int, count: int) -> None:
        self.read_column, self.write_column, self.count = read_column, write_column, count
        self.commits: list[int] = []
        self.last_read: tuple[int, Touch] | None = None


class Side:
    """One side of a copy: where, by which agent until when, and through which proxy."""

    __slots__ = ("column", "row", "sh", "time", "where")

    def __init__(self, sh: Shadow, where: Any, column: int, time: int, row: int) -> None:
        self.sh, self.where, self.column, self.time, self.row = sh, where, column, time, row


class AsyncCopies:
    """Issue, commit, wait and completion of asynchronous copies."""

    def __init__(self, core: Core, barriers: BarrierClocks) -> None:
        self.core, self.barriers = core, barriers
        # Address of a tensor map → lane's column → (time of its fence, what it knew).
        self.map_fences: dict[int, dict[int, tuple[int, Clock]]] = {}

    # -- groups ------------------------------------------------------------------------------
    def lane_ops(self, w: Warp, kind: str, lane: int) -> LaneOps:
        """The operations of one lane, made on first use."""
        found = w.hb_groups.get((kind, lane))
        if found is None:
            agents, cta = self.core.agents, w.cta
            key = (w.pe, cta.number, w.index, lane)
            if kind == "bulk":
                uid = cta.cluster.uid
                read = agents.column(("bulk_read", *key), cluster=uid)
                write = agents.column(("bulk_write", *key), cluster=uid)
            else:
                read = write = agents.column(("copy", *key))
            found = w.hb_groups[kind, lane] = LaneOps(read, write, agents.times[write])
        return found

    def commit(self, w: Warp, kind: str, lanes: list[int]) -> None:
        """commit_group."""
        for lane in lanes:
            ops = self.lane_ops(w, kind, lane)
            ops.commits.append(ops.count)

    def wait(self, w: Warp, kind: str, keep: int, read_only: bool, lanes: list[int]) -> None:
        """wait_group: the lane learns that its older groups are done."""
        hb: WarpClock = w.hb
        for lane in lanes:
            ops = w.hb_groups.get((kind, lane))
            if ops is None or len(ops.commits) <= keep:
                continue
            done = ops.commits[len(ops.commits) - 1 - keep]
            hb.column(1 << lane, ops.read_column, done)
            if not read_only and ops.write_column != ops.read_column:
                hb.column(1 << lane, ops.write_column, done)

    def all_done(self, w: Warp, clock: Clock) -> None:
        """A kernel's end completes everything."""
        for ops in w.hb_groups.values():
            for column in (ops.read_column, ops.write_column):
                clock[GENERIC, column] = max(int(clock[GENERIC, column]), ops.count)
                self.core.agents.times[column] = ops.count

    # -- issue -------------------------------------------------------------------------------
    def issue(self, op: AsyncOp) -> None:
        """Enter both sides of a copy into shadow memory."""
        w, lane, kind = op.warp, op.lane, op.kind
        hb: WarpClock = w.hb
        if kind == "cp.async.arrive":
            self.arrive_later(w, op, lane)
            return
        clock = hb.lookup(1 << lane)[0][1]
        phases = [(bar, bar.hb.stamp(bar.phase)) for bar, _ in op.done]
        op.note = [bar.phase for bar, _ in op.done]
        if phases:
            for bar, _ in phases:
                self.barriers.initialised(w, op.ins, bar, 1 << lane, op.kind != "st.async")
            read_stamp = (phases[0][0].hb.column, phases[0][1])
            write_stamps = [(bar.hb.column, stamp) for bar, stamp in phases]
        else:
            ops = self.lane_ops(w, "copy" if kind == "cp.async" else "bulk", lane)
            ops.count += 1
            read_stamp = (ops.read_column, ops.count)
            write_stamps = [(ops.write_column, ops.count)]
        source, targets, links = self.sides(op, read_stamp, write_stamps)
        unwritten = None
        if source is not None:
            touch = Touch(w, op.ins, "asynchronous read", 1 << lane)
            unwritten = self.read(source, clock, hb.base + lane, w, touch)
            if not phases and source.row == SHARED:
                ops.last_read = (source.time, touch)
        for number, target in enumerate(targets):
            what = "asynchronous write"
            reduces = op.ins.opcode.startswith(("cp.reduce", "red.async"))
            if reduces:
                what = "asynchronous reduction"
            touch = Touch(w, op.ins, what, 1 << lane, reduce=reduces)
            if op.same_as is not None:  # lanes that store the same bytes: one access
                touch = op.same_as.touch
            op.touch = touch
            self.write(target, clock, hb.base + lane, w, touch, unwritten, links)
            if phases:
                phases[number][0].hb.last_copy = (target.time, touch)

    def sides(
        self, op: AsyncOp, read_stamp: tuple[int, int], write_stamps: list[tuple[int, int]]
    ) -> tuple[Side | None, list[Side], Any]:
        """(source, destinations, how bytes of one map to the other)."""
        kind, w = op.kind, op.warp
        if kind.startswith("tensor"):
            return self.tensor_sides(op, read_stamp, write_stamps)
        region, off, n, dests = op.track
        generic = kind in ("cp.async", "st.async")
        source = None
        if region is not None and n and region.shadow is not None:
            row = GENERIC if generic else GLOBAL if region.kind == "global" else SHARED
            source = Side(region.shadow, region.shadow.span(off, n), *read_stamp, row)
        size = n
        if kind == "cp.async":
            size = int(op.ins.operands[2].value)
        targets = []
        for (dest, at), stamp in zip(dests, write_stamps, strict=True):
            row = GENERIC if generic else GLOBAL if dest.kind == "global" else SHARED
            targets.append(Side(dest.shadow, dest.shadow.span(at, size), *stamp, row))
        return source, targets, None if w is None else (n, size)

    def tensor_sides(
        self, op: AsyncOp, read_stamp: tuple[int, int], write_stamps: list[tuple[int, int]]
    ) -> tuple[Side | None, list[Side], Any]:
        """Box copies: pieces of global memory and of shared memory."""
        region, off, plan, dests, where = op.track
        piece = plan.piece
        load = op.kind == "tensor_load"
        sh = region.shadow
        outer = None
        if plan.extent and sh is not None:
            outer = pieces(sh, off, plan.global_index, piece)
        cta = op.warp.cta
        boxes = dests if load else [(cta.region, where + cta.smem_base - cta.region.base)]
        inner = []
        for dest, at in boxes:
            s: Shadow = dest.shadow
            count = len(plan.shared_index) + len(plan.fill_index)
            whole = load or not len(plan.fill_index)
            start = at - ((where & 1023) if not whole else 0)
            if whole:
                inner.append((s, s.span(at, count * piece)))
            else:
                inner.append((s, pieces(s, start, plan.shared_index, piece)))
        if load:
            source = None if outer is None else Side(sh, outer, *read_stamp, GLOBAL)
            targets = [
                Side(s, cells, *stamp, SHARED)
                for (s, cells), stamp in zip(inner, write_stamps, strict=True)
            ]
        else:
            s, cells = inner[0]
            source = Side(s, cells, *read_stamp, SHARED)
            targets = [] if outer is None else [Side(sh, outer, *write_stamps[0], GLOBAL)]
        return source, targets, (plan, where, load)

    # -- checks ------------------------------------------------------------------------------
    def read(self, side: Side, clock: Clock, own: int, w: Warp, touch: Touch) -> Any:
        """The read side; returns which of its cells were never written, or None."""
        core, sh = self.core, side.sh
        ids = sh.writes[side.where]
        unwritten = None
        if len(ids) and np.minimum.reduce(ids) <= 0:
            unwritten = ids <= 0
            ids = np.abs(ids)
        self.check(side, ids, clock, own, w, touch, False)
        rec = core.records.add(side.column, side.time, touch)
        before = sh.reads[side.where]
        if np.count_nonzero(before):
            bad = core.records.unordered(before, clock, own)
            if bad is not None:
                bad &= before != rec
                if np.count_nonzero(bad):
                    sh.displace(cells_of(side.where)[bad], before[bad], core.records)
        sh.reads[side.where] = rec
        return unwritten

    def write(
        self, side: Side, clock: Clock, own: int, w: Warp, touch: Touch, unwritten: Any, links: Any
    ) -> None:
        """The write side."""
        core, sh = self.core, side.sh
        ids = sh.writes[side.where]
        if len(ids) and np.minimum.reduce(ids) < 0:
            ids = np.abs(ids)
        self.check(side, ids, clock, own, w, touch, False)
        readers = sh.reads[side.where]
        if np.count_nonzero(readers):
            self.check(side, readers, clock, own, w, touch, True)
            sh.reads[side.where] = 0
        if sh.overflow:
            for key, some, ids in sh.overflowing(side.where):
                part = Side(sh, some, side.column, side.time, side.row)
                self.check(part, ids, clock, own, w, touch, True)
                sh.forget(key, some)
        rec = core.records.add(side.column, side.time, touch)
        sh.writes[side.where] = rec
        if sh.words:
            cells = cells_of(side.where)
            sh.break_words(int(cells.min()), int(cells.max()) + 1)
        if unwritten is not None:
            self.carry(side, rec, w, touch, unwritten, links)

    def check(
        self, side: Side, ids: Any, clock: Clock, own: int, w: Warp, touch: Touch, war: bool
    ) -> None:
        """Races of one side with what is in its cells."""
        if not len(ids):
            return
        distinct = distinct_of(ids)
        records = self.core.records
        if war or side.row == GENERIC:
            bad = records.unordered(distinct, clock, own)
        else:
            uid = w.cta.cluster.uid
            bad = records.unordered_async(distinct, clock, side.row, own, uid)
        if bad is None:
            return
        cells = cells_of(side.where)
        hit = np.isin(ids, distinct[bad])
        row = GENERIC if war else side.row
        self.core.races(side.sh, cells, ids, hit, clock, touch, touch.bits, row=row, own=own)

    # -- never-written bytes ------------------------------------------------------------------
    def carry(
        self, side: Side, rec: int, w: Warp, touch: Touch, unwritten: Any, links: Any
    ) -> None:
        """Bytes that were never written stay so in their new place."""
        sh = side.sh
        where = cells_of(side.where)
        if isinstance(links[0], int):
            n, size = links
            marks = spread(unwritten, n, size, len(where))
        else:
            plan, at, load = links
            if load:
                per_piece = by_piece(unwritten, len(plan.global_index))
                marks = np.zeros(len(where), np.bool_)
                k = plan.piece >> sh.grain
                base = (plan.shared_index[per_piece] * plan.piece - (at & 1023)) >> sh.grain
                marks[(base[:, None] + np.arange(max(k, 1))).ravel()] = True
                self.with_fill(marks, plan, at, sh.grain)
            else:
                marks = self.stored(unwritten, plan, at, len(where))
        sh.writes[where[marks]] = -rec
        leaves = sh.region.kind == "global" and (sh.host_owned or sh.region.pe != w.pe)
        if leaves and marks.any():
            cell = where[marks][:1]
            self.core.poison(sh, cell, np.array([-rec]), touch)

    @staticmethod
    def with_fill(marks: Any, plan: Any, at: int, grain: int) -> None:
        """A row of which nothing was written stays one: its zeros from outside the tensor are
        marked too, or a user would take it for a row that was written in part."""
        if not len(plan.fill_index):
            return
        first = (plan.fill_index * plan.piece - (at & 1023)) >> grain
        filled = np.zeros(len(marks), np.bool_)
        filled[(first[:, None] + np.arange(max(plan.piece >> grain, 1))).ravel()] = True
        lines = marks.reshape(-1, max(plan.line_bytes >> grain, 1))
        filled = filled.reshape(lines.shape)
        lines[(lines | filled).all(axis=1) & lines.any(axis=1)] = True

    @staticmethod
    def stored(unwritten: Any, plan: Any, at: int, n: int) -> Any:
        """Marks of a box's destination cells from marks of its source cells."""
        inside = len(plan.shared_index)
        if len(plan.fill_index):
            per_piece = by_piece(unwritten, inside)
        else:
            order = plan.shared_index - ((at & 1023) // plan.piece)
            per_piece = by_piece(unwritten, inside)[order]
        return np.repeat(per_piece, n // inside)

    # -- completion --------------------------------------------------------------------------
    def complete(self, op: AsyncOp) -> None:
        """The bytes arrive: in the phase in which the copy was issued?"""
        for (bar, _), phase in zip(op.done, op.note or (), strict=False):
            if bar.phase != phase:
                ins = op.ins
                if self.core.findings.new("transaction", 0, ins.line):
                    touch = Touch(op.warp, ins, "asynchronous write", 1 << max(op.lane, 0))
                    self.core.findings.add(
                        "transaction", None, touch.place(),
                        "expected bytes (expect_tx) that keep the phase open until this copy has"
                        f" completed: phase {phase} ended without it",
                        f"mbarrier smem+{bar.offset:#x}", op.warp.pe,
                    )  # fmt: skip

    def arrive_later(self, w: Warp, op: AsyncOp, lane: int) -> None:
        """cp.async.mbarrier.arrive: the phase shows that the lane's copies are done."""
        bar = op.track[0]
        ops = self.lane_ops(w, "copy", lane)
        clock = self.core.agents.empty()
        clock[GENERIC, ops.write_column] = ops.count
        bar.hb.own = self.core.agents.joined(bar.hb.own, clock)

    # -- tensor maps -------------------------------------------------------------------------
    def map_fence(self, w: Warp, ins: Instruction, address: Any) -> None:
        """fence.proxy.tensormap::generic.acquire: what these lanes know of a map's writes becomes
        visible to copies that use it."""
        if ".acquire" not in ins.opcode or address is None:
            return
        hb: WarpClock = w.hb
        for lane in lane_array(w.cur.bits).tolist():
            at = address if type(address) is int else int(address[lane])
            clock = hb.lookup(1 << lane)[0][1]
            events = self.map_fences.setdefault(at, {})
            events[hb.base + lane] = (hb.time, clock)

    def tensor_map(self, w: Warp, ins: Instruction, region: Region, off: int, lane: int) -> None:
        """A copy reads its tensor map through the tensormap proxy: a fence for this map has to
        come before it and after the map's writes. Maps in parameters need none."""
        sh = region.shadow
        if sh is None:
            return
        hb: WarpClock = w.hb
        clock, own = hb.lookup(1 << lane)[0][1], hb.base + lane
        touch = Touch(w, ins, "read of the tensor map", 1 << lane)
        cells = sh.span(off, ENCODED)
        ids = sh.writes[cells]
        if ids.min() <= 0:
            self.core.poison(sh, cells_of(cells), ids, touch)
            ids = np.abs(ids)
        records, distinct = self.core.records, distinct_of(ids)
        self.check(Side(sh, cells, own, hb.time, GENERIC), ids, clock, own, w, touch, False)
        for column, (time, known) in self.map_fences.get(region.base + off, {}).items():
            seen = column == own or clock[GENERIC, column] >= time
            if seen and records.unordered(distinct, self.core.agents.fit(known), column) is None:
                return
        every = np.ones(len(ids), np.bool_)
        self.core.races(
            sh, cells_of(cells), ids, every, clock, touch, touch.bits, row=TENSORMAP, own=own
        )
