"""Case list of the forward kernel on vgpu, small enough for CI, large enough that every pipeline
stage wraps (H ≥ 512, I ≥ 256, E ≥ 8).

Legend: P PEs, T tokens, H hidden, E experts, K experts per token.
"""

from dataclasses import dataclass

import torch
from case_data import Inputs, make_inputs, weights_per_pe

from megamoe import MoEConfig
from megamoe.reference import moe_oracle
from megamoe.testing import VgpuMoE, VgpuResult

SCATTERED = ((1, 2), (0, 1), (3, 0), (1, 0), (2, 0), (0, 0), (1, 1), (3, 1))
"""Eight experts on four PEs, neither contiguous nor even: 2, 3, 1, 2."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a group; ``tokens`` gives T of every PE."""

    name: str
    tokens: tuple[int, ...]
    top_k: int = 2
    hidden: int = 512
    intermediate: int = 256
    num_experts: int = 8
    max_tokens: int = 64
    expert_map: tuple[tuple[int, int], ...] | None = None
    masked: float = 0.0
    route: str = "random"
    activation: str = "relu"
    capacity: int | None = None
    grid: int = 2

    @property
    def cfg(self) -> MoEConfig:
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_pes=len(self.tokens),
            max_tokens=self.max_tokens,
            expert_map=self.expert_map,
            activation=self.activation,
            capacity=self.capacity,
            combine="direct",
            invalid_ids="mask",
        )

    def inputs(self, *, seed: int = 0, integers: bool = True) -> Inputs:
        """Seeded inputs; ``route`` "one" sends every slot to one expert, "same" repeats an expert
        in all slots of a token."""
        data = make_inputs(
            self.cfg, tokens=list(self.tokens), seed=seed, integers=integers, masked=self.masked
        )
        for ids_TK in data.topk_ids:
            if self.route == "one":
                ids_TK.fill_(self.num_experts - 3)
            elif self.route == "same":
                ids_TK.copy_(ids_TK[:, :1].expand_as(ids_TK).clone())
            elif self.route == "none":
                ids_TK.fill_(-1)
        return data


CASES = (
    Case(name="one_pe", tokens=(40,)),
    Case(name="ragged", tokens=(0, 1, 17, 64)),
    Case(name="all_to_one_expert", tokens=(33, 64), route="one", top_k=1),
    Case(name="same_expert_twice", tokens=(20, 31), route="same"),
    Case(name="scattered_map", tokens=(9, 30, 5, 21), expert_map=SCATTERED),
    Case(name="k1", tokens=(64, 13), top_k=1),
    Case(name="k8", tokens=(24, 31), top_k=8),
    Case(name="half_masked", tokens=(48, 64), masked=0.5, top_k=4),
    Case(name="all_masked", tokens=(16, 3), route="none"),
    Case(name="no_tokens", tokens=(0, 0)),
    Case(name="more_pes_than_experts", tokens=(7, 5, 0, 9, 3), num_experts=4),
    Case(name="three_ctas", tokens=(64, 50), grid=3),
    Case(name="odd_tiles", tokens=(30, 20), hidden=576, intermediate=320),
    Case(name="several_senders", tokens=(150, 3), max_tokens=160, grid=4, top_k=3),
)


def layer(case: Case, data: Inputs, **options) -> VgpuMoE:
    """The case's layer on vgpu."""
    weights = weights_per_pe(case.cfg, data)
    return VgpuMoE(case.cfg, **weights, grid=case.grid, **options)


def call(moe: VgpuMoE, data: Inputs, **options) -> VgpuResult:
    """One forward of ``data``."""
    return moe.forward(x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights, **options)


def expected(case: Case, data: Inputs) -> list[torch.Tensor]:
    """The oracle with the kernel's rounding points; exact on integer data."""
    return moe_oracle(case.cfg, **data.kwargs, rounding="kernel")


def assert_same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Bit for bit, NaN included."""
    for pe, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape, pe
        same = a.view(torch.int16) == b.bfloat16().view(torch.int16)
        assert bool(same.all()), f"PE {pe}: {int((~same).sum())} of {same.numel()} differ"
