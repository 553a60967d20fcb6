"""Reading the pool layout that recv-and-place wrote to shared memory."""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from megamoe.cute_kernels import ptx, ptx_copies
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.kernel_config import fc1_tiles, fc2_tiles
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.routing import warp_inclusive_sum
from megamoe.cute_kernels.scheduler import TileScheduler, make_scheduler


@cute.jit
def block_prefix(c: Context, expert: Int32) -> Int32:
    """First M-block of a local expert; of ``local_experts()``: the number of blocks."""
    return ptx.lds_i32(c.smem + c.shared.block_prefix + expert * 4)


@dataclass
class ExpertCursor:
    """Maps M-blocks, asked for in ascending order, to local experts.

    ``block`` is what ``seek_tile`` found; ``pairs`` counts pairs of blocks before ``expert``.
    """

    expert: Int32
    block: Int32
    pairs: Int32

    @cute.jit
    def seek(self, c: Context, block: Int32):
        """Move to the expert that owns ``block``; experts without rows own no block."""
        while block_prefix(c, self.expert + 1) <= block:
            self.expert = self.expert + 1

    @cute.jit
    def rows(self, c: Context, block: Int32) -> Int32:
        """Valid rows of ``block``, 1 to BLOCK_M; call after ``seek``. Not positive for the second
        block of a pair that the expert does not have."""
        rows = ptx.lds_i32(c.smem + c.shared.expert_rows + self.expert * 4)
        rows -= (block - block_prefix(c, self.expert)) * BLOCK_M
        if rows > BLOCK_M:
            rows = Int32(BLOCK_M)
        return rows

    @cute.jit
    def seek_tile(self, c: Context, index: Int32):
        """Move to this CTA's M-block of tile row ``index`` of the order: the block of that number
        or, where pairs of CTAs share weights, one of a pair of blocks of one expert."""
        self.block = index
        if cutlass.const_expr(c.config.cluster == "weights"):
            pairs = expert_pairs(c, self.expert)
            while self.pairs + pairs <= index:
                self.pairs = self.pairs + pairs
                self.expert = self.expert + 1
                pairs = expert_pairs(c, self.expert)
            first = block_prefix(c, self.expert)
            self.block = first + 2 * (index - self.pairs) + (c.cta & 1)
        else:
            self.seek(c, index)


def make_expert_cursor() -> ExpertCursor:
    """A cursor at the first expert."""
    return ExpertCursor(expert=Int32(0), block=Int32(0), pairs=Int32(0))


@cute.jit
def expert_pairs(c: Context, expert: Int32) -> Int32:
    """Pairs of M-blocks of an expert; the last may be one block."""
    return (block_prefix(c, expert + 1) - block_prefix(c, expert) + 1) // 2


@cute.jit
def tile_rows(c: Context) -> Int32:
    """Rows of the tile order: M-blocks, or pairs of them."""
    experts = c.local_experts()
    rows = block_prefix(c, experts)
    if cutlass.const_expr(c.config.cluster == "weights"):
        # One warp's worth of shared-memory loads; an empty pool was left without a prefix.
        if rows > 0:
            rows = Int32(0)
            for expert in cutlass.range(lane(), experts, 32, unroll=1):
                rows += expert_pairs(c, expert)
            rows = cute.arch.shuffle_sync(warp_inclusive_sum(rows), 31)
    return rows


@cute.jit
def token_width(c: Context, rows: Int32) -> Int32:
    """The smallest of the config's token widths that holds ``rows``; 0 without rows."""
    widths = c.config.token_widths
    width = Int32(widths[len(widths) - 1])
    for i in cutlass.range_constexpr(len(widths) - 1):
        smaller = widths[len(widths) - 2 - i]
        if rows <= smaller:
            width = Int32(smaller)
    if cutlass.const_expr(c.config.cluster == "weights"):
        # A pair's second block may not exist; its CTA still takes part in copying weights.
        if rows <= 0:
            width = Int32(0)
    return width


@cute.jit
def tiles_of(c: Context) -> TileScheduler:
    """Wait for the layout, then a scheduler over this CTA's tiles."""
    ptx_copies.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
    return make_scheduler(
        c.cta // c.config.cluster_size,
        c.grid // c.config.cluster_size,
        tile_rows(c),
        fc1_tiles(c.problem, c.config),
        fc2_tiles(c.problem, c.config),
        c.config.lag_waves,
        # fc2 of the block whose place another takes must come before that one's fc1.
        c.problem.ring_blocks - 1 if c.problem.ring_blocks else c.problem.pool_blocks,
        c.config.split_k,
        int(c.config.cluster == "tokens"),
        c.cta % c.config.cluster_size,
    )
