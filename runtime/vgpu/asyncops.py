"""Asynchronous copies: each has a read side and a write side that the completion policy places.

``eager`` does both at issue. ``late`` does them only when somebody's wait needs them: an explicit
``wait_group``, or when nothing else in the world can go on. ``random`` draws the moment.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu import convert
from megamoe.runtime.vgpu.access import Access, fault, region_of
from megamoe.runtime.vgpu.atomics import operation
from megamoe.runtime.vgpu.barriers import MBarrier
from megamoe.runtime.vgpu.errors import MemoryFault
from megamoe.runtime.vgpu.memory import Region
from megamoe.runtime.vgpu.ptx_ast import Instruction
from megamoe.runtime.vgpu.sync import active, lane_values, mbarrier_at

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp
    from megamoe.runtime.vgpu.world import World


class AsyncOp:
    """One asynchronous operation between its issue and its completion."""

    __slots__ = (
        "data", "done", "ins", "kind", "lane", "note", "reader", "same_as", "stage", "touch",
        "track", "warp", "writer",
    )  # fmt: skip

    def __init__(
        self, w: Warp, ins: Instruction, kind: str,
        reader: Callable[[], Any], writer: Callable[[Any], None], done: list[tuple[MBarrier, int]],
        lane: int,
    ) -> None:  # fmt: skip
        self.warp, self.ins, self.kind, self.lane = w, ins, kind, lane
        self.reader, self.writer, self.done = reader, writer, done
        self.stage, self.data = 0, None
        self.track: Any = None
        self.note: Any = None
        # The detector's record of the writes, and the very store as an earlier lane of the same
        # instruction issued it.
        self.touch: Any = None
        self.same_as: AsyncOp | None = None

    def read(self) -> None:
        """Do the read side."""
        if self.stage == 0:
            self.stage = 1
            self.data = self.reader()
            world = self.warp.world
            if world.detector is not None:
                world.detector.async_read(self)

    def complete(self) -> None:
        """Do what is left: read side, write side, transaction bytes."""
        if self.stage == 2:
            return
        self.read()
        self.stage = 2
        world = self.warp.world
        self.writer(self.data)
        self.data = None
        if world.detector is not None:
            world.detector.async_complete(self)
        world.progress += 1
        for bar, nbytes in self.done:
            bar.transact(-nbytes, world)


class LaneGroups:
    """Bulk or cp.async groups of one thread."""

    __slots__ = ("groups", "open")

    def __init__(self) -> None:
        self.open: list[AsyncOp] = []
        self.groups: deque[list[AsyncOp]] = deque()

    def commit(self) -> None:
        """Close the open group."""
        self.groups.append(self.open)
        self.open = []

    def wait(self, keep: int, read_only: bool) -> None:
        """Force all but the last ``keep`` groups."""
        for group in list(self.groups)[: max(0, len(self.groups) - keep)]:
            for op in group:
                if read_only:
                    op.read()
                else:
                    op.complete()
        if not read_only:
            while len(self.groups) > keep:
                self.groups.popleft()


def groups_of(w: Warp, kind: str, lane: int) -> LaneGroups:
    """The groups of one lane, made on first use."""
    table = w.bulk_groups if kind == "bulk" else w.copy_groups
    found = table.get(lane)
    if found is None:
        found = table[lane] = LaneGroups()
    return found


def commit_group(w: Warp, ins: Instruction, kind: str) -> None:
    """commit_group, per lane."""
    for lane in active(w):
        groups_of(w, kind, lane).commit()
    if w.world.detector is not None:
        w.world.detector.group_commit(w, ins, kind)


def wait_group(w: Warp, ins: Instruction, kind: str, keep: int, read_only: bool) -> None:
    """wait_group, per lane; completes what it waits for."""
    table = w.bulk_groups if kind == "bulk" else w.copy_groups
    for lane in active(w):
        if lane in table:
            table[lane].wait(keep, read_only)
    if w.world.detector is not None:
        w.world.detector.group_wait(w, ins, kind, keep, read_only)


def wait_all(w: Warp, ins: Instruction) -> None:
    """cp.async.wait_all: committed or not."""
    for lane in active(w):
        g = groups_of(w, "copy", lane)
        g.commit()
        g.wait(0, False)
    if w.world.detector is not None:
        w.world.detector.group_wait(w, ins, "copy", 0, False)


def span(w: Warp, ins: Instruction, space: str, address: int, nbytes: int, lane: int,
         align: int = 16, write: bool = False) -> tuple[Region, int]:  # fmt: skip
    """Region and offset of a range of bytes, checked."""
    a = Access(ins, "bulk", space, 1, 1)
    region, off = region_of(w, a, address, lane)
    a.count = nbytes
    if address % align:
        raise fault(w, a, address, lane, f"not aligned to {align} bytes")
    if off + nbytes > region.end - region.base:
        raise fault(w, a, address, lane, "out of bounds")
    if write and not region.writable:
        raise fault(w, a, address, lane, "read-only memory")
    return region, off


def bulk_copy(
    w: Warp, ins: Instruction, form: str, dst: Any, src: Any, size: Any, bar: Any, mask: Any,
    reduce: str = "",
) -> None:  # fmt: skip
    """cp.async.bulk and cp.reduce.async.bulk in their directions, for each active lane.

    ``form`` is ``g2s``, ``s2g`` or ``s2s``.
    """
    world = w.world
    args = [dst, src, size, 0 if bar is None else bar, 0 if mask is None else mask]
    issued: dict[tuple[int, ...], AsyncOp] = {}
    for lane, (d, s, n, b, ctas) in zip(active(w), lane_values(w, *args), strict=True):
        if n % 16:
            raise MemoryFault(f"{w.place(lane)}: {ins.opcode} of {n} bytes ({w.source(ins)})")
        src_space, dst_space = {
            "g2s": ("global", "shared"), "s2g": ("shared", "global"), "s2s": ("shared", "shared")
        }[form]  # fmt: skip
        sr, so = span(w, ins, src_space, s, n, lane)
        targets = [d]
        if mask is not None:
            targets = [(d & 0xFFFFFF) | r << 24 for r in range(16) if ctas >> r & 1]
        dests = [span(w, ins, dst_space, t, n, lane, write=True) for t in targets]
        done: list[tuple[MBarrier, int]] = []
        if bar is not None:
            if mask is None:
                done = [(mbarrier_at(w, ins, b), n)]
            else:
                done = [(mbarrier_at(w, ins, (b & 0xFFFFFF) | t >> 24 << 24), n) for t in targets]
        same_as = issued.get((d, s, n)) if form == "s2g" and not reduce else None
        issued[d, s, n] = submit_copy(w, ins, form, lane, (sr, so, n), dests, done, reduce, same_as)
        world.count_async(ins, n * len(dests))


def submit_copy(
    w: Warp, ins: Instruction, form: str, lane: int, src: tuple[Region, int, int],
    dests: list[tuple[Region, int]], done: list[tuple[MBarrier, int]], reduce: str,
    same_as: AsyncOp | None,
) -> AsyncOp:  # fmt: skip
    """Queue one copy of a range of bytes."""
    sr, so, n = src
    apply = reducer(reduce) if reduce else None

    def reader() -> np.ndarray:
        return sr.data[so : so + n].copy()

    def writer(data: np.ndarray) -> None:
        for region, off in dests:
            part = region.data[off : off + n]
            part[:] = data if apply is None else apply(part, data)

    op = AsyncOp(w, ins, form, reader, writer, done, lane)
    op.track, op.same_as = (sr, so, n, dests), same_as
    for region, _ in dests:
        if form == "s2g":
            w.stored[region.tally] += n
    if form == "g2s":
        w.loaded[sr.tally] += n
    if not done:
        groups_of(w, "bulk", lane).open.append(op)
    w.world.submit(op)
    return op


def reducer(spec: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """``op.type`` → a function on byte arrays (memory, incoming)."""
    op, kind = spec.split(".")
    if kind == "bf16" and op in ("add", "min", "max"):
        wide = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]

        def on_bf16(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            x = convert.f32_from_bf16(old.view(np.uint16))
            y = convert.f32_from_bf16(new.view(np.uint16))
            return convert.bf16_from_f32(wide(x, y)).view(np.uint8)

        return on_bf16
    dtypes = {"f16": "f2", "f32": "f4", "f64": "f8"}
    if kind in dtypes or op == "add":
        dtype = dtypes.get(
            kind, kind.replace("b", "u")[0].replace("s", "i") + str(int(kind[1:]) // 8)
        )
        fn = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]

        def numeric(old: np.ndarray, new: np.ndarray) -> np.ndarray:
            return fn(old.copy().view(dtype), new.view(dtype)).view(np.uint8)

        return numeric
    each = operation(op, kind)
    unit = f"u{int(kind[1:]) // 8}"

    def generic(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        pairs = zip(old.copy().view(unit).tolist(), new.view(unit).tolist(), strict=True)
        return np.array([each(x, y) for x, y in pairs], unit).view(np.uint8)

    return generic


def cp_async(w: Warp, ins: Instruction, dst: Any, src: Any, size: int, used: Any) -> None:
    """cp.async of 4, 8 or 16 bytes a lane; bytes beyond ``used`` are zero-filled."""
    for lane, (d, s, n) in zip(active(w), lane_values(w, dst, src, used), strict=True):
        dr, do = span(w, ins, "shared", d, size, lane, size, write=True)
        n = min(n, size)
        sr, so = span(w, ins, "global", s, n, lane, size) if n else (dr, do)

        def reader(sr: Region = sr, so: int = so, n: int = n) -> np.ndarray:
            data = np.zeros(size, np.uint8)
            if n:
                data[:n] = sr.data[so : so + n]
            return data

        def writer(data: np.ndarray, dr: Region = dr, do: int = do) -> None:
            dr.data[do : do + size] = data

        op = AsyncOp(w, ins, "cp.async", reader, writer, [], lane)
        op.track = (sr, so, n, [(dr, do)])
        w.loaded[sr.tally] += n
        groups_of(w, "copy", lane).open.append(op)
        w.world.submit(op)
    w.world.count_async(ins, size * w.cur.bits.bit_count())


def cp_async_arrive(w: Warp, ins: Instruction, address: Any, noinc: bool) -> None:
    """cp.async.mbarrier.arrive: an arrival once this thread's earlier copies are complete."""
    for lane, (addr,) in zip(active(w), lane_values(w, address), strict=True):
        bar = mbarrier_at(w, ins, addr)
        groups = groups_of(w, "copy", lane)
        earlier = [op for g in groups.groups for op in g] + list(groups.open)
        if not noinc:
            bar.pending += 1

        def writer(_: Any, bar: MBarrier = bar, earlier: list[AsyncOp] = earlier) -> None:
            for op in earlier:
                op.complete()
            bar.arrive(1, w.world)

        op = AsyncOp(w, ins, "cp.async.arrive", lambda: None, writer, [], lane)
        op.track = (bar,)
        w.world.submit(op)


def submit(world: World, op: AsyncOp) -> None:
    """Place a new operation according to the world's completion policy."""
    if world.detector is not None:
        world.detector.async_issue(op)
    if world.completion == "eager":
        op.complete()
    else:
        world.pending.append(op)
