"""Activations of the fc1 epilogue, on fp32 values.

=================  ======================================================================
``silu``           silu(gate) · up
``gelu_tanh``      gelu(gate), tanh form, · up
``relu``           max(gate, 0) · up; exact on integers
``gpt_oss``        g = min(gate, limit), u = clamp(up, ±limit): g · sigmoid(alpha · g) · (u + 1)
``swiglu_clamped`` silu(min(gate, limit)) · clamp(up, ±limit)
``relu2``          max(x, 0)²; no gate; exact on integers
=================  ======================================================================

NaN stays NaN. The exponential is ex2.approx and the division rcp.approx, relative error of a
sigmoid below 2⁻²⁰.
"""

import math

from cutlass import Float32

from megamoe.cute_kernels import ptx_values
from megamoe.cute_kernels.problem import Problem

GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(−x))."""
    return ptx_values.rcp_approx(
        Float32(1.0) + ptx_values.exp2_approx(x * Float32(-ptx_values.LOG2_E))
    )


def clamp(x: Float32, limit: float) -> Float32:
    """x limited to [−limit, limit]."""
    return ptx_values.max_nan(ptx_values.min_nan(x, Float32(limit)), Float32(-limit))


def gated(p: Problem, gate: Float32, up: Float32) -> Float32:
    """The gated activations; ``p`` is static."""
    if p.activation == "silu":
        return gate * sigmoid(gate) * up
    if p.activation == "relu":
        return ptx_values.max_nan(gate, Float32(0.0)) * up
    if p.activation == "gelu_tanh":
        inner = Float32(GELU_SCALE) * (gate + Float32(GELU_CUBIC) * gate * gate * gate)
        # 0.5 · (1 + tanh(z)) = sigmoid(2z)
        return gate * sigmoid(inner + inner) * up
    limited = ptx_values.min_nan(gate, Float32(p.limit))
    bounded = clamp(up, p.limit)
    if p.activation == "gpt_oss":
        return limited * sigmoid(limited * Float32(p.alpha)) * (bounded + Float32(1.0))
    if p.activation == "swiglu_clamped":
        return limited * sigmoid(limited) * bounded
    raise ValueError(f"activation={p.activation!r}: no gated epilogue for it")


def plain(p: Problem, x: Float32) -> Float32:
    """The activations without a gate; ``p`` is static."""
    if p.activation == "relu2":
        positive = ptx_values.max_nan(x, Float32(0.0))
        return positive * positive
    raise ValueError(f"activation={p.activation!r}: no plain epilogue for it")
