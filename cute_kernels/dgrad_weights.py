"""d_topk_weights in dgrad: the scalar of a row, from its parts to the source PE.

dw = ⟨dh, activation⟩ with dh = dy · W2, unweighted, so that a zero weight has its gradient too;
where the router weight also multiplies fc2's bias (``weight_at="combine"``), plus ⟨dy, b2⟩.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_values
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.bias import fc2_bias
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.smem import BF16_BYTES
from megamoe.cute_kernels.staging import GROUP_WARPS, group_barrier
from megamoe.cute_kernels.sync import aborted
from megamoe.cute_kernels.workspace import PART_COLUMNS

COLUMNS_OF_LANE = 8
"""Columns of one 16-byte load."""
PARTS_IN_FLIGHT = 8


@cute.jit
def bias_products(c: Context, thread: Int32, expert: Int32, block: Int32, rows: Int32):
    """⟨dy, b2⟩ of the block's rows to ``d_rows``; a warp takes every fourth row, and a row's sum
    has one order."""
    for row in cutlass.range(thread // 32, rows, GROUP_WARPS, unroll=1):
        dy = c.pool_x() + Int64(block * BLOCK_M + row) * (c.problem.hidden * BF16_BYTES)
        total = Float32(0.0)
        first = lane() * COLUMNS_OF_LANE
        for column in cutlass.range(first, c.problem.hidden, 32 * COLUMNS_OF_LANE, unroll=1):
            words = ptx.ld_i32x4(dy + column * BF16_BYTES)
            for i in cutlass.range_constexpr(COLUMNS_OF_LANE):
                value = ptx_values.bf16_to_f32(words[i // 2], i % 2 == 1)
                total = total + value * fc2_bias(c, expert, column + i)
        for step in cutlass.range_constexpr(5):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << step)
        if lane() == 0:
            ptx.sts_f32(c.smem + c.shared.d_rows + row * 4, total)


@cute.jit
def send_weight_gradients(c: Context, thread: Int32, expert: Int32, block: Int32, rows: Int32):
    """One warpgroup: every row's scalar to ``d_topk`` of its source PE. The tile's count, later,
    releases it together with the rows."""
    biased = c.problem.bias2 != "none" and c.problem.weight_at == "combine"
    if cutlass.const_expr(biased):
        # The first warpgroup's half of the table, which its last tile may still be reading.
        group_barrier(Int32(0))
        bias_products(c, thread, expert, block, rows)
        group_barrier(Int32(0))
    if (thread < rows) & (aborted(c.guard) == 0):
        row = block * BLOCK_M + thread
        total = Float32(0.0)
        if cutlass.const_expr(biased):
            total = ptx.lds_f32(c.smem + c.shared.d_rows + thread * 4)
        parts = ceil_div(c.problem.intermediate, PART_COLUMNS)
        for part in cutlass.range(parts, unroll=PARTS_IN_FLIGHT):
            index = Int64(part) * c.problem.pool_rows + row
            total = total + ptx.ld_f32(c.loc("d_weight") + index * 4)
        source, token, k, _ = ptx.ld_i32x4(c.row_meta(row))
        target = c.peer(source, "d_topk") + (Int64(token) * c.problem.top_k + k) * 4
        ptx.st_f32(target, total)
