"""Saved calls as forwards and dgrads would leave them, the wgrad kernel on vgpu, and the oracle.

Legend: P PEs, S expert slots, L experts of this PE, M pool rows, H hidden, I intermediate.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megamoe.cute_kernels.build import compile_wgrad
from megamoe.cute_kernels.image import Image
from megamoe.cute_kernels.problem import BLOCK_M, Problem
from megamoe.cute_kernels.wgrad_tables import WGRAD_ROLES, WgradConfig, block_of
from megamoe.runtime.devices.base import Allocation
from megamoe.runtime.devices.vgpu import VgpuDevice
from megamoe.runtime.session import region_view
from megamoe.runtime.vgpu.world import World
from megamoe.runtime.wgrad import BoundSaved, WgradLauncher

SPARE_BLOCKS = 1
"""Pool blocks that no expert uses."""


@dataclass(frozen=True, kw_only=True)
class WgradCase:
    """A layer on one PE and the rows of its experts.

    ``rows[s][e]``: rows of local expert e in saved call s. ``other_slots``: slots of other PEs in
    front of this one's. The rest as in `Problem` and `WgradConfig`.
    """

    hidden: int = 136
    intermediate: int = 72
    rows: tuple[tuple[int, ...], ...] = ((70, 0, 128, 1),)
    num_pes: int = 2
    other_slots: int = 3
    activation: str = "relu"
    w13_layout: str = "gate_up"
    w13_transposed: bool = False
    w2_transposed: bool = False
    bias: str = "none"
    weight_at: str = "act"
    grad: str = "f32"
    bias_grad: str = "f32"
    stages: int = 2

    @property
    def experts(self) -> int:
        return len(self.rows[0])

    @property
    def problem(self) -> Problem:
        slots = self.experts + self.other_slots
        blocks = max(sum(-(-n // BLOCK_M) for n in rows) for rows in self.rows) + SPARE_BLOCKS
        return Problem(
            hidden=self.hidden, intermediate=self.intermediate, num_experts=slots,
            experts_per_pe=max(self.experts, -(-slots // self.num_pes)), top_k=1,
            num_pes=self.num_pes, max_tokens=64, pool_rows=BLOCK_M * blocks,
            activation=self.activation, w13_layout=self.w13_layout,
            w13_transposed=self.w13_transposed, w2_transposed=self.w2_transposed,
            bias13=self.bias, bias2=self.bias, weight_at=self.weight_at,
        )  # fmt: skip

    @property
    def config(self) -> WgradConfig:
        return WgradConfig(grad=self.grad, bias_grad=self.bias_grad, stages=self.stages)


@functools.lru_cache(maxsize=8)
def image_of(problem: Problem, config: WgradConfig) -> Image:
    """Compiled once a process."""
    return compile_wgrad(problem=problem, config=config)


@dataclass
class SavedData:
    """Rows of one saved call: per expert ``x``, ``gate``, ``up``, ``dy``, ``wact``, ``weight``."""

    experts: list[dict[str, torch.Tensor]] = field(default_factory=list)


def draw(case: WgradCase, rows: Sequence[int], seed: int, integers: bool) -> SavedData:
    """Rows of one saved call. Small integers keep every sum exact in fp32; most
    sums of many rows must be rounded in bf16."""
    g = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        if integers:
            return torch.randint(-3, 16, shape, generator=g).to(torch.bfloat16)
        return torch.randn(shape, generator=g).to(torch.bfloat16)

    data = SavedData()
    for n in rows:
        data.experts.append(
            {
                "x": values(n, case.hidden),
                "gate": values(n, case.intermediate),
                "up": values(n, case.intermediate),
                "dy": values(n, case.hidden),
                "wact": values(n, case.intermediate),
                "weight": torch.randint(0, 3, (n,), generator=g).float()
                if integers else torch.rand(n, generator=g),
            }
        )  # fmt: skip
    return data


def w13_of(case: WgradCase, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows of gate and up (dimension 0) in the order of w13."""
    if not case.problem.gated:
        return up
    if case.w13_layout == "interleaved":
        return torch.stack((gate, up), 1).flatten(0, 1)
    return torch.cat((up, gate) if case.w13_layout == "up_gate" else (gate, up))


def oracle(
    case: WgradCase, calls: Sequence[SavedData], *, absolute: bool = False
) -> dict[str, Any]:
    """Gradients of all experts in fp64; ``absolute``: with the operands' magnitudes."""
    out: dict[str, list[torch.Tensor]] = {"w13": [], "w2": [], "b13": [], "b2": []}
    for e in range(case.experts):
        parts = {
            name: torch.cat([call.experts[e][name] for call in calls]).double()
            for name in calls[0].experts[e]
        }
        if absolute:
            parts = {name: value.abs() for name, value in parts.items()}
        x, gate, up, dy = (parts[name] for name in ("x", "gate", "up", "dy"))
        w13, w2 = w13_of(case, gate.T @ x, up.T @ x), dy.T @ parts["wact"]
        weighted = dy * parts["weight"][:, None] if case.weight_at == "combine" else dy
        out["w13"].append(w13.T if case.w13_transposed else w13)
        out["w2"].append(w2.T if case.w2_transposed else w2)
        out["b13"].append(w13_of(case, gate.sum(0), up.sum(0)))
        out["b2"].append(weighted.sum(0))
    names = ("w13", "w2") if case.bias == "none" else tuple(out)
    return {name: torch.stack(out[name]) for name in names}


class Wgrad:
    """One PE of a case on vgpu.

    ``options`` are those of ``World``; ``image`` replaces the compiled kernel, e.g. by a mutant.
    """

    def __init__(
        self, case: WgradCase, *, grid: int = 2, image: Image | None = None, **options: Any
    ) -> None:
        self.case, self.problem = case, case.problem
        self.world = World(pes=1, **options)
        self.device = VgpuDevice(self.world, 0, WGRAD_ROLES)
        self.launcher = WgradLauncher(
            problem=self.problem, config=case.config,
            image=image or image_of(self.problem, case.config), device=self.device,
            first_slot=case.other_slots, experts=case.experts, grid=grid,
        )  # fmt: skip

    def save(self, data: SavedData, rows: Sequence[int]) -> BoundSaved:
        """Lay a saved call out in fresh memory: 0xFF, NaN in every type, where no row lies."""
        blocks: dict[str, Allocation] = {}
        for name in ("saved", "dgrad"):
            blocks[name] = self.device.allocate(block_of(self.problem, name).nbytes, name)
        views = {
            region.name: region_view(block_of(self.problem, name), blocks[name], region.name)
            for name in blocks
            for region in block_of(self.problem, name).regions
        }
        counts_PS = views["route_count"]
        counts_PS.fill_(5)  # rows of other PEs' experts
        for e, n in enumerate(rows):
            # All but a third of the rows come from the last source.
            share = [n // 3] + [0] * (self.problem.num_pes - 2) + [n - n // 3]
            slot = self.case.other_slots + e
            counts_PS[:, slot] = torch.tensor(share[-self.problem.num_pes :] if
                                              self.problem.num_pes > 1 else [n])  # fmt: skip
        first = 0
        for e, n in enumerate(rows):
            source = data.experts[e]
            segment = slice(first, first + n)
            for name in ("x", "dy", "wact", "up"):
                views[name][segment] = source[name]
            views["row_weight"][segment] = source["weight"]
            if self.problem.paired_rows:
                pairs = torch.stack((source["gate"], source["up"]), 2)
                views["dgu"][segment] = pairs.flatten(1)
                # As dgrad leaves them: the pre-activations.
                views["gate"][segment] = views["up"][segment] = 77.0
            elif self.problem.gated:
                views["gate"][segment] = source["gate"]
            first += -(-n // BLOCK_M) * BLOCK_M
        return self.launcher.bind_saved(
            saved=blocks["saved"].address, dgrad=blocks["dgrad"].address
        )

    def gradients(self, fill: float = float("nan")) -> dict[str, torch.Tensor]:
        """Fresh gradients of every name."""
        return {
            name: torch.full((self.case.experts, *shape), fill, dtype=self.launcher.dtype_of(name))
            for name, shape in self.launcher.shapes.items()
        }


def run(
    case: WgradCase,
    *,
    seed: int = 0,
    integers: bool = True,
    accumulate: bool = False,
    **options: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """One launch of a case: (gradients, oracle in fp64, report). Accumulates onto threes."""
    wgrad = Wgrad(case, seed=seed, **options)
    calls = [draw(case, rows, 100 * seed + s, integers) for s, rows in enumerate(case.rows)]
    bound = [wgrad.save(data, rows) for data, rows in zip(calls, case.rows, strict=True)]
    grads = wgrad.gradients(3.0 if accumulate else float("nan"))
    wgrad.launcher.launch(bound, accumulate=accumulate, **grads)
    report = wgrad.world.run(raise_on_finding=True)
    want = oracle(case, calls)
    if accumulate:
        want = {name: value + 3.0 for name, value in want.items()}
    return grads, want, report
