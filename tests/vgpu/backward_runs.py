"""One training step of any layer on vgpu against the oracle: bit for bit on integers, else by the
derived bound."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megamoe import MoEConfig
from megamoe.error_bound_backward import backward_error_bound
from megamoe.reference_backward import Gradients, moe_backward_oracle
from megamoe.testing import VgpuMoE
from megamoe.verify.inputs import Inputs, make_inputs, weights_per_pe

WEIGHTS = ("w13", "w2", "b13", "b2")
WAYS = [("round_robin", "eager"), ("random", "late"), ("starve", "random")]
"""Schedules and completion policies."""
PARTS = ("dx", "d_topk_weights", *(f"d{name}" for name in WEIGHTS))


@dataclass(frozen=True, kw_only=True)
class Step:
    """A layer and one call of it; ``tokens`` are of four PEs, the first P count."""

    name: str
    cfg: dict[str, Any] = field(default_factory=dict)
    tokens: tuple[int, ...] = (9, 0, 17, 1)
    masked: float = 0.15
    repeated: float = 0.0
    integers: bool = False

    def config(self, num_pes: int) -> MoEConfig:
        sizes: dict[str, Any] = {
            "hidden": 72, "intermediate": 88, "num_experts": 6, "top_k": 2, "max_tokens": 24,
        }  # fmt: skip
        return MoEConfig(**(sizes | {"num_pes": num_pes} | self.cfg))

    def inputs(self, num_pes: int) -> Inputs:
        return make_inputs(
            self.config(num_pes),
            tokens=list(self.tokens[:num_pes]),
            integers=self.integers,
            masked=self.masked,
            repeated=self.repeated,
            seed=3,
        )


def output_gradients(step: Step, data: Inputs) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(11)
    if step.integers:
        return [torch.randint(-1, 2, x.shape, generator=rng).bfloat16() for x in data.x]
    return [torch.randn(x.shape, generator=rng).bfloat16() for x in data.x]


def layer_of(cfg: MoEConfig, data: Inputs, **options: Any) -> VgpuMoE:
    return VgpuMoE(cfg, **weights_per_pe(cfg, data), training=True, **options)


def train_step(moe: VgpuMoE, data: Inputs, dy: list[torch.Tensor]) -> Gradients:
    """Forward, dgrad, wgrad: one launch each on every PE."""
    done = moe.forward(
        x=data.x, topk_ids=data.topk_ids, topk_weights=data.topk_weights, save_for_backward=True
    )
    assert done.saved is not None
    back = moe.backward_dgrad(dy, done.saved)
    made = moe.backward_wgrad(done.saved)
    ones = [1] * moe.cfg.num_pes
    assert done.launches == back.launches == made.launches == ones
    lists = {name: [each.get(name) for each in made.grads] for name in WEIGHTS}
    parts = {f"d{n}": None if each[0] is None else each for n, each in lists.items()}
    return Gradients(dx=back.dx, d_topk_weights=back.d_topk_weights, dresidual=None, **parts)  # type: ignore[arg-type]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    """Every number equal and none of them NaN; zeros may differ in sign."""
    for pe, (a, b) in enumerate(zip(got, want, strict=True)):
        off = (a != b.to(a.dtype)).nonzero()
        assert a.shape == b.shape and not len(off), f"PE {pe}: {len(off)} differ, first {off[0]}"


def check(step: Step, num_pes: int, **options: Any) -> Gradients:
    """Run the step and compare every gradient."""
    cfg, data = step.config(num_pes), step.inputs(num_pes)
    dy = output_gradients(step, data)
    got = train_step(layer_of(cfg, data, **options), data, dy)
    rounded = moe_backward_oracle(cfg, dy=dy, **data.kwargs, dtype=torch.float32, rounding="kernel")
    exact = moe_backward_oracle(cfg, dy=dy, **data.kwargs)
    bound = backward_error_bound(cfg, dy=dy, **data.kwargs)
    for name in PARTS:
        mine, model, true, most = (getattr(g, name) for g in (got, rounded, exact, bound))
        assert (mine is None) == (model is None), name
        if mine is None:
            continue
        if step.integers:
            assert_same(mine, model)
            continue
        for pe in range(num_pes):
            excess = (mine[pe].double() - true[pe]).abs() - most[pe]
            assert bool((excess <= 0).all()), f"{name}, PE {pe}: {float(excess.max()):.3e} over"
    return got


GPT_OSS = {
    "activation": "gpt_oss", "activation_limit": 0.8, "w13_layout": "interleaved",
    "w13_transposed": True, "w2_transposed": True, "fc1_bias": True, "fc2_bias": True,
    "weight_at": "combine", "combine": "direct",
}  # fmt: skip
STEPS = [
    Step(name="silu"),
    Step(name="integers, relu, direct", cfg={"activation": "relu", "combine": "direct"},
         integers=True, repeated=0.3),
    Step(name="gpt-oss", cfg=GPT_OSS),
    Step(name="integers, relu2, biases", integers=True,
         cfg={"activation": "relu2", "combine": "prereduced", "fc1_bias": True, "fc2_bias": True}),
    Step(name="gelu, weight in the combine",
         cfg={"activation": "gelu_tanh", "weight_at": "combine", "fc2_bias": True}),
    Step(name="clamped swiglu, up first",
         cfg={"activation": "swiglu_clamped", "activation_limit": 0.7, "w13_layout": "up_gate",
              "fc1_bias": True}),
    Step(name="interleaved rows", cfg={"w13_layout": "interleaved", "w2_transposed": True}),
    Step(name="transposed w13, up first, integers", integers=True,
         cfg={"activation": "relu", "w13_transposed": True, "w13_layout": "up_gate",
              "weight_at": "combine", "combine": "prereduced"}),
    Step(name="one expert a token", cfg={"num_experts": 4, "top_k": 1}, masked=0.0),
    Step(name="k of eight, repeated ids", cfg={"top_k": 6}, repeated=0.6, masked=0.3),
    Step(name="all masked", masked=1.0),
    Step(name="fewer experts than PEs, integers", integers=True,
         cfg={"num_experts": 2, "activation": "relu", "fc1_bias": True, "fc2_bias": True,
              "bias_dtype": "fp32"}),
    Step(name="uneven experts, interleaved and transposed", tokens=(3, 20, 0, 5),
         cfg={"num_experts": 5, "top_k": 4, "w13_layout": "interleaved", "w13_transposed": True,
              "combine": "prereduced", "fc1_bias": True}),
    Step(name="tails of 8", cfg={"hidden": 8, "intermediate": 8, "top_k": 3}),
    Step(name="sizes beyond a tile", cfg={"hidden": 264, "intermediate": 200}),
]  # fmt: skip


def with_cfg(step: Step, **more: Any) -> Step:
    return replace(step, cfg={**step.cfg, **more})
