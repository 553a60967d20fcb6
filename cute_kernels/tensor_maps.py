"""What the kernel's tensor maps describe: dimensions, strides and boxes, innermost first.

Plain data for whoever encodes them (the CUDA driver's cuTensorMapEncodeTiled, or vgpu). All are
bf16 with a 128-byte swizzle; the inner box of 64 elements is one swizzle row.

Weights are read in the engine's own layout. A weight map has four dimensions; which of the first
two is the reduction (k) depends on the storage:

=============  ==============================  ======================  ===================
storage        dimensions                      box                     copies a stage
=============  ==============================  ======================  ===================
rows of k      (k, row, gate|up, expert)       (64, 128, 1, 1)         2
transposed     (row, k, gate|up, expert)       (64, 64, 1, 1)          4
transposed,    (gate and up rows in turn, k,   (64, 64, 1, 1)          4
interleaved    1, expert)
=============  ==============================  ======================  ===================

Gate and up are a dimension of their own, so that a box at the edge of I never runs from gate into
up. The third dimension has size 1 without a gate. dgrad multiplies with the transposed matrices:
the same dimensions with the box of the other storage.
"""

from dataclasses import dataclass, replace

from megamoe.cute_kernels.kernel_config import KernelConfig, alternating_octets, h_columns
from megamoe.cute_kernels.problem import BLOCK_K, Problem
from megamoe.cute_kernels.saved import region_block
from megamoe.cute_kernels.smem import BF16_BYTES, HALF_ROWS, PIECE_TOKENS

ALTERNATING_ROWS = 16
"""Rows of 8 gate and 8 up rows of the same columns, the unit of narrow tiles."""
WIDE_ROWS = 64
"""Pool rows of the wide token box; tiles of 64 and 128 tokens use it."""
NARROW_ROWS = 8
"""Pool rows of the narrow token box, for the rest."""


@dataclass(frozen=True)
class TensorMapSpec:
    """Arguments of one encode call; ``strides`` (of dimensions 1 and up), ``swizzle`` in bytes."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


def w13_spec(p: Problem, config: KernelConfig, experts: int) -> TensorMapSpec:
    """Map of contiguous ``w13 [experts, rows, H]`` or, transposed, ``[experts, H, rows]``."""
    rows, inter, hidden = p.w13_rows, p.intermediate, p.hidden
    parts = 2 if p.gated else 1
    interleaved = p.w13_layout == "interleaved"
    k_inside = not (p.fc2_m_major if p.backward else p.fc1_m_major)
    if p.paired_rows:
        return _spec(
            config, (rows, hidden, 1, experts), (rows, rows * hidden, rows * hidden), k_inside
        )
    if p.w13_transposed:
        return _spec(
            config, (inter, hidden, parts, experts), (rows, inter, rows * hidden), k_inside
        )
    row_stride = 2 * hidden if interleaved else hidden
    part_stride = hidden if interleaved else inter * hidden
    if alternating_octets(p, config):
        dims = (hidden, 8, 2, inter // 8, experts)
        strides_8 = (row_stride, part_stride, 8 * row_stride, rows * hidden)
        return _spec(config, dims, strides_8, k_inside)
    strides = (row_stride, part_stride, rows * hidden)
    return _spec(config, (hidden, inter, parts, experts), strides, k_inside)


def w2_spec(p: Problem, config: KernelConfig, experts: int) -> TensorMapSpec:
    """Map of contiguous ``w2 [experts, H, I]`` or, transposed, ``[experts, I, H]``."""
    inter, hidden = p.intermediate, p.hidden
    size = inter * hidden
    k_inside = not (p.fc1_m_major if p.backward else p.fc2_m_major)
    if p.w2_transposed:
        return _spec(config, (hidden, inter, 1, experts), (hidden, size, size), k_inside)
    return _spec(config, (inter, hidden, 1, experts), (inter, size, size), k_inside)


def _spec(
    config: KernelConfig, dims: tuple[int, ...], strides: tuple[int, ...], k_inside: bool
) -> TensorMapSpec:
    """A weight map; ``strides`` in elements; ``k_inside``: the first dimension is reduced over."""
    rows = min(HALF_ROWS, config.block_n) if k_inside else WIDE_ROWS
    box: tuple[int, ...] = (BLOCK_K, rows, 1, 1)
    if len(dims) == 5:
        box = (BLOCK_K, 8, 2, config.block_n // ALTERNATING_ROWS, 1)
    return TensorMapSpec(dims, tuple(stride * BF16_BYTES for stride in strides), box)


@dataclass(frozen=True)
class MapEntry:
    """A tensor map of a launch: what it describes, and the region of which block it lies on.

    ``block`` is ``"weights"`` (``region`` is then ``"w13"`` or ``"w2"``), ``"local"``, or a block
    of ``saved.py``, ``"saved"`` or ``"dgrad"``.
    """

    spec: TensorMapSpec
    block: str
    region: str


def map_table(p: Problem, config: KernelConfig, experts: int) -> dict[str, MapEntry]:
    """The tensor maps of a launch by name, in the order in which they lie in memory.

    ``pool_x`` holds the rows of the first GEMM (dgrad: of dy); ``…_8`` are the narrow boxes,
    ``…_piece`` the boxes that epilogues store and load; ``w13_forward`` has the forward's boxes.

    Args:
        experts: experts of this PE; with none no tile is run, and a map only has to be well
            formed.
    """
    entries = {
        "w13": MapEntry(w13_spec(p, config, max(experts, 1)), "weights", "w13"),
        "w2": MapEntry(w2_spec(p, config, max(experts, 1)), "weights", "w2"),
    }

    def rows_of(width: int, box_rows: int, rows: int) -> TensorMapSpec:
        return TensorMapSpec((width, rows), (width * BF16_BYTES,), (BLOCK_K, box_rows))

    def pool(name: str, width: int, block: str, region: str, rows: int = p.pool_rows) -> None:
        entries[name] = MapEntry(rows_of(width, WIDE_ROWS, rows), block, region)
        entries[f"{name}_8"] = MapEntry(rows_of(width, NARROW_ROWS, rows), block, region)

    def piece(name: str, width: int, block: str, rows: int = p.pool_rows) -> None:
        entries[f"{name}_piece"] = MapEntry(rows_of(width, PIECE_TOKENS, rows), block, name)

    halves = ("gate", "up") if p.gated else ("up",)
    if p.backward:
        pool("pool_x", p.hidden, "dgrad", "dy")
        if p.paired_rows:
            pool("dgu", p.w13_rows, "dgrad", "dgu")
            piece("dgu", p.w13_rows, "dgrad")
        else:
            for name in halves:
                pool(name, p.intermediate, region_block(p, name), name)
        piece("wact", p.intermediate, "dgrad")
        if p.recomputes:
            forward = replace(p, mode="save")
            spec = w13_spec(forward, config, max(experts, 1))
            entries["w13_forward"] = MapEntry(spec, "weights", "w13")
            pool("x", p.hidden, "saved", "x")
    else:
        if p.saves:
            pool("pool_x", p.hidden, "saved", "x")
        else:
            pool("pool_x", p.hidden, "local", "pool_x", p.stored_rows)
        pool("pool_h", p.intermediate, "local", "pool_h", p.stored_rows)
        columns = h_columns(p, config)
        spec = rows_of(p.intermediate, PIECE_TOKENS, p.stored_rows)
        spec = replace(spec, box=(columns, PIECE_TOKENS), swizzle=columns * BF16_BYTES)
        entries["pool_h_piece"] = MapEntry(spec, "local", "pool_h")
    if p.backward or p.stores_gate_up:
        for name in halves:
            piece(name, p.intermediate, region_block(p, name))
    if p.prereduced:
        piece("pool_y", p.hidden, "local")
    return entries


def map_names(p: Problem) -> tuple[str, ...]:
    """Names of the maps of a launch, in order; a config changes none."""
    return tuple(map_table(p, KernelConfig(), 1))
