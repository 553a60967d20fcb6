"""Where the gradients of weights go: a new tensor for autograd, or a parameter's ``main_grad``.

Training frameworks (Megatron's fused accumulation) keep one gradient buffer per parameter, often
fp32, as ``parameter.main_grad``. It is added to in place, once, in its own dtype; then
``parameter.grad_added_to_main_grad`` is set and autograd gets a tensor of zeros, so that hooks fire
and whoever adds ``.grad`` again adds nothing. Parameters without ``main_grad`` get their gradient
from autograd as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from megamoe.autograd import Engine


@dataclass(frozen=True)
class Pending:
    """A call whose gradients of the weights are still to be computed.

    Args:
        engine: computes them.
        saved: the call, after dgrad.
        wanted: per side the weights that require a gradient, by name.
    """

    engine: Engine
    saved: Any
    wanted: list[dict[str, torch.Tensor]]


def main_grad_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The buffer to add to, or None.

    Raises:
        ValueError: it cannot take the gradient; names what it is and what it must be.
    """
    buffer = getattr(weight, "main_grad", None)
    if buffer is None:
        return None
    good = (
        buffer.shape == weight.shape
        and buffer.dtype in (torch.float32, torch.bfloat16)
        and buffer.device == weight.device
        and buffer.is_contiguous()
    )
    if not good:
        raise ValueError(
            f"main_grad is {buffer.dtype} {list(buffer.shape)} on {buffer.device}, strides "
            f"{buffer.stride()}: must be a contiguous float32 or bfloat16 {list(weight.shape)} on "
            f"{weight.device}"
        )
    return buffer


def add_gradients(pending: Sequence[Pending]) -> list[dict[str, torch.Tensor]]:
    """Compute what is pending, all of one layer, and bring it where it belongs.

    Returns:
        Per side and name what autograd gets: the gradient in the dtype of the weight, or zeros if
        it went to ``main_grad``.

    Raises:
        ValueError: see `main_grad_of`.
    """
    first = pending[0]
    results: list[dict[str, torch.Tensor]] = []
    targets: list[dict[str, torch.Tensor]] = []
    buffers = [
        {name: main_grad_of(weight) for name, weight in wanted.items()} for wanted in first.wanted
    ]
    accumulate = any(buffer is not None for side in buffers for buffer in side.values())
    for wanted, side in zip(first.wanted, buffers, strict=True):
        targets.append({})
        for name, weight in wanted.items():
            buffer = side[name]
            if buffer is None:
                make = torch.zeros_like if accumulate else torch.empty_like
                buffer = make(weight, memory_format=torch.contiguous_format)
            targets[-1][name] = buffer.detach()
    first.engine.wgrad([each.saved for each in pending], targets, accumulate=accumulate)
    for wanted, side, made in zip(first.wanted, buffers, targets, strict=True):
        results.append({})
        for name, weight in wanted.items():
            if side[name] is None:
                results[-1][name] = made[name]
                continue
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
            results[-1][name] = _zeros_like(weight)
    return results


class DelayedGradients:
    """Calls whose gradients of the weights wait for ``MegaMoE.backward_dw``.

    ``hooks`` are called after each run, as frameworks do where parameters' own hooks cannot fire.
    """

    def __init__(self) -> None:
        self.hooks: list[Callable[[], None]] = []
        self._pending: list[Pending] = []

    def append(self, pending: Pending) -> None:
        """Note a call; called by the backward."""
        self._pending.append(pending)

    def run(self) -> None:
        """Compute all that is pending, in one go where the calls want the same gradients."""
        pending, self._pending = self._pending, []
        alike: dict[tuple[int, ...], list[Pending]] = {}
        for each in pending:
            wanted = tuple(id(weight) for side in each.wanted for weight in side.values())
            alike.setdefault(wanted, []).append(each)
        for calls in alike.values():
            results = add_gradients(calls)
            for weights, made in zip(calls[0].wanted, results, strict=True):
                for name, weight in weights.items():
                    if main_grad_of(weight) is not None:
                        continue
                    if weight.grad is None:
                        weight.grad = made[name]
                    else:
                        weight.grad += made[name]
        for hook in self.hooks:
            hook()


_ZEROS: dict[tuple[Any, ...], torch.Tensor] = {}


def _zeros_like(weight: torch.Tensor) -> torch.Tensor:
    """Zeros that all weights of a shape share; made anew if somebody wrote to them."""
    key = (tuple(weight.shape), weight.dtype, weight.device)
    zeros = _ZEROS.get(key)
    if zeros is None or zeros._version:
        zeros = _ZEROS[key] = torch.zeros(key[0], dtype=weight.dtype, device=weight.device)
    return zeros.detach()
