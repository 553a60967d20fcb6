"""How tests of the forward kernel compare; its cases are `megamoe.verify.cases`."""

import torch

from megamoe.verify.cases import differing


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Bit for bit, NaN included."""
    assert differing(got, want) == ""
