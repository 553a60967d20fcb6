"""A session as the engine of a differentiable call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.autograd import Side
from megamoe.runtime.saved import Saved
from megamoe.runtime.weights import BoundWeights
from megamoe.session import Session


class SessionEngine:
    """Computes with kernels (see ``autograd.Engine``; lists have one entry, this PE's).

    Args:
        session: built with ``training=True``.
        bound: the weights of the call.
        num_tokens: as for ``Session.forward``.
    """

    def __init__(self, session: Session, bound: BoundWeights, num_tokens: torch.Tensor | None):
        self.session, self.bound, self.num_tokens = session, bound, num_tokens

    def save(self, sides: Sequence[Side]) -> tuple[list[torch.Tensor], Saved]:
        (side,) = sides
        y, saved = self.session.forward(
            self.bound,
            side.x.detach(),
            side.topk_ids,
            side.topk_weights.detach(),
            residual=None if side.residual is None else side.residual.detach(),
            num_tokens=self.num_tokens,
            save_for_backward=True,
        )
        return [y], saved

    def dgrad(
        self, dy: Sequence[torch.Tensor], saved: Saved
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        dx, d_topk_weights = self.session.backward_dgrad(dy[0], saved)
        return [dx], [d_topk_weights]

    def wgrad(
        self,
        saved: Sequence[Saved],
        grads: Sequence[dict[str, torch.Tensor]],
        *,
        accumulate: bool,
    ) -> None:
        into = {"accumulate_into" if accumulate else "out": grads[0]}
        self.session.backward_wgrad(saved, **into)

    def free(self, saved: Saved) -> None:
        saved.free()
