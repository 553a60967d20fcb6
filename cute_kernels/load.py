"""load: the TMA producer of weight (A) and token (B) tiles for fc1 and fc2. One warp.

Both GEMMs share one loop: tensor maps lie in global memory, so which one a copy uses is an address
and not a different instruction. A stage is 256 weight rows (fc1 with a gate: 128 gate and 128 up
rows of the same columns) and as many pool rows as the tile's token width.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx_copies
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.dgrad_load import (
    copy_weights_backward,
    gradient_maps,
    load_saved,
    prefetch_backward,
    reduction_part,
    tile_of,
)
from megamoe.cute_kernels.kernel_config import alternating_octets
from megamoe.cute_kernels.layout import make_expert_cursor, tiles_of, token_width
from megamoe.cute_kernels.load_boxes import (
    ROW_BYTES,
    SLOT_BYTES,
    SLOT_ROWS,
    copy_box,
    copy_rows_of_k,
    copy_transposed,
)
from megamoe.cute_kernels.pipelines import (
    StagePosition,
    await_empty,
    full_barrier,
    make_position,
)
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M
from megamoe.cute_kernels.scheduler import TilePhase
from megamoe.cute_kernels.smem import B_STAGE_BYTES, HALF_ROWS, a_stage_bytes
from megamoe.cute_kernels.split import k_range
from megamoe.cute_kernels.sync import wait_at_least
from megamoe.cute_kernels.tensor_maps import (
    ALTERNATING_ROWS,
    NARROW_ROWS,
    WIDE_ROWS,
    map_names,
)


@cute.jit
def copy_paired(
    c: Context, a: Int32, weights: Int64, k: Int32, row: Int32, expert: Int32, full: Int32
):
    """Transposed and interleaved: rows of gate and up in turn. Of 256, warpgroup g holds slots g
    and g + 2; it gets raw rows 128g … 128g + 127, hence 64 consecutive columns of h."""
    halves = c.config.halves
    for slot in cutlass.range_constexpr(c.config.block_n // SLOT_ROWS):
        raw = row + ((slot % 2) * halves + slot // 2) * SLOT_ROWS
        box = (raw, k, Int32(0), expert)
        copy_box(c, slot // 2, a + slot * SLOT_BYTES, weights, box, full)


@cute.jit
def copy_fc1_weights(
    c: Context, a: Int32, weights: Int64, k: Int32, n: Int32, expert: Int32, full: Int32
):
    """The boxes of w13 of one stage of the forward's fc1; with a gate both halves start at the same
    row, else the second follows the first."""
    p = c.problem
    first = n * c.config.block_n
    if cutlass.const_expr(p.paired_rows):
        copy_paired(c, a, weights, k, first, expert, full)
    elif cutlass.const_expr(alternating_octets(p, c.config)):
        group = n * (c.config.block_n // ALTERNATING_ROWS)
        ptx_copies.tma_load_5d(a, weights, k, Int32(0), Int32(0), group, expert, full)
    else:
        part = 1 if p.w13_layout == "up_gate" else 0
        rows = (n * HALF_ROWS, n * HALF_ROWS) if p.gated else (first, first + HALF_ROWS)
        parts = (Int32(part), Int32(1 - part)) if p.gated else (Int32(0), Int32(0))
        copy = copy_transposed if p.w13_transposed else copy_rows_of_k
        copy(c, a, weights, k, rows, parts, expert, full)


@cute.jit
def copy_weights(
    c: Context, a: Int32, phase: Int32, k: Int32, n: Int32, expert: Int32, full: Int32
):
    """The weight boxes of one stage."""
    p = c.problem
    octets = alternating_octets(p, c.config)
    same_storage = p.w13_transposed == p.w2_transposed and not p.paired_rows and not octets
    first_part = 1 if p.w13_layout == "up_gate" else 0
    # fc1 with a gate: both halves start at the same row; else the second follows the first.
    first = n * c.config.block_n
    rows_1 = (n * HALF_ROWS, n * HALF_ROWS) if p.gated else (first, first + HALF_ROWS)
    parts_1 = (first_part, 1 - first_part) if p.gated else (0, 0)
    rows_2 = (first, first + HALF_ROWS)
    if cutlass.const_expr(same_storage):
        weights = c.map("w13")
        row_0, row_1 = rows_1
        part_0, part_1 = Int32(parts_1[0]), Int32(parts_1[1])
        if phase == TilePhase.FC2:
            weights = c.map("w2")
            row_0, row_1 = rows_2
            part_0 = Int32(0)
            part_1 = Int32(0)
        copy = copy_transposed if p.w2_transposed else copy_rows_of_k
        copy(c, a, weights, k, (row_0, row_1), (part_0, part_1), expert, full)
    elif phase == TilePhase.FC1:
        copy_fc1_weights(c, a, c.map("w13"), k, n, expert, full)
    else:
        copy = copy_transposed if p.w2_transposed else copy_rows_of_k
        copy(c, a, c.map("w2"), k, rows_2, (Int32(0), Int32(0)), expert, full)


@cute.jit
def copy_tokens(
    c: Context,
    b: Int32,
    wide: Int64,
    narrow: Int64,
    k: Int32,
    row: Int32,
    width: Int32,
    full: Int32,
):
    """``width`` pool rows: boxes of 64, the rest in boxes of 8. Where a pair of CTAs shares tokens,
    the first half of the boxes of 8 (rounded up) is the first's, the rest the second's."""
    shared = c.config.cluster == "tokens"
    copy = ptx_copies.tma_load_2d_to_pair if shared else ptx_copies.tma_load_2d
    first = Int32(0)
    last = width // NARROW_ROWS
    if cutlass.const_expr(shared):
        middle = (last + 1) // 2
        if c.cta % 2 == 0:
            last = middle
        else:
            first = middle
    wide_boxes = (last - first) // (WIDE_ROWS // NARROW_ROWS)
    for i in cutlass.range(wide_boxes, unroll=1):
        at = first * NARROW_ROWS + i * WIDE_ROWS
        copy(b + at * ROW_BYTES, wide, k, row + at, full)
    for i in cutlass.range(first + wide_boxes * (WIDE_ROWS // NARROW_ROWS), last, unroll=1):
        at = i * NARROW_ROWS
        copy(b + at * ROW_BYTES, narrow, k, row + at, full)


@cute.jit
def load_tile(
    c: Context,
    position: StagePosition,
    phase: Int32,
    expert: Int32,
    block: Int32,
    n: Int32,
    part: Int32,
    width: Int32,
) -> StagePosition:
    """All stages of one tile; returns the position after them."""
    p = c.problem
    wide, narrow = c.map("pool_x"), c.map("pool_x_8")
    first, k_tiles = k_range(c, phase, part)
    recompute, n = tile_of(c, phase, n)
    if cutlass.const_expr(p.recomputes):
        if recompute == 1:
            wide = c.map("x")
            narrow = c.map("x_8")
    if cutlass.const_expr(not p.backward):
        if phase == TilePhase.FC2:
            wide = c.map("pool_h")
            narrow = c.map("pool_h_8")
    row = c.stored_block(block) * BLOCK_M
    nbytes = Int32(a_stage_bytes(c.config)) + width * ROW_BYTES
    for k_tile in cutlass.range(k_tiles, unroll=1):
        await_empty(c, position)
        full = full_barrier(c, position.stage)
        a = c.smem + c.shared.a + position.stage * a_stage_bytes(c.config)
        b = c.smem + c.shared.b + position.stage * B_STAGE_BYTES
        k = (first + k_tile) * BLOCK_K
        pool = Int32(0)
        if cutlass.const_expr(p.backward):
            if phase == TilePhase.FC2:
                pool, k = reduction_part(c, first + k_tile)
                wide, narrow = gradient_maps(c, pool)
        with cute.arch.elect_one():
            ptx_copies.mbarrier_arrive_expect_tx(full, nbytes)
            if cutlass.const_expr(not p.backward):
                copy_weights(c, a, phase, k, n, expert, full)
            elif recompute == 0:
                copy_weights_backward(c, a, phase, k, pool, n, expert, full)
            elif cutlass.const_expr(p.recomputes):
                copy_fc1_weights(c, a, c.map("w13_forward"), k, n, expert, full)
            copy_tokens(c, b, wide, narrow, k, row, width, full)
        position.advance()
    if cutlass.const_expr(p.backward):
        if (phase == TilePhase.FC1) & (recompute == 0):
            position = load_saved(c, position, block, n, width)
    return position


@cute.jit
def prefetch_weights(c: Context, expert: Int32, n: Int32):
    """Bring the first k-tiles of a CTA's first fc1 tile to L2: nothing depends on its rows."""
    p = c.problem
    k_tiles = min(c.config.prefetch_tiles, ceil_div(p.hidden, BLOCK_K))
    in_halves = p.gated and not p.paired_rows
    row = n * (HALF_ROWS if in_halves else c.config.block_n)
    rows_of_box = SLOT_ROWS if p.w13_transposed else min(HALF_ROWS, c.config.block_n)
    parts = 2 if in_halves else 1
    boxes = c.config.block_n // (rows_of_box * parts)
    with cute.arch.elect_one():
        for k_tile in cutlass.range(k_tiles, unroll=1):
            k = k_tile * BLOCK_K
            if cutlass.const_expr(alternating_octets(p, c.config)):
                group = n * (c.config.block_n // ALTERNATING_ROWS)
                ptx_copies.tma_prefetch_5d(c.map("w13"), k, Int32(0), Int32(0), group, expert)
            else:
                for part in cutlass.range_constexpr(parts):
                    for box in cutlass.range_constexpr(boxes):
                        at = row + box * rows_of_box
                        if cutlass.const_expr(p.w13_transposed):
                            ptx_copies.tma_prefetch_4d(c.map("w13"), at, k, Int32(part), expert)
                        else:
                            ptx_copies.tma_prefetch_4d(c.map("w13"), k, at, Int32(part), expert)


@cute.jit
def load_role(c: Context):
    """The whole role: per tile wait for its rows or activations, then feed the pipeline."""
    p = c.problem
    with cute.arch.elect_one():
        for name in map_names(c.problem):
            ptx_copies.fence_tensormap_acquire(c.map(name))
            ptx_copies.prefetch_tensormap(c.map(name))
    tiles = tiles_of(c)
    fc1_expert = make_expert_cursor()
    fc2_expert = make_expert_cursor()
    position = make_position(c.config.stages)
    first = Int32(1)
    tiles.advance()
    while tiles.valid == 1:
        expert = Int32(0)
        block = Int32(0)
        rows = Int32(0)
        if tiles.phase == TilePhase.FC1:
            fc1_expert.seek_tile(c, tiles.block)
            expert = fc1_expert.expert
            block = fc1_expert.block
            rows = fc1_expert.rows(c, block)
            # Rows to await: none of dy before gate and up are computed again.
            recompute, n = tile_of(c, tiles.phase, tiles.n)
            arriving = rows
            if cutlass.const_expr(p.recomputes):
                if recompute == 1:
                    arriving = Int32(0)
            if (first == 1) & (recompute == 0):
                if cutlass.const_expr(p.backward):
                    prefetch_backward(c, expert, n)
                else:
                    prefetch_weights(c, expert, n)
            if arriving > 0:
                wait_at_least(
                    c.guard,
                    c.counter("x_ready", block),
                    arriving,
                    "gpu",
                    int(Phase.X_READY),
                    c.pe,
                    block,
                )
        else:
            fc2_expert.seek_tile(c, tiles.block)
            expert = fc2_expert.expert
            block = fc2_expert.block
            rows = fc2_expert.rows(c, block)
            if rows > 0:
                wait_at_least(
                    c.guard,
                    c.counter("h_ready", block),
                    Int32(c.h_target()),
                    "gpu",
                    int(Phase.H_READY),
                    c.pe,
                    block,
                )
        first = Int32(0)
        # The rows were written by copies or TMA stores of other CTAs (announced with release);
        # the acquire above is generic, the reads below are asynchronous. Every lane has polled
        # and fences itself, so it does not matter which one is elected to issue the copies.
        ptx_copies.fence_proxy_async_global()
        width = token_width(c, rows)
        position = load_tile(c, position, tiles.phase, expert, block, tiles.n, tiles.part, width)
        tiles.advance()
    # Leave no copy in flight: wait until math has released every stage.
    for _ in cutlass.range(c.config.stages, unroll=1):
        await_empty(c, position)
        position.advance()
