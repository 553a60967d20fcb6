"""Weights a session can run with, and what shapes they must have.

Legend: L experts of this PE, H hidden, I intermediate, G rows of w13 (2I with a gate, else I).
"""

from dataclasses import dataclass

import torch

from megamoe.cute_kernels.problem import Problem
from megamoe.runtime.devices.base import Allocation

BIAS_DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True, eq=False)
class BoundWeights:
    """Weights that lie where a launch's tensor maps point. They are read in place at every call.

    Args:
        tensors: ``w13``, ``w2`` and, where the problem has them, ``b13`` and ``b2``.
        addresses: where each was when bound, 0 on a PE without experts.
        maps: the tensor maps in device memory.
    """

    tensors: dict[str, torch.Tensor]
    addresses: dict[str, int]
    maps: Allocation

    def still_there(self, tensors: dict[str, torch.Tensor]) -> bool:
        """True if these tensors lie where the bound ones did."""
        return self.tensors.keys() == tensors.keys() and all(
            self.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items()
        )


def checked_weights(
    p: Problem, experts: int, tensors: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """The tensors that problem ``p`` takes, of ``experts`` local experts.

    ``w13 [L, G, H]`` or, transposed, ``[L, H, G]``; ``w2 [L, H, I]`` or ``[L, I, H]``;
    ``b13 [L, G]``, ``b2 [L, H]``.

    Raises:
        ValueError: one is missing or not wanted, has another shape or dtype, or is not contiguous.
    """
    rows, hidden, inter = p.w13_rows, p.hidden, p.intermediate
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "w13": ((hidden, rows) if p.w13_transposed else (rows, hidden), torch.bfloat16),
        "w2": ((inter, hidden) if p.w2_transposed else (hidden, inter), torch.bfloat16),
    }
    if p.bias13 != "none":
        wanted["b13"] = ((rows,), BIAS_DTYPES[p.bias13])
    if p.bias2 != "none":
        wanted["b2"] = ((hidden,), BIAS_DTYPES[p.bias2])
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if given.keys() != wanted.keys():
        raise ValueError(f"weights: got {sorted(given)}, this layer takes {sorted(wanted)}")
    for name, (tail, dtype) in wanted.items():
        tensor, shape = given[name], (experts, *tail)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)}, must be {dtype} {shape}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")
    return given
