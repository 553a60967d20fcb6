"""Where each local expert's rows lie in a pool, computed by one warp from the row counts."""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.context import lane
from megamoe.cute_kernels.problem import BLOCK_M, Problem
from megamoe.cute_kernels.routing import warp_inclusive_sum

LOAD_BATCH = 8
"""Counts of this many sources are loaded before the first is used, to overlap their latency."""


@cute.jit
def sum_segments(
    problem: cutlass.Constexpr[Problem],
    counts: Int64,
    first_slot: Int32,
    experts: Int32,
    block_prefix: Int32,
    expert_rows: Int32,
    segment: Int32,
    keep_segments: cutlass.Constexpr[bool],
):
    """Segments of the pool: experts in order, padded to BLOCK_M; inside one, sources in order.

    Worked example, 2 sources, local experts with rows (source 0, source 1) = (100, 60), (0, 5):
    expert_rows = 160, 5; block_prefix = 0, 2, 3; segment = 0, 100 | 0, 0.

    Args:
        counts: address of ``[P, S]`` rows per source and slot.
        first_slot, experts: the slots of this PE.
        block_prefix, expert_rows, segment: shared addresses of the results, ``[experts + 1]``,
            ``[experts]`` and, if ``keep_segments``, ``[experts, P]``.
    """
    num_pes = problem.num_pes
    carry = Int32(0)
    base = Int32(0)
    while base < experts:
        expert = base + lane()
        rows = Int32(0)
        for batch in cutlass.range(ceil_div(num_pes, LOAD_BATCH), unroll=1):
            loaded = []
            for i in cutlass.range_constexpr(min(LOAD_BATCH, num_pes)):
                source = batch * LOAD_BATCH + i
                count = Int32(0)
                if (expert < experts) & (source < num_pes):
                    index = source * problem.num_slots + first_slot + expert
                    count = ptx.ld_i32(counts + Int64(index) * 4)
                loaded.append(count)
            for i in cutlass.range_constexpr(min(LOAD_BATCH, num_pes)):
                source = batch * LOAD_BATCH + i
                if cutlass.const_expr(keep_segments):
                    if (expert < experts) & (source < num_pes):
                        ptx.sts_i32(segment + (expert * num_pes + source) * 4, rows)
                rows += loaded[i]
        blocks = (rows + BLOCK_M - 1) // BLOCK_M
        inclusive = warp_inclusive_sum(blocks)
        if expert < experts:
            ptx.sts_i32(expert_rows + expert * 4, rows)
            ptx.sts_i32(block_prefix + expert * 4, carry + inclusive - blocks)
        carry += cute.arch.shuffle_sync(inclusive, 31)
        base += 32
    if lane() == 0:
        ptx.sts_i32(block_prefix + experts * 4, carry)
