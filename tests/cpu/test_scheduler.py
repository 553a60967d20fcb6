"""The device scheduler itself, run natively by the DSL's host JIT."""

import cutlass
import numpy as np
import pytest
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from megamoe.cute_kernels.scheduler import TilePhase, make_scheduler


@cute.jit
def walk(
    out: cute.Tensor,
    count: cute.Tensor,
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
):
    """All items of one CTA into ``out[:, (phase, block, n, part)]``."""
    tiles = make_scheduler(
        cta, grid, blocks, fc1_tiles, fc2_tiles, lag_waves, max_lag, fc2_parts, pair, rank
    )
    tiles.advance()
    i = Int32(0)
    while tiles.valid == 1:
        out[i, 0] = tiles.phase
        out[i, 1] = tiles.block
        out[i, 2] = tiles.n
        out[i, 3] = tiles.part
        i = i + 1
        tiles.advance()
    count[0] = i


def items(cta, grid, blocks, fc1_tiles, fc2_tiles, lag_waves=1, max_lag=1000, parts=1, rank=None):
    """(phase, block, n) of a CTA's items; with ``parts`` > 1 also the part; with a
    ``rank``, of a CTA of pair ``cta`` of ``grid`` pairs."""
    out = np.full((blocks * (fc1_tiles + fc2_tiles * parts) + 1, 4), -1, np.int32)
    count = np.zeros(1, np.int32)
    walk(
        from_dlpack(out),
        from_dlpack(count),
        Int32(cta),
        Int32(grid),
        Int32(blocks),
        fc1_tiles,
        fc2_tiles,
        lag_waves,
        max_lag,
        parts,
        int(rank is not None),
        Int32(rank or 0),
    )
    return [tuple(row) for row in out[: count[0], : 3 if parts == 1 else 4].tolist()]


def test_worked_example():
    order = items(0, 1, blocks=3, fc1_tiles=2, fc2_tiles=1)
    text = " ".join(f"{phase + 1}{block}{n}" for phase, block, n in order)
    assert text == "100 101 110 111 200 120 121 210 220"


@pytest.mark.parametrize(
    ("grid", "blocks", "fc1_tiles", "fc2_tiles", "lag_waves"),
    [(1, 1, 1, 1, 1), (2, 5, 2, 2, 1), (3, 7, 6, 8, 1), (4, 2, 3, 5, 2), (132, 9, 16, 28, 1)],
)
def test_every_tile_once_and_after_what_it_needs(grid, blocks, fc1_tiles, fc2_tiles, lag_waves):
    per_cta = [items(c, grid, blocks, fc1_tiles, fc2_tiles, lag_waves) for c in range(grid)]
    wanted = {(TilePhase.FC1, b, n) for b in range(blocks) for n in range(fc1_tiles)}
    wanted |= {(TilePhase.FC2, b, n) for b in range(blocks) for n in range(fc2_tiles)}
    order = {tile: c + i * grid for c, tiles in enumerate(per_cta) for i, tile in enumerate(tiles)}
    assert sorted(order.values()) == list(range(len(wanted)))
    assert set(order) == wanted
    for b in range(blocks):
        last_fc1 = max(order[TilePhase.FC1, b, n] for n in range(fc1_tiles))
        assert last_fc1 < min(order[TilePhase.FC2, b, n] for n in range(fc2_tiles))


def test_fc2_follows_one_wave_behind_fc1():
    """12 tiles of lag and 4 fc1 tiles a block are 3 blocks: fc2 of 0 follows fc1 of block 3."""
    order = items(0, 1, blocks=6, fc1_tiles=4, fc2_tiles=2, lag_waves=12)
    assert order.index((TilePhase.FC2, 0, 0)) == order.index((TilePhase.FC1, 3, 3)) + 1


def test_a_ring_of_two_blocks_has_a_lag_of_one():
    """fc2 of block b must precede fc1 of block b + 2, which takes its place."""
    order = items(0, 1, blocks=5, fc1_tiles=2, fc2_tiles=2, lag_waves=50, max_lag=1)
    for block in range(3):
        last_fc2 = order.index((TilePhase.FC2, block, 1))
        assert last_fc2 < order.index((TilePhase.FC1, block + 2, 0))


def test_no_blocks_no_items():
    assert items(0, 2, blocks=0, fc1_tiles=2, fc2_tiles=2) == []


def test_parts_of_a_tile_lie_side_by_side():
    """One block of one fc1 tile and two fc2 tiles of three parts, on four CTAs."""
    order = [items(c, 4, blocks=1, fc1_tiles=1, fc2_tiles=2, parts=3) for c in range(4)]
    listed = [order[i % 4][i // 4] for i in range(7)]
    fc1, fc2 = int(TilePhase.FC1), int(TilePhase.FC2)
    assert listed == [(fc1, 0, 0, 0)] + [(fc2, 0, n, part) for n in range(2) for part in range(3)]


def test_pairs_take_neighbouring_tiles():
    """Two CTAs of a pair walk the same blocks and phases in step, one on even n, one on odd."""
    first, second = (items(1, 3, blocks=4, fc1_tiles=4, fc2_tiles=6, rank=rank) for rank in (0, 1))
    assert len(first) > 3
    assert second == [(phase, block, n + 1) for phase, block, n in first]
    assert {n % 2 for _, _, n in first} == {0}
