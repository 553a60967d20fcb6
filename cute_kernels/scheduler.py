"""The order of tiles: one total order over all CTAs of a PE, without a tensor in sight.

Items, per M-block b of the pool: ``fc1_tiles`` tiles of fc1 and ``fc2_tiles`` of fc2. fc2 of a
block comes ``lag`` blocks behind its fc1, so that its activations are complete by the time it is
reached. CTA c works on items c, c + grid, c + 2·grid … in that order. An item depends only on
earlier items (invariant I8), hence no set of resident CTAs can deadlock.

Worked example, 3 blocks, 2 fc1 tiles, 1 fc2 tile, lag 1; ``fc1(b,n)`` is written 1bn:

    100 101 | 110 111 200 | 120 121 210 | 220
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
from cutlass import Int32, cute


class TilePhase(IntEnum):
    """Which GEMM a tile belongs to."""

    FC1 = 0
    FC2 = 1


@dataclass
class TileScheduler:
    """Walks this CTA's items. ``advance`` sets phase, block, n and valid for the next one.

    Args:
        item: number of the next item, the CTA's index at first.
        stride: CTAs in the grid.
        blocks: M-blocks of the pool in use.
        lag: blocks between fc1 and fc2 (clipped to ``blocks``).
        phase, block, n, part, valid: the current tile and, of fc2 tiles, the part of its
            reduction; ``valid`` is 0 after the last.
        pair: 1 if pairs of CTAs take two neighbouring tiles of a block, else 0; ``rank`` of the
            CTA in its pair. ``item`` and ``stride`` then count pairs.
        fc2_parts: parts of an fc2 tile, items of their own side by side.
    """

    item: Int32
    stride: Int32
    blocks: Int32
    lag: Int32
    phase: Int32
    block: Int32
    n: Int32
    part: Int32
    valid: Int32
    fc1_tiles: cutlass.Constexpr[int]
    fc2_tiles: cutlass.Constexpr[int]
    fc2_parts: cutlass.Constexpr[int]
    pair: cutlass.Constexpr[int]
    rank: Int32

    @cute.jit
    def advance(self):
        """Decode ``item`` and step to this CTA's next."""
        rest = self.item
        fc1_items = self.fc1_tiles >> self.pair
        head = self.lag * fc1_items
        fc2_items = (self.fc2_tiles >> self.pair) * self.fc2_parts
        per_step = fc1_items + fc2_items
        middle = (self.blocks - self.lag) * per_step
        self.phase = Int32(TilePhase.FC1)
        self.valid = Int32(1)
        if rest < head:
            self.block = rest // fc1_items
            self.n = rest - self.block * fc1_items
        else:
            rest = rest - head
            if rest < middle:
                step = rest // per_step
                within = rest - step * per_step
                self.block = step + self.lag
                self.n = within
                if within >= fc1_items:
                    self.phase = Int32(TilePhase.FC2)
                    self.block = step
                    self.n = within - fc1_items
            else:
                rest = rest - middle
                step = rest // fc2_items
                self.phase = Int32(TilePhase.FC2)
                self.block = self.blocks - self.lag + step
                self.n = rest - step * fc2_items
                self.valid = Int32(step < self.lag)
        self.part = Int32(0)
        if cutlass.const_expr(self.fc2_parts > 1):
            if self.phase == TilePhase.FC2:
                self.part = self.n % self.fc2_parts
                self.n = self.n // self.fc2_parts
        if cutlass.const_expr(self.pair == 1):
            self.n = self.n * 2 + self.rank
        self.item = self.item + self.stride


@cute.jit
def make_scheduler(
    cta: Int32,
    grid: Int32,
    blocks: Int32,
    fc1_tiles: cutlass.Constexpr[int],
    fc2_tiles: cutlass.Constexpr[int],
    lag_waves: cutlass.Constexpr[int],
    max_lag: cutlass.Constexpr[int],
    fc2_parts: cutlass.Constexpr[int],
    pair: cutlass.Constexpr[int],
    rank: Int32,
) -> TileScheduler:
    """A scheduler at its first item; the lag is ``lag_waves`` waves of fc1 tiles, in blocks, at
    most ``max_lag`` (with a ring pool, one less than its blocks)."""
    fc1_items = fc1_tiles >> pair
    lag = (grid * lag_waves + fc1_items - 1) // fc1_items
    if lag > max_lag:
        lag = Int32(max_lag)
    if lag > blocks:
        lag = blocks
    return TileScheduler(
        item=cta,
        stride=grid,
        blocks=blocks,
        lag=lag,
        phase=Int32(TilePhase.FC1),
        block=Int32(0),
        n=Int32(0),
        part=Int32(0),
        valid=Int32(0),
        fc1_tiles=fc1_tiles,
        fc2_tiles=fc2_tiles,
        fc2_parts=fc2_parts,
        pair=pair,
        rank=rank,
    )
