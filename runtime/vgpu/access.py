"""Loads, stores and atomics of one warp: the narrow place through which all of them go.

Scalar versions serve an address that is the same in all lanes; vector versions take 32-lane
arrays. Both find the region, check bounds and alignment, and tell the world's detector if there
is one. Vector accesses first try the common case, all lanes in one region.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.errors import MemoryFault
from megamoe.runtime.vgpu.lanes import LANES
from megamoe.runtime.vgpu.memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_SIZE, Region
from megamoe.runtime.vgpu.ptx_ast import Instruction

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp

SHIFT = {1: 0, 2: 1, 4: 2, 8: 3, 16: 4}
_TAKE_MASK = {1: 0, 2: 1, 4: 3, 8: 7, 16: 15, 32: 31}


class Access:
    """The static side of a memory instruction."""

    __slots__ = ("atomic", "count", "ins", "kind", "poll", "scope", "sem", "size", "space")

    def __init__(
        self, ins: Instruction, kind: str, space: str, size: int, count: int = 1,
        sem: str = "weak", scope: str = "", poll: bool = False,
    ) -> None:  # fmt: skip
        self.ins, self.kind, self.space, self.size, self.count = ins, kind, space, size, count
        self.sem, self.scope, self.poll = sem, scope, poll
        self.atomic = kind in ("atom", "red")


def fault(w: Warp, a: Access, address: int, lane: int | None, why: str = "") -> MemoryFault:
    """The error for a bad address."""
    space = a.space
    if space == "generic" and SHARED_WINDOW <= address < SHARED_WINDOW + WINDOW_SIZE:
        space, address = "shared", address - SHARED_WINDOW
    if space == "shared":
        what = w.cta.describe_shared(address)
    else:
        what = w.world.memory.describe(address)
    total = a.size * a.count
    text = why or f"{what}"
    if why:
        text = f"{why}: {what}"
    return MemoryFault(
        f"{w.place(lane)}: {a.ins.opcode} of {total} bytes at {address:#x}: {text}"
        f" ({w.source(a.ins)})"
    )


def region_of(w: Warp, a: Access, address: int, lane: int | None = None) -> tuple[Region, int]:
    """The region of an address in the access's space, and the offset in it."""
    space = a.space
    if space == "generic":
        if SHARED_WINDOW <= address < SHARED_WINDOW + WINDOW_SIZE:
            address -= SHARED_WINDOW
            space = "shared"
        elif LOCAL_WINDOW <= address < LOCAL_WINDOW + WINDOW_SIZE:
            raise fault(w, a, address, lane, "generic access to local memory is per lane")
    if space == "shared":
        region = w.cta.shared_region(address)
    else:
        region = w.world.memory.find(address)
    if region is None:
        raise fault(w, a, address, lane)
    off = address - region.base
    total = a.size * a.count
    if off < 0 or off + total > region.end - region.base:
        raise fault(w, a, address, lane, "out of bounds")
    if off & (total - 1):
        raise fault(w, a, address, lane, "misaligned")
    return region, off


# -- loads -------------------------------------------------------------------------------------
def load(w: Warp, a: Access, address: int) -> int:
    """One value from one address."""
    region, off = region_of(w, a, address)
    value = region.cells[a.size][off >> SHIFT[a.size]]
    w.loaded[region.tally] += a.size
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, None)
    if a.poll:
        w.poll(a, address, value)
    return value


def load_many(w: Warp, a: Access, address: int) -> list[int]:
    """A vector of values from one address."""
    region, off = region_of(w, a, address)
    first = off >> SHIFT[a.size]
    w.loaded[region.tally] += a.size * a.count
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, None)
    values = region.cells[a.size][first : first + a.count].tolist()
    if a.poll:
        w.poll(a, address, values)
    return values


def _lanes(mask: np.ndarray | None) -> np.ndarray:
    return LANES if mask is None else np.flatnonzero(mask)


def _offsets(w: Warp, a: Access, address: np.ndarray, mask: np.ndarray | None) -> tuple:
    """(region, offsets as int64, lanes) if all lanes hit one region rightly, else (None, ...)."""
    lanes = None if mask is None else mask.nonzero()[0]
    addr = address if lanes is None else address[lanes]
    first = int(addr[0])
    space = a.space
    if space == "shared":
        region = w.cta.shared_region(first)
        if region is None:
            raise fault(w, a, first, 0 if lanes is None else int(lanes[0]))
        # 32-bit wrap-around turns an address below the base into a large offset.
        off = (addr - region.base).astype(np.int64)
    else:
        if space == "generic" and first < LOCAL_WINDOW + WINDOW_SIZE:
            return None, addr, lanes
        region = w.world.memory.find(first)
        if region is None:
            raise fault(w, a, first, 0 if lanes is None else int(lanes[0]))
        off = (addr - region.base).view(np.int64)
    total = a.size * a.count
    every = int(np.bitwise_or.reduce(off))
    if (
        every < 0
        or every & (total - 1)
        or (
            every >= region.end - region.base - total + 1
            and int(off.max()) > region.end - region.base - total
        )
    ):
        return None, addr, lanes
    return region, off, lanes


def load_lanes(w: Warp, a: Access, address: np.ndarray, mask: np.ndarray | None) -> Any:
    """One value per lane: an array, or a list of arrays for vector loads."""
    region, off, lanes = _offsets(w, a, address, mask)
    if region is None:
        return _load_slow(w, a, off, lanes)
    size, count = a.size, a.count
    if count == 1:
        got = region.views[size].take(off >> SHIFT[size])
        if lanes is not None:
            out = np.zeros(32, got.dtype)
            out[lanes] = got
            got = out
    else:
        raw = _rows(region, off, size * count)
        if lanes is not None:
            out = np.zeros((32, size * count), np.uint8)
            out[lanes] = raw
            raw = out
        got = np.ascontiguousarray(raw.view(f"u{size}").T)
    w.loaded[region.tally] += len(off) * size * count
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, lanes)
    if a.poll:
        w.poll(a, address.tobytes(), got.tobytes())
    return got


def _rows(region: Region, off: np.ndarray, total: int) -> np.ndarray:
    """uint8 [lanes, total] rows of an aligned vector access."""
    if total == 16:
        return region.views[16].take(off >> 4, axis=0)
    if total in (2, 4, 8):
        return region.views[total].take(off >> SHIFT[total]).view(np.uint8).reshape(-1, total)
    part = off >> 4
    return np.concatenate(
        [region.views[16].take(part, axis=0), region.views[16].take(part + 1, axis=0)], axis=1
    )


def _load_slow(w: Warp, a: Access, address: np.ndarray, lanes: np.ndarray | None) -> Any:
    """Lanes in different regions, local memory, or a fault: one lane at a time."""
    out = np.zeros((a.count, 32), f"u{a.size}")
    for i, lane in enumerate(range(32) if lanes is None else lanes.tolist()):
        addr = int(address[i])
        region, off = _lane_region(w, a, addr, lane)
        first = off >> SHIFT[a.size]
        out[:, lane] = region.views[a.size][first : first + a.count]
        w.loaded[region.tally] += a.size * a.count
        if w.world.detector is not None:
            w.world.detector.access(w, a, region, np.array([off]), np.array([lane]))
    if a.poll:
        w.poll(a, address.tobytes(), out.tobytes())
    return out if a.count > 1 else out[0]


def _lane_region(w: Warp, a: Access, address: int, lane: int) -> tuple[Region, int]:
    if a.space == "generic" and LOCAL_WINDOW <= address < LOCAL_WINDOW + WINDOW_SIZE:
        off = address - LOCAL_WINDOW
        region = w.local_region(lane)
        if off + a.size * a.count > region.end:
            raise fault(w, a, address, lane, "beyond local memory")
        return region, off
    return region_of(w, a, address, lane)


# -- stores ------------------------------------------------------------------------------------
def store(w: Warp, a: Access, address: int, values: list, mask: np.ndarray | None) -> None:
    """Values to one address; where they differ by lane, the last lane wins."""
    region, off = region_of(w, a, address)
    if not region.writable:
        raise fault(w, a, address, None, "read-only memory")
    first, cells = off >> SHIFT[a.size], region.cells[a.size]
    last = None
    for i, v in enumerate(values):
        if type(v) is np.ndarray:
            if last is None:
                last = 31 if mask is None else int(np.flatnonzero(mask)[-1])
            v = int(v[last])
        cells[first + i] = v
    w.stored[region.tally] += a.size * a.count
    w.world.progress += 1
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, mask)


def store_lanes(
    w: Warp, a: Access, address: np.ndarray, values: list, mask: np.ndarray | None
) -> None:
    """Values to one address per lane."""
    region, off, lanes = _offsets(w, a, address, mask)
    if region is None or not region.writable:
        _store_slow(w, a, off if region is None else address, values, lanes)
        return
    size, count = a.size, a.count
    view = region.views[size]
    first = off >> SHIFT[size]
    for i, v in enumerate(values):
        if lanes is not None and type(v) is np.ndarray:
            v = v[lanes]
        view[first + i if i else first] = v
    w.stored[region.tally] += len(off) * size * count
    w.world.progress += 1
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, lanes)


def _store_slow(
    w: Warp, a: Access, address: np.ndarray, values: list, lanes: np.ndarray | None
) -> None:
    for i, lane in enumerate(range(32) if lanes is None else lanes.tolist()):
        addr = int(address[i])
        region, off = _lane_region(w, a, addr, lane)
        if not region.writable:
            raise fault(w, a, addr, lane, "read-only memory")
        first = off >> SHIFT[a.size]
        for j, v in enumerate(values):
            region.views[a.size][first + j] = v[lane] if type(v) is np.ndarray else v
        w.stored[region.tally] += a.size * a.count
        if w.world.detector is not None:
            w.world.detector.access(w, a, region, np.array([off]), np.array([lane]))
    w.world.progress += 1


# -- local memory ------------------------------------------------------------------------------
def local_load(w: Warp, a: Access, address: Any, mask: np.ndarray | None) -> Any:
    """ld.local: each lane has its own copy of the address range."""
    first = _local_index(w, a, address, mask)
    view = w.local.view(f"u{a.size}")
    out = [view[LANES, first + i] for i in range(a.count)]
    return out if a.count > 1 else out[0]


def local_store(w: Warp, a: Access, address: Any, values: list, mask: np.ndarray | None) -> None:
    """st.local."""
    first = _local_index(w, a, address, mask)
    view = w.local.view(f"u{a.size}")
    lanes = _lanes(mask)
    for i, v in enumerate(values):
        view[lanes, (first + i)[lanes]] = v[lanes] if type(v) is np.ndarray else v


def _local_index(w: Warp, a: Access, address: Any, mask: np.ndarray | None) -> np.ndarray:
    addr = np.broadcast_to(np.asarray(address, np.int64), 32)
    bad = (addr < 0) | (addr + a.size * a.count > w.local.shape[1]) | (addr & (a.size - 1) != 0)
    if mask is not None:
        bad = bad & mask
        addr = np.where(mask, addr, 0)
    if bad.any():
        lane = int(np.flatnonzero(bad)[0])
        raise fault(w, a, int(addr[lane]), lane, "outside local memory or misaligned")
    return addr >> SHIFT[a.size]
