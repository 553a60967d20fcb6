"""What a form of the forward computes and moves, from its tile sizes alone.

``compare_forms.py`` checks this arithmetic against counters for the forms that exist, and uses it
for those that do not. Letters: H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from megamoe.cute_kernels.arith import ceil_div, round_up

WIDTHS = (8, 16, 32, 64, 128)
K_TILE = 64
K_STEP = 16
"""k of one WGMMA on bf16."""
BF16 = 2


@dataclass(frozen=True, kw_only=True)
class Form:
    """Tile sizes of a form.

    Args:
        block_n: weight rows of a tile.
        block_tokens: rows of a block: the pool is cut into such blocks, expert by expert.
        widths: tokens that a tile's WGMMA may cover.
        tokens_on_m: tokens are the 64-row operand of WGMMA, weights the N side.
        shares: what pairs of CTAs load together: ``""``, ``"weights"`` or ``"tokens"``.
        changes: of the kernel config; None: there is no such kernel.
    """

    name: str
    block_n: int = 256
    block_tokens: int = 128
    widths: tuple[int, ...] = WIDTHS
    tokens_on_m: bool = False
    shares: str = ""
    changes: dict[str, Any] | None = field(default=None, hash=False)


FORMS = (
    Form(name="256 x 128", changes={}),
    Form(name="256 x 128, shared weights", shares="weights", changes={"cluster": "weights"}),
    Form(name="256 x 128, shared tokens", shares="tokens", changes={"cluster": "tokens"}),
    Form(name="256 x 128, 4 parts", changes={"split_k": 4}),
    Form(name="128 x 128", block_n=128, changes={"block_n": 128}),
    Form(name="64 x 128", block_n=64, changes={"block_n": 64}),
    # Five loops on the accumulator is what ptxas bears: a sixth width takes the place of the first.
    Form(name="128 x 256", block_n=128, block_tokens=256, widths=(16, 32, 64, 128, 256)),
    Form(name="plain, tokens on M", widths=(64, 128), tokens_on_m=True),
)
"""Weight rows x tokens; the last two are not built."""


@dataclass(frozen=True)
class Traffic:
    """Sums over both GEMMs: flops of WGMMA, bytes that WGMMA reads of shared memory, that TMA reads
    of L2 and writes to shared memory, and the WGMMA instructions."""

    flops: int = 0
    operands: int = 0
    l2: int = 0
    stored: int = 0
    wgmma: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, n: int) -> Traffic:
        """``n`` of it."""
        return Traffic(*(n * value for value in astuple(self)))


def useful_flops(rows: Sequence[int], *, hidden: int, intermediate: int) -> int:
    """Of a gated layer without any padding; ``rows`` are those of each expert."""
    return 6 * sum(rows) * hidden * intermediate


def tile(form: Form, width: int, k: int) -> Traffic:
    """One tile over a K of ``k``, alone."""
    k = round_up(k, K_TILE)
    m, n = (width, form.block_n) if form.tokens_on_m else (form.block_n, width)
    wgmma = m // 64 * (k // K_STEP)
    loaded = (form.block_n + width) * k * BF16
    return Traffic(2 * m * n * k, wgmma * (64 + n) * K_STEP * BF16, loaded, loaded, wgmma)


def expert(form: Form, rows: int, weight_rows: int, k: int) -> Traffic:
    """One GEMM of one expert."""
    blocks = [min(form.block_tokens, rows - at) for at in range(0, rows, form.block_tokens)]
    widths = [min(w for w in form.widths if w >= block) for block in blocks]
    tiles = ceil_div(weight_rows, form.block_n)
    k_bytes = round_up(k, K_TILE) * BF16
    total = Traffic()
    for width in widths:
        total += tile(form, width, k).times(tiles)
    if form.shares == "weights":
        # A pair works on two blocks; where there is none, a CTA loads its half all the same.
        weights = form.block_n * k_bytes * tiles
        pairs = ceil_div(len(blocks), 2)
        alone = 2 * pairs - len(blocks)
        total = replace(
            total,
            l2=total.l2 - weights * (len(blocks) - pairs),
            stored=total.stored + weights * alone,
        )
    elif form.shares == "tokens":
        # Pairs of tiles of a block; an odd number has one outside.
        saved = sum(width * k_bytes for width in widths) * (tiles // 2)
        total = replace(total, l2=total.l2 - saved)
    return total


def layer(form: Form, rows: Sequence[int], *, hidden: int, intermediate: int) -> Traffic:
    """Both GEMMs of a gated layer; ``rows`` are those of each expert of one PE."""
    total = Traffic()
    for count in rows:
        total += expert(form, count, 2 * intermediate, hidden)
        total += expert(form, count, hidden, intermediate)
    return total
