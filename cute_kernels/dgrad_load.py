"""What load brings for dgrad: transposed weights, and the saved gate and up of a tile.

The first GEMM is dh = dy · W2 (reduced over H), the second dx = [dgate | dup] · W13 (over gate's
columns, then up's). Behind the k-tiles of the first come up to four more stages, one for each 64
columns of h (half by half, one for each warpgroup): gate and up of the block's rows, in pieces of
32 rows, in the A part of the stage.

With ``recompute`` the first tiles of a block are the forward's fc1 on the saved rows of x, which
waits for nothing; those of dh then wait for all of them, just before their saved values.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx_copies
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.kernel_config import recompute_tiles
from megamoe.cute_kernels.load_boxes import SLOT_ROWS, copy_rows_of_k, copy_transposed
from megamoe.cute_kernels.pipelines import StagePosition, await_empty, full_barrier
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M
from megamoe.cute_kernels.scheduler import TilePhase
from megamoe.cute_kernels.smem import HALF_ROWS, PIECE_BYTES, PIECE_TOKENS, a_stage_bytes
from megamoe.cute_kernels.sync import wait_at_least
from megamoe.cute_kernels.workspace import PART_COLUMNS, TENSOR_MAP_BYTES

HALVES = 2
"""Halves of a tile, of 128 columns of h, 64 for each math warpgroup."""
SLOT_COLUMNS = PART_COLUMNS
UP_OFFSET = BLOCK_M * SLOT_COLUMNS * 2
"""Bytes from the gate pieces of a stage to its up pieces."""


def first_column(c: Context, n: Int32, half: int, group) -> Int32:
    """First of the 64 columns of h that a warpgroup has in a half of tile ``n``."""
    return n * c.config.block_n + (2 * half + group) * SLOT_COLUMNS


@cute.jit
def tile_of(c: Context, phase: Int32, n: Int32) -> tuple[Int32, Int32]:
    """(1, n) of a tile that computes gate and up again, else (0, tile of its GEMM)."""
    recompute = Int32(0)
    if cutlass.const_expr(c.problem.recomputes):
        if phase == TilePhase.FC1:
            count = recompute_tiles(c.problem, c.config)
            recompute = Int32(n < count)
            if recompute == 0:
                n = n - count
    return recompute, n


@cute.jit
def reduction_part(c: Context, k_tile: Int32) -> tuple[Int32, Int32]:
    """(part, k) of a k-tile of the second GEMM: part 0 is gate, or all there is; part 1 up."""
    per_part = ceil_div(c.problem.fc2_reduction, BLOCK_K)
    part = Int32(0)
    if cutlass.const_expr(c.problem.fc2_parts == 2):
        part = k_tile // per_part
    return part, (k_tile - part * per_part) * BLOCK_K


@cute.jit
def copy_weights_backward(
    c: Context, a: Int32, phase: Int32, k: Int32, part: Int32, n: Int32, expert: Int32, full: Int32
):
    """The weight boxes of one stage: 256 columns of h, or of x, by 64 of the reduction."""
    p = c.problem
    first = n * c.config.block_n
    rows = (first, first + HALF_ROWS)
    stored_part = part ^ 1 if p.w13_layout == "up_gate" else part
    if cutlass.const_expr(p.fc1_m_major == p.fc2_m_major):
        weights = c.map("w2")
        third = Int32(0)
        if phase == TilePhase.FC2:
            weights = c.map("w13")
            third = stored_part
        copy = copy_transposed if p.fc1_m_major else copy_rows_of_k
        copy(c, a, weights, k, rows, (third, third), expert, full)
    elif phase == TilePhase.FC1:
        copy = copy_transposed if p.fc1_m_major else copy_rows_of_k
        copy(c, a, c.map("w2"), k, rows, (Int32(0), Int32(0)), expert, full)
    else:
        copy = copy_transposed if p.fc2_m_major else copy_rows_of_k
        copy(c, a, c.map("w13"), k, rows, (stored_part, stored_part), expert, full)


@cute.jit
def prefetch_backward(c: Context, expert: Int32, n: Int32):
    """Bring the first k-tiles of a CTA's first tile of dh to L2: nothing depends on its rows."""
    k_tiles = min(c.config.prefetch_tiles, ceil_div(c.problem.hidden, BLOCK_K))
    rows_of_box = SLOT_ROWS if c.problem.fc1_m_major else HALF_ROWS
    weights = c.map("w2")
    with cute.arch.elect_one():
        for k_tile in cutlass.range(k_tiles, unroll=1):
            k = k_tile * BLOCK_K
            for box in cutlass.range_constexpr(c.config.block_n // rows_of_box):
                row = n * c.config.block_n + box * rows_of_box
                if cutlass.const_expr(c.problem.fc1_m_major):
                    ptx_copies.tma_prefetch_4d(weights, row, k, Int32(0), expert)
                else:
                    ptx_copies.tma_prefetch_4d(weights, k, row, Int32(0), expert)


def gradient_maps(c: Context, part: Int32) -> tuple[Int64, Int64]:
    """Wide and narrow map of the pool that the second GEMM reduces over in ``part``."""
    if c.problem.paired_rows:
        return c.map("dgu"), c.map("dgu_8")
    if not c.problem.gated:
        return c.map("up"), c.map("up_8")
    step = Int64(part) * ((c.map_index("up") - c.map_index("gate")) * TENSOR_MAP_BYTES)
    return c.map("gate") + step, c.map("gate_8") + step


@cute.jit
def load_saved(
    c: Context, position: StagePosition, block: Int32, n: Int32, width: Int32
) -> StagePosition:
    """The stages of saved values of one tile; slots past the last column of h are left out.

    Where gate and up are computed again but never came, as the epoch was given up, nothing is
    copied: math finds in the stages what was there before.
    """
    pieces = (width + PIECE_TOKENS - 1) // PIECE_TOKENS
    if cutlass.const_expr(c.problem.recomputes):
        word = c.counter("h_ready", block)
        complete = Int32(c.recomputed_target())
        came = wait_at_least(c.guard, word, complete, "gpu", int(Phase.H_READY), c.pe, block)
        pieces = pieces * came
        # As in ``load_role``: other CTAs' TMA stores, acquired generically, read asynchronously.
        ptx_copies.fence_proxy_async_global()
    parts = 2 if c.problem.gated else 1
    for slot in cutlass.range_constexpr(2 * HALVES):
        column = first_column(c, n, slot // 2, slot % 2)
        if column < c.problem.intermediate:
            await_empty(c, position)
            full = full_barrier(c, position.stage)
            a = c.smem + c.shared.a + position.stage * a_stage_bytes(c.config)
            with cute.arch.elect_one():
                ptx_copies.mbarrier_arrive_expect_tx(full, pieces * (parts * PIECE_BYTES))
                for piece in cutlass.range(pieces, unroll=1):
                    row = block * BLOCK_M + piece * PIECE_TOKENS
                    target = a + piece * PIECE_BYTES
                    if cutlass.const_expr(c.problem.gated):
                        ptx_copies.tma_load_2d(target, c.map("gate_piece"), column, row, full)
                    up = target + UP_OFFSET
                    ptx_copies.tma_load_2d(up, c.map("up_piece"), column, row, full)
            position.advance()
    return position
