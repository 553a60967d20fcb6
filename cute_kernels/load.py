"""load: the TMA producer of weight (A) and token (B) tiles for fc1 and fc2. One warp.

Both GEMMs share one loop: tensor maps lie in global memory, so which one a copy uses is an address
and not a different instruction. A stage is two boxes of 128 weight rows (fc1: gate and up rows of
the same columns; fc2: two halves of 256 output columns) and one box of 128 pool rows.
"""

import cutlass
from cutlass import Int32, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import MAPS, Phase
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.layout import ExpertCursor, tiles_of
from megamoe.cute_kernels.pipelines import (
    StagePosition,
    empty_barrier,
    full_barrier,
    make_position,
)
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M, BLOCK_N
from megamoe.cute_kernels.scheduler import TilePhase
from megamoe.cute_kernels.smem import (
    A_STAGE_BYTES,
    B_STAGE_BYTES,
    MATH_WARPGROUPS,
    STAGE_BYTES,
)
from megamoe.cute_kernels.sync import wait_at_least

HALF = BLOCK_N // 2


@cute.jit
def load_tile(
    c: Context, position: StagePosition, phase: Int32, expert: Int32, block: Int32, n: Int32
) -> StagePosition:
    """All stages of one tile; returns the position after them."""
    weight_map = c.map("w13")
    token_map = c.map("pool_x")
    k_tiles = Int32(c.problem.hidden // BLOCK_K)
    # fc1: gate and up are index 0 and 1 of the map's third dimension. fc2: its size is 1.
    row_0 = n * HALF
    row_1 = row_0
    part_1 = Int32(1)
    if phase == TilePhase.FC2:
        weight_map = c.map("w2")
        token_map = c.map("pool_h")
        k_tiles = Int32(c.problem.intermediate // BLOCK_K)
        row_0 = n * BLOCK_N
        row_1 = row_0 + HALF
        part_1 = Int32(0)
    for k_tile in cutlass.range(k_tiles, unroll=1):
        ptx.mbarrier_wait(empty_barrier(c, position.stage), position.parity ^ 1)
        full = full_barrier(c, position.stage)
        a = c.smem + c.shared.a + position.stage * A_STAGE_BYTES
        b = c.smem + c.shared.b + position.stage * B_STAGE_BYTES
        k = k_tile * BLOCK_K
        with cute.arch.elect_one():
            ptx.mbarrier_arrive_expect_tx(full, Int32(STAGE_BYTES))
            ptx.tma_load_4d(a, weight_map, k, row_0, Int32(0), expert, full)
            ptx.tma_load_4d(a + A_STAGE_BYTES // 2, weight_map, k, row_1, part_1, expert, full)
            ptx.tma_load_2d(b, token_map, k, block * BLOCK_M, full)
        position.advance()
    return position


@cute.jit
def load_role(c: Context):
    """The whole role: per tile wait for its rows or activations, then feed the pipeline."""
    with cute.arch.elect_one():
        for name in MAPS:
            ptx.fence_tensormap_acquire(c.map(name))
            ptx.prefetch_tensormap(c.map(name))
    tiles = tiles_of(c)
    fc1_expert = ExpertCursor(expert=Int32(0))
    fc2_expert = ExpertCursor(expert=Int32(0))
    position = make_position(c.config.stages)
    tiles.advance()
    while tiles.valid == 1:
        expert = Int32(0)
        if tiles.phase == TilePhase.FC1:
            fc1_expert.seek(c, tiles.block)
            expert = fc1_expert.expert
            wait_at_least(
                c.guard,
                c.counter("x_ready", tiles.block),
                fc1_expert.rows(c, tiles.block),
                "gpu",
                int(Phase.X_READY),
                c.pe,
                tiles.block,
            )
        else:
            fc2_expert.seek(c, tiles.block)
            expert = fc2_expert.expert
            wait_at_least(
                c.guard,
                c.counter("h_ready", tiles.block),
                Int32(c.problem.fc1_tiles * MATH_WARPGROUPS),
                "gpu",
                int(Phase.H_READY),
                c.pe,
                tiles.block,
            )
        # The rows were written by copies or TMA stores of other CTAs (announced with release);
        # the acquire above is generic, the reads below are asynchronous.
        ptx.fence_proxy_async_global()
        cute.arch.sync_warp()
        position = load_tile(c, position, tiles.phase, expert, tiles.block, tiles.n)
        tiles.advance()
    # Leave no copy in flight: wait until math has released every stage.
    for _ in cutlass.range(c.config.stages, unroll=1):
        ptx.mbarrier_wait(empty_barrier(c, position.stage), position.parity ^ 1)
        position.advance()
