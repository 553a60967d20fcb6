"""math of wgrad: the rows of an expert are the reduction; CTA tile 256 × 128 × 64 rows.

Accumulators lie as in ``mma_sm90.py``: half h holds rows 64·group … + 63 of half h of the tile,
``acc[column parity + 2·(row, row + 8) + 4·(column / 8) + 64·h]``.
"""

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from megamoe.cute_kernels import ptx, ptx_copies, ptx_values
from megamoe.cute_kernels.mma_sm90 import WGMMA_K, operand
from megamoe.cute_kernels.pipelines import StagePosition, full_barrier, make_position, release
from megamoe.cute_kernels.problem import BLOCK_K
from megamoe.cute_kernels.smem import BF16_BYTES
from megamoe.cute_kernels.staging import GROUP_THREADS, HALF_ACCUMULATORS
from megamoe.cute_kernels.sync import NamedBarrier
from megamoe.cute_kernels.wgrad_context import WgradContext, k_tiles_of, make_row_cursor
from megamoe.cute_kernels.wgrad_load import SLOT_BYTES
from megamoe.cute_kernels.wgrad_tables import (
    A_STAGE_BYTES,
    B_STAGE_BYTES,
    GRAD_BYTES,
    SLOT,
    TILE_M,
    TILE_N,
)
from megamoe.cute_kernels.wgrad_tiles import WgradTiles, field, make_tiles, pick, target_of

MATH_THREADS = 2 * GROUP_THREADS
ROW_BYTES = SLOT * BF16_BYTES
CHUNK_BYTES = 16
OCTETS = TILE_N // 8


@cute.jit
def zero_tail(c: WgradContext, math_thread: Int32, stage: Int32, valid: Int32):
    """Zero the stage's rows from ``valid`` on, in both operands.

    They are the reduction: rows beyond an expert's count hold anything, and 0 · NaN is NaN. All
    math threads, because both warpgroups read all columns.
    """
    a = c.smem + c.shared.a + stage * A_STAGE_BYTES
    b = c.smem + c.shared.b + stage * B_STAGE_BYTES
    for chunk in cutlass.range(
        valid * (ROW_BYTES // CHUNK_BYTES) + math_thread,
        SLOT_BYTES // CHUNK_BYTES,
        MATH_THREADS,
        unroll=1,
    ):
        for slot in cutlass.range_constexpr(A_STAGE_BYTES // SLOT_BYTES):
            ptx.sts_zero_x4(a + slot * SLOT_BYTES + chunk * CHUNK_BYTES)
        for slot in cutlass.range_constexpr(B_STAGE_BYTES // SLOT_BYTES):
            ptx.sts_zero_x4(b + slot * SLOT_BYTES + chunk * CHUNK_BYTES)
    # WGMMA reads shared memory through the asynchronous proxy.
    ptx_copies.fence_proxy_async_shared()
    cute.arch.barrier(barrier_id=int(NamedBarrier.MATH_0), number_of_threads=MATH_THREADS)


@cute.jit
def multiply(
    c: WgradContext,
    acc: cute.Tensor,
    math_thread: Int32,
    position: StagePosition,
    expert: Int32,
    k_tiles: Int32,
) -> StagePosition:
    """Accumulate one tile; one WGMMA group stays in flight while the next stage is awaited."""
    tiled_mma = sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.MN, OperandMajorMode.MN, Float32,
        (2, 1, 1), (64, TILE_N),
    )  # fmt: skip
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    thread_mma = tiled_mma.get_slice(math_thread)
    a = operand(c, c.shared.a, TILE_M, True, TILE_M * BLOCK_K)
    b = operand(c, c.shared.b, TILE_N, True, TILE_N * BLOCK_K)
    a_frag = tiled_mma.make_fragment_A(thread_mma.partition_A(a))
    b_frag = tiled_mma.make_fragment_B(thread_mma.partition_B(b))
    layout = cute.make_layout(((2, 2, OCTETS), 2, 1), stride=((1, 2, 4), HALF_ACCUMULATORS, 0))
    tile = cute.make_tensor(acc.iterator, layout)
    rows = make_row_cursor()
    previous = Int32(-1)
    for _ in cutlass.range(k_tiles, unroll=1):
        rows.advance(c, expert)
        ptx_copies.mbarrier_wait(full_barrier(c, position.stage), position.parity)
        if rows.left < BLOCK_K:
            zero_tail(c, math_thread, position.stage, rows.left)
        warpgroup.fence()
        for k_block in cutlass.range_constexpr(BLOCK_K // WGMMA_K):
            index = (None, None, k_block, position.stage)
            cute.gemm(tiled_mma, tile, a_frag[index], b_frag[index], tile)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        if previous >= 0:
            release(c, previous)
        previous = position.stage
        position.advance()
    warpgroup.wait_group(0)
    if previous >= 0:
        release(c, previous)
    return position


def add_f32(accumulate: Int32, valid, address: Int64, values):
    """Store four floats, or add them to what is there."""
    olds = [ptx.ld_f32x4_if(ok & accumulate, address + 64 * i) for i, ok in enumerate(valid)]
    for i, ok in enumerate(valid):
        sums = [new + old for new, old in zip(values[i], olds[i], strict=True)]
        ptx.st_f32x4_if(ok, address + 64 * i, *sums)


def add_bf16(accumulate: Int32, valid, address: Int64, values):
    """Store four bf16, or the once-rounded fp32 sums with what is there."""
    olds = [ptx.ld_i32x2_if(ok & accumulate, address + 32 * i) for i, ok in enumerate(valid)]
    for i, ok in enumerate(valid):
        pairs = []
        for j in range(2):
            low = values[i][2 * j] + ptx_values.bf16_to_f32(olds[i][j], False)
            high = values[i][2 * j + 1] + ptx_values.bf16_to_f32(olds[i][j], True)
            pairs.append(ptx_values.pack_bf16x2(low, high))
        ptx.st_i32x2_if(ok, address + 32 * i, *pairs)


@cute.jit
def exchange(acc: cute.Tensor, first: cutlass.Constexpr[int], odd: Int32):
    """Four consecutive columns of one row from two octets at ``first`` and ``first + 4``.

    A lane holds two columns of each; an even lane gets its neighbour's two of the first octet, an
    odd lane those of the second. So a row of 16 columns leaves as four vectors, whole sectors.
    """
    kept, received = [], []
    for i in cutlass.range_constexpr(2):
        keep = acc[first + i]
        send = acc[first + 4 + i]
        if odd == 1:
            keep = acc[first + 4 + i]
            send = acc[first + i]
        kept.append(keep)
        received.append(cute.arch.shuffle_sync_bfly(send, 1))
    low_0, low_1, high_0, high_1 = kept[0], kept[1], received[0], received[1]
    if odd == 1:
        low_0, low_1, high_0, high_1 = received[0], received[1], kept[0], kept[1]
    return low_0, low_1, high_0, high_1


@cute.jit
def store_tile(
    c: WgradContext,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    tiles: WgradTiles,
    target: Int64,
):
    """Write this warpgroup's half rows of the tile, or add them to what is there."""
    p = c.problem
    nbytes = GRAD_BYTES[c.config.grad]
    odd = thread & 1
    n_extent = pick(tiles.product, field(p, lambda x: x.n_extent))
    m_extent = pick(tiles.product, field(p, lambda x: x.m_extent))
    length = pick(tiles.product, field(p, lambda x: x.row_length))
    scale = pick(tiles.product, field(p, lambda x: x.row_scale))
    shift = pick(tiles.product, field(p, lambda x: x.half_shift))
    # Lane q of four: columns 4·(q / 2) … + 3 of octet q % 2 of each pair of octets.
    column = tiles.n * TILE_N + 8 * odd + 4 * ((thread >> 1) & 1)
    first_column = pick(tiles.product, field(p, lambda x: x.column_base)) + column
    first_row = tiles.m * pick(tiles.product, field(p, lambda x: x.m_step))
    first_row += 64 * group + 16 * (thread // 32) + ((thread % 32) >> 2)
    for half in cutlass.range_constexpr(2):
        base = pick(tiles.product, field(p, lambda x, half=half: x.row_base[half]))
        for r in cutlass.range_constexpr(2):
            row = first_row + half * shift + 8 * r
            element = Int64(row * scale + base) * length + first_column
            inside = Int32(row < m_extent)
            valid, values = [], []
            for pair in cutlass.range_constexpr(OCTETS // 2):
                valid.append(inside & Int32(column + 16 * pair < n_extent))
                first = half * HALF_ACCUMULATORS + 8 * pair + 2 * r
                values.append(exchange(acc, first, odd))
            add = add_f32 if c.config.grad == "f32" else add_bf16
            add(c.accumulate, valid, target + element * nbytes, values)


@cute.jit
def wgrad_math_role(c: WgradContext, math_thread: Int32):
    """The whole role of both warpgroups; ``math_thread`` counts over them, 0 to 255."""
    group = math_thread // GROUP_THREADS
    thread = math_thread % GROUP_THREADS
    acc = cute.make_rmem_tensor((2 * HALF_ACCUMULATORS,), Float32)
    tiles = make_tiles(c.cta, c.grid, c.experts, c.problem)
    position = make_position(c.config.stages)
    tiles.advance()
    while tiles.valid == 1:
        target = target_of(c, tiles)
        if target != 0:
            # Known to be one, the loop would be unrolled and its zeros sink past wgmma.fence.
            k_tiles = ptx_values.opaque_i32(k_tiles_of(c, tiles.expert))
            # An expert without rows: exact zeros, or nothing to add.
            if (k_tiles > 0) | (c.accumulate == 0):
                acc.fill(0.0)
                position = multiply(c, acc, math_thread, position, tiles.expert, k_tiles)
                store_tile(c, acc, thread, group, tiles, target)
        tiles.advance()
