"""What the kernel's tensor maps describe: dimensions, strides and boxes, innermost first.

Plain data for whoever encodes them (the CUDA driver's cuTensorMapEncodeTiled, or vgpu). All are
bf16 with a 128-byte swizzle; the inner box of 64 elements is one swizzle row.
"""

from dataclasses import dataclass

from megamoe.cute_kernels.problem import BLOCK_K, BLOCK_M, BLOCK_N, Problem
from megamoe.cute_kernels.smem import BF16_BYTES, PIECE_TOKENS

SWIZZLE_BYTES = 128


@dataclass(frozen=True)
class TensorMapSpec:
    """Arguments of one encode call; ``strides`` in bytes, of dimensions 1 and up."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


def weight_specs(p: Problem, experts: int) -> tuple[TensorMapSpec, TensorMapSpec]:
    """Maps of ``w13 [experts, 2I, H]`` (gate first) and ``w2 [experts, H, I]``, contiguous.

    w13 is seen as (H, I, gate|up, expert), so that a box at the edge of I never runs from gate
    into up; w2 as (I, H, 1, expert), so that both GEMMs use the same copy instruction.
    """
    hidden, inter = p.hidden, p.intermediate
    w13_row, w2_row = hidden * BF16_BYTES, inter * BF16_BYTES
    box = (BLOCK_K, BLOCK_N // 2, 1, 1)
    return (
        TensorMapSpec(
            (hidden, inter, 2, experts), (w13_row, inter * w13_row, 2 * inter * w13_row), box
        ),
        TensorMapSpec((inter, hidden, 1, experts), (w2_row, hidden * w2_row, hidden * w2_row), box),
    )


def pool_specs(p: Problem) -> tuple[TensorMapSpec, TensorMapSpec, TensorMapSpec]:
    """Maps of ``pool_x [M, H]`` and ``pool_h [M, I]`` for loads, and of ``pool_h`` for stores."""
    x_row, h_row = p.hidden * BF16_BYTES, p.intermediate * BF16_BYTES
    return (
        TensorMapSpec((p.hidden, p.pool_rows), (x_row,), (BLOCK_K, BLOCK_M)),
        TensorMapSpec((p.intermediate, p.pool_rows), (h_row,), (BLOCK_K, BLOCK_M)),
        TensorMapSpec((p.intermediate, p.pool_rows), (h_row,), (BLOCK_K, PIECE_TOKENS)),
    )
