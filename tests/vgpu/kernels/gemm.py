"""A warp-specialised persistent WGMMA GEMM for sm_90a, written for vgpu's tests.

D[m, n] = Σ_k A[m, k] · B[n, k], bf16 in and out, fp32 accumulation; each operand is contiguous
along k or, transposed, along m or n. Tiles come by TMA through a ring of mbarrier stages, leave by
stmatrix and a TMA store. ``m_major`` False: D is stored n-contiguous (the plain form). True: D is
stored m-contiguous, the "swapped" form in which A holds weights, B tokens, and stmatrix transposes.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int16, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

EPI_M, EPI_N = 128, 32
MATH_THREADS = 256
THREADS = MATH_THREADS + 128


@dataclass(frozen=True)
class GemmConfig:
    """Static sizes: D [m, n] over k, CTA tile tile_m × tile_n × tile_k.

    ``swizzle`` is that of the operands, 0, 32, 64 or 128 bytes; ``a_mn`` and ``b_mn`` choose the
    transposed operand forms. ``cluster`` = 2: two CTAs work on neighbouring n tiles and each loads
    half of their common A tile for both by multicast.
    """

    m: int
    n: int
    k: int
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    swizzle: int = 128
    a_mn: bool = False
    b_mn: bool = False
    m_major: bool = False
    cluster: int = 1

    @property
    def epi_tiles(self) -> int:
        """Pieces of 128 × 32 in which a tile leaves."""
        return (self.tile_m // EPI_M) * (self.tile_n // EPI_N)

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along m, and along n in units of a cluster's tiles."""
        return -(-self.m // self.tile_m), -(-self.n // (self.tile_n * self.cluster))

    @property
    def smem_bytes(self) -> int:
        """Operand stages, staging of a whole tile, and one page for barriers and alignment."""
        operands = (self.tile_m + self.tile_n) * self.tile_k * 2 * self.stages
        return operands + self.tile_m * self.tile_n * 2 + 2048


class Gemm:
    """Host function and kernel of one configuration."""

    def __init__(self, config: GemmConfig) -> None:
        self.c = config

    def _layouts(self):
        c = self.c
        a = self._operand(c.tile_m, c.a_mn)
        b = self._operand(c.tile_n, c.b_mn)
        order = LayoutEnum.COL_MAJOR if c.m_major else LayoutEnum.ROW_MAJOR
        d = sm90.make_smem_layout_epi(BFloat16, order, (EPI_M, EPI_N), c.epi_tiles)
        return a, b, d

    def _operand(self, rows: int, mn: bool):
        c = self.c
        name = f"SW{c.swizzle}" if c.swizzle else "INTER"
        kind = getattr(warpgroup.SmemLayoutAtomKind, f"{'MN' if mn else 'K'}_{name}")
        atom = warpgroup.make_smem_layout_atom(kind, BFloat16)
        order = (1, 0, 2) if mn else (0, 1, 2)
        return cute.tile_to_shape(atom, (rows, c.tile_k, c.stages), order=order)

    def _mma(self):
        c = self.c
        modes = [OperandMajorMode.MN if mn else OperandMajorMode.K for mn in (c.a_mn, c.b_mn)]
        return sm90.make_trivial_tiled_mma(
            BFloat16, BFloat16, modes[0], modes[1], Float32,
            (2, 1, 1), (64, c.tile_n),
        )  # fmt: skip

    @cute.jit
    def __call__(self, m_a: cute.Tensor, m_b: cute.Tensor, m_d: cute.Tensor, ctas: Int32):
        c = self.c
        a, b, d = self._layouts()
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_a = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.cluster > 1 else load
        atom_a, t_a = cpasync.make_tiled_tma_atom(
            load_a, m_a, cute.slice_(a, (None, None, 0)), (c.tile_m, c.tile_k), c.cluster
        )
        atom_b, t_b = cpasync.make_tiled_tma_atom(
            load, m_b, cute.slice_(b, (None, None, 0)), (c.tile_n, c.tile_k)
        )
        atom_d, t_d = cpasync.make_tiled_tma_atom(
            store, m_d, cute.slice_(d, (None, None, 0)), (EPI_M, EPI_N)
        )
        self.kernel(atom_a, t_a, atom_b, t_b, atom_d, t_d).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), cluster=(c.cluster, 1, 1),
            smem=c.smem_bytes, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(self, atom_a, t_a, atom_b, t_b, atom_d, t_d):
        c = self.c
        a_layout, b_layout, d_layout = self._layouts()
        smem = SmemAllocator()
        s_a = smem.allocate_tensor(BFloat16, a_layout.outer, 1024, a_layout.inner)
        s_b = smem.allocate_tensor(BFloat16, b_layout.outer, 1024, b_layout.inner)
        s_d = smem.allocate_tensor(BFloat16, d_layout.outer, 1024, d_layout.inner)
        ring = smem.allocate_array(cutlass.Int64, 2 * c.stages)
        producer, consumer = pipeline.PipelineTmaAsync.create(
            num_stages=c.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            # Every math warp releases a stage in all CTAs that write into it.
            consumer_group=pipeline.CooperativeGroup(
                pipeline.Agent.Thread, MATH_THREADS // 32 * c.cluster
            ),
            tx_count=(c.tile_m + c.tile_n) * c.tile_k * 2,
            barrier_storage=ring,
            cta_layout_vmnk=cute.make_layout((1, 1, c.cluster, 1)),
            defer_sync=True,
        ).make_participants()
        cluster_shape = cute.make_layout((1, c.cluster))
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster_shape, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster_shape)
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index < MATH_THREADS // 32:
            cute.arch.setmaxregister_increase(232)
            self.math(s_a, s_b, s_d, consumer, atom_d, t_d)
        else:
            cute.arch.setmaxregister_decrease(40)
            if warp_index == MATH_THREADS // 32:
                self.load(s_a, s_b, producer, atom_a, t_a, atom_b, t_b)

    def tile_range(self):
        """First tile, step, and this CTA's rank in its cluster (which share their tiles)."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        size = self.c.cluster
        return block // size, grid // size, block % size

    @cute.jit
    def load(self, s_a, s_b, producer, atom_a, t_a, atom_b, t_b):
        """One warp: every k tile of this CTA's output tiles."""
        c = self.c
        tiles_m, tiles_n = c.tiles
        one = cute.make_layout(1)
        g_a = cute.local_tile(t_a, (c.tile_m, c.tile_k), (None, None))
        g_b = cute.local_tile(t_b, (c.tile_n, c.tile_k), (None, None))
        first, step, rank = self.tile_range()
        to_a, from_a = cpasync.tma_partition(
            atom_a, rank, cute.make_layout(c.cluster),
            cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2),
        )  # fmt: skip
        to_b, from_b = cpasync.tma_partition(
            atom_b, 0, one, cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
        )
        mask = Int16((1 << c.cluster) - 1) if c.cluster > 1 else None
        for tile in cutlass.range(first, tiles_m * tiles_n, step, unroll=1):
            n_tile = tile // tiles_m * c.cluster + rank
            for k in cutlass.range(-(-c.k // c.tile_k), unroll=1):
                h = producer.acquire_and_advance()
                cute.copy(
                    atom_a, from_a[None, tile % tiles_m, k], to_a[None, h.index],
                    tma_bar_ptr=h.barrier, mcast_mask=mask,
                )  # fmt: skip
                cute.copy(
                    atom_b, from_b[None, n_tile, k], to_b[None, h.index],
                    tma_bar_ptr=h.barrier,
                )  # fmt: skip
        producer.tail()

    @cute.jit
    def math(self, s_a, s_b, s_d, consumer, atom_d, t_d):
        """Two warpgroups: main loop, then the epilogue through shared memory."""
        c = self.c
        tiles_m, tiles_n = c.tiles
        thread, _, _ = cute.arch.thread_idx()
        mma = self._mma()
        mine = mma.get_slice(thread)
        r_a = mma.make_fragment_A(mine.partition_A(s_a))
        r_b = mma.make_fragment_B(mine.partition_B(s_b))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((c.tile_m, c.tile_n)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)

        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(c.m_major, 4), BFloat16)
        r2s = cute.make_tiled_copy_S(store, cute.make_tiled_copy_C_atom(store, mma))
        to_d = r2s.get_slice(thread).partition_D(s_d)
        g_d = cute.local_tile(t_d, (EPI_M, EPI_N), (None, None))
        from_d, out_d = cpasync.tma_partition(
            atom_d, 0, cute.make_layout(1), cute.group_modes(s_d, 0, 2), cute.group_modes(g_d, 0, 2)
        )
        everyone = pipeline.NamedBarrier(barrier_id=1, num_threads=MATH_THREADS)
        first, step, rank = self.tile_range()
        for tile in cutlass.range(first, tiles_m * tiles_n, step, unroll=1):
            # Zero-initialised instead of a peeled first step (which would serialise wgmma).
            acc.fill(0.0)
            for _ in cutlass.range(-(-c.k // c.tile_k), unroll=1):
                h = consumer.wait_and_advance()
                warpgroup.fence()
                for block in cutlass.range_constexpr(c.tile_k // 16):
                    at = (None, None, block, h.index)
                    cute.gemm(mma, acc, r_a[at], r_b[at], acc)
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                h.release()
            if thread < 32:
                with cute.arch.elect_one():
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            everyone.arrive_and_wait()
            for mi in cutlass.range_constexpr(c.tile_m // EPI_M):
                for ni in cutlass.range_constexpr(c.tile_n // EPI_N):
                    # Piece (mi, ni) is 16 consecutive accumulators: 4 octets of n × 2 × 2.
                    piece = cute.make_tensor(
                        acc.iterator + (mi * (c.tile_n // 2) + ni * 16), cute.make_layout(16)
                    )
                    half = cute.make_rmem_tensor(cute.make_layout(16), BFloat16)
                    half.store(piece.load().to(BFloat16))
                    at = (None, None, None, mi * (c.tile_n // EPI_N) + ni)
                    source = cute.make_tensor(half.iterator, to_d[at].shape)
                    cute.copy(r2s, source, to_d[at])
            cute.arch.fence_proxy("async.shared", space="cta")
            everyone.arrive_and_wait()
            if thread < 32:
                with cute.arch.elect_one():
                    for mi in cutlass.range_constexpr(c.tile_m // EPI_M):
                        for ni in cutlass.range_constexpr(c.tile_n // EPI_N):
                            row = (tile % tiles_m) * (c.tile_m // EPI_M) + mi
                            n_tile = tile // tiles_m * c.cluster + rank
                            column = n_tile * (c.tile_n // EPI_N) + ni
                            index = mi * (c.tile_n // EPI_N) + ni
                            # A piece that is all outside has no tile index of its own.
                            if (row * EPI_M < c.m) & (column * EPI_N < c.n):
                                cute.copy(atom_d, from_d[None, index], out_d[None, row, column])
                    cute.arch.cp_async_bulk_commit_group()
        if thread < 32:
            with cute.arch.elect_one():
                cute.arch.cp_async_bulk_wait_group(0, read=False)


def compile_gemm(config: GemmConfig) -> str:
    """PTX of a configuration, compiled without a GPU."""
    fake = cute.runtime.make_fake_tensor
    stride = (1, config.m) if config.a_mn else (config.k, 1)
    m_a = fake(BFloat16, (config.m, config.k), stride, assumed_align=16)
    stride = (1, config.n) if config.b_mn else (config.k, 1)
    m_b = fake(BFloat16, (config.n, config.k), stride, assumed_align=16)
    stride = (1, config.m) if config.m_major else (config.n, 1)
    m_d = fake(BFloat16, (config.m, config.n), stride, assumed_align=16)
    with tempfile.TemporaryDirectory(prefix="vgpu-gemm-") as folder:
        options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {folder} --generate-line-info"
        compiled = cute.compile(Gemm(config), m_a, m_b, m_d, Int32(1), options=options)
        return str(compiled.artifacts.PTX)


def operand_box(config: GemmConfig, rows: int, mn: bool) -> tuple[int, int]:
    """TMA box of an operand tile, innermost first: one swizzle span wide, as long as the tile."""
    span = (config.swizzle or 16) // 2
    return (span, config.tile_k if mn else rows)


def output_box(config: GemmConfig) -> tuple[tuple[int, int], int]:
    """TMA box of D, innermost first, and its swizzle."""
    return ((64, EPI_N), 128) if config.m_major else ((EPI_N, EPI_M), 64)
