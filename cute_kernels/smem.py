"""The shared-memory map of the forward kernel: the one place that knows offsets and the total.

The host checks the total against the SM's limit and the kernel computes its addresses from the
same table, so the two cannot disagree (CASES S7, S8).
"""

import itertools
from dataclasses import dataclass, replace

from megamoe.cute_kernels.arith import ceil_div, round_up
from megamoe.cute_kernels.kernel_config import BLOCKS_N, KernelConfig, check_fits, tiles_for
from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M, Problem

SMEM_LIMIT = 232448
"""Shared memory a CTA may use on sm_90, bytes (CUDA programming guide, compute capability 9.0)."""
BF16_BYTES = 2
HALF_ROWS = 128
"""Weight rows of one half of a tile of 256, or of a box of K-major weights."""
B_STAGE_BYTES = BLOCK_M * BLOCK_K * BF16_BYTES
PIECE_TOKENS = 32
"""Tokens of one epilogue piece: 32 tokens by 64 weight rows, one 4 KB swizzled buffer."""
PIECE_BYTES = PIECE_TOKENS * BLOCK_K * BF16_BYTES
STAGING_BUFFERS = 2
ROW_ENTRY_BYTES = 8
MAX_COPY_BYTES = 4096
"""Largest bulk copy of recv-and-place: more in flight, not larger, hides latency."""

# Byte offsets in the control area.
CTRL_EPOCH = 0
CTRL_TOKENS = 4
CTRL_FLAG = 8
CTRL_REDUCE = 12
CTRL_SEND = 16
CTRL_BYTES = 64


def a_stage_bytes(config: KernelConfig) -> int:
    """Bytes of the weight rows of one stage."""
    return config.block_n * BLOCK_K * BF16_BYTES


class Offsets:
    """Lays named areas out one behind the other."""

    def __init__(self) -> None:
        self.named: dict[str, int] = {}
        self.end = 0

    def place(self, name: str, nbytes: int, align: int = 16) -> None:
        """Put an area behind the last."""
        self.named[name] = round_up(self.end, align)
        self.end = self.named[name] + nbytes


def copy_bytes(p: Problem) -> int:
    """Bytes of one row piece: the row in equal pieces of at most ``MAX_COPY_BYTES``.

    A 7168-wide bf16 row of 14336 bytes goes in four pieces of 3584.
    """
    row = p.hidden * BF16_BYTES
    return round_up(ceil_div(row, ceil_div(row, MAX_COPY_BYTES)), 128)


@dataclass(frozen=True)
class SharedMap:
    """Byte offsets into the CTA's dynamic shared memory, and its total."""

    a: int
    b: int
    staging: int
    ring: int
    row_entries: int
    full: int
    empty: int
    ring_full: int
    layout_ready: int
    partner_ready: int
    d_rows: int
    skip: int
    partner_ok: int
    ctrl: int
    block_prefix: int
    expert_rows: int
    segment: int
    primary: int
    total: int

    @classmethod
    def of(cls, p: Problem, config: KernelConfig) -> "SharedMap":
        """The map for one problem and config.

        Raises:
            ValueError: the config does not serve the problem, needs more than ``SMEM_LIMIT`` bytes,
                or the counting histograms do not fit in the (not yet used) pipeline stages.
        """
        check_fits(p, config)
        offsets = Offsets()
        place = offsets.place
        experts = p.experts_per_pe
        place("a", config.stages * a_stage_bytes(config), 1024)
        place("b", config.stages * B_STAGE_BYTES, 1024)
        place("staging", config.math_groups * STAGING_BUFFERS * PIECE_BYTES, 1024)
        place("ring", config.place_warps * config.ring_slots * copy_bytes(p), 128)
        place("row_entries", config.math_groups * BLOCK_M * ROW_ENTRY_BYTES)
        # dgrad: parts of d_topk_weights, per warp and row of the block.
        place("d_rows", config.math_warps * BLOCK_M * 4 if p.backward else 0)
        place("full", 8 * config.stages)
        place("empty", 8 * config.stages)
        place("ring_full", 8 * config.place_warps * config.ring_slots)
        place("layout_ready", 8)
        place("partner_ready", 8 if config.cluster_size > 1 else 0)
        place("skip", 4)
        place("partner_ok", 4 if config.cluster_size > 1 else 0)
        place("ctrl", CTRL_BYTES)
        place("block_prefix", 4 * (experts + 1))
        place("expert_rows", 4 * experts)
        place("segment", 4 * experts * p.num_pes)
        place("primary", 4 * (experts + 1) * p.num_pes)
        shared = cls(total=round_up(offsets.end, 128), **offsets.named)
        if shared.total > SMEM_LIMIT:
            raise ValueError(
                f"stages={config.stages}, ring_slots={config.ring_slots}: {shared.total} bytes of "
                f"shared memory, allowed are {SMEM_LIMIT}; use fewer stages or ring slots"
            )
        counting = dispatch_bytes(p, config)
        if counting > shared.staging:
            raise ValueError(
                f"num_slots={p.num_slots}: counting needs {counting} bytes of shared "
                f"memory, allowed are {shared.staging} (the pipeline stages)"
            )
        return shared


def dispatch_bytes(p: Problem, config: KernelConfig) -> int:
    """Bytes dispatch-send uses in the idle pipeline stages: per-warp histograms of rows and
    primaries, and one list base per slot."""
    return 4 * p.num_slots * (2 * config.warps + 1)


DEPTHS = {256: (4, 3, 2), 128: (6, 5, 4, 3, 2), 64: (8, 7, 6, 5, 4, 3, 2)}
"""Stages by ``block_n``, the most first: as many bytes in flight as four stages of 256 rows."""
RING_SLOTS = (4, 3, 2)


def deepest(p: Problem, config: KernelConfig) -> KernelConfig:
    """``config`` with the deepest pipeline, then the longest row ring, that fit ``p``.

    Raises:
        ValueError: nothing fits, or the config does not serve ``p`` at all.
    """
    error: ValueError | None = None
    for stages, ring_slots in itertools.product(DEPTHS[config.block_n], RING_SLOTS):
        found = replace(config, stages=stages, ring_slots=ring_slots)
        try:
            SharedMap.of(p, found)
        except ValueError as exc:
            error = exc
            continue
        return found
    raise ValueError(f"no kernel config fits: {error}")


def default_config(p: Problem, *, sms: int | None = None) -> KernelConfig:
    """The deepest pipeline and row ring that fit ``p`` (rule-based; the tuner may choose others).

    Every token width is one main loop, two where weights of both storages are multiplied; with more
    than five loops on the one accumulator ptxas serialises WGMMA (C7511).

    Args:
        sms: SMs that ``tiles_for`` keeps busy in calls of ``p.max_tokens``; None: the widest tiles
            and no split, so that results depend on no machine.

    Raises:
        ValueError: nothing fits.
    """
    widths = (8, 16, 32, 64, BLOCK_M)
    if p.mixed_majors:
        widths = (32, BLOCK_M)
    block_n, split_k = (BLOCKS_N[0], 1) if sms is None else tiles_for(p, sms)
    return deepest(p, KernelConfig(token_widths=widths, block_n=block_n, split_k=split_k))
