"""A small model of two MoE layers that learns a fixed function: whole training loops, all PEs in
one process, on any engine. It shows that gradients are right where they are used, nothing else.

Legend: T tokens, H hidden, E experts, K top-k, P PEs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megamoe.autograd import Engine, Side, apply
from megamoe.config import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.reference_backward import moe_backward_oracle
from megamoe.verify.inputs import make_inputs, weights_per_pe
from megamoe.weight_gradients import DelayedGradients

Weights = list[dict[str, torch.Tensor]]
"""Local weights of every PE, by name."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """How the toy is trained.

    Args:
        cfg: of both layers.
        tokens: T of every PE and micro-batch; they differ, and may be 0.
        micro_batches: forwards whose gradients are added before an update.
        steps: updates.
        rate: learning rate of plain gradient descent on fp32 master weights.
        delay: compute the gradients of the weights after all micro-batches (``backward_dw``).
    """

    cfg: MoEConfig
    tokens: tuple[int, ...]
    micro_batches: int = 2
    steps: int = 50
    rate: float = 0.5
    delay: bool = False


class ToyLayer:
    """Router weights and experts of one layer on all PEs, with fp32 masters and main_grad."""

    def __init__(self, training: Training, make: Callable[[Weights], Engine], *, seed: int):
        cfg = training.cfg
        data = make_inputs(cfg, tokens=[0] * cfg.num_pes, seed=seed)
        split = weights_per_pe(cfg, data)
        self.weights: Weights = [
            {n: each[pe].clone() for n, each in split.items() if each is not None}
            for pe in range(cfg.num_pes)
        ]
        rng = torch.Generator().manual_seed(seed)
        self.router_EH = torch.randn(cfg.num_experts, cfg.hidden, generator=rng) / cfg.hidden**0.5
        self.router_EH.requires_grad_()
        self.masters = [{n: t.float() for n, t in each.items()} for each in self.weights]
        for weight in self._all():
            weight.requires_grad_()
            weight.main_grad = torch.zeros(weight.shape)  # type: ignore[attr-defined]
        self.cfg, self.engine = cfg, make(self.weights)
        self.delayed = DelayedGradients() if training.delay else None

    def _all(self) -> list[torch.Tensor]:
        return [weight for each in self.weights for weight in each.values()]

    def __call__(self, x: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """x + MoE(x), the router's weights softmaxed over the chosen experts."""
        sides = []
        for x_TH, weights in zip(x, self.weights, strict=True):
            logits_TE = x_TH.float() @ self.router_EH.T
            top = logits_TE.topk(self.cfg.top_k, dim=-1)
            router_TK = top.values.softmax(dim=-1)
            sides.append(Side(x_TH, top.indices, router_TK, x_TH, weights))
        delay = None if self.delayed is None else self.delayed.append
        return apply(self.engine, sides, delay=delay)

    def update(self, rate: float) -> None:
        """Gradient descent on the masters; the weights are rounded to in place."""
        if self.delayed is not None:
            self.delayed.run()
        with torch.no_grad():
            for weights, masters in zip(self.weights, self.masters, strict=True):
                for name, weight in weights.items():
                    main_grad: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]
                    masters[name] -= rate * main_grad
                    weight.copy_(masters[name])
                    main_grad.zero_()
                    weight.grad = None
            assert self.router_EH.grad is not None
            self.router_EH -= rate * self.router_EH.grad
            self.router_EH.grad = None


def train(training: Training, make: Callable[[Weights], Engine]) -> list[float]:
    """Losses before each update: mean square distance to a fixed rotation of tanh(x).

    Args:
        make: the engine of a layer, from its weights; they are updated in place.
    """
    cfg = training.cfg
    layers = [ToyLayer(training, make, seed=seed) for seed in (1, 2)]
    rng = torch.Generator().manual_seed(0)
    target_HH = torch.linalg.qr(torch.randn(cfg.hidden, cfg.hidden, generator=rng)).Q
    batches = [
        [torch.randn(count, cfg.hidden, generator=rng).bfloat16() for count in training.tokens]
        for _ in range(training.micro_batches)
    ]
    values = sum(x.numel() for x in batches[0]) * training.micro_batches
    losses = []
    for _ in range(training.steps):
        total = 0.0
        for x in batches:
            y = layers[1](layers[0](x))
            wanted = [torch.tanh(x_TH.float()) @ target_HH for x_TH in x]
            loss = sum(
                ((y_TH.float() - w_TH) ** 2).sum() for y_TH, w_TH in zip(y, wanted, strict=True)
            )
            loss = loss / values
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        for layer in layers:
            layer.update(training.rate)
    return losses


class OracleEngine:
    """All PEs by the oracle (see ``autograd.Engine``): the loss curve to be followed.

    Args:
        cfg: the layer; every expert in one place, in the default order.
        exact: without the kernels' roundings to bf16, but for those of the tensors passed on.
    """

    def __init__(self, cfg: MoEConfig, *, exact: bool = True):
        self.cfg = cfg
        self.how: dict[str, Any] = {
            "dtype": torch.float64 if exact else torch.float32,
            "rounding": "none" if exact else "kernel",
        }

    def _call(self, sides: Sequence[Side]) -> dict[str, Any]:
        named = {n: torch.cat([s.weights[n].detach() for s in sides]) for n in sides[0].weights}
        residual = [side.residual for side in sides]
        return named | {
            "x": [side.x.detach() for side in sides],
            "topk_ids": [side.topk_ids for side in sides],
            "topk_weights": [side.topk_weights.detach() for side in sides],
            "residual": None if residual[0] is None else [r.detach() for r in residual],  # type: ignore[union-attr]
        }

    def save(self, sides: Sequence[Side]) -> tuple[list[torch.Tensor], dict[str, Any]]:
        call = self._call(sides)
        return [y.bfloat16() for y in moe_oracle(self.cfg, **call, **self.how)], call

    def dgrad(
        self, dy: Sequence[torch.Tensor], saved: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        grads = moe_backward_oracle(self.cfg, dy=dy, **saved, **self.how)
        saved["grads"] = grads
        return [t.bfloat16() for t in grads.dx], [t.float() for t in grads.d_topk_weights]

    def wgrad(
        self,
        saved: Sequence[dict[str, Any]],
        grads: Sequence[dict[str, torch.Tensor]],
        *,
        accumulate: bool,
    ) -> None:
        for number, call in enumerate(saved):
            for pe, into in enumerate(grads):
                for name, target in into.items():
                    made = getattr(call["grads"], f"d{name}")[pe].float()
                    if accumulate or number:
                        made = target.float() + made
                    target.copy_(made)

    def free(self, saved: dict[str, Any]) -> None:
        saved.clear()
