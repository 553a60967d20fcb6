"""What every wgrad role knows, and the walk over an expert's rows.

An expert's rows may lie in several saved calls; they are summed in list order, each in row order.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M, Problem
from megamoe.cute_kernels.wgrad_tables import WgradConfig, WgradShared


@dataclass(frozen=True)
class WgradContext:
    """Launch parameters; fields as in ``WGRAD_PARAMETERS``."""

    w13: Int64
    w13_stride: Int64
    w2: Int64
    w2_stride: Int64
    b13: Int64
    b13_stride: Int64
    b2: Int64
    b2_stride: Int64
    accumulate: Int32
    first_slot: Int32
    experts: Int32
    num_saved: Int32
    cta: Int32
    grid: Int32
    smem: Int32
    problem: cutlass.Constexpr[Problem]
    config: cutlass.Constexpr[WgradConfig]
    shared: cutlass.Constexpr[WgradShared]

    def entry(self, saved: Int32) -> Int64:
        """Address of a saved call's entry."""
        return ptx.lds_i64(self.smem + self.shared.entries + saved * 8)

    def block_prefix(self, saved: Int32) -> Int32:
        """Shared address of a saved call's first block per expert."""
        words = self.problem.experts_per_pe + 1
        return self.smem + self.shared.block_prefix + saved * (words * 4)

    def expert_rows(self, saved: Int32) -> Int32:
        """Shared address of a saved call's rows per expert."""
        words = self.problem.experts_per_pe
        return self.smem + self.shared.expert_rows + saved * (words * 4)

    def rows(self, saved: Int32, expert: Int32) -> Int32:
        """Rows of an expert in a saved call."""
        return ptx.lds_i32(self.expert_rows(saved) + expert * 4)

    def first_row(self, saved: Int32, expert: Int32) -> Int32:
        """Pool row at which an expert's segment begins."""
        return ptx.lds_i32(self.block_prefix(saved) + expert * 4) * BLOCK_M


@cute.jit
def k_tiles_of(c: WgradContext, expert: Int32) -> Int32:
    """Stages of 64 rows that an expert's rows take, over all saved calls."""
    tiles = Int32(0)
    for saved in cutlass.range(c.num_saved, unroll=1):
        tiles += (c.rows(saved, expert) + BLOCK_K - 1) // BLOCK_K
    return tiles


@cute.jit
def destination(base: Int64, stride: Int64, expert: Int32) -> Int64:
    """Address of an expert's gradient, 0 if it is not wanted."""
    address = base
    if base != 0:
        if stride == 0:
            address = ptx.ld_i64(base + Int64(expert) * 8)
        else:
            address = base + Int64(expert) * stride
    return address


@dataclass
class RowCursor:
    """Walks an expert's rows in steps of BLOCK_K; ``left`` counts the valid ones from ``row``."""

    saved: Int32
    row: Int32
    left: Int32

    @cute.jit
    def advance(self, c: WgradContext, expert: Int32):
        """The next step. The caller counts steps by ``k_tiles_of``: there is one."""
        self.row = self.row + BLOCK_K
        self.left = self.left - BLOCK_K
        while self.left <= 0:
            self.saved = self.saved + 1
            self.left = c.rows(self.saved, expert)
            self.row = c.first_row(self.saved, expert)


def make_row_cursor() -> RowCursor:
    """Before the first step."""
    return RowCursor(saved=Int32(-1), row=Int32(0), left=Int32(0))
