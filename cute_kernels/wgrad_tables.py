"""What the wgrad kernel multiplies and where it writes: plain data for kernel and host.

Every product has the rows of an expert as its reduction (k):
``out[r, c] = Σ_row a[row, r]·b[row, c]``. Both operands lie as ``[rows, width]`` in a pool, which
makes both MN-major, so one main loop serves all of them. ``a`` is chosen such that ``c`` is
contiguous in the weight's own storage:

=========================  ==============  =====================  ==============================
gradient                   a (M side)      b (N side)             out [expert]
=========================  ==============  =====================  ==============================
w13                        gate and up     x                      [gate, up rows as stored, H]
w13 transposed             x               gate; up               [H, gate, up columns as stored]
w13 transposed,            x               dgu (gate and up in    [H, 2I]
interleaved                                turn)
w2                         dy              wact                   [H, I]
w2 transposed              wact            dy                     [I, H]
=========================  ==============  =====================  ==============================

Letters as in ``problem.py``.
"""

from dataclasses import dataclass

from megamoe.cute_kernels.abi import WGRAD_MAPS, WGRAD_MAX_SAVED
from megamoe.cute_kernels.arith import ceil_div, round_up
from megamoe.cute_kernels.problem import BLOCK_K, Problem
from megamoe.cute_kernels.saved import dgrad_block, region_block, saved_block
from megamoe.cute_kernels.smem import BF16_BYTES, SMEM_LIMIT, Offsets
from megamoe.cute_kernels.tensor_maps import TensorMapSpec
from megamoe.cute_kernels.workspace import TENSOR_MAP_BYTES, Block

LOAD_WARP = 0
BIAS_WARP = 1
"""First of the bias warps."""
FIRST_MATH_WARP = 4
WARPS = 12
MATH_WARPS = WARPS - FIRST_MATH_WARP
WGRAD_ROLES = {
    LOAD_WARP: "load",
    **dict.fromkeys(range(BIAS_WARP, FIRST_MATH_WARP), "bias"),
    **dict.fromkeys(range(FIRST_MATH_WARP, WARPS), "math"),
}
"""Warp → role."""
TILE_M = 256
"""Rows of an output tile: two halves of 128, of which each math warpgroup has 64."""
TILE_N = 128
HALF_M = TILE_M // 2
A_STAGE_BYTES = TILE_M * BLOCK_K * BF16_BYTES
B_STAGE_BYTES = TILE_N * BLOCK_K * BF16_BYTES
SLOT = BLOCK_K
"""Columns of a TMA box: one 128-byte swizzle row of bf16; a box has as many pool rows."""
GRAD_BYTES = {"f32": 4, "bf16": 2}
BIAS_LANE_COLUMNS = 8
BIAS_COLUMNS = 32 * BIAS_LANE_COLUMNS
"""Columns that one warp sums: 16 bytes a lane."""
ENTRY_SAVED, ENTRY_DGRAD, ENTRY_MAPS = 0, 8, TENSOR_MAP_BYTES
ENTRY_BYTES = ENTRY_MAPS + len(WGRAD_MAPS) * TENSOR_MAP_BYTES
"""What device memory holds of each saved call: the addresses of its two blocks, then its maps."""


@dataclass(frozen=True, kw_only=True)
class WgradConfig:
    """Choices of a wgrad kernel.

    Args:
        grad: type of the weights' gradients, ``"f32"`` or ``"bf16"``.
        bias_grad: type of the biases' gradients.
        stages: depth of the TMA → WGMMA pipeline, 48 KB each.
        service_registers, math_registers: ``setmaxnreg`` of the two kinds of warpgroup.

    Raises:
        ValueError: a value out of range.
    """

    grad: str = "f32"
    bias_grad: str = "f32"
    stages: int = 4
    service_registers: int = 56
    math_registers: int = 224

    def __post_init__(self) -> None:
        for name in ("grad", "bias_grad"):
            if getattr(self, name) not in GRAD_BYTES:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be 'f32' or 'bf16'")
        if not 2 <= self.stages <= 4:
            raise ValueError(f"stages={self.stages}: must be 2 to 4")
        for name in ("service_registers", "math_registers"):
            value = getattr(self, name)
            if value % 8 or not 24 <= value <= 240:
                raise ValueError(f"{name}={value}: setmaxnreg takes multiples of 8 from 24 to 240")
        registers = 128 * self.service_registers + 256 * self.math_registers
        if registers > 65536:
            raise ValueError(
                f"math_registers={self.math_registers}: 128·service + 256·math = {registers} "
                "registers exceed the 65536 of an SM"
            )


@dataclass(frozen=True, kw_only=True)
class Product:
    """One gradient matrix, or the gate or up part of one, in tiles of 256 × 128.

    Args:
        grad: ``"w13"`` or ``"w2"``.
        a: map of each half of 128 rows of a tile: gate and up, or one map twice.
        b: map of the columns.
        m_extent, n_extent: width of ``a`` and of ``b``.
        half_shift: rows from the first half to the second: 128, or 0 if they are gate and up.
        row_scale, row_base, row_length, column_base: row r of half h and column c go to element
            ``(row_scale·r + row_base[h])·row_length + column_base + c`` of the expert's gradient.
    """

    grad: str
    a: tuple[str, str]
    b: str
    m_extent: int
    n_extent: int
    row_length: int
    half_shift: int = HALF_M
    row_scale: int = 1
    row_base: tuple[int, int] = (0, 0)
    column_base: int = 0

    @property
    def m_step(self) -> int:
        """Rows of ``a`` from one tile to the next."""
        return HALF_M + self.half_shift

    @property
    def m_tiles(self) -> int:
        return ceil_div(self.m_extent, self.m_step)

    @property
    def n_tiles(self) -> int:
        return ceil_div(self.n_extent, TILE_N)

    @property
    def m_inner(self) -> bool:
        """True if tiles go along m first. Tiles at work together then share their operands in L2:
        the narrower side of the matrix is walked in full before the wider side advances."""
        return self.m_tiles * TILE_M <= self.n_tiles * TILE_N


def products(p: Problem) -> tuple[Product, ...]:
    """All products of one expert, in the order in which their tiles are computed."""
    hidden, inter, rows = p.hidden, p.intermediate, p.w13_rows
    up_first = p.w13_layout == "up_gate"
    if not p.gated:
        up = {"grad": "w13", "row_length": hidden}
        if p.w13_transposed:
            w13 = [Product(grad="w13", a=("x", "x"), b="up", m_extent=hidden, n_extent=inter,
                           row_length=inter)]  # fmt: skip
        else:
            w13 = [Product(a=("up", "up"), b="x", m_extent=inter, n_extent=hidden, **up)]
    elif p.paired_rows:
        w13 = [Product(grad="w13", a=("x", "x"), b="dgu", m_extent=hidden, n_extent=rows,
                       row_length=rows)]  # fmt: skip
    elif p.w13_transposed:
        w13 = [
            Product(grad="w13", a=("x", "x"), b=name, m_extent=hidden, n_extent=inter,
                    row_length=rows, column_base=inter * place)
            for name, place in (("gate", int(up_first)), ("up", int(not up_first)))
        ]  # fmt: skip
    else:
        interleaved = p.w13_layout == "interleaved"
        distance = 1 if interleaved else inter
        w13 = [
            Product(grad="w13", a=("gate", "up"), b="x", m_extent=inter, n_extent=hidden,
                    row_length=hidden, half_shift=0, row_scale=2 if interleaved else 1,
                    row_base=(distance, 0) if up_first else (0, distance))
        ]  # fmt: skip
    a, b = ("wact", "dy") if p.w2_transposed else ("dy", "wact")
    m, n = (inter, hidden) if p.w2_transposed else (hidden, inter)
    return (*w13, Product(grad="w2", a=(a, a), b=b, m_extent=m, n_extent=n, row_length=n))


def tiles_of_expert(p: Problem) -> int:
    """Output tiles of one expert."""
    return sum(product.m_tiles * product.n_tiles for product in products(p))


@dataclass(frozen=True, kw_only=True)
class BiasSum:
    """Column sums of one region, in chunks of ``BIAS_COLUMNS``; column c goes to element
    ``scale·c + base`` of the expert's gradient. ``first`` numbers the chunks of all sums."""

    grad: str
    block: str
    region: str
    width: int
    first: int
    scale: int = 1
    base: int = 0
    weighted: bool = False

    @property
    def chunks(self) -> int:
        return ceil_div(self.width, BIAS_COLUMNS)


def bias_sums(p: Problem) -> tuple[BiasSum, ...]:
    """The sums of one expert; none if there are no biases."""
    sums: list[BiasSum] = []

    def add(**values) -> None:
        first = sums[-1].first + sums[-1].chunks if sums else 0
        sums.append(BiasSum(first=first, **values))

    if p.bias13 != "none":
        inter = p.intermediate
        if p.paired_rows:
            add(grad="b13", block="dgrad", region="dgu", width=2 * inter)
        elif not p.gated:
            add(grad="b13", block=region_block(p, "up"), region="up", width=inter)
        else:
            interleaved = p.w13_layout == "interleaved"
            distance = 1 if interleaved else inter
            for place, name in enumerate(("up", "gate") if p.w13_layout == "up_gate" else
                                         ("gate", "up")):  # fmt: skip
                add(grad="b13", block=region_block(p, name), region=name, width=inter,
                    scale=2 if interleaved else 1, base=place * distance)  # fmt: skip
    if p.bias2 != "none":
        add(grad="b2", block="dgrad", region="dy", width=p.hidden,
            weighted=p.weight_at == "combine")  # fmt: skip
    return tuple(sums)


def block_of(p: Problem, name: str) -> Block:
    """The table of block ``"saved"`` or ``"dgrad"``."""
    return saved_block(p) if name == "saved" else dgrad_block(p)


def map_regions(p: Problem) -> dict[str, str]:
    """Map name → block of its region, for the maps that this problem's products use."""
    used = {name for product in products(p) for name in (*product.a, product.b)}
    return {name: region_block(p, name) for name in WGRAD_MAPS if name in used}


def wgrad_map_spec(p: Problem, name: str) -> TensorMapSpec:
    """Map of a region ``[M, width]``: boxes of 64 columns by 64 rows."""
    rows, width = block_of(p, map_regions(p)[name])[name].shape
    return TensorMapSpec((width, rows), (width * BF16_BYTES,), (SLOT, BLOCK_K))


@dataclass(frozen=True)
class WgradShared:
    """Byte offsets into the CTA's dynamic shared memory, and its total."""

    a: int
    b: int
    full: int
    empty: int
    entries: int
    block_prefix: int
    expert_rows: int
    total: int

    @classmethod
    def of(cls, p: Problem, config: WgradConfig) -> "WgradShared":
        """The map for one problem and config.

        Raises:
            ValueError: it needs more than ``SMEM_LIMIT`` bytes.
        """
        offsets = Offsets()
        place = offsets.place
        experts = p.experts_per_pe
        place("a", config.stages * A_STAGE_BYTES, 1024)
        place("b", config.stages * B_STAGE_BYTES, 1024)
        place("full", 8 * config.stages)
        place("empty", 8 * config.stages)
        place("entries", 8 * WGRAD_MAX_SAVED)
        place("block_prefix", 4 * WGRAD_MAX_SAVED * (experts + 1))
        place("expert_rows", 4 * WGRAD_MAX_SAVED * experts)
        shared = cls(total=round_up(offsets.end, 128), **offsets.named)
        if shared.total > SMEM_LIMIT:
            raise ValueError(
                f"stages={config.stages}, experts_per_pe={experts}: {shared.total} bytes of shared "
                f"memory, allowed are {SMEM_LIMIT}; use fewer stages"
            )
        return shared


def default_wgrad_config(p: Problem, *, grad: str = "f32", bias_grad: str = "f32") -> WgradConfig:
    """The deepest pipeline that fits.

    Raises:
        ValueError: nothing fits.
    """
    error: ValueError | None = None
    for stages in (4, 3, 2):
        config = WgradConfig(grad=grad, bias_grad=bias_grad, stages=stages)
        try:
            WgradShared.of(p, config)
        except ValueError as exc:
            error = exc
            continue
        return config
    raise ValueError(f"no wgrad config fits: {error}")
