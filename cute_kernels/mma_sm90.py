"""math: WGMMA main loop of the math warpgroups, weights on the M side, tokens on the N side.

CTA tile 256 weight rows × up to 128 tokens × 64. Warpgroup w holds weight rows 64w … 64w+63 of both
halves, so in fc1 a thread has gate ``acc[i]`` and up ``acc[i + 64]`` of the same value. Index of a
thread's accumulator: token parity + 2·(row, row + 8) + 4·(token / 8) + 64·half, for every token
width alike: one accumulator and one epilogue serve all widths. Tiles of 128 rows have one half, of
64 rows also one warpgroup; gate and up rows then alternate by 8, so a thread has gate ``acc[i]``
and up ``acc[i + 2]``.
"""

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from megamoe.cute_kernels import ptx, ptx_copies, ptx_values
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.dgrad_epilogue import dgrad_epilogue
from megamoe.cute_kernels.dgrad_load import tile_of
from megamoe.cute_kernels.fc1_epilogue import fc1_epilogue
from megamoe.cute_kernels.fc2_epilogue import fc2_epilogue
from megamoe.cute_kernels.layout import make_expert_cursor, tiles_of, token_width
from megamoe.cute_kernels.pipelines import (
    StagePosition,
    full_barrier,
    make_position,
    release,
)
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M
from megamoe.cute_kernels.scheduler import TilePhase
from megamoe.cute_kernels.split import complete_tile, k_range
from megamoe.cute_kernels.staging import GROUP_THREADS, HALF_ACCUMULATORS

WGMMA_K = 16


def make_mma(groups: int, width: int, transposed: bool):
    """Warpgroups along M, each 64 rows × ``width`` tokens at a time; tokens are K-major,
    weights K-major or, if stored transposed, M-major."""
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.MN if transposed else OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        (groups, 1, 1),
        (64, width),
    )


def operand(c: Context, offset: int, rows: int, transposed: bool, stage_elements: int):
    """Shared-memory tensor (rows, BLOCK_K, stages) at ``offset``, as the TMA boxes fill it with a
    128-byte swizzle: rows of 64 k, or (transposed) slots of 64 rows with k outside."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    order = (0, 1)
    if transposed:
        kind = warpgroup.SmemLayoutAtomKind.MN_SW128
        order = (1, 0)
    atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
    one = cute.tile_to_shape(atom, (rows, BLOCK_K), order=order)
    stages = cute.make_layout(c.config.stages, stride=stage_elements)
    layout = cute.append(one.outer, stages)
    pointer = cute.recast_ptr(
        ptx.shared_ptr(BFloat16, c.smem + offset, 1024), one.inner, dtype=BFloat16
    )
    return cute.make_tensor(pointer, layout)


@cute.jit
def main_loop(
    c: Context,
    acc: cute.Tensor,
    math_thread: Int32,
    position: StagePosition,
    k_tiles: Int32,
    width: cutlass.Constexpr[int],
    transposed: cutlass.Constexpr[bool],
) -> StagePosition:
    """Accumulate one tile; one WGMMA group stays in flight while the next stage is awaited."""
    tiled_mma = make_mma(c.config.math_groups, width, transposed)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    thread_mma = tiled_mma.get_slice(math_thread)
    weights = operand(c, c.shared.a, c.config.block_n, transposed, c.config.block_n * BLOCK_K)
    tokens = operand(c, c.shared.b, width, False, BLOCK_M * BLOCK_K)
    a_frag = tiled_mma.make_fragment_A(thread_mma.partition_A(weights))
    b_frag = tiled_mma.make_fragment_B(thread_mma.partition_B(tokens))
    layout = cute.make_layout(((2, 2, width // 8), c.config.halves, 1), stride=((1, 2, 4), 64, 0))
    narrow = cute.make_tensor(acc.iterator, layout)
    previous = Int32(-1)
    for _ in cutlass.range(k_tiles, unroll=1):
        ptx_copies.mbarrier_wait(full_barrier(c, position.stage), position.parity)
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(BLOCK_K // WGMMA_K):
            index = (None, None, k_block, position.stage)
            cute.gemm(tiled_mma, narrow, a_frag[index], b_frag[index], narrow)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if previous >= 0:
            release(c, previous, c.config.cluster_size)
        previous = position.stage
        position.advance()
    warpgroup.wait_group(0)
    release(c, previous, c.config.cluster_size)
    return position


@cute.jit
def pass_by(c: Context, position: StagePosition, k_tiles: Int32) -> StagePosition:
    """Take a tile's stages without a product: the CTA's partner needs them (``"weights"``)."""
    for _ in cutlass.range(k_tiles, unroll=1):
        ptx_copies.mbarrier_wait(full_barrier(c, position.stage), position.parity)
        release(c, position.stage, c.config.cluster_size)
        position.advance()
    return position


@cute.jit
def accumulate(
    c: Context,
    acc: cute.Tensor,
    math_thread: Int32,
    position: StagePosition,
    k_tiles: Int32,
    tile_width: Int32,
    transposed: cutlass.Constexpr[bool],
) -> StagePosition:
    """``main_loop`` of the tile's token width."""
    for width in cutlass.range_constexpr(8, BLOCK_M + 1, 8):
        if cutlass.const_expr(width in c.config.token_widths):
            if tile_width == width:
                position = main_loop(c, acc, math_thread, position, k_tiles, width, transposed)
    return position


@cute.jit
def weights_m_major(c: Context, phase: Int32, recompute: Int32) -> Int32:
    """1 if the weights of a tile are stored with the MMA's rows inside."""
    p = c.problem
    m_major = Int32(p.fc2_m_major)
    if phase == TilePhase.FC1:
        m_major = Int32(p.fc1_m_major)
        if cutlass.const_expr(p.recomputes):
            if recompute == 1:
                m_major = Int32(p.w13_transposed)
    return m_major


@cute.jit
def math_role(c: Context, math_thread: Int32):
    """The whole role of both warpgroups; ``math_thread`` counts over them, 0 to 255."""
    p = c.problem
    group = math_thread // GROUP_THREADS
    thread = math_thread % GROUP_THREADS
    acc = cute.make_rmem_tensor((HALF_ACCUMULATORS * c.config.halves,), Float32)
    tiles = tiles_of(c)
    fc1_expert = make_expert_cursor()
    fc2_expert = make_expert_cursor()
    position = make_position(c.config.stages)
    tiles.advance()
    while tiles.valid == 1:
        # Zero-initialised instead of a peeled first step: a shared accumulator with a peeled
        # step makes ptxas serialise WGMMA (C7511).
        acc.fill(0.0)
        expert = Int32(0)
        block = Int32(0)
        rows = Int32(0)
        if tiles.phase == TilePhase.FC1:
            fc1_expert.seek_tile(c, tiles.block)
            expert = fc1_expert.expert
            block = fc1_expert.block
            rows = fc1_expert.rows(c, block)
        else:
            fc2_expert.seek_tile(c, tiles.block)
            expert = fc2_expert.expert
            block = fc2_expert.block
            rows = fc2_expert.rows(c, block)
        width = token_width(c, rows)
        _, k_tiles = k_range(c, tiles.phase, tiles.part)
        # Unrolled (H and I ≤ 64), the loop would have its zeros written after wgmma.fence.
        k_tiles = ptx_values.opaque_i32(k_tiles)
        recompute, n = tile_of(c, tiles.phase, tiles.n)
        if cutlass.const_expr(not p.mixed_majors):
            position = accumulate(c, acc, math_thread, position, k_tiles, width, p.fc1_m_major)
        elif weights_m_major(c, tiles.phase, recompute) == 1:
            position = accumulate(c, acc, math_thread, position, k_tiles, width, True)
        else:
            position = accumulate(c, acc, math_thread, position, k_tiles, width, False)
        work = Int32(1)
        if cutlass.const_expr(c.config.cluster == "weights"):
            work = Int32(rows > 0)
            if work == 0:
                position = pass_by(c, position, k_tiles)
        if cutlass.const_expr(c.config.split_k > 1):
            if tiles.phase == TilePhase.FC2:
                work = complete_tile(c, acc, thread, group, block, tiles.n, tiles.part, rows)
        if (work == 1) & (tiles.phase == TilePhase.FC1):
            if cutlass.const_expr(not p.backward):
                fc1_epilogue(c, acc, thread, group, expert, block, n, rows)
            elif recompute == 0:
                position = dgrad_epilogue(c, acc, position, thread, group, block, n, rows)
            elif cutlass.const_expr(p.recomputes):
                fc1_epilogue(c, acc, thread, group, expert, block, n, rows)
        elif work == 1:
            fc2_epilogue(c, acc, thread, group, expert, block, tiles.n, rows)
        tiles.advance()
