"""The order of wgrad's output tiles, and where a tile reads and writes.

Items are all tiles of all experts: expert by expert, inside one product by product. CTA c takes
items c, c + grid, c + 2·grid, … Tiles at work at the same time so belong to one expert or two
neighbours, have about the same number of rows, and share their operands in L2.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels.abi import WGRAD_MAPS
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.wgrad_context import WgradContext, destination
from megamoe.cute_kernels.wgrad_tables import Product, products, tiles_of_expert


@dataclass
class WgradTiles:
    """Walks this CTA's items. ``advance`` decodes the next one.

    Args:
        item: number of the next item, the CTA's index at first.
        stride: CTAs in the grid.
        experts: experts of this PE.
        expert, product, m, n: the current tile; ``valid`` is 0 after the last.
    """

    item: Int32
    stride: Int32
    experts: Int32
    expert: Int32
    product: Int32
    m: Int32
    n: Int32
    valid: Int32
    problem: cutlass.Constexpr[Problem]

    @cute.jit
    def advance(self):
        """Decode ``item`` and step to this CTA's next."""
        per_expert = tiles_of_expert(self.problem)
        self.expert = self.item // per_expert
        rest = self.item - self.expert * per_expert
        self.valid = Int32(self.expert < self.experts)
        first = 0
        for index, product in enumerate(products(self.problem)):
            tiles = product.m_tiles * product.n_tiles
            if (rest >= first) & (rest < first + tiles):
                self.product = Int32(index)
                inner = product.m_tiles if product.m_inner else product.n_tiles
                outer_index = (rest - first) // inner
                inner_index = (rest - first) - outer_index * inner
                if cutlass.const_expr(product.m_inner):
                    self.m = inner_index
                    self.n = outer_index
                else:
                    self.m = outer_index
                    self.n = inner_index
            first = first + tiles
        self.item = self.item + self.stride


def make_tiles(cta: Int32, grid: Int32, experts: Int32, problem: Problem) -> WgradTiles:
    """Before the first item."""
    zero = Int32(0)
    return WgradTiles(
        item=cta,
        stride=grid,
        experts=experts,
        expert=zero,
        product=zero,
        m=zero,
        n=zero,
        valid=zero,
        problem=problem,
    )


@cute.jit
def pick(product: Int32, values: cutlass.Constexpr[tuple]) -> Int32:
    """``values[product]``, a static table looked up at run time."""
    chosen = Int32(values[0])
    for index in cutlass.range_constexpr(1, len(values)):
        if cutlass.const_expr(values[index] != values[0]):
            if product == index:
                chosen = Int32(values[index])
    return chosen


def field(problem: Problem, of) -> tuple:
    """A value of every product."""
    return tuple(of(product) for product in products(problem))


def map_index(product: Product, half: int | None) -> int:
    """Place in ``WGRAD_MAPS`` of a half's rows, or of the columns."""
    return WGRAD_MAPS.index(product.b if half is None else product.a[half])


@cute.jit
def target_of(c: WgradContext, tiles: WgradTiles) -> Int64:
    """Address of the gradient that the tile is a part of, 0 if it is not wanted."""
    address = Int64(0)
    is_w2 = pick(tiles.product, field(c.problem, lambda x: int(x.grad == "w2")))
    if is_w2 == 1:
        address = destination(c.w2, c.w2_stride, tiles.expert)
    else:
        address = destination(c.w13, c.w13_stride, tiles.expert)
    return address
