"""The layer by plain loops over single scalars, an oracle for the oracle: no chunking, no masks, no
grouping, and index arithmetic of its own for every weight layout. fp64 throughout.

Legend: T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

import math

import torch

from megamoe import MoEConfig
from megamoe.verify.inputs import Inputs


def scalar_activation(cfg: MoEConfig, gate: float, up: float) -> float:
    """The activation of one value, written out; ``up`` is not read if there is none."""

    def sigmoid(value: float) -> float:
        return 1.0 / (1.0 + math.exp(-value))

    limit = cfg.activation_limit
    if cfg.activation == "silu":
        return gate * sigmoid(gate) * up
    if cfg.activation == "gelu_tanh":
        inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1.0 + math.tanh(inner)) * up
    if cfg.activation == "relu":
        return (gate if gate > 0 else 0.0) * up
    if cfg.activation == "relu2":
        return gate * gate if gate > 0 else 0.0
    assert limit is not None
    gate = gate if gate < limit else limit
    up = limit if up > limit else -limit if up < -limit else up
    if cfg.activation == "gpt_oss":
        return gate * sigmoid(cfg.activation_alpha * gate) * (up + 1.0)
    return gate * sigmoid(gate) * up


def fc1_row(cfg: MoEConfig, kind: str, i: int) -> int:
    """Row of w13 and b13 that holds gate or up value i."""
    if not cfg.gated:
        return i
    second = (kind == "up") != (cfg.w13_layout == "up_gate")
    if cfg.w13_layout == "interleaved":
        return 2 * i + (kind == "up")
    return i + cfg.intermediate * second


def by_loops(cfg: MoEConfig, inputs: Inputs, pe: int) -> torch.Tensor:
    """y of one PE, ``[T, H]`` fp64; slow, for a few tokens."""
    x_TH, w13, w2 = inputs.x[pe].double(), inputs.w13.double(), inputs.w2.double()
    y_TH = torch.zeros_like(x_TH)

    def fc1(expert: int, kind: str, i: int, x_H: torch.Tensor) -> float:
        row = fc1_row(cfg, kind, i)
        weights_H = w13[expert, :, row] if cfg.w13_transposed else w13[expert, row]
        bias = 0.0 if inputs.b13 is None else float(inputs.b13[expert, row])
        return float(torch.dot(weights_H, x_H)) + bias

    for t in range(x_TH.shape[0]):
        for k in range(cfg.top_k):
            expert = int(inputs.topk_ids[pe][t, k])
            if not 0 <= expert < cfg.num_experts:
                continue
            weight = float(inputs.topk_weights[pe][t, k])
            act_I = torch.tensor(
                [
                    scalar_activation(
                        cfg,
                        fc1(expert, "gate", i, x_TH[t]),
                        fc1(expert, "up", i, x_TH[t]) if cfg.gated else 0.0,
                    )
                    for i in range(cfg.intermediate)
                ],
                dtype=torch.float64,
            )
            w2_HI = w2[expert].T if cfg.w2_transposed else w2[expert]
            row_H = torch.mv(w2_HI, act_I)
            bias_H = 0.0 if inputs.b2 is None else inputs.b2[expert].double()
            if cfg.weight_at == "act":
                y_TH[t] += weight * row_H + bias_H
            else:
                y_TH[t] += weight * (row_H + bias_H)
        if inputs.residual is not None:
            y_TH[t] += inputs.residual[pe][t].double()
    return y_TH
