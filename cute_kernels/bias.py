"""Loading the few bias values that a math thread needs for its weight rows."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_values


@cute.jit
def load_bias(
    kind: cutlass.Constexpr[str], base: Int64, index: Int64, valid: cutlass.Boolean
) -> Float32:
    """Element ``index`` of a ``"bf16"`` or ``"f32"`` bias at ``base``; 0 where not ``valid``."""
    value = Float32(0.0)
    if valid:
        if cutlass.const_expr(kind == "bf16"):
            value = ptx_values.bf16_to_f32(ptx.ld_u16(base + index * 2), False)
        else:
            value = ptx_values.bits_to_f32(ptx.ld_i32(base + index * 4))
    return value


@cute.jit
def fc1_bias(c, expert: Int32, column: Int32, part: cutlass.Constexpr[int]) -> Float32:
    """Bias of column ``column`` of h; ``part`` 0 gate (or the only one), 1 up. ``c`` is the
    launch's context."""
    p = c.problem
    base = Int64(expert) * p.w13_rows
    if cutlass.const_expr(p.w13_layout == "interleaved"):
        index = base + 2 * column + part
    else:
        first = part ^ 1 if p.w13_layout == "up_gate" else part
        index = base + column + first * p.intermediate
    return load_bias(p.bias13, c.bias13, index, column < p.intermediate)


@cute.jit
def fc2_bias(c, expert: Int32, column: Int32) -> Float32:
    """Bias of output column ``column``; ``c`` is the launch's context."""
    p = c.problem
    index = Int64(expert) * p.hidden + column
    return load_bias(p.bias2, c.bias2, index, column < p.hidden)
