"""Tunable choices of a kernel: one frozen dataclass, its validity rules and its budgets.

Pure integers: nothing here imports the compiler.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megamoe.cute_kernels.arith import ceil_div, round_up
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M, Problem

SM_REGISTERS = 65536
WARPGROUP_THREADS = 128
DEFAULT_SMS = 132
"""SMs of an H100 (SXM) or H200: whom configs are chosen for where no GPU is at hand."""
BLOCKS_N = (256, 128, 64)
MAX_SPLIT_K = 16
CLUSTERS = ("none", "weights", "tokens")
GROUP_ROWS = 64
"""Weight rows of one WGMMA, which belongs to one warpgroup."""


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Tunable choices of a forward kernel. Only ``split_k`` changes a bit of a result.

    Args:
        stages: depth of the TMA → WGMMA pipeline.
        service_warps: 4, or 8: twice the warps that place rows and sum contributions.
        service_registers, math_registers: ``setmaxnreg`` of the two kinds of warpgroup; unused
            with ``block_n=64``, which needs one math warpgroup and no ``setmaxnreg``.
        lag_waves: how many waves of fc1 tiles lie between fc1 and fc2 of an M-block.
        ring_slots: row-copy slots of at most 4 KB of each place warp.
        block_n: weight rows of one tile: 256, or 128 or 64 where few tiles leave SMs idle. With a
            gate, half of those of fc1 are gate, half up.
        split_k: parts that the reduction of an fc2 tile is cut into (``split.py``); fp32 sums of
            parts are added in a fixed order, so results depend on it, but on nothing else.
        cluster: what pairs of CTAs (clusters of 2) share by TMA multicast: ``"none"``, no pairs;
            ``"weights"``: they work on two M-blocks of an expert; ``"tokens"``: on two weight
            tiles of an M-block. Each then loads half of what is shared.
        token_widths: tokens a tile's WGMMA may cover; a tile takes the smallest that holds its
            valid rows. Multiples of 8, ascending, the last BLOCK_M.
        prefetch_tiles: weight k-tiles of a CTA's first tile that are brought to L2 while its
            rows are awaited.
        poll_sleep_ns: pause between two polls of a cross-CTA word.

    Raises:
        ValueError: a value outside the ranges above; names the field, the value and what is
            allowed.
    """

    stages: int = 4
    service_warps: int = 4
    service_registers: int = 56
    math_registers: int = 224
    lag_waves: int = 1
    ring_slots: int = 3
    block_n: int = 256
    split_k: int = 1
    cluster: str = "none"
    token_widths: tuple[int, ...] = (8, 16, 32, 64, BLOCK_M)
    prefetch_tiles: int = 8
    poll_sleep_ns: int = 64

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: {allowed}")

        for name, low, high in (
            ("stages", 2, 8),
            ("lag_waves", 1, 64),
            ("ring_slots", 2, 16),
            ("split_k", 1, MAX_SPLIT_K),
            ("prefetch_tiles", 0, 64),
            ("poll_sleep_ns", 0, 1_000_000),
        ):
            need(low <= getattr(self, name) <= high, name, f"must be {low} to {high}")
        need(self.service_warps in (4, 8), "service_warps", "must be 4 or 8")
        need(self.block_n in BLOCKS_N, "block_n", f"must be one of {BLOCKS_N}")
        need(self.cluster in CLUSTERS, "cluster", f"must be one of {CLUSTERS}")
        alone = self.block_n == 256 and self.split_k == 1
        need(alone or self.cluster == "none", "cluster", "needs block_n=256 and split_k=1")
        widths = self.token_widths
        ascending = all(a < b for a, b in itertools.pairwise((0, *widths)))
        ascending = ascending and all(width % 8 == 0 for width in widths)
        need(
            ascending and widths[-1:] == (BLOCK_M,),
            "token_widths",
            f"must be ascending multiples of 8 that end with {BLOCK_M}",
        )
        if self.reallocates:
            self._check_registers(need)

    def _check_registers(self, need: Callable[[bool, str, str], None]) -> None:
        launch = self.launch_registers
        for name, low, high in (
            ("service_registers", 24, launch),
            ("math_registers", launch, 240),
        ):
            value = getattr(self, name)
            need(
                value % 8 == 0 and low <= value <= high,
                name,
                f"setmaxnreg takes multiples of 8, here from {low} to {high} ({self.threads} "
                f"threads are launched with {launch})",
            )
        needed = WARPGROUP_THREADS * (
            self.service_warps // 4 * self.service_registers
            + self.math_groups * self.math_registers
        )
        need(
            needed <= self.threads * launch,
            "math_registers",
            f"service and math warps together need {needed} registers; they exceed the "
            f"{self.threads * launch} that a CTA is launched with",
        )

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> "KernelConfig":
        """From ``asdict`` after a trip through JSON, which has no tuples."""
        return cls(**values | {"token_widths": tuple(values["token_widths"])})

    @property
    def cluster_size(self) -> int:
        """CTAs of a cluster; a grid is a multiple of it."""
        return 1 if self.cluster == "none" else 2

    @property
    def place_warps(self) -> int:
        """Warps of recv-and-place."""
        return self.service_warps // 4

    @property
    def send_warps(self) -> int:
        """Service warps that do combine-send before they reduce (pre-reduced combine)."""
        return self.service_warps // 4

    @property
    def math_groups(self) -> int:
        """Warpgroups of math; each multiplies 64 weight rows at a time."""
        return min(2, self.block_n // GROUP_ROWS)

    @property
    def halves(self) -> int:
        """How often 64 weight rows of each math warpgroup make up the tile."""
        return self.block_n // (GROUP_ROWS * self.math_groups)

    @property
    def reallocates(self) -> bool:
        """True if registers move between warpgroups. With one math warpgroup all warps have enough
        from the launch on, and the register fields are unused."""
        return self.math_groups > 1

    @property
    def math_warps(self) -> int:
        """Warps of math."""
        return 4 * self.math_groups

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.service_warps + self.math_warps

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps

    @property
    def launch_registers(self) -> int:
        """Registers a thread is launched with: what an SM has, in steps of 8."""
        return SM_REGISTERS // self.threads // 8 * 8


def check_fits(p: Problem, config: KernelConfig) -> None:
    """Refuse a config that cannot serve a layer, whatever its sizes.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """
    if config.block_n < 256 and p.mode != "forward":
        raise ValueError(f"block_n={config.block_n}: must be 256 in mode {p.mode!r}")
    if config.split_k > 1 and p.mode != "forward":
        raise ValueError(f"split_k={config.split_k}: must be 1 in mode {p.mode!r}")
    if config.cluster != "none" and p.mode != "forward":
        raise ValueError(f"cluster={config.cluster!r}: must be 'none' in mode {p.mode!r}")
    if config.cluster == "weights" and p.ring_blocks:
        raise ValueError(
            f"cluster={config.cluster!r}: must be 'none' or 'tokens' with a ring pool (a pair of "
            "blocks would wait for two places at once)"
        )
    if config.split_k > ceil_div(p.intermediate, BLOCK_K):
        raise ValueError(
            f"split_k={config.split_k}: must be 1 to {ceil_div(p.intermediate, BLOCK_K)}, the "
            f"k-tiles of fc2 with intermediate={p.intermediate}"
        )
    if config.block_n < 256 and p.gated and p.w13_transposed and not p.paired_rows:
        raise ValueError(
            f"block_n={config.block_n}: must be 256 where w13 is transposed and not interleaved "
            "(gate and up of a narrow tile would lie in different warpgroups)"
        )


def alternating_octets(p: Problem, config: KernelConfig) -> bool:
    """True if 8 gate and 8 up rows alternate in an fc1 tile, so that each warp has both of a
    column; tiles of 256 rows have them in two halves of 128."""
    return p.gated and not p.w13_transposed and config.block_n < 256


def h_columns(p: Problem, config: KernelConfig) -> int:
    """Columns of ``pool_h`` that one math warpgroup stores at once: 64, or 32 of a narrow tile."""
    return GROUP_ROWS // 2 if p.gated and config.halves == 1 else GROUP_ROWS


def fc1_tiles(p: Problem, config: KernelConfig) -> int:
    """Tiles of one M-block before its second GEMM: of the first, and in a dgrad that recomputes,
    before them, of the forward's."""
    if p.backward:
        return recompute_tiles(p, config) + ceil_div(p.intermediate, config.block_n)
    return _paired(config, _gate_up_tiles(p, config))


def recompute_tiles(p: Problem, config: KernelConfig) -> int:
    """Tiles of one M-block in which dgrad computes gate and up again."""
    return _gate_up_tiles(p, config) if p.recomputes else 0


def _gate_up_tiles(p: Problem, config: KernelConfig) -> int:
    """Tiles of a forward's fc1; with a gate, half of their ``block_n`` weight rows are gate, half
    up."""
    return ceil_div(p.intermediate, config.block_n // (2 if p.gated else 1))


def fc2_tiles(p: Problem, config: KernelConfig) -> int:
    """Tiles of one M-block's second GEMM."""
    return _paired(config, ceil_div(p.hidden, config.block_n))


def _paired(config: KernelConfig, tiles: int) -> int:
    """With shared tokens, tiles of a block come in pairs; the last may be outside."""
    return round_up(tiles, 2) if config.cluster == "tokens" else tiles


def tiles_for(p: Problem, sms: int) -> tuple[int, int]:
    """``block_n`` and ``split_k`` that keep ``sms`` SMs busy in calls of ``p.max_tokens`` tokens.

    Narrower tiles until the fc2 tiles of the expected blocks are two waves; where that is not
    enough, a split over K up to one and a half waves (parts cost L2 traffic), of at least 8 k-tiles
    each. Rows are expected to be spread evenly: ``max_tokens · top_k`` of them on a PE.
    """
    if p.mode != "forward":
        return BLOCKS_N[0], 1
    rows = p.max_tokens * p.top_k
    experts = min(p.experts_per_pe, rows)
    blocks = experts * ceil_div(ceil_div(rows, experts), BLOCK_M)
    narrow = not p.gated or not p.w13_transposed or p.paired_rows
    block_n = BLOCKS_N[0]
    for narrower in BLOCKS_N[1:]:
        if narrow and blocks * ceil_div(p.hidden, block_n) < 2 * sms:
            block_n = narrower
    items = blocks * ceil_div(p.hidden, block_n)
    split_k = 1
    most = min(MAX_SPLIT_K, ceil_div(p.intermediate, BLOCK_K) // 8)
    while 2 * items * split_k < 3 * sms and 2 * split_k <= most:
        split_k *= 2
    return block_n, split_k
