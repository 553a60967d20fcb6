"""Cases of the forward and of training on vgpu, small enough for CI, large enough that every
pipeline stage wraps (H ≥ 512, I ≥ 256, E ≥ 8).

Legend: P PEs, T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe.config import Activation, MoEConfig
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.saved import mode_kernels
from megamoe.cute_kernels.smem import default_config
from megamoe.lowering import kernel_problem
from megamoe.reference import moe_oracle
from megamoe.testing import VgpuMoE, VgpuResult
from megamoe.verify.inputs import Inputs, make_inputs, weights_per_pe

SCATTERED = ((1, 2), (0, 1), (3, 0), (1, 0), (2, 0), (0, 0), (1, 1), (3, 1))
"""Eight experts on four PEs, neither contiguous nor even: 2, 3, 1, 2."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls of a group on one session.

    Args:
        name: of the case.
        tokens: T of every PE.
        calls: calls in a row, each with its own inputs; every second one writes its tokens into
            the session's input view, so that nothing is staged.
        route: ``random``, or ``one`` (every slot to one expert), ``same`` (one expert in all slots
            of a token), ``pair`` (two experts in turn), ``crowd`` (all tokens to expert 1, the last
            one to 0 and 2 as well), ``none`` (all masked).
        features: further arguments of `MoEConfig`.
        config: what differs from the default `KernelConfig`; nothing in training.
        mode: the kernel whose case it is: ``forward``, ``save`` or ``dgrad``; see
            `megamoe.verify.attempts`.
        recompute: of training: dgrad computes the pre-activations again.
        fails: the error that the case must end with: ``capacity`` (a pool is too small),
            ``absent`` (the last PE does not call, the others time out), ``hasty`` (deadlines so
            short that somebody times out), ``invalid`` (an id past the end, reported).
        timeout_s: deadline of waits in logical time.
    """

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
    activation: Activation = "relu"
    capacity: int | None = None
    grid: int = 2
    calls: int = 1
    features: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    mode: str = "forward"
    recompute: bool = False
    fails: str = ""
    timeout_s: float = 300.0

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
            invalid_ids="mask",
            **{"combine": "direct", **dict(self.features)},
        )

    @property
    def kernel(self) -> tuple[Problem, KernelConfig]:
        """The kernel whose case it is."""
        return self.kernels[self.mode]

    @property
    def kernels(self) -> dict[str, tuple[Problem, KernelConfig]]:
        """Kernels of the case's layer by mode."""
        problem = replace(kernel_problem(self.cfg), recompute=self.recompute)
        config = replace(default_config(problem), **dict(self.config)) if self.config else None
        return mode_kernels(problem, config, training=self.mode != "forward")

    def inputs(self, *, seed: int = 0, integers: bool = True) -> Inputs:
        """Seeded inputs of one call."""
        data = make_inputs(
            self.cfg, tokens=list(self.tokens), seed=seed, integers=integers, masked=self.masked
        )
        for ids_TK in data.topk_ids:
            if self.route == "one":
                ids_TK[ids_TK >= 0] = self.num_experts - 3
            elif self.route == "same":
                ids_TK.copy_(ids_TK[:, :1].expand_as(ids_TK).clone())
            elif self.route == "pair":
                turn_TK = torch.arange(ids_TK.numel()).view_as(ids_TK) % 2
                ids_TK.copy_(torch.where(turn_TK == 0, 1, self.num_experts - 2))
            elif self.route == "crowd":
                ids_TK.fill_(-1)
                ids_TK[:, 1] = 1
                ids_TK[-1:, :3] = torch.arange(3, dtype=ids_TK.dtype)
            elif self.route == "none":
                ids_TK.fill_(-1)
        if self.fails == "invalid":
            data.topk_ids[0][2::70, 1] = self.num_experts
        return data

    def with_pes(self, pes: int) -> Case:
        """The case on another number of PEs, its token counts repeated or cut.

        >>> Case(name="a", tokens=(5, 7)).with_pes(3).tokens
        (5, 7, 5)
        """
        if pes == len(self.tokens):
            return self
        repeated = self.tokens * pes
        return replace(self, tokens=repeated[:pes], expert_map=None)


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
"""What the forward kernel is tested with; all give results."""

VERIFY_CASES = (
    *CASES,
    Case(name="three_calls", tokens=(21, 40, 3), calls=3),
    Case(
        name="prereduced",
        tokens=(20, 31, 4),
        top_k=4,
        calls=2,
        features=(("combine", "prereduced"),),
    ),
    Case(
        name="ring_pool",
        tokens=(64, 50),
        calls=2,
        grid=3,
        features=(("ring_rows", 256),),
    ),
    Case(
        name="ring_pool_prereduced",
        tokens=(40, 64),
        top_k=4,
        calls=2,
        features=(("ring_rows", 256), ("combine", "prereduced")),
    ),
    Case(
        name="transposed_biased",
        tokens=(33, 20),
        features=(
            ("w13_layout", "interleaved"),
            ("w13_transposed", True),
            ("w2_transposed", True),
            ("fc1_bias", True),
            ("fc2_bias", True),
        ),
    ),
    Case(
        name="split",
        tokens=(20, 31),
        calls=2,
        features=(("fc2_bias", True),),
        config=(("split_k", 2), ("block_n", 64)),
    ),
    Case(
        name="shared_weights",
        tokens=(64, 50),
        num_experts=4,
        grid=4,
        calls=2,
        features=(("combine", "prereduced"),),
        config=(("cluster", "weights"),),
    ),
    Case(
        name="shared_tokens",
        tokens=(40, 21),
        grid=4,
        calls=2,
        features=(("ring_rows", 256), ("w2_transposed", True)),
        config=(("cluster", "tokens"), ("token_widths", (32, 128))),
    ),
    Case(
        name="sixteen_warps",
        tokens=(33, 50),
        top_k=4,
        grid=3,
        features=(("combine", "prereduced"),),
        config=(("service_warps", 8), ("math_registers", 200), ("block_n", 128)),
    ),
    Case(
        name="small_pool",
        tokens=(80, 96),
        top_k=1,
        max_tokens=96,
        route="one",
        capacity=1,
        fails="capacity",
    ),
    Case(name="absent_pe", tokens=(25, 6, 0), fails="absent", timeout_s=1e-3),
    Case(name="hasty", tokens=(50, 60), fails="hasty", timeout_s=1e-6),
    Case(
        name="hasty_clusters",
        tokens=(150, 0),
        top_k=3,
        max_tokens=160,
        route="one",
        grid=4,
        config=(("cluster", "weights"),),
        fails="hasty",
        timeout_s=5e-5,
    ),
    Case(name="id_past_the_end", tokens=(9, 6), fails="invalid"),
    Case(name="saving", tokens=(20, 31, 4), mode="save", masked=0.2, calls=2),
    Case(name="dgrad", tokens=(17, 30), mode="dgrad", calls=2),
    Case(
        name="dgrad_prereduced",
        tokens=(20, 31),
        top_k=4,
        mode="dgrad",
        features=(
            ("combine", "prereduced"),
            ("w13_layout", "interleaved"),
            ("w13_transposed", True),
            ("w2_transposed", True),
            ("fc1_bias", True),
        ),
    ),
    Case(name="dgrad_recomputing", tokens=(64, 50), mode="dgrad", recompute=True, grid=3),
    Case(
        name="dgrad_absent_pe",
        tokens=(25, 6, 0),
        mode="dgrad",
        recompute=True,
        fails="absent",
        timeout_s=1e-3,
    ),
    Case(
        name="dgrad_hasty",
        tokens=(50, 60),
        mode="dgrad",
        recompute=True,
        fails="hasty",
        timeout_s=1e-5,
    ),
)
"""What ``megamoe verify`` runs."""

CASES_BY_NAME = {case.name: case for case in VERIFY_CASES}


def layer(case: Case, data: Inputs, *, image: Image | None = None, **options: Any) -> VgpuMoE:
    """The case's layer on vgpu; ``image`` takes the place of the case's kernel."""
    weights = weights_per_pe(case.cfg, data)
    options.setdefault("timeout_s", case.timeout_s)
    if case.mode == "forward":
        options.setdefault("config", case.kernel[1])
        options["image"] = image
    else:
        options |= {"training": True, "recompute": case.recompute}
        if image is not None:
            options["training_images"] = {case.mode: image}
    moe = VgpuMoE(case.cfg, **weights, grid=case.grid, **options)
    if case.fails == "invalid":
        for session in moe.group.sessions:
            session.check_invalid_ids = True
    return moe


def call(moe: VgpuMoE, data: Inputs, **options) -> VgpuResult:
    """One forward of ``data``."""
    return moe.forward(x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights, **options)


def expected(case: Case, data: Inputs) -> list[torch.Tensor]:
    """The oracle with the kernel's rounding points; exact on integer data."""
    return moe_oracle(case.cfg, **data.kwargs, rounding="kernel")


def differing(got: list[torch.Tensor], want: list[torch.Tensor]) -> str:
    """Where outputs differ in a bit, in words; empty if nowhere. NaN counts like any value."""
    for pe, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape != b.shape:
            return f"PE {pe}: shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        same = a.view(torch.int16) == b.bfloat16().view(torch.int16)
        if not bool(same.all()):
            return f"PE {pe}: {int((~same).sum())} of {same.numel()} values differ"
    return ""
