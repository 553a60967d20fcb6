"""math: WGMMA main loop of the two math warpgroups, weights on the M side, tokens on the N side.

CTA tile 256 weight rows × 128 tokens × 64. Warpgroup w holds weight rows 64w … 64w+63 of both
halves, so in fc1 a thread has gate ``acc[i]`` and up ``acc[i + 64]`` of the same value. Index of a
thread's accumulator: token parity + 2·(row, row + 8) + 4·(token / 8) + 64·half.
"""

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.epilogue import GROUP_THREADS, fc1_epilogue, fc2_epilogue
from megamoe.cute_kernels.layout import ExpertCursor, tiles_of
from megamoe.cute_kernels.pipelines import (
    StagePosition,
    empty_barrier,
    full_barrier,
    make_position,
)
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M, BLOCK_N
from megamoe.cute_kernels.scheduler import TilePhase
from megamoe.cute_kernels.sync import aborted

WGMMA_K = 16


def make_mma():
    """Two warpgroups along M, each 64 rows × 128 tokens at a time, both operands K-major."""
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        OperandMajorMode.K,
        OperandMajorMode.K,
        Float32,
        (2, 1, 1),
        (64, BLOCK_M),
    )


def operand_layout(rows: int, stages: int):
    """K-major tile of ``rows`` × BLOCK_K with the 128-byte swizzle that TMA writes."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, BLOCK_K, stages), order=(0, 1, 2))


def operand(c: Context, offset: int, rows: int):
    """Shared-memory tensor (rows, BLOCK_K, stages) at ``offset``."""
    layout = operand_layout(rows, c.config.stages)
    pointer = cute.recast_ptr(
        ptx.shared_ptr(BFloat16, c.smem + offset, 1024), layout.inner, dtype=BFloat16
    )
    return cute.make_tensor(pointer, layout.outer)


@cute.jit
def release(c: Context, stage: Int32):
    """This warp no longer reads ``stage``."""
    if lane() == 0:
        ptx.mbarrier_arrive(empty_barrier(c, stage))


@cute.jit
def main_loop(
    c: Context, tiled_mma, a_frag, b_frag, acc, position: StagePosition, k_tiles: Int32
) -> StagePosition:
    """Accumulate one tile; one WGMMA group stays in flight while the next stage is awaited."""
    previous = Int32(-1)
    for _ in cutlass.range(k_tiles, unroll=1):
        ptx.mbarrier_wait(full_barrier(c, position.stage), position.parity)
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(BLOCK_K // WGMMA_K):
            index = (None, None, k_block, position.stage)
            cute.gemm(tiled_mma, acc, a_frag[index], b_frag[index], acc)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if previous >= 0:
            release(c, previous)
        previous = position.stage
        position.advance()
    warpgroup.wait_group(0)
    release(c, previous)
    return position


@cute.jit
def math_role(c: Context, math_thread: Int32):
    """The whole role of both warpgroups; ``math_thread`` counts over them, 0 to 255."""
    group = math_thread // GROUP_THREADS
    thread = math_thread % GROUP_THREADS
    tiled_mma = make_mma()
    thread_mma = tiled_mma.get_slice(math_thread)
    a_frag = tiled_mma.make_fragment_A(thread_mma.partition_A(operand(c, c.shared.a, BLOCK_N)))
    b_frag = tiled_mma.make_fragment_B(thread_mma.partition_B(operand(c, c.shared.b, BLOCK_M)))
    acc = cute.make_rmem_tensor(tiled_mma.partition_shape_C((BLOCK_N, BLOCK_M)), Float32)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    tiles = tiles_of(c)
    fc1_expert = ExpertCursor(expert=Int32(0))
    fc2_expert = ExpertCursor(expert=Int32(0))
    position = make_position(c.config.stages)
    tiles.advance()
    while tiles.valid == 1:
        # Zero-initialised instead of a peeled first step: a shared accumulator with a peeled
        # step makes ptxas serialise WGMMA (C7511).
        acc.fill(0.0)
        k_tiles = Int32(c.problem.hidden // BLOCK_K)
        if tiles.phase == TilePhase.FC2:
            k_tiles = Int32(c.problem.intermediate // BLOCK_K)
        position = main_loop(c, tiled_mma, a_frag, b_frag, acc, position, k_tiles)
        if tiles.phase == TilePhase.FC1:
            fc1_expert.seek(c, tiles.block)
            rows = fc1_expert.rows(c, tiles.block)
            fc1_epilogue(c, acc, thread, group, tiles.block, tiles.n, rows)
        else:
            fc2_expert.seek(c, tiles.block)
            rows = fc2_expert.rows(c, tiles.block)
            fc2_epilogue(c, acc, thread, group, tiles.block, tiles.n, rows, aborted(c.guard))
        tiles.advance()
