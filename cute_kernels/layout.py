"""Reading the pool layout that recv-and-place wrote to shared memory."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.kernel_config import fc1_tiles, fc2_tiles
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.scheduler import TileScheduler, make_scheduler


@cute.jit
def block_prefix(c: Context, expert: Int32) -> Int32:
    """First M-block of a local expert; of ``local_experts()``: the number of blocks."""
    return ptx.lds_i32(c.smem + c.shared.block_prefix + expert * 4)


@dataclass
class ExpertCursor:
    """Maps M-blocks, asked for in ascending order, to local experts."""

    expert: Int32

    @cute.jit
    def seek(self, c: Context, block: Int32):
        """Move to the expert that owns ``block``; experts without rows own no block."""
        while block_prefix(c, self.expert + 1) <= block:
            self.expert = self.expert + 1

    @cute.jit
    def rows(self, c: Context, block: Int32) -> Int32:
        """Valid rows of ``block``, 1 to BLOCK_M; call after ``seek``."""
        rows = ptx.lds_i32(c.smem + c.shared.expert_rows + self.expert * 4)
        rows -= (block - block_prefix(c, self.expert)) * BLOCK_M
        if rows > BLOCK_M:
            rows = Int32(BLOCK_M)
        return rows


@cute.jit
def token_width(c: Context, rows: Int32) -> Int32:
    """The smallest of the config's token widths that holds ``rows``."""
    widths = c.config.token_widths
    width = Int32(widths[len(widths) - 1])
    for i in cutlass.range_constexpr(len(widths) - 1):
        smaller = widths[len(widths) - 2 - i]
        if rows <= smaller:
            width = Int32(smaller)
    return width


@cute.jit
def tiles_of(c: Context) -> TileScheduler:
    """Wait for the layout, then a scheduler over this CTA's tiles."""
    ptx.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
    return make_scheduler(
        c.cta,
        c.grid,
        block_prefix(c, c.local_experts()),
        fc1_tiles(c.problem, c.config),
        fc2_tiles(c.problem, c.config),
        c.config.lag_waves,
        # fc2 of the block whose place another takes must come before that one's fc1.
        c.problem.ring_blocks - 1 if c.problem.ring_blocks else c.problem.pool_blocks,
        c.config.split_k,
    )
