"""Derivatives of the activations of ``activation.py``, on fp32 values.

Each returns (activation, d gate, d up) for the gradient ``d`` of the activation; without a gate
(activation, d x). At and inside a clamp's limit the gradient passes, beyond it is 0, as torch's
``clamp`` has it. Selected, never multiplied by a mask: a masked-out NaN stays out.

With s = sigmoid(z): silu(z) = z·s has the slope s + z·s·(1 − s) = s·(1 + z·(1 − s)).
"""

import cutlass
from cutlass import Float32

from megamoe.cute_kernels import ptx_values
from megamoe.cute_kernels.activation import GELU_CUBIC, GELU_SCALE, clamp, sigmoid
from megamoe.cute_kernels.problem import Problem


def where(condition, value: Float32) -> Float32:
    """``value`` where ``condition``, else 0."""
    return Float32(cutlass.select_(condition, value, Float32(0.0)))


def gated_backward(p: Problem, gate: Float32, up: Float32, d: Float32) -> tuple:
    """The gated activations; ``p`` is static."""
    one = Float32(1.0)
    if p.activation == "silu":
        s = sigmoid(gate)
        act = gate * s
        return act * up, d * up * s * (one + gate * (one - s)), d * act
    if p.activation == "relu":
        act = ptx_values.max_nan(gate, Float32(0.0))
        return act * up, where(gate > 0.0, d * up), d * act
    if p.activation == "gelu_tanh":
        square = gate * gate
        inner = Float32(GELU_SCALE) * (gate + Float32(GELU_CUBIC) * gate * square)
        slope = Float32(GELU_SCALE) * (one + Float32(3 * GELU_CUBIC) * square)
        # 0.5 · (1 + tanh(z)) = s = sigmoid(2z), and ds/dz = 2·s·(1 − s)
        s = sigmoid(inner + inner)
        act = gate * s
        return act * up, d * up * (s + (act + act) * (one - s) * slope), d * act
    limited = ptx_values.min_nan(gate, Float32(p.limit))
    bounded = clamp(up, p.limit)
    alpha = Float32(p.alpha if p.activation == "gpt_oss" else 1.0)
    if p.activation == "gpt_oss":
        bounded = bounded + one
    elif p.activation != "swiglu_clamped":
        raise ValueError(f"activation={p.activation!r}: no gated backward for it")
    s = sigmoid(limited * alpha)
    act = limited * s
    d_gate = d * bounded * s * (one + limited * alpha * (one - s))
    inside = (up <= Float32(p.limit)) & (up >= Float32(-p.limit))
    return act * bounded, where(gate <= Float32(p.limit), d_gate), where(inside, d * act)


def plain_backward(p: Problem, x: Float32, d: Float32) -> tuple:
    """The activations without a gate; ``p`` is static."""
    if p.activation == "relu2":
        positive = ptx_values.max_nan(x, Float32(0.0))
        return positive * positive, where(x > 0.0, d * (positive + positive))
    raise ValueError(f"activation={p.activation!r}: no plain backward for it")
