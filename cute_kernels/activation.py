"""Activations of the fc1 epilogue, on fp32 gate and up values."""

import math

import cutlass
from cutlass import Float32

from megamoe.cute_kernels import ptx

LOG2_E = math.log2(math.e)


def gated(name: cutlass.Constexpr[str], gate: Float32, up: Float32) -> Float32:
    """``act(gate) · up``.

    ``silu``: gate / (1 + exp(−gate)), by ex2.approx and rcp.approx: relative error below 2⁻²⁰.
    ``relu``: max(gate, 0), NaN kept; exact, so integer data gives bit-exact results.
    """
    if name == "silu":
        sigmoid = ptx.rcp_approx(Float32(1.0) + ptx.exp2_approx(gate * Float32(-LOG2_E)))
        return gate * sigmoid * up
    if name == "relu":
        return ptx.max_nan(gate, Float32(0.0)) * up
    raise ValueError(f"activation={name!r}: no epilogue for it")
