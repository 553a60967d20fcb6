"""Shadow memory: per cell of a region, the last write and the reads since.

A *cell* is ``1 << grain`` bytes, 4 to start with; a region is refined when something narrower
touches it. A cell's entry is an *id*: record number << 6 | lane (32: see the record). Record 0 is
"never written", 1 is the host before the first run. A negative id is a write of never-written
bytes: an asynchronous copy carried them there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megamoe.runtime.vgpu.clocks import GENERIC, Agents, Clock
from megamoe.runtime.vgpu.findings import Touch

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.memory import Region
    from megamoe.runtime.vgpu.warp import Warp

LANE_BITS = 6
LANE_MASK = 63
HOST_ID = 1 << LANE_BITS
POISON_WORD = 0xFFFBFFFD  # negative as an integer, NaN as f32 and as two bf16

Ids = NDArray[np.int32]
Cells = NDArray[np.int64]
# Cells of a range operation: a contiguous slice, or an index array.
Footprint = Any


class Records:
    """Accesses that shadow memory refers to: agent column, time, and what it was."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.column = np.zeros(1 << 14, np.int32)
        self.time = np.zeros(1 << 14, np.int32)
        nothing = Touch(None, None, "nothing", 0)
        self.touch: list[Touch] = [nothing, Touch(None, None, "write", 0)]
        self.time[1] = 1

    def add(self, column: int, time: int, touch: Touch) -> int:
        """A new record's id (without a lane)."""
        n = len(self.touch)
        if n == len(self.time):
            self.column = np.concatenate([self.column, np.zeros(n, np.int32)])
            self.time = np.concatenate([self.time, np.zeros(n, np.int32)])
        self.column[n] = column
        self.time[n] = time
        self.touch.append(touch)
        return n << LANE_BITS

    def of(self, id_: int) -> Touch:
        """The access an id stands for."""
        return self.touch[abs(id_) >> LANE_BITS]

    def compact(self, shadows: list[Shadow]) -> None:
        """Forget the records that no shadow refers to any more."""
        used = np.zeros(len(self.touch), np.bool_)
        used[:2] = True
        arrays = [ids for sh in shadows for ids in (sh.writes, sh.reads)]
        arrays += [o.ids for sh in shadows for o in sh.overflow.values()]
        for ids in arrays:
            used[np.abs(ids) >> LANE_BITS] = True
        kept = np.flatnonzero(used)
        number = np.zeros(len(used), np.int32)
        number[kept] = np.arange(len(kept), dtype=np.int32)
        for ids in arrays:
            plain = np.abs(ids)
            new = number[plain >> LANE_BITS] << LANE_BITS | plain & LANE_MASK
            ids[:] = np.where(ids < 0, -new, new)
        self.column[: len(kept)] = self.column[kept]
        self.time[: len(kept)] = self.time[kept]
        self.touch = [self.touch[i] for i in kept.tolist()]

    def agent(self, id_: int) -> tuple[int, int]:
        """(column, time) of an id."""
        n = abs(id_) >> LANE_BITS
        return int(self.column[n]) + (abs(id_) & LANE_MASK), int(self.time[n])

    def unordered(self, ids: Ids, clock: Clock, own: Any) -> NDArray[np.bool_] | None:
        """Which of these accesses a thread with ``clock`` is not ordered after; None: none.

        ``own``: the column of the thread itself, whose accesses program order covers.
        """
        rec = ids >> LANE_BITS
        column = self.column.take(rec)
        column += ids & LANE_MASK
        bad = clock[GENERIC].take(column) < self.time.take(rec)
        if not np.count_nonzero(bad):
            return None
        bad &= column != own
        return bad if np.count_nonzero(bad) else None

    def unordered_async(
        self, ids: Ids, clock: Clock, row: int, own: int, cluster: int
    ) -> NDArray[np.bool_] | None:
        """The same for an asynchronous access issued by a thread: also what has not crossed
        proxies. Asynchronous accesses of one cluster need no proxy fence between them."""
        rec = ids >> LANE_BITS
        column = self.column.take(rec)
        column += ids & LANE_MASK
        time = self.time.take(rec)
        bad = (clock[GENERIC].take(column) < time) & (column != own)
        crossing = clock[row].take(column) < time
        if np.count_nonzero(crossing):
            crossing &= self.agents.cluster.take(column) != cluster
            bad |= crossing
        return bad if np.count_nonzero(bad) else None


class Overflow:
    """Reads that a later, unordered read displaced from their cells."""

    __slots__ = ("cells", "high", "ids", "low")

    def __init__(self, cells: Cells, ids: Ids) -> None:
        self.cells, self.ids = cells, ids
        self.low, self.high = int(cells[0]), int(cells[-1])
        if len(cells) > 1:
            self.low, self.high = int(cells.min()), int(cells.max())


class Word:
    """What a release sequence on a word carries: clocks by scope and releasing CTA."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: dict[tuple[str, int], tuple[Warp, Clock]] = {}


class Shadow:
    """The shadow of one region."""

    __slots__ = (
        "grain", "host_owned", "marks", "overflow", "overflow_cells", "ran", "reads", "region",
        "size", "snapshot", "word_bytes", "words", "writes",
    )  # fmt: skip

    def __init__(self, region: Region, written: bool) -> None:
        self.region, self.host_owned = region, written
        self.size = region.end - region.base
        self.grain = 2
        count = (self.size + 3) >> 2
        self.writes: Ids = np.full(count, HOST_ID if written else 0, np.int32)
        self.reads: Ids = np.zeros(count, np.int32)
        self.overflow: dict[tuple, Overflow] = {}
        self.marks = np.zeros(count, np.bool_)  # scratch
        self.overflow_cells = (count, -1)  # bounds of all of them
        self.words: dict[int, Word] = {}
        self.word_bytes = (self.size, -1)  # bounds of their offsets
        self.snapshot: NDArray[np.uint8] | None = None
        self.ran = False  # part of an earlier run

    def refine(self, grain: int) -> None:
        """Make cells ``1 << grain`` bytes."""
        k = 1 << (self.grain - grain)
        self.writes = np.repeat(self.writes, k)
        self.reads = np.repeat(self.reads, k)
        self.marks = np.zeros(len(self.reads), np.bool_)
        fine = np.arange(k)
        self.overflow = {
            key: Overflow((o.cells[:, None] * k + fine).ravel(), np.repeat(o.ids, k))
            for key, o in self.overflow.items()
        }
        self.grain = grain
        low, high = self.overflow_cells
        self.overflow_cells = (low * k, high * k + k - 1)

    def span(self, offset: int, nbytes: int) -> slice:
        """The cells of a range of bytes."""
        if self.grain and (offset | nbytes) & ((1 << self.grain) - 1):
            low = (offset | nbytes) & -(offset | nbytes)
            self.refine(min(self.grain, low.bit_length() - 1))
        return slice(offset >> self.grain, (offset + nbytes) >> self.grain)

    def where(self, cell: int) -> str:
        """``region[index]`` of a cell."""
        return self.region.where(self.region.base + (cell << self.grain))

    def displace(self, cells: Cells, ids: Ids, records: Records) -> None:
        """Keep reads that are about to be overwritten by an unordered one."""
        key = (int(records.column[int(ids[0]) >> LANE_BITS]), int(cells[0]), len(cells))
        new = self.overflow[key] = Overflow(cells, ids)
        low, high = self.overflow_cells
        self.overflow_cells = (min(low, new.low), max(high, new.high))

    def overflowing(self, where: Footprint) -> list[tuple[tuple, Cells, Ids]]:
        """(key, cells, ids) of displaced reads that lie in a footprint."""
        if isinstance(where, slice):
            low, high = where.start, where.stop - 1
        else:
            low, high = int(np.minimum.reduce(where)), int(np.maximum.reduce(where))
        if low > self.overflow_cells[1] or high < self.overflow_cells[0]:
            return []
        near = [x for x in self.overflow.items() if x[1].low <= high and x[1].high >= low]
        if not near:
            return []
        out = []
        self.marks[where] = True
        for key, o in near:
            hit = self.marks.take(o.cells)
            n = np.count_nonzero(hit)
            if n == len(hit):
                out.append((key, o.cells, o.ids))
            elif n:
                out.append((key, o.cells[hit], o.ids[hit]))
        self.marks[where] = False
        return out

    def forget(self, key: tuple, cells: Cells) -> None:
        """Displaced reads that a write has been checked against."""
        o = self.overflow[key]
        if len(cells) == len(o.cells):
            del self.overflow[key]
            return
        self.marks[cells] = True
        rest = ~self.marks.take(o.cells)
        self.marks[cells] = False
        self.overflow[key] = Overflow(o.cells[rest], o.ids[rest])

    def word(self, offset: int) -> Word:
        """The synchronising word at an offset, made on first use."""
        found = self.words.get(offset)
        if found is None:
            found = self.words[offset] = Word()
            low, high = self.word_bytes
            self.word_bytes = (min(low, offset), max(high, offset))
        return found

    def break_words(self, low: int, high: int) -> None:
        """A plain write to cells [low, high) ends the release sequences of words in it."""
        first, last = low << self.grain, high << self.grain
        if first > self.word_bytes[1] or last <= self.word_bytes[0]:
            return
        if high - low < len(self.words):
            for offset in range(first, last, 1 << self.grain):
                if offset in self.words:
                    self.words[offset].entries.clear()
            return
        for offset, word in self.words.items():
            if first <= offset < last:
                word.entries.clear()
