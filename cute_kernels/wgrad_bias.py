"""Bias gradients: column sums of a region over an expert's rows, in row order. Three warps a CTA.

The sums need no pipeline stage and no math warp: they run beside the products.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_values
from megamoe.cute_kernels.context import lane
from megamoe.cute_kernels.smem import BF16_BYTES
from megamoe.cute_kernels.wgrad_context import WgradContext, destination, k_tiles_of
from megamoe.cute_kernels.wgrad_tables import (
    BIAS_COLUMNS,
    BIAS_LANE_COLUMNS,
    BIAS_WARP,
    ENTRY_DGRAD,
    ENTRY_SAVED,
    FIRST_MATH_WARP,
    GRAD_BYTES,
    BiasSum,
    bias_sums,
    block_of,
)

BIAS_WARPS = FIRST_MATH_WARP - BIAS_WARP
LOADS_IN_FLIGHT = 4


@cute.jit
def sum_columns(
    c: WgradContext, s: cutlass.Constexpr[BiasSum], expert: Int32, column: Int32
) -> cute.Tensor:
    """This lane's eight sums from ``column`` on."""
    p = c.problem
    block = block_of(p, s.block)
    sums = cute.make_rmem_tensor((BIAS_LANE_COLUMNS,), Float32)
    sums.fill(0.0)
    for saved in cutlass.range(c.num_saved, unroll=1):
        rows = c.rows(saved, expert)
        first = c.first_row(saved, expert)
        start = ptx.ld_i64(c.entry(saved) + (ENTRY_DGRAD if s.block == "dgrad" else ENTRY_SAVED))
        source = start + block[s.region].offset + Int64(column) * BF16_BYTES
        for row in cutlass.range(0, rows, LOADS_IN_FLIGHT, unroll=1):
            loaded, weights = [], []
            for i in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                # Rows beyond the count hold anything: they are not loaded.
                inside = Int32(row + i < rows)
                at = Int64(first + row + i)
                loaded.append(ptx.ld_i32x4_if(inside, source + at * (s.width * BF16_BYTES)))
                if cutlass.const_expr(s.weighted):
                    weight = start + block["row_weight"].offset + at * 4
                    weights.append(ptx.ld_f32_if(inside, weight))
            for i in cutlass.range_constexpr(LOADS_IN_FLIGHT):
                for j in cutlass.range_constexpr(BIAS_LANE_COLUMNS):
                    value = ptx_values.bf16_to_f32(loaded[i][j // 2], j % 2 == 1)
                    if cutlass.const_expr(s.weighted):
                        value = value * weights[i]
                    sums[j] = sums[j] + value
    return sums


@cute.jit
def store_sums(
    c: WgradContext, s: cutlass.Constexpr[BiasSum], sums: cute.Tensor, column: Int32, target: Int64
):
    """Write a lane's sums, or add them to what is there."""
    nbytes = GRAD_BYTES[c.config.bias_grad]
    for j in cutlass.range_constexpr(BIAS_LANE_COLUMNS):
        address = target + Int64(s.scale * (column + j) + s.base) * nbytes
        total = sums[j]
        if cutlass.const_expr(c.config.bias_grad == "f32"):
            if c.accumulate == 1:
                total = total + ptx_values.bits_to_f32(ptx.ld_i32(address))
            ptx.st_i32(address, ptx_values.f32_to_bits(total))
        else:
            if c.accumulate == 1:
                total = total + ptx_values.bf16_to_f32(ptx.ld_u16(address), False)
            ptx.st_i16(address, ptx_values.pack_bf16x2(total, Float32(0.0)))


@cute.jit
def bias_item(c: WgradContext, s: cutlass.Constexpr[BiasSum], expert: Int32, chunk: Int32):
    """One chunk of columns of one expert."""
    column = chunk * BIAS_COLUMNS + lane() * BIAS_LANE_COLUMNS
    if cutlass.const_expr(s.grad == "b13"):
        target = destination(c.b13, c.b13_stride, expert)
    else:
        target = destination(c.b2, c.b2_stride, expert)
    if (target != 0) & (column < s.width):
        if (k_tiles_of(c, expert) > 0) | (c.accumulate == 0):
            sums = sum_columns(c, s, expert, column)
            store_sums(c, s, sums, column, target)


@cute.jit
def bias_role(c: WgradContext, worker: Int32):
    """The whole role of one warp; ``worker`` is 0 to BIAS_WARPS − 1."""
    sums = bias_sums(c.problem)
    per_expert = sums[-1].first + sums[-1].chunks
    first = c.cta * BIAS_WARPS + worker
    for item in cutlass.range(first, c.experts * per_expert, c.grid * BIAS_WARPS, unroll=1):
        expert = item // per_expert
        chunk = item - expert * per_expert
        for index in cutlass.range_constexpr(len(sums)):
            s = sums[index]
            if (chunk >= s.first) & (chunk < s.first + s.chunks):
                bias_item(c, s, expert, chunk - s.first)
