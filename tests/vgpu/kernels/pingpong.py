"""A ping-pong WGMMA GEMM for sm_90a: two math warpgroups take turns at the tensor cores.

D[m, n] = Σ_k A[m, k] · B[n, k], bf16 or fp8 in, bf16 out. While one warpgroup runs its main loop,
the other one is in its epilogue. Both read tiles from one ring, so the order barrier is needed for
the data too: a warpgroup that waited for stages of its tile while the other's are still to come
would mistake an earlier phase of the same parity for its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from kernels.compiling import compile_ptx

TILE_M, TILE_N, STAGES = 64, 64, 3
EPI_N = 32
PIECES = TILE_N // EPI_N
GROUP = 128
THREADS = 3 * GROUP
STORED, TURN = 1, 3
"""Named barriers: STORED + g inside warpgroup g, TURN + g hands the turn to warpgroup g."""


@dataclass(frozen=True)
class PingPongConfig:
    """Sizes are multiples of the tile: 64 × 64 × 128 bytes of k."""

    m: int
    n: int
    k: int
    fp8: bool = False

    @property
    def dtype(self):
        """Type of the operands."""
        return Float8E4M3FN if self.fp8 else BFloat16

    @property
    def tile_k(self) -> int:
        """One 128-byte swizzle row."""
        return 128 if self.fp8 else 64

    @property
    def smem_bytes(self) -> int:
        """Stages, staging of both warpgroups, and one page for barriers and alignment."""
        return (TILE_M + TILE_N) * 128 * STAGES + 2 * TILE_M * TILE_N * 2 + 2048


class PingPong:
    """Host function and kernel of one configuration."""

    def __init__(self, config: PingPongConfig) -> None:
        self.c = config

    def layouts(self):
        """Shared-memory layouts of A, B and the staging of D."""
        dtype = self.c.dtype
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        order = (0, 1, 2)
        a = cute.tile_to_shape(atom, (TILE_M, self.c.tile_k, STAGES), order=order)
        b = cute.tile_to_shape(atom, (TILE_N, self.c.tile_k, STAGES), order=order)
        d = sm90.make_smem_layout_epi(BFloat16, LayoutEnum.ROW_MAJOR, (TILE_M, EPI_N), 2 * PIECES)
        return a, b, d

    def mma(self):
        """One warpgroup, 64 × TILE_N."""
        k = OperandMajorMode.K
        return sm90.make_trivial_tiled_mma(
            self.c.dtype, self.c.dtype, k, k, Float32, (1, 1, 1), (64, TILE_N)
        )

    @cute.jit
    def __call__(self, m_a: cute.Tensor, m_b: cute.Tensor, m_d: cute.Tensor, ctas: Int32):
        c = self.c
        a, b, d = self.layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        atom_a, t_a = cpasync.make_tiled_tma_atom(
            load, m_a, cute.slice_(a, (None, None, 0)), (TILE_M, c.tile_k)
        )
        atom_b, t_b = cpasync.make_tiled_tma_atom(
            load, m_b, cute.slice_(b, (None, None, 0)), (TILE_N, c.tile_k)
        )
        atom_d, t_d = cpasync.make_tiled_tma_atom(
            store, m_d, cute.slice_(d, (None, None, 0)), (TILE_M, EPI_N)
        )
        self.kernel(atom_a, t_a, atom_b, t_b, atom_d, t_d).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), smem=c.smem_bytes, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(self, atom_a, t_a, atom_b, t_b, atom_d, t_d):
        a_layout, b_layout, d_layout = self.layouts()
        smem = SmemAllocator()
        dtype = self.c.dtype
        s_a = smem.allocate_tensor(dtype, a_layout.outer, 1024, a_layout.inner)
        s_b = smem.allocate_tensor(dtype, b_layout.outer, 1024, b_layout.inner)
        s_d = smem.allocate_tensor(BFloat16, d_layout.outer, 1024, d_layout.inner)
        ring = pipeline.PipelineTmaAsync.create(
            num_stages=STAGES,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, GROUP // 32),
            tx_count=(TILE_M + TILE_N) * 128,
            barrier_storage=smem.allocate_array(cutlass.Int64, 2 * STAGES),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp_index // 4
        if group < 2:
            cute.arch.setmaxregister_increase(232)
            self.math(ring, s_a, s_b, s_d, atom_d, t_d, group)
        else:
            cute.arch.setmaxregister_decrease(40)
            if warp_index == 8:
                self.load(ring, s_a, s_b, atom_a, t_a, atom_b, t_b)

    def tiles(self):
        """(tiles along m, all tiles)."""
        tiles_m = self.c.m // TILE_M
        return tiles_m, tiles_m * (self.c.n // TILE_N)

    @cute.jit
    def load(self, ring, s_a, s_b, atom_a, t_a, atom_b, t_b):
        """One warp: the k tiles of every tile of this CTA, in order."""
        c = self.c
        tiles_m, count = self.tiles()
        one = cute.make_layout(1)
        g_a = cute.local_tile(t_a, (TILE_M, c.tile_k), (None, None))
        g_b = cute.local_tile(t_b, (TILE_N, c.tile_k), (None, None))
        to_a, from_a = cpasync.tma_partition(
            atom_a, 0, one, cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
        )
        to_b, from_b = cpasync.tma_partition(
            atom_b, 0, one, cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        for tile in cutlass.range(first, count, step, unroll=1):
            for k in cutlass.range(c.k // c.tile_k, unroll=1):
                ring.producer_acquire(state)
                bar = ring.producer_get_barrier(state)
                index = state.index
                cute.copy(atom_a, from_a[None, tile % tiles_m, k], to_a[None, index],
                          tma_bar_ptr=bar)  # fmt: skip
                cute.copy(atom_b, from_b[None, tile // tiles_m, k], to_b[None, index],
                          tma_bar_ptr=bar)  # fmt: skip
                state.advance()
        ring.producer_tail(state)

    @cute.jit
    def take_turn(self, group: Int32):
        """Wait until the other warpgroup has handed over."""
        if group == 0:
            cute.arch.barrier(barrier_id=TURN, number_of_threads=2 * GROUP)
        else:
            cute.arch.barrier(barrier_id=TURN + 1, number_of_threads=2 * GROUP)

    @cute.jit
    def pass_turn(self, group: Int32):
        """Hand over to the other warpgroup."""
        if group == 0:
            cute.arch.barrier_arrive(barrier_id=TURN + 1, number_of_threads=2 * GROUP)
        else:
            cute.arch.barrier_arrive(barrier_id=TURN, number_of_threads=2 * GROUP)

    @cute.jit
    def together(self, group: Int32):
        """Barrier of one warpgroup."""
        if group == 0:
            cute.arch.barrier(barrier_id=STORED, number_of_threads=GROUP)
        else:
            cute.arch.barrier(barrier_id=STORED + 1, number_of_threads=GROUP)

    @cute.jit
    def math(self, ring, s_a, s_b, s_d, atom_d, t_d, group: Int32):
        """A math warpgroup: every second tile of the CTA."""
        c = self.c
        tiles_m, count = self.tiles()
        k_tiles = c.k // c.tile_k
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % GROUP
        mma = self.mma()
        mine = mma.get_slice(thread)
        r_a = mma.make_fragment_A(mine.partition_A(s_a))
        r_b = mma.make_fragment_B(mine.partition_B(s_b))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((TILE_M, TILE_N)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        r2s = cute.make_tiled_copy_S(store, cute.make_tiled_copy_C_atom(store, mma))
        to_d = r2s.get_slice(thread).partition_D(s_d)
        g_d = cute.local_tile(t_d, (TILE_M, EPI_N), (None, None))
        from_d, out_d = cpasync.tma_partition(
            atom_d, 0, cute.make_layout(1), cute.group_modes(s_d, 0, 2), cute.group_modes(g_d, 0, 2)
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        for _ in cutlass.range(group * k_tiles, unroll=1):
            state.advance()
        for tile in cutlass.range(first + group * step, count, 2 * step, unroll=1):
            if tile != first:
                self.take_turn(group)
            acc.fill(0.0)
            for _ in cutlass.range(k_tiles, unroll=1):
                ring.consumer_wait(state)
                warpgroup.fence()
                for block in cutlass.range_constexpr(c.tile_k * c.dtype.width // 256):
                    at = (None, None, block, state.index)
                    cute.gemm(mma, acc, r_a[at], r_b[at], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                ring.consumer_release(state)
                state.advance()
            for _ in cutlass.range(k_tiles, unroll=1):
                state.advance()
            if tile + step < count:
                self.pass_turn(group)
            if thread < 32:
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            self.together(group)
            for piece in cutlass.range_constexpr(PIECES):
                values = cute.make_tensor(acc.iterator + piece * 16, cute.make_layout(16))
                half = cute.make_rmem_tensor(cute.make_layout(16), BFloat16)
                half.store(values.load().to(BFloat16))
                at = (None, None, None, group * PIECES + piece)
                source = cute.make_tensor(half.iterator, to_d[at].shape)
                cute.copy(r2s, source, to_d[at])
            cute.arch.fence_proxy("async.shared", space="cta")
            self.together(group)
            if thread < 32:
                with cute.arch.elect_one():
                    for piece in cutlass.range_constexpr(PIECES):
                        column = tile // tiles_m * PIECES + piece
                        staged = from_d[None, group * PIECES + piece]
                        cute.copy(atom_d, staged, out_d[None, tile % tiles_m, column])
                    cute.arch.cp_async_bulk_commit_group()
        # The last stores still read shared memory, which ends with the CTA.
        if thread < 32:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def compile_pingpong(config: PingPongConfig) -> str:
    """PTX of a configuration."""
    fake = cute.runtime.make_fake_tensor
    m_a = fake(config.dtype, (config.m, config.k), (config.k, 1), assumed_align=16)
    m_b = fake(config.dtype, (config.n, config.k), (config.k, 1), assumed_align=16)
    m_d = fake(BFloat16, (config.m, config.n), (config.n, 1), assumed_align=16)
    return compile_ptx(PingPong(config), m_a, m_b, m_d, Int32(1))
