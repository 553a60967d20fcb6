"""The workspace table: name, dtype, shape → offset. Host bytes and device addresses come from it.

Two blocks a PE: the *symmetric* one, at whose addresses peers read and write (the same offsets on
every PE), and the *local* one. Letters as in ``problem.py``; ``[2]`` is the bank, epoch & 1.
Counters and signals sit in front, at offsets that do not depend on H, so that a stale word of
another shape can never be read as one (CASES X2); each region starts on its own 256 bytes.
"""

import math
from dataclasses import dataclass

from megamoe.cute_kernels.arith import ceil_div, round_up
from megamoe.cute_kernels.kernel_config import KernelConfig, fc2_tiles
from megamoe.cute_kernels.problem import BLOCK_M, MAX_SEND_CTAS, Problem

REGION_ALIGN = 256
PART_COLUMNS = 64
"""Columns of h behind one part of a row's d_topk_weights: what a math warpgroup has in a half."""
DTYPE_BYTES = {"u32": 4, "i32": 4, "u64": 8, "f32": 4, "bf16": 2, "u8": 1}

STATUS_WORDS = 16
"""Words of the status record, see ``abi.py``; it lies outside the workspace."""
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Region:
    """One named array of a block: ``offset`` in bytes from the block's base."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Block:
    """A block of memory made of regions.

    >>> block = Block.of(("a", "u32", (3,)), ("b", "bf16", (2, 8)))
    >>> block["b"].offset, block.nbytes
    (256, 512)
    """

    regions: tuple[Region, ...]

    @classmethod
    def of(cls, *specs: tuple[str, str, tuple[int, ...]]) -> "Block":
        regions, offset = [], 0
        for name, dtype, shape in specs:
            region = Region(name, dtype, shape, offset)
            regions.append(region)
            offset = round_up(offset + region.nbytes, REGION_ALIGN)
        return cls(tuple(regions))

    def __getitem__(self, name: str) -> Region:
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    @property
    def nbytes(self) -> int:
        last = self.regions[-1]
        return round_up(last.offset + last.nbytes, REGION_ALIGN)


def symmetric_block(p: Problem) -> Block:
    """Regions that peers address. Writer → reader of each: DESIGN §4, docs/protocol.md.

    The modes of one layer share a block as large as the largest: they agree on all but the end.
    """
    backward: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("d_topk", "f32", (p.max_tokens, p.top_k)),
    )
    return Block.of(
        ("arrive", "u32", (p.num_pes,)),
        ("route_count", "u32", (2, p.num_pes, p.num_slots)),
        ("primary_count", "u32", (2, p.num_pes, p.experts_per_pe)),
        ("done", "u32", (2, p.max_tokens)),
        ("route", "i32", (2, p.num_pes, p.max_records, p.record_words)),
        ("x", "bf16", (p.max_tokens, p.hidden)),
        ("comb", "bf16", (p.max_tokens, p.comb_slots, p.hidden)),
        *(backward if p.backward else ()),
    )


def local_block(p: Problem, config: KernelConfig | None = None) -> Block:
    """Regions that only this PE's kernel (and its host) touches.

    What outlives a launch (words and tables) comes first and is alike in all modes of a layer,
    which share a block as large as the largest. A saving forward has its x rows, and dgrad both
    pools, in the blocks of ``saved.py``.

    Args:
        config: adds what a split over K needs, at the end; None: nothing.
    """
    regions: list[tuple[str, str, tuple[int, ...]]] = [
        ("epoch", "u32", (1,)),
        ("readers", "u32", (1,)),
        ("sent", "u32", (1,)),
        ("abort", "u32", (1,)),
        ("invalid_seen", "u32", (1,)),
        ("count_flag", "u32", (MAX_SEND_CTAS,)),
        ("x_ready", "u32", (2, p.pool_blocks)),
        ("h_ready", "u32", (2, p.pool_blocks)),
        ("y_ready", "u32", (2, p.pool_blocks)),
    ]
    if p.prereduced:
        regions.append(("finished", "u32", (2, p.num_pes * p.max_tokens)))
    regions += [
        ("expert_map", "i32", (p.num_experts,)),
        ("replica_start", "i32", (p.num_experts + 1,)),
        ("replica", "i32", (p.num_slots,)),
        ("slot_base", "i32", (p.num_pes + 1,)),
        ("peers", "u64", (p.num_pes,)),
        ("histogram", "u32", (MAX_SEND_CTAS, 2, p.num_slots)),
        ("row_meta", "i32", (p.pool_rows, p.meta_words)),
    ]
    if p.prereduced:
        regions.append(("token_rows", "i32", (p.num_pes, p.max_tokens, p.top_k)))
        regions.append(("pool_y", "bf16", (p.pool_rows, p.hidden)))
    if p.backward:
        # Parts of a row's d_topk_weights; their number does not depend on the tile.
        regions.append(("d_weight", "f32", (ceil_div(p.intermediate, PART_COLUMNS), p.pool_rows)))
    else:
        if not p.saves:
            regions.append(("pool_x", "bf16", (p.stored_rows, p.hidden)))
        regions.append(("pool_h", "bf16", (p.stored_rows, p.intermediate)))
    if config is not None and config.split_k > 1:
        # Last, so that all else lies where it does without a split.
        tiles = p.pool_blocks * fc2_tiles(p, config)
        stored = p.stored_rows // BLOCK_M * fc2_tiles(p, config)
        part = (config.math_groups, config.block_n // config.math_groups * BLOCK_M)
        regions.append(("parts", "u32", (tiles, config.math_groups)))
        regions.append(("partial", "f32", (stored, config.split_k, *part)))
    return Block.of(*regions)
