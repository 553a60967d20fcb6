"""A whole group on vgpu as the engine of differentiable calls: models train on the real kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megamoe.autograd import Side
from megamoe.runtime.saved import Saved
from megamoe.testing import VgpuMoE


class VgpuEngine:
    """Computes with the compiled kernels on vgpu (see ``autograd.Engine``; lists have one entry for
    each PE).

    Args:
        moe: built with ``training=True`` from the very tensors that the sides bring as weights, so
            that updates in place are seen.

    Attributes:
        launches: kernel launches of each PE so far.
    """

    def __init__(self, moe: VgpuMoE):
        self.moe = moe

    @property
    def launches(self) -> list[int]:
        return [device.launches for device in self.moe.devices]

    def save(self, sides: Sequence[Side]) -> tuple[list[torch.Tensor], list[Saved]]:
        for pe, side in enumerate(sides):
            if not self.moe.weights[pe].still_there(side.weights):
                raise ValueError(f"the weights of PE {pe} are not those the group was built from")
        residual = [side.residual for side in sides]
        result = self.moe.forward(
            x=[side.x.detach() for side in sides],
            topk_ids=[side.topk_ids for side in sides],
            topk_weights=[side.topk_weights.detach() for side in sides],
            residual=None
            if residual[0] is None
            else [r.detach() for r in residual if r is not None],
            save_for_backward=True,
        )
        assert result.saved is not None
        return result.y, result.saved

    def dgrad(
        self, dy: Sequence[torch.Tensor], saved: list[Saved]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        result = self.moe.backward_dgrad(dy, saved)
        return result.dx, result.d_topk_weights

    def wgrad(
        self,
        saved: Sequence[list[Saved]],
        grads: Sequence[dict[str, torch.Tensor]],
        *,
        accumulate: bool,
    ) -> None:
        into = {"accumulate_into" if accumulate else "out": grads}
        self.moe.backward_wgrad(saved, **into)

    def free(self, saved: list[Saved]) -> None:
        for each in saved:
            each.free()
