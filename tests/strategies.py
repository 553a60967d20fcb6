"""Hypothesis strategies: small layers with every feature of `MoEConfig`, and calls of them.

Sizes shrink towards one token, one expert and one PE; tensors come from a drawn seed
(`megamoe.verify.inputs.make_inputs`), so an example prints as a config and a few numbers.

Legend: P PEs, T tokens, H hidden, E experts, K experts per token, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from hypothesis import strategies as st

from megamoe import MoEConfig, checks
from megamoe.config import (
    ACTIVATIONS,
    CLAMPED,
    NON_GATED,
    SIZE_MULTIPLE,
    Activation,
    Combine,
    W13Layout,
    WeightAt,
)
from megamoe.cute_kernels.kernel_config import KernelConfig, check_fits
from megamoe.cute_kernels.problem import BLOCK_K, Problem
from megamoe.cute_kernels.smem import default_config
from megamoe.verify.inputs import Inputs, make_inputs

MAX_SIZE = 320
MAX_EXPERTS = 12
MAX_PES = 4
MAX_TOKENS = 40
EXACT: tuple[Activation, ...] = ("relu", "relu2")
"""Activations that map small integers to integers."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a layer. ``inputs`` builds the tensors, the same at every time."""

    cfg: MoEConfig
    tokens: tuple[int, ...]
    integers: bool
    seed: int
    masked: float
    repeated: float
    residual: bool
    id_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype

    def inputs(self) -> Inputs:
        options = {name: value for name, value in vars(self).items() if name != "cfg"}
        return make_inputs(self.cfg, **{**options, "tokens": list(self.tokens)})


@st.composite
def expert_maps(
    draw: st.DrawFn, *, num_experts: int, num_pes: int, replicas: bool
) -> tuple[Any, ...] | None:
    """None, or places in any order, uneven; with ``replicas`` up to three for an expert, on any
    PEs, one PE twice included."""
    if draw(st.booleans()):
        return None
    most = 3 if replicas else 1
    counts = [draw(st.integers(1, most)) for _ in range(num_experts)]
    slots = [(expert, n) for expert, count in enumerate(counts) for n in range(count)]
    used = [0] * num_pes
    place = {}
    for slot in draw(st.permutations(slots)):
        pe = draw(st.integers(0, num_pes - 1))
        place[slot] = (pe, used[pe])
        used[pe] += 1
    return tuple(
        tuple(place[expert, n] for n in range(count)) for expert, count in enumerate(counts)
    )


@st.composite
def layers(
    draw: st.DrawFn,
    *,
    activations: tuple[Activation, ...] = ACTIVATIONS,
    kernel: bool = False,
    max_size: int = MAX_SIZE,
) -> MoEConfig:
    """Any small layer.

    Args:
        activations: to draw from.
        kernel: only what `megamoe.checks.check_kernel_support` takes.
        max_size: largest H and I.
    """

    def pick(table: tuple[Any, ...], everything: tuple[Any, ...]) -> Any:
        return draw(st.sampled_from([v for v in everything if not kernel or v in table]))

    multiple = checks.KERNEL_SIZE_MULTIPLE if kernel else SIZE_MULTIPLE
    sizes = st.integers(1, max_size // multiple).map(lambda n: n * multiple)
    num_experts = draw(st.integers(1, MAX_EXPERTS))
    num_pes = draw(st.integers(1, MAX_PES))
    activation = pick(checks.KERNEL_ACTIVATIONS, activations)
    layouts = get_args(W13Layout) if activation not in NON_GATED else ("gate_up",)
    flags = (False, True)
    return MoEConfig(
        hidden=draw(sizes),
        intermediate=draw(sizes),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(8, num_experts))),
        num_pes=num_pes,
        max_tokens=draw(st.integers(1, MAX_TOKENS)),
        activation=activation,
        activation_alpha=draw(st.sampled_from([1.702, 1.0])) if activation == "gpt_oss" else 1.702,
        # Gate and up are near 1, so the lower limits clamp many of them.
        activation_limit=draw(st.sampled_from([7.0, 1.0, 0.3])) if activation in CLAMPED else None,
        w13_layout=pick(checks.KERNEL_W13_LAYOUTS, layouts),
        w13_transposed=pick(checks.KERNEL_W13_TRANSPOSED, flags),
        w2_transposed=pick(checks.KERNEL_W2_TRANSPOSED, flags),
        fc1_bias=pick(checks.KERNEL_FC1_BIAS, flags),
        fc2_bias=pick(checks.KERNEL_FC2_BIAS, flags),
        weight_at=pick(checks.KERNEL_WEIGHT_AT, get_args(WeightAt)),
        expert_map=draw(
            expert_maps(
                num_experts=num_experts,
                num_pes=num_pes,
                replicas=not kernel or True in checks.KERNEL_REPLICATED,
            )
        ),
        combine=pick(checks.KERNEL_COMBINE, get_args(Combine)),
        ring_rows=draw(st.sampled_from([None, None, 256, 384])),
    )


@st.composite
def calls(
    draw: st.DrawFn,
    *,
    integers: bool,
    kernel: bool = False,
    residual: bool = True,
    max_size: int = MAX_SIZE,
) -> Call:
    """Any call of any small layer.

    Args:
        integers: small-integer data, and only activations that are exact on it.
        kernel, max_size: see `layers`.
        residual: draw whether there is a residual; False: there is none.
    """
    activations = EXACT if integers else ACTIVATIONS
    cfg = draw(layers(activations=activations, kernel=kernel, max_size=max_size))
    bias_dtype = draw(st.sampled_from(checks.BIAS_DTYPES))
    return draw(calls_of(cfg, integers=integers, residual=residual, bias_dtype=bias_dtype))


@st.composite
def calls_of(
    draw: st.DrawFn, cfg: MoEConfig, *, integers: bool, bias_dtype: torch.dtype, residual: bool
) -> Call:
    """Any call of a layer; arguments as in `calls`."""
    counts = st.integers(0, cfg.max_tokens)
    share = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    return Call(
        cfg=cfg,
        tokens=tuple(draw(st.tuples(*[counts] * cfg.num_pes))),
        integers=integers,
        seed=draw(st.integers(0, 2**16)),
        masked=draw(share),
        repeated=draw(share),
        residual=residual and draw(st.booleans()),
        id_dtype=draw(st.sampled_from(checks.ID_DTYPES)),
        weight_dtype=draw(st.sampled_from(checks.WEIGHT_DTYPES)),
        bias_dtype=bias_dtype,
    )


@st.composite
def kernel_configs(draw: st.DrawFn, problem: Problem) -> KernelConfig:
    """A valid config: any tile, split, cluster, warps and depth that serve the problem."""
    tile = draw(
        st.sampled_from(
            [
                {},
                {"service_warps": 8, "math_registers": 200},
                {"block_n": 128},
                {"block_n": 64},
                {"cluster": "weights"},
                {"cluster": "tokens"},
            ]
        )
    )
    parts = draw(st.integers(1, min(4, -(-problem.intermediate // BLOCK_K))))
    changes: dict[str, Any] = {
        "stages": draw(st.integers(2, 3)),
        "ring_slots": 2,
        "lag_waves": draw(st.integers(1, 3)),
        "split_k": 1 if "cluster" in tile else parts,
    }
    config = replace(default_config(problem), **(changes | tile))
    try:
        check_fits(problem, config)
    except ValueError:
        # What a layer's storage or pool refuses is tested by name.
        return replace(default_config(problem), **changes)
    return config
