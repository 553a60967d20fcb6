"""Index plans of tensor boxes: which pieces of global memory go to which pieces of shared memory.

Source: PTX ISA, "Tiled mode" (bounds) and "Swizzling modes". One plan serves every box that is
cut by the tensor's edges in the same way and has the same alignments; it moves the largest
power-of-two pieces (up to 16 bytes) by one numpy gather and one scatter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
Pieces = NDArray[np.generic]

_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # c16: 16 bytes that numpy moves fast
_PATTERN = 1024  # every swizzle repeats after at most this many bytes


@dataclass(frozen=True)
class BoxPlan:
    """How to move one box; offsets are from the first in-bounds byte and the shared pattern.

    Attributes:
        piece: bytes moved per index (1 to 16); no piece is cut by an edge.
        global_index, shared_index: int64 per in-bounds piece, in pieces.
        fill_index: shared pieces outside the tensor; `fill` is one such piece.
        extent: bytes from the first to the last in-bounds byte, for bounds checks; 0 if none.
        bytes_inside: in-bounds bytes.
        row_starts: int64 byte offset of each in-bounds row; row_bytes: its length.
        line_bytes: a row of the box in shared memory, what lies outside the tensor included.
    """

    piece: int
    global_index: I64
    shared_index: I64
    fill_index: I64
    fill: Pieces
    extent: int
    bytes_inside: int
    row_starts: I64
    row_bytes: int
    line_bytes: int

    def gather_global(self, window: U8) -> Pieces:
        """Pieces of a box from `window`: the `extent` bytes from the first in-bounds byte on."""
        return window.view(_DTYPES[self.piece]).take(self.global_index)

    def scatter_global(self, window: U8, pieces: Pieces) -> None:
        """The reverse of `gather_global`, in place."""
        window.view(_DTYPES[self.piece])[self.global_index] = pieces

    def gather_shared(self, smem: U8, smem_addr: int) -> Pieces:
        """In-bounds pieces of a box at `smem_addr`; `smem` is indexed by shared address."""
        return self._shared(smem, smem_addr).take(self.shared_index)

    def scatter_shared(self, smem: U8, smem_addr: int, pieces: Pieces) -> None:
        """Write the in-bounds pieces and fill the others."""
        view = self._shared(smem, smem_addr)
        view[self.shared_index] = pieces
        if len(self.fill_index):
            view[self.fill_index] = self.fill

    def _shared(self, smem: U8, smem_addr: int) -> Pieces:
        base = smem_addr & -_PATTERN
        end = len(smem) & -16
        return smem[base:end].view(_DTYPES[self.piece])


def build_plan(
    counts: tuple[int, ...],
    strides: tuple[int, ...],
    swizzle: int,
    clip: tuple[int, ...],
    fill: bytes,
) -> BoxPlan:
    """Make a plan.

    Args:
        counts: elements of the box, innermost first.
        strides: bytes from one element to the next along each dimension (element strides included);
            strides[0] is the element size.
        swizzle: 0, 32, 64 or 128.
        clip: (shared address % 1024, alignment of the box's start in global memory % 16,
            then first and one-past-last in-bounds index of each dimension).
        fill: 16 bytes for the outside.
    """
    phase, align = clip[0], clip[1]
    spans = list(zip(clip[2::2], clip[3::2], strict=True))
    size = strides[0]
    inner = counts[0] * size
    low, high = (x * size for x in spans[0])
    empty = any(a == b for a, b in spans)
    mixed = 16 | low | high | (align + low)  # the lowest set bit divides everything that matters
    piece = mixed & -mixed

    rows_global = np.zeros(1, np.int64)
    rows_shared = np.zeros(1, np.int64)
    pitch = inner
    for n, stride, (a, b) in zip(counts[1:], strides[1:], spans[1:], strict=True):
        j = np.arange(a, b, dtype=np.int64)[:, None]
        rows_global = ((j - a) * stride + rows_global[None, :]).ravel()
        rows_shared = (j * pitch + rows_shared[None, :]).ravel()
        pitch *= n
    columns = np.arange(low, high, piece, dtype=np.int64)
    global_offset = (rows_global[:, None] + (columns - low)[None, :]).ravel()
    shared_offset = (rows_shared[:, None] + columns[None, :]).ravel()
    if empty:
        global_offset = shared_offset = rows_global = np.zeros(0, np.int64)

    outside = np.ones(pitch // piece, bool)
    outside[shared_offset // piece] = False
    outside_offset = np.flatnonzero(outside) * piece
    return BoxPlan(
        piece=piece,
        global_index=global_offset // piece,
        shared_index=swizzled(phase + shared_offset, swizzle) // piece,
        fill_index=swizzled(phase + outside_offset, swizzle) // piece,
        fill=np.frombuffer(fill, np.uint8)[:piece].copy().view(_DTYPES[piece]),
        extent=0 if empty else int(global_offset.max()) + piece,
        bytes_inside=len(global_offset) * piece,
        row_starts=rows_global,
        row_bytes=0 if empty else high - low,
        line_bytes=inner,
    )


def swizzled(address: I64, swizzle: int) -> I64:
    """XOR address bits [4:6] with [7:9] (128 bytes), [4:5] with [7:8] (64), [4] with [7] (32)."""
    if swizzle == 0:
        return address
    return address ^ ((address >> 7 & (swizzle // 16 - 1)) << 4)
