"""The activations of `megamoe.config.MoEConfig` in plain torch, differentiable, any float dtype.

Sources of the formulas: gated linear units after Shazeer, "GLU Variants Improve Transformer"
(arXiv:2002.05202); the tanh form of gelu after Hendrycks and Gimpel (arXiv:1606.08415); squared
relu after So et al., "Primer" (arXiv:2109.08668); ``gpt_oss`` as in the GptOssExperts of Hugging
Face transformers, against which tests/cpu compares it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from megamoe.config import ACTIVATIONS, CLAMPED, GPT_OSS_ALPHA, NON_GATED, Activation


def activate(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    *,
    activation: Activation = "silu",
    alpha: float = GPT_OSS_ALPHA,
    limit: float | None = None,
) -> torch.Tensor:
    """The activation of fc1 outputs, bias included, elementwise in their dtype.

    Args:
        gate: g, any shape; the fc1 output itself if the activation is not gated.
        up: u, same shape; None exactly if the activation is not gated (``"relu2"``).
        activation: ``"silu"``: g·sigmoid(g)·u. ``"gelu_tanh"``: gelu(g)·u, in its tanh form.
            ``"relu"``: max(g, 0)·u. ``"gpt_oss"``: g·sigmoid(alpha·g)·(u + 1) with
            g = min(g, limit) and u = clamp(u, -limit, limit). ``"swiglu_clamped"``:
            g·sigmoid(g)·u with the same clamps. ``"relu2"``: max(g, 0)².
        alpha: of ``"gpt_oss"``.
        limit: of ``"gpt_oss"`` and ``"swiglu_clamped"``; beyond it the gradient is 0.

    Raises:
        ValueError: an unknown activation, a missing limit, or ``up`` where there is none.

    Worked example beyond a limit of 7: g = 100 becomes 7, u = -8 becomes -7, and as
    sigmoid(1.702·7) is 0.99999, the result is 7·(-7 + 1) but for the last digits:

    >>> activate(torch.tensor([100.0]), torch.tensor([-8.0]), activation="gpt_oss",
    ...          limit=7.0).round(decimals=3).tolist()
    [-42.0]
    """
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation={activation!r}: must be one of {', '.join(map(repr, ACTIVATIONS))}"
        )
    if activation in NON_GATED:
        if up is not None:
            raise ValueError(f"up is given: must be None for activation={activation!r}")
        return torch.relu(gate).square()
    if up is None:
        raise ValueError(f"up is None: must be a tensor for activation={activation!r}")
    if activation == "silu":
        return torch.nn.functional.silu(gate) * up
    if activation == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is sigmoid(2 z), which does not cancel for z far below 0.
        z = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * torch.sigmoid(2.0 * z) * up
    if activation == "relu":
        return torch.relu(gate) * up
    if limit is None:
        raise ValueError(f"limit=None: must be given for activation={activation!r}")
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if activation == "swiglu_clamped":
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class ActivationGradients(NamedTuple):
    """Value and partial derivatives of an activation, elementwise."""

    act: torch.Tensor
    by_gate: torch.Tensor
    by_up: torch.Tensor | None


def activation_gradients(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    *,
    activation: Activation = "silu",
    alpha: float = GPT_OSS_ALPHA,
    limit: float | None = None,
) -> ActivationGradients:
    """`activate` and its derivatives, in closed form, in the dtype of ``gate``.

    With s = sigmoid(z): a(g) = g·s has a'(g) = s·(1 + g·z'(g)·(1 - s)), where z = g, alpha·g, or
    2·sqrt(2/pi)·(g + 0.044715·g³), so that g·z' = z, z, or 2·sqrt(2/pi)·(g + 3·0.044715·g³). Beyond
    a clamp the derivative is 0, at it 1, as torch.clamp has it; relu at 0 has derivative 0.

    Args: as for `activate`.

    Returns:
        act, d act / d gate, d act / d up (None if not gated), all of the shape of ``gate``.

    Raises:
        ValueError: as `activate`.

    relu(g)·u at g = 3, u = 5 and at g = -1, u = 2:

    >>> [part.tolist() for part in activation_gradients(
    ...     torch.tensor([3.0, -1.0]), torch.tensor([5.0, 2.0]), activation="relu")]
    [[15.0, 0.0], [5.0, 0.0], [3.0, 0.0]]
    """
    act = activate(gate, up, activation=activation, alpha=alpha, limit=limit)
    if up is None:
        return ActivationGradients(act, 2.0 * torch.relu(gate), None)
    if activation == "relu":
        by_gate = torch.where(gate > 0, up, torch.zeros_like(up))
        return ActivationGradients(act, by_gate, torch.relu(gate))
    inside_gate = inside_up = None
    if activation in CLAMPED and limit is not None:
        inside_gate, inside_up = gate <= limit, up.abs() <= limit
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if activation == "gelu_tanh":
        c = 2.0 * math.sqrt(2.0 / math.pi)
        s = torch.sigmoid(c * (gate + 0.044715 * gate**3))
        rise = c * (gate + 3 * 0.044715 * gate**3)
    else:
        rise = gate * alpha if activation == "gpt_oss" else gate
        s = torch.sigmoid(rise)
    by_gate = s * (1.0 + rise * (1.0 - s)) * (up + 1.0 if activation == "gpt_oss" else up)
    by_up = gate * s
    if inside_gate is not None and inside_up is not None:
        by_gate = torch.where(inside_gate, by_gate, torch.zeros_like(by_gate))
        by_up = torch.where(inside_up, by_up, torch.zeros_like(by_up))
    return ActivationGradients(act, by_gate, by_up)
