"""Split over K: the parts of an fc2 tile, and their sum in a fixed order.

With ``split_k`` = S the reduction of every fc2 tile is cut into S parts, items of their own that
lie next to each other in the tile order, so that few tiles still fill the SMs. Each part stores its
fp32 accumulators in ``partial``; the warpgroup that completes a tile's last part sums parts
0 … S−1 in that order and runs the epilogue. Who that is changes no bit. Nobody waits for another
part.

``partial`` is in the order of the registers: 16-byte vectors of a token octet's four values (token
parity + 2·(row, row + 8)), of consecutive threads side by side.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.kernel_config import fc2_tiles
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M
from megamoe.cute_kernels.scheduler import TilePhase
from megamoe.cute_kernels.smem import PIECE_TOKENS
from megamoe.cute_kernels.staging import (
    GROUP_THREADS,
    HALF_ACCUMULATORS,
    PIECES,
    VALUES,
    group_barrier,
    make_values,
    row_entries,
)

VECTOR_BYTES = 16


@cute.jit
def k_range(c: Context, phase: Int32, part: Int32) -> tuple[Int32, Int32]:
    """First k-tile of a tile's part, and how many; fc1 tiles have one part."""
    first = Int32(0)
    count = Int32(ceil_div(c.problem.hidden, BLOCK_K))
    if phase == TilePhase.FC2:
        total = c.problem.fc2_parts * ceil_div(c.problem.fc2_reduction, BLOCK_K)
        first = part * total // c.config.split_k
        count = (part + 1) * total // c.config.split_k - first
    return first, count


@cute.jit
def partial_address(
    c: Context, thread: Int32, group: Int32, block: Int32, n: Int32, part: Int32
) -> Int64:
    """Where a thread's part lies: vector v is v·(threads of a warpgroup) vectors further."""
    tile = Int64(c.stored_block(block)) * fc2_tiles(c.problem, c.config) + n
    slot = (tile * c.config.split_k + part) * c.config.math_groups + group
    return (
        c.loc("partial")
        + slot * (c.config.block_n // c.config.math_groups * BLOCK_M * 4)
        + (thread * VECTOR_BYTES)
    )


@cute.jit
def complete_tile(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    block: Int32,
    n: Int32,
    part: Int32,
    rows: Int32,
) -> Int32:
    """Store this part; 1 if it was the tile's last: ``acc`` is then the sum of all of them."""
    step = GROUP_THREADS * VECTOR_BYTES
    mine = partial_address(c, thread, group, block, n, part)
    for half in cutlass.range_constexpr(c.config.halves):
        for piece in cutlass.range_constexpr(PIECES):
            if piece * PIECE_TOKENS < rows:
                first = half * HALF_ACCUMULATORS + piece * VALUES
                for i in cutlass.range_constexpr(first, first + VALUES, 4):
                    vector = mine + i // 4 * step
                    ptx.st_f32x4(vector, acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
    group_barrier(group)
    if thread == 0:
        tile = block * fc2_tiles(c.problem, c.config) + n
        counter = c.loc("parts") + Int64(tile * c.config.math_groups + group) * 4
        earlier = ptx.atom_acq_rel(counter, Int32(1))
        last = Int32(earlier == c.config.split_k - 1)
        if last == 1:
            # Nobody counts here again before the next launch.
            ptx.st_relaxed(counter, Int32(0), "gpu")
        ptx.sts_i32(row_entries(c, group), last)
    group_barrier(group)
    last = ptx.lds_i32(row_entries(c, group))
    if last == 1:
        sum_parts(c, acc, thread, group, block, n, rows)
    # The epilogue writes the row entries next.
    group_barrier(group)
    return last


@cute.jit
def sum_parts(
    c: Context, acc: cute.Tensor, thread: Int32, group: Int32, block: Int32, n: Int32, rows: Int32
):
    """The parts' values, added in ascending order."""
    step = GROUP_THREADS * VECTOR_BYTES
    zero = partial_address(c, thread, group, block, n, Int32(0))
    one = partial_address(c, thread, group, block, n, Int32(1))
    sums = make_values()
    for half in cutlass.range_constexpr(c.config.halves):
        for piece in cutlass.range_constexpr(PIECES):
            if piece * PIECE_TOKENS < rows:
                first = half * HALF_ACCUMULATORS + piece * VALUES
                sums.fill(0.0)
                for part in cutlass.range(c.config.split_k, unroll=1):
                    at = zero + part * (one - zero) + first // 4 * step
                    for i in cutlass.range_constexpr(0, VALUES, 4):
                        v0, v1, v2, v3 = ptx.ld_f32x4(at + i // 4 * step)
                        sums[i] = sums[i] + v0
                        sums[i + 1] = sums[i + 1] + v1
                        sums[i + 2] = sums[i + 2] + v2
                        sums[i + 3] = sums[i + 3] + v3
                for i in cutlass.range_constexpr(VALUES):
                    acc[first + i] = sums[i]
