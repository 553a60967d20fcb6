"""load of wgrad: TMA boxes of 64 columns × 64 rows from the pools, six a stage. One warp."""

import cutlass
from cutlass import Int32, cute

from megamoe.cute_kernels import ptx_copies
from megamoe.cute_kernels.abi import WGRAD_MAPS
from megamoe.cute_kernels.pipelines import empty_barrier, full_barrier, make_position
from megamoe.cute_kernels.problem import BLOCK_K
from megamoe.cute_kernels.smem import BF16_BYTES
from megamoe.cute_kernels.wgrad_context import WgradContext, k_tiles_of, make_row_cursor
from megamoe.cute_kernels.wgrad_tables import (
    A_STAGE_BYTES,
    B_STAGE_BYTES,
    ENTRY_MAPS,
    HALF_M,
    SLOT,
    TILE_N,
)
from megamoe.cute_kernels.wgrad_tiles import field, make_tiles, map_index, pick, target_of
from megamoe.cute_kernels.workspace import TENSOR_MAP_BYTES

SLOT_BYTES = SLOT * BLOCK_K * BF16_BYTES
SLOTS_OF_HALF = HALF_M // SLOT
SLOTS_OF_B = TILE_N // SLOT


@cute.jit
def acquire_maps(c: WgradContext):
    """Make every saved call's maps usable by this thread's copies."""
    for saved in cutlass.range(c.num_saved, unroll=1):
        maps = c.entry(saved) + ENTRY_MAPS
        for index in cutlass.range(len(WGRAD_MAPS), unroll=1):
            ptx_copies.fence_tensormap_acquire(maps + index * TENSOR_MAP_BYTES)
            ptx_copies.prefetch_tensormap(maps + index * TENSOR_MAP_BYTES)


@cute.jit
def wgrad_load_role(c: WgradContext):
    """The whole role: per tile the boxes of all its rows."""
    with cute.arch.elect_one():
        acquire_maps(c)
    tiles = make_tiles(c.cta, c.grid, c.experts, c.problem)
    position = make_position(c.config.stages)
    tiles.advance()
    while tiles.valid == 1:
        k_tiles = Int32(0)
        if target_of(c, tiles) != 0:
            k_tiles = k_tiles_of(c, tiles.expert)
        shift = pick(tiles.product, field(c.problem, lambda x: x.half_shift))
        m = tiles.m * pick(tiles.product, field(c.problem, lambda x: x.m_step))
        n = tiles.n * TILE_N
        map_0 = pick(tiles.product, field(c.problem, lambda x: map_index(x, 0)))
        map_1 = pick(tiles.product, field(c.problem, lambda x: map_index(x, 1)))
        map_b = pick(tiles.product, field(c.problem, lambda x: map_index(x, None)))
        rows = make_row_cursor()
        for _ in cutlass.range(k_tiles, unroll=1):
            rows.advance(c, tiles.expert)
            ptx_copies.mbarrier_wait(empty_barrier(c, position.stage), position.parity ^ 1)
            full = full_barrier(c, position.stage)
            a = c.smem + c.shared.a + position.stage * A_STAGE_BYTES
            b = c.smem + c.shared.b + position.stage * B_STAGE_BYTES
            maps = c.entry(rows.saved) + ENTRY_MAPS
            with cute.arch.elect_one():
                # Every lane has awaited ``empty`` itself: it does not matter which is elected.
                ptx_copies.mbarrier_arrive_expect_tx(full, A_STAGE_BYTES + B_STAGE_BYTES)
                for half in cutlass.range_constexpr(2):
                    chosen = (map_0, map_1)[half]
                    for slot in cutlass.range_constexpr(SLOTS_OF_HALF):
                        ptx_copies.tma_load_2d(
                            a + (half * SLOTS_OF_HALF + slot) * SLOT_BYTES,
                            maps + chosen * TENSOR_MAP_BYTES,
                            m + shift * half + slot * SLOT,
                            rows.row,
                            full,
                        )
                for slot in cutlass.range_constexpr(SLOTS_OF_B):
                    ptx_copies.tma_load_2d(
                        b + slot * SLOT_BYTES,
                        maps + map_b * TENSOR_MAP_BYTES,
                        n + slot * SLOT,
                        rows.row,
                        full,
                    )
            position.advance()
        tiles.advance()
    # No copy is left in flight: math awaits every stage that was filled.
