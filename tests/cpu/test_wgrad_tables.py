"""What wgrad multiplies: every element of every gradient once, by tiles in one total order."""

import itertools
from dataclasses import replace

import cutlass
import numpy as np
import pytest
import torch
from cutlass import Int32, cute
from cutlass.cute.runtime import from_dlpack

from megamoe.cute_kernels.problem import W13_LAYOUTS, Problem
from megamoe.cute_kernels.wgrad_tables import (
    HALF_M,
    TILE_N,
    bias_sums,
    products,
    tiles_of_expert,
)
from megamoe.cute_kernels.wgrad_tiles import make_tiles

BASE = Problem(
    hidden=392, intermediate=264, num_experts=4, experts_per_pe=4, top_k=1, num_pes=1,
    max_tokens=8, pool_rows=512, activation="relu", bias13="f32", bias2="f32",
)  # fmt: skip
PROBLEMS = [
    replace(BASE, w13_layout=layout, w13_transposed=t13, w2_transposed=t2)
    for layout, t13, t2 in itertools.product(W13_LAYOUTS, (False, True), (False, True))
] + [replace(BASE, activation="relu2", w13_transposed=t, w2_transposed=t) for t in (False, True)]


def source_of(p: Problem, grad: str) -> torch.Tensor:
    """(w13) for every element 1000·column of [gate | up] + column of x; (w2) 1000·h + i."""
    if grad == "w2":
        values = 1000 * torch.arange(p.hidden)[:, None] + torch.arange(p.intermediate)
        return values.T if p.w2_transposed else values
    gate = 1000 * torch.arange(p.intermediate)[:, None] + torch.arange(p.hidden)
    up = gate + 1_000_000
    if not p.gated:
        rows = up
    elif p.w13_layout == "interleaved":
        rows = torch.stack((gate, up), 1).flatten(0, 1)
    else:
        rows = torch.cat((up, gate) if p.w13_layout == "up_gate" else (gate, up))
    return rows.T if p.w13_transposed else rows


def element(p: Problem, a: str, b: str, r: int, c: int) -> int:
    """What ``source_of`` has for column r of region a times column c of region b."""
    columns = {a: r, b: c}
    if {a, b} == {"dy", "wact"}:
        return 1000 * columns["dy"] + columns["wact"]
    (part,) = {a, b} - {"x"}
    column, is_up = columns[part], part == "up"
    if part == "dgu":
        column, is_up = columns[part] // 2, columns[part] % 2 == 1
    return 1_000_000 * is_up + 1000 * column + columns["x"]


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: f"{p.w13_layout}-{p.activation}")
def test_products_cover_every_gradient_once(p: Problem) -> None:
    for grad in ("w13", "w2"):
        want = source_of(p, grad).flatten()
        seen = torch.full_like(want, -1)
        for x in (x for x in products(p) if x.grad == grad):
            for m, half in itertools.product(range(x.m_tiles), range(2)):
                # Every row of the half tile; its first and last column.
                start = m * x.m_step + half * x.half_shift
                for r in range(start, min(start + HALF_M, x.m_extent)):
                    row = (x.row_scale * r + x.row_base[half]) * x.row_length + x.column_base
                    assert bool((seen[row : row + x.n_extent] == -1).all())
                    first = element(p, x.a[half], x.b, r, 0)
                    last = element(p, x.a[half], x.b, r, x.n_extent - 1)
                    assert (int(want[row]), int(want[row + x.n_extent - 1])) == (first, last)
                    seen[row : row + x.n_extent] = 1
            assert x.n_tiles * TILE_N >= x.n_extent > (x.n_tiles - 1) * TILE_N
        assert bool((seen == 1).all())


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: f"{p.w13_layout}-{p.activation}")
def test_bias_sums_cover_every_gradient_once(p: Problem) -> None:
    for grad, size in (("b13", p.w13_rows), ("b2", p.hidden)):
        seen = [
            s.scale * c + s.base for s in bias_sums(p) if s.grad == grad for c in range(s.width)
        ]
        assert sorted(seen) == list(range(size))
    assert bias_sums(replace(p, bias13="none", bias2="none")) == ()


@cute.jit
def walk(
    out: cute.Tensor, cta: Int32, grid: Int32, experts: Int32, problem: cutlass.Constexpr[Problem]
):
    """All items of one CTA into ``out[:, (expert, product, m, n)]``."""
    tiles = make_tiles(cta, grid, experts, problem)
    tiles.advance()
    i = Int32(0)
    while tiles.valid == 1:
        out[i, 0] = tiles.expert
        out[i, 1] = tiles.product
        out[i, 2] = tiles.m
        out[i, 3] = tiles.n
        i = i + 1
        tiles.advance()


@pytest.mark.parametrize("p", [PROBLEMS[0], PROBLEMS[7]], ids=["plain", "transposed"])
def test_every_tile_has_one_owner(p: Problem) -> None:
    experts, grid = 3, 4
    want = [
        (e, index, m, n)
        for e in range(experts)
        for index, x in enumerate(products(p))
        for m in range(x.m_tiles)
        for n in range(x.n_tiles)
    ]
    found, dealt = [], []
    for cta in range(grid):
        out = np.full((len(want) + 1, 4), -1, np.int32)
        walk(from_dlpack(out), Int32(cta), Int32(grid), Int32(experts), p)
        rows = [tuple(row) for row in out.tolist() if row[0] >= 0]
        assert [row[0] for row in rows] == sorted(row[0] for row in rows)
        found += rows
        dealt.append(len(rows))
    assert sorted(found) == want
    assert len(want) == experts * tiles_of_expert(p)
    assert max(dealt) - min(dealt) <= 1
