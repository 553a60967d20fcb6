"""The layer under torch autograd, whoever computes it: a session, a vgpu group, or the reference.

One autograd node is one call of one PE, or of all PEs of a group that lives in this process.
``loss.backward()`` asks the engine for the gradients of x and of the router weights, then for those
of the weights, or leaves these to ``MegaMoE.backward_dw`` (`megamoe.weight_gradients`).

Legend: T tokens, H hidden, K top-k, L local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megamoe.weight_gradients import Pending, add_gradients

WEIGHTS = ("w13", "w2", "b13", "b2")


@dataclass(frozen=True)
class Side:
    """What one PE brings to a call.

    Args:
        x: ``[T, H]``. topk_ids, topk_weights: ``[T, K]``. residual: ``[T, H]`` or None.
        weights: ``w13``, ``w2`` and the biases there are.
    """

    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    residual: torch.Tensor | None
    weights: dict[str, torch.Tensor]

    def flat(self) -> list[torch.Tensor | None]:
        """As inputs of the autograd node."""
        weights = [self.weights.get(name) for name in WEIGHTS]
        return [self.x, self.topk_ids, self.topk_weights, self.residual, *weights]

    @classmethod
    def of(cls, flat: Sequence[torch.Tensor | None]) -> Side:
        """The inverse of `flat`."""
        x, ids, router, residual, *weights = flat
        assert x is not None and ids is not None and router is not None
        named = zip(WEIGHTS, weights, strict=True)
        return cls(x, ids, router, residual, {n: w for n, w in named if w is not None})


SIDE_INPUTS = 4 + len(WEIGHTS)


class Engine(Protocol):
    """Who computes. Lists have one entry for each PE of this process: one, or all."""

    def save(self, sides: Sequence[Side]) -> tuple[list[torch.Tensor], Any]:
        """The forward: y of each side, and what the backward needs of the call."""
        ...

    def dgrad(
        self, dy: Sequence[torch.Tensor], saved: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Gradients of x ``[T, H]`` in its dtype and of the router weights ``[T, K]`` fp32."""
        ...

    def wgrad(
        self, saved: Sequence[Any], grads: Sequence[dict[str, torch.Tensor]], *, accumulate: bool
    ) -> None:
        """Gradients of the weights, summed over the calls ``saved``, stored or added in place.

        Args:
            grads: per side, by name; a name may be missing if nobody wants that gradient.
        """
        ...

    def free(self, saved: Any) -> None:
        """Nobody wants the gradients of the weights."""
        ...


@dataclass(frozen=True)
class Call:
    """What a node keeps besides tensors.

    Args:
        engine: computes.
        sides: how many PEs.
        delay: takes what is left to do for the weights, or None to do it in the backward.
    """

    engine: Engine
    sides: int
    delay: Callable[[Pending], None] | None = None


class _MoE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *inputs: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        sides = [
            Side.of(inputs[i * SIDE_INPUTS : (i + 1) * SIDE_INPUTS]) for i in range(call.sides)
        ]
        y, ctx.saved_call = call.engine.save(sides)
        ctx.call = call
        # x is not kept: engines have its rows. The rest is kept so that torch refuses a backward
        # after it was changed in place; ids and router weights are read again.
        ctx.save_for_backward(
            *(t for s in sides for t in (s.topk_ids, s.topk_weights, *s.weights.values()))
        )
        ctx.names = [tuple(side.weights) for side in sides]
        return tuple(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Call = ctx.call
        kept = list(ctx.saved_tensors)
        saved, needed = ctx.saved_call, ctx.needs_input_grad[1:]
        dx, d_router = call.engine.dgrad(dy, saved)
        grads: list[torch.Tensor | None] = []
        wanted: list[dict[str, torch.Tensor]] = []
        for i in range(call.sides):
            _, router, *weights = [kept.pop(0) for _ in range(2 + len(ctx.names[i]))]
            need = needed[i * SIDE_INPUTS : (i + 1) * SIDE_INPUTS]
            grads += [
                dx[i] if need[0] else None,
                None,
                d_router[i].to(router.dtype) if need[2] else None,
                dy[i] if need[3] else None,
                *[None] * len(WEIGHTS),
            ]
            flags = dict(zip(WEIGHTS, need[4:], strict=True))
            named = zip(ctx.names[i], weights, strict=True)
            wanted.append({name: weight for name, weight in named if flags[name]})
        pending = Pending(call.engine, saved, wanted)
        if not any(wanted):
            call.engine.free(saved)
        elif call.delay is not None:
            call.delay(pending)
        else:
            for i, made in enumerate(add_gradients([pending])):
                at = i * SIDE_INPUTS + 4
                grads[at : at + len(WEIGHTS)] = [made.get(name) for name in WEIGHTS]
        return None, *grads


def apply(
    engine: Engine,
    sides: Sequence[Side],
    *,
    delay: Callable[[Pending], None] | None = None,
) -> list[torch.Tensor]:
    """One differentiable call: y ``[T, H]`` of each side.

    Args:
        engine: computes, forward and backward.
        sides: what each PE brings.
        delay: see `Call`.
    """
    flat = [tensor for side in sides for tensor in side.flat()]
    return list(_MoE.apply(Call(engine, len(sides), delay), *flat))
