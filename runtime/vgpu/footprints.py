"""Footprints of range operations in shadow memory: slices or index arrays of cells."""

from __future__ import annotations

from typing import Any

import numpy as np

from megamoe.runtime.vgpu.shadow import Shadow


def pieces(sh: Shadow, start: int, index: Any, piece: int) -> Any:
    """Cells of ``piece`` bytes at ``start + index * piece``, in order."""
    if piece < 1 << sh.grain or start & ((1 << sh.grain) - 1):
        low = piece | (start & ((1 << sh.grain) - 1))
        sh.refine(min(sh.grain, (low & -low).bit_length() - 1))
    k = piece >> sh.grain
    cells = (start >> sh.grain) + index * k
    if k > 1:
        cells = (cells[:, None] + np.arange(k)).ravel()
    return cells


def distinct_of(ids: Any) -> Any:
    """The ids that occur: the first of each run of equal ones."""
    changes = np.flatnonzero(ids[1:] != ids[:-1])
    return ids[:1] if not len(changes) else ids.take(np.append(0, changes + 1))


def by_piece(marks: Any, count: int) -> Any:
    """Marks of cells as marks of ``count`` equal pieces of them."""
    if len(marks) < count:
        marks = np.repeat(marks, count // len(marks))
    return marks.reshape(count, -1).any(axis=1)


def cells_of(where: Any) -> Any:
    """A footprint as an index array."""
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where


def spread(marks: Any, n: int, size: int, cells: int) -> Any:
    """Marks of n source bytes as marks of destination cells that cover ``size`` bytes."""
    per_byte = np.zeros(size, np.bool_)
    per_byte[:n] = np.repeat(marks, n // len(marks))
    return per_byte.reshape(cells, -1).any(axis=1)
