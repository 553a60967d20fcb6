"""What the kernel's tensor maps describe: dimensions, strides and boxes, innermost first.

Plain data for whoever encodes them (the CUDA driver's cuTensorMapEncodeTiled, or vgpu). All are
bf16 with a 128-byte swizzle; the inner box of 64 elements is one swizzle row.

Weights are read in the engine's own layout. A weight map has four dimensions; which of the first
two is the reduction (k) depends on the storage:

=============  ==============================  ======================  ===================
storage        dimensions                      box                     copies a stage
=============  ==============================  ======================  ===================
rows of k      (k, row, gate|up, expert)       (64, 128, 1, 1)         2
transposed     (row, k, gate|up, expert)       (64, 64, 1, 1)          4
transposed,    (gate and up rows in turn, k,   (64, 64, 1, 1)          4
interleaved    1, expert)
=============  ==============================  ======================  ===================

Gate and up are a dimension of their own, so that a box at the edge of I never runs from gate into
up. The third dimension has size 1 without a gate.
"""

from dataclasses import dataclass

from megamoe.cute_kernels.problem import BLOCK_K, Problem
from megamoe.cute_kernels.smem import BF16_BYTES, PIECE_TOKENS

SWIZZLE_BYTES = 128
HALF_ROWS = 128
"""Rows of a box of weights: half a tile."""
WIDE_ROWS = 64
"""Pool rows of the wide token box; tiles of 64 and 128 tokens use it."""
NARROW_ROWS = 8
"""Pool rows of the narrow token box, for the rest."""


@dataclass(frozen=True)
class TensorMapSpec:
    """Arguments of one encode call; ``strides`` in bytes, of dimensions 1 and up."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def w13_spec(p: Problem, experts: int) -> TensorMapSpec:
    """Map of contiguous ``w13 [experts, rows, H]`` or, transposed, ``[experts, H, rows]``."""
    rows, inter, hidden = p.w13_rows, p.intermediate, p.hidden
    parts = 2 if p.gated else 1
    interleaved = p.w13_layout == "interleaved"
    if p.paired_rows:
        return _spec((rows, hidden, 1, experts), (rows, rows * hidden, rows * hidden), True)
    if p.w13_transposed:
        return _spec((inter, hidden, parts, experts), (rows, inter, rows * hidden), True)
    row_stride = 2 * hidden if interleaved else hidden
    part_stride = hidden if interleaved else inter * hidden
    strides = (row_stride, part_stride, rows * hidden)
    return _spec((hidden, inter, parts, experts), strides, False)


def w2_spec(p: Problem, experts: int) -> TensorMapSpec:
    """Map of contiguous ``w2 [experts, H, I]`` or, transposed, ``[experts, I, H]``."""
    inter, hidden = p.intermediate, p.hidden
    size = inter * hidden
    if p.w2_transposed:
        return _spec((hidden, inter, 1, experts), (hidden, size, size), True)
    return _spec((inter, hidden, 1, experts), (inter, size, size), False)


def _spec(dims: tuple[int, ...], strides: tuple[int, ...], transposed: bool) -> TensorMapSpec:
    """A weight map; ``strides`` in elements."""
    box = (BLOCK_K, WIDE_ROWS, 1, 1) if transposed else (BLOCK_K, HALF_ROWS, 1, 1)
    return TensorMapSpec(dims, tuple(stride * BF16_BYTES for stride in strides), box)


def pool_specs(p: Problem) -> dict[str, TensorMapSpec]:
    """Maps of ``pool_x [M, H]`` and ``pool_h [M, I]``: wide and narrow loads, stores of
    pieces; and of ``pool_y [M, H]`` where rows are summed before they go back."""

    def rows_of(width: int, box_rows: int, rows: int = p.stored_rows) -> TensorMapSpec:
        return TensorMapSpec((width, rows), (width * BF16_BYTES,), (BLOCK_K, box_rows))

    stores = {}
    if p.prereduced:
        stores["pool_y_store"] = rows_of(p.hidden, PIECE_TOKENS, p.pool_rows)
    return stores | {
        "pool_x": rows_of(p.hidden, WIDE_ROWS),
        "pool_x_8": rows_of(p.hidden, NARROW_ROWS),
        "pool_h": rows_of(p.intermediate, WIDE_ROWS),
        "pool_h_8": rows_of(p.intermediate, NARROW_ROWS),
        "pool_h_store": rows_of(p.intermediate, PIECE_TOKENS),
    }
