"""The cases and shapes of the GPU check, and the images they need.

Legend: P PEs, T tokens, H hidden, I intermediate, E experts, K top-k.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from megamoe import MoEConfig
from megamoe.cute_kernels.kernel_config import DEFAULT_SMS, KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.smem import default_config
from megamoe.lowering import kernel_problem

PES = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of a group; ``tokens`` is repeated over the PEs."""

    name: str
    tokens: tuple[int, ...] = (17, 0, 64, 1)
    hidden: int = 512
    intermediate: int = 256
    num_experts: int = 8
    top_k: int = 2
    max_tokens: int = 64
    activation: str = "relu"
    route: str = "random"
    masked: float = 0.0
    wide_ids: bool = False
    in_place: bool = False

    @property
    def exact(self) -> bool:
        """Integer data and an exact activation: every bit is known."""
        return self.activation == "relu"

    def config(self, pes: int) -> MoEConfig:
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_pes=pes,
            max_tokens=self.max_tokens,
            activation=self.activation,  # type: ignore[arg-type]
            invalid_ids="mask",
        )

    def call(self, pes: int, *, seed: int = 0) -> Call:
        """Seeded inputs of one call, on the CPU."""
        cfg = self.config(pes)
        rng = torch.Generator().manual_seed(1000 * seed + pes)

        def values(*shape: int, scale: float) -> torch.Tensor:
            if self.exact:
                return torch.randint(-1, 2, shape, generator=rng).bfloat16()
            return (torch.randn(*shape, generator=rng) * scale).bfloat16()

        w13 = values(self.num_experts, *cfg.w13_shape, scale=self.hidden**-0.5)
        w2 = values(self.num_experts, *cfg.w2_shape, scale=self.intermediate**-0.5)
        x, ids, weights = [], [], []
        for pe in range(pes):
            count = self.tokens[(pe + seed) % len(self.tokens)]
            x.append(values(count, self.hidden, scale=1.0))
            chosen = torch.rand(count, self.num_experts, generator=rng).argsort(dim=1)
            chosen = chosen[:, : self.top_k]
            if self.route == "one":
                chosen = torch.full_like(chosen, self.num_experts - 3)
            drop = torch.rand(count, self.top_k, generator=rng) < self.masked
            chosen = torch.where(drop, -1, chosen)
            ids.append(chosen.to(torch.int64 if self.wide_ids else torch.int32))
            if self.exact:
                factors = torch.randint(1, 4, (count, self.top_k), generator=rng).float()
            else:
                factors = torch.rand(count, self.top_k, generator=rng)
            weights.append(factors)
        return Call(cfg=cfg, x=x, topk_ids=ids, topk_weights=weights, w13=w13, w2=w2)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Inputs of one call of a whole group, and the global weights."""

    cfg: MoEConfig
    x: list[torch.Tensor]
    topk_ids: list[torch.Tensor]
    topk_weights: list[torch.Tensor]
    w13: torch.Tensor
    w2: torch.Tensor

    @property
    def oracle(self) -> dict[str, Any]:
        """Arguments of ``moe_oracle`` and ``error_bound``."""
        return {name: value for name, value in vars(self).items() if name != "cfg"}

    def per_pe_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        mine = [list(self.cfg.local_experts(pe)) for pe in range(self.cfg.num_pes)]
        return [self.w13[experts] for experts in mine], [self.w2[experts] for experts in mine]

    def to(self, device: torch.device) -> Call:
        """The inputs on a device; the global weights stay."""

        def move(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor.to(device) for tensor in tensors]

        return replace(
            self,
            x=move(self.x),
            topk_ids=move(self.topk_ids),
            topk_weights=move(self.topk_weights),
        )


CASES = (
    Case(name="ragged"),
    Case(name="one_expert", route="one", top_k=1, tokens=(33, 64)),
    Case(name="same_expert_in_all_slots", route="one", tokens=(20, 31)),
    Case(name="k1", top_k=1, tokens=(64, 13)),
    Case(name="k8", top_k=8, tokens=(24, 31)),
    Case(name="half_masked", masked=0.5, top_k=4, tokens=(48, 64)),
    Case(name="no_tokens", tokens=(0,)),
    Case(name="odd_tiles", hidden=576, intermediate=320, tokens=(30, 20)),
    Case(name="wide_ids", wide_ids=True),
    Case(name="in_place", in_place=True),
    Case(name="random", activation="silu"),
    Case(
        name="wide", activation="silu", hidden=1024, intermediate=384, num_experts=32, top_k=8,
        max_tokens=256, tokens=(256, 100, 0, 129),
    ),
)  # fmt: skip
SMALL = CASES[0]
"""The case of the soak, of the graph and of compute-sanitizer."""
FEW_SMS = (1, 7)
"""``num_sms`` with which it must give the same bits as with all."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A real model's layer as one GPU of an expert-parallel group sees it (P = 1 here)."""

    name: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    tokens: int

    @property
    def cfg(self) -> MoEConfig:
        return MoEConfig(
            hidden=self.hidden,
            intermediate=self.intermediate,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_pes=1,
            max_tokens=self.tokens,
            invalid_ids="mask",
        )

    @property
    def flops(self) -> float:
        return 6.0 * self.tokens * self.top_k * self.hidden * self.intermediate


SHAPES = (
    Shape(name="Qwen3-30B-A3B", hidden=2048, intermediate=768, num_experts=128, top_k=8, tokens=64),
    Shape(
        name="Qwen3-30B-A3B", hidden=2048, intermediate=768, num_experts=128, top_k=8, tokens=8192
    ),
    Shape(name="Mixtral-8x7B", hidden=4096, intermediate=14336, num_experts=8, top_k=2, tokens=64),
    Shape(
        name="Mixtral-8x7B", hidden=4096, intermediate=14336, num_experts=8, top_k=2, tokens=4096
    ),
    Shape(
        name="DeepSeek-V3, a share of 32 experts", hidden=7168, intermediate=2048, num_experts=32,
        top_k=8, tokens=512,
    ),
    Shape(
        name="DeepSeek-V3, a share of 32 experts", hidden=7168, intermediate=2048, num_experts=32,
        top_k=8, tokens=4096,
    ),
)  # fmt: skip

ROW_PULLS = {"4 KB": (4096, 1), "8 KB": (4096, 2), "14 KB": (3584, 4)}
"""Rows of the row-copy probe: (bytes of a piece, pieces), as the kernel splits such rows."""
PULLED_BYTES = {"L2": 16 << 20, "HBM": 1 << 30}
"""How much is read, so that it comes from the one or the other."""

PROBES = (
    # The whole kernel with almost no arithmetic: the row copies decide the time.
    Shape(name="rows of 4 KB", hidden=2048, intermediate=64, num_experts=8, top_k=1, tokens=8192),
    Shape(name="rows of 8 KB", hidden=4096, intermediate=64, num_experts=8, top_k=1, tokens=8192),
    Shape(name="rows of 14 KB", hidden=7168, intermediate=64, num_experts=8, top_k=1, tokens=8192),
    # One token: launch, signals, one row, one tile.
    Shape(name="one token", hidden=2048, intermediate=64, num_experts=8, top_k=1, tokens=1),
)


def problems(sms: int = DEFAULT_SMS) -> list[tuple[Problem, KernelConfig]]:
    """Every image that the check and ``tests/gpu`` load on a GPU of ``sms`` SMs, once each."""
    wanted = [(case.config(pes), sms // pes) for case in CASES for pes in PES]
    wanted += [(shape.cfg, sms) for shape in (*SHAPES, *PROBES)]
    wanted += [(SMALL.config(1), few) for few in FEW_SMS]
    jobs = []
    for cfg, each in wanted:
        problem = kernel_problem(cfg)
        jobs.append((problem, default_config(problem, sms=each)))
    return list(dict.fromkeys(jobs))


def digest(y: list[torch.Tensor]) -> str:
    """SHA-256 over the bits of a group's output."""
    sha = hashlib.sha256()
    for y_TH in y:
        sha.update(y_TH.cpu().contiguous().view(torch.int16).numpy().tobytes())
    return sha.hexdigest()
