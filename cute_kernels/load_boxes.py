"""Boxes of weights that every kernel's load role copies to a stage."""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx_copies
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.problem import BLOCK_K
from megamoe.cute_kernels.smem import BF16_BYTES, HALF_ROWS

SLOT_ROWS = 64
SLOT_BYTES = SLOT_ROWS * BLOCK_K * BF16_BYTES
ROW_BYTES = BLOCK_K * BF16_BYTES


@cute.jit
def copy_box(
    c: Context, half: cutlass.Constexpr[int], target: Int32, weights: Int64, box, full: Int32
):
    """One box of weights of half ``half`` of the tile. Where a pair of CTAs shares weights, each
    loads one half for both."""
    if cutlass.const_expr(c.config.cluster != "weights"):
        ptx_copies.tma_load_4d(target, weights, box[0], box[1], box[2], box[3], full)
    elif (c.cta & 1) == half:
        ptx_copies.tma_load_4d_to_pair(target, weights, box[0], box[1], box[2], box[3], full)


@cute.jit
def copy_rows_of_k(
    c: Context, a: Int32, weights: Int64, k: Int32, rows, parts, expert: Int32, full: Int32
):
    """K-major storage: one box of 128 (or ``block_n``) rows for each half of the tile."""
    for half in cutlass.range_constexpr(c.config.halves):
        target = a + half * (HALF_ROWS * ROW_BYTES)
        copy_box(c, half, target, weights, (k, rows[half], parts[half], expert), full)


@cute.jit
def copy_transposed(
    c: Context, a: Int32, weights: Int64, k: Int32, rows, parts, expert: Int32, full: Int32
):
    """Transposed storage: boxes of 64 rows by 64 k; slots 2h and 2h + 1 are half h."""
    for slot in cutlass.range_constexpr(c.config.block_n // SLOT_ROWS):
        half = slot // 2
        row = rows[half] + (slot % 2) * SLOT_ROWS
        target = a + slot * SLOT_BYTES
        copy_box(c, half, target, weights, (row, k, parts[half], expert), full)
