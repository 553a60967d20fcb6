"""Probe: how fast one warp per SM pulls rows by bulk copies while it stores them elsewhere.

The row ring of recv-and-place without anything else: loads of at most 4 KB ahead of stores, one
elected lane a CTA. Row r goes to every copy's row r.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx_copies
from megamoe.cute_kernels.build import compile_kernel
from megamoe.cute_kernels.image import Image

PARAMETERS = (
    ("source", "u64", "address of the rows"),
    ("target", "u64", "address of the copies [copies, rows, row bytes]"),
    ("rows", "u32", "rows to copy"),
    ("copies", "u32", "times each row is stored"),
)
ALIGN = 1024


class RowPull:
    """Kernel for rows of ``pieces`` pieces of ``piece_bytes``, with a ring of ``slots``."""

    def __init__(self, *, piece_bytes: int, pieces: int, slots: int):
        self.piece_bytes, self.pieces, self.slots = piece_bytes, pieces, slots
        self.smem_bytes = slots * piece_bytes + 8 * slots + ALIGN

    @cute.jit
    def __call__(self, source: Int64, target: Int64, rows: Int32, copies: Int32, grid: Int32):
        """Host entry of the trace."""
        self.kernel(source, target, rows, copies).launch(
            grid=(grid, 1, 1), block=(32, 1, 1), smem=self.smem_bytes
        )

    @cute.kernel
    def kernel(self, source: Int64, target: Int64, rows: Int32, copies: Int32):
        """One lane loads into the ring and stores from it."""
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        slots, size, pieces = self.slots, self.piece_bytes, self.pieces
        smem = Int32(cutlass.memory.SmemAllocator().allocate(self.smem_bytes, ALIGN).toint())
        barriers = smem + slots * size
        if thread == 0:
            for slot in cutlass.range_constexpr(slots):
                ptx_copies.mbarrier_init(barriers + slot * 8, 1)
            ptx_copies.fence_mbarrier_init()
            mine = Int32(0)
            if cta < rows:
                mine = (rows - cta + grid - 1) // grid * pieces
            loaded = Int32(0)
            while (loaded < slots - 1) & (loaded < mine):
                self.load(source, smem, barriers, cta, grid, loaded)
                loaded = loaded + 1
            row_bytes = Int64(size * pieces)
            for item in cutlass.range(mine, unroll=1):
                slot = item % slots
                ptx_copies.mbarrier_wait(barriers + slot * 8, (item // slots) & 1)
                row = cta + item // pieces * grid
                offset = Int64(row) * row_bytes + Int64(item % pieces) * size
                for copy in cutlass.range(copies, unroll=1):
                    place = target + Int64(copy) * rows * row_bytes + offset
                    ptx_copies.bulk_store(place, smem + slot * size, Int32(size))
                ptx_copies.bulk_commit()
                # The slot of the item before is free once its stores have read it.
                ptx_copies.bulk_wait_read(1)
                if loaded < mine:
                    self.load(source, smem, barriers, cta, grid, loaded)
                    loaded = loaded + 1
            ptx_copies.bulk_wait(0)

    @cute.jit
    def load(
        self, source: Int64, smem: Int32, barriers: Int32, cta: Int32, grid: Int32, item: Int32
    ):
        """Fetch piece ``item`` of this CTA into its slot."""
        size, pieces = self.piece_bytes, self.pieces
        slot = item % self.slots
        row = cta + item // pieces * grid
        place = source + Int64(row) * (size * pieces) + Int64(item % pieces) * size
        ptx_copies.mbarrier_arrive_expect_tx(barriers + slot * 8, size)
        ptx_copies.bulk_load(smem + slot * size, place, Int32(size), barriers + slot * 8)


def compile_row_pull(
    *, piece_bytes: int, pieces: int, slots: int = 4, arch: str = "sm_90a"
) -> Image:
    """The probe's image."""
    kernel = RowPull(piece_bytes=piece_bytes, pieces=pieces, slots=slots)
    kernel.kernel.set_name_prefix("megamoe_row_pull")
    return compile_kernel(kernel, parameters=PARAMETERS, smem_bytes=kernel.smem_bytes, arch=arch)
