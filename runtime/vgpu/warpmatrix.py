"""ldmatrix, stmatrix, movmatrix and mma.sync on the registers of one warp."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megamoe.runtime.vgpu import matrix
from megamoe.runtime.vgpu.access import Access, fault

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp


def _rows(w: Warp, a: Access, address: np.ndarray, count: int) -> tuple:
    """(region, row index) of the 16-byte rows whose addresses the first lanes give."""
    rows = address[: 8 * count]
    region = w.cta.shared_region(int(rows[0]))
    if region is None:
        raise fault(w, a, int(rows[0]), 0)
    off = (rows.astype(np.uint32) - np.uint32(region.base)).astype(np.int64)
    bad = (off & 15 != 0) | (off + 16 > region.end - region.base)
    if bad.any():
        lane = int(np.flatnonzero(bad)[0])
        raise fault(w, a, int(rows[lane]), lane, "misaligned or out of bounds")
    return region, off


def ldmatrix(w: Warp, a: Access, address: np.ndarray, count: int, trans: bool) -> np.ndarray:
    """Registers [count, 32] of 8x8 matrices."""
    region, off = _rows(w, a, address, count)
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, np.arange(8 * count))
    return matrix.ldmatrix(region.views[16].take(off >> 4, axis=0), trans)


def stmatrix(w: Warp, a: Access, address: np.ndarray, values: list, trans: bool) -> None:
    """Store registers of 8x8 matrices as rows."""
    count = len(values)
    region, off = _rows(w, a, address, count)
    regs = np.empty((count, 32), np.uint32)
    for i, v in enumerate(values):
        regs[i] = v
    region.views[16][off >> 4] = matrix.stmatrix(regs, trans)
    w.world.progress += 1
    if w.world.detector is not None:
        w.world.detector.access(w, a, region, off, np.arange(8 * count))


def movmatrix(x: np.ndarray) -> np.ndarray:
    """Transpose an 8x8 matrix in registers."""
    return matrix.movmatrix_trans(x)


def mma(a: list, b: list, c: list, kind: str) -> np.ndarray:
    """mma.sync m16n8k16."""
    return matrix.mma_m16n8k16(np.stack(a), np.stack(b), np.stack(c), kind)
