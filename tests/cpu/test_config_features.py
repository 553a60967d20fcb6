"""MoEConfig: activations, weight layouts, biases and the combine (CASES A1, A3)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megamoe import MoEConfig
from megamoe import checks as checks_module
from megamoe.checks import check_kernel_support

GOOD: dict[str, Any] = {
    "hidden": 512,
    "intermediate": 256,
    "num_experts": 8,
    "top_k": 4,
    "num_pes": 4,
    "max_tokens": 64,
}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"activation_alpha": 0.0}, "activation_alpha=0.0: must be a finite number > 0"),
        ({"activation_alpha": "1"}, "activation_alpha='1': must be a finite number > 0"),
        ({"activation_alpha": 1.5}, "activation_alpha=1.5: only activation='gpt_oss' .*'silu'"),
        ({"activation": "gpt_oss", "activation_alpha": float("nan")}, "activation_alpha=nan"),
        ({"activation_limit": 7.0}, "activation_limit=7.0: must be None for activation='silu'"),
        ({"activation": "swiglu_clamped"}, "activation_limit=None: must be given for .*clamped"),
        ({"activation": "gpt_oss", "activation_limit": -7}, "activation_limit=-7: must be a fin"),
        ({"activation": "gpt_oss", "activation_limit": float("inf")}, "activation_limit=inf: must"),
        ({"activation": "gpt_oss", "activation_limit": True}, "activation_limit=True: must be a"),
        ({"activation": "relu2", "w13_layout": "up_gate"}, "w13_layout='up_gate': must be 'gate"),
        ({"activation": "relu2", "w13_layout": "interleaved"}, "w13_layout='interleaved': must"),
        ({"w13_layout": "gate_first"}, "w13_layout='gate_first': must be one of 'gate_up', 'up_g"),
        ({"w13_transposed": 1}, "w13_transposed=1: must be True or False"),
        ({"w2_transposed": None}, "w2_transposed=None: must be True or False"),
        ({"fc1_bias": "no"}, "fc1_bias='no': must be True or False"),
        ({"fc2_bias": 0}, "fc2_bias=0: must be True or False"),
        ({"combine": "ring"}, "combine='ring': must be one of 'auto', 'direct', 'prereduced'"),
    ],
)
def test_bad_values_name_argument_value_and_rule(change: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MoEConfig(**{**GOOD, **change})


def test_clamp_parameters() -> None:
    """A3: the parameters are part of the layer's identity, and none is silently ignored."""
    oss = MoEConfig(**GOOD, activation="gpt_oss")
    assert (oss.activation_alpha, oss.activation_limit) == (1.702, 7.0)
    assert oss == MoEConfig(**GOOD, activation="gpt_oss", activation_limit=np.float32(7))
    others = {
        MoEConfig(**GOOD, activation="gpt_oss", activation_limit=6.5),
        MoEConfig(**GOOD, activation="gpt_oss", activation_alpha=1.5),
        MoEConfig(**GOOD, activation="swiglu_clamped", activation_limit=7),
        MoEConfig(**GOOD, activation="swiglu_clamped", activation_limit=10),
        MoEConfig(**GOOD),
    }
    assert len(others | {oss}) == 6
    assert MoEConfig(**GOOD).activation_limit is None


def test_shapes_of_the_weights() -> None:
    gated = MoEConfig(**GOOD)
    assert gated.gated and gated.w13_rows == 512
    assert gated.w13_shape == (512, 512) and gated.w2_shape == (512, 256)
    plain = MoEConfig(**{**GOOD, "hidden": 384}, activation="relu2")
    assert not plain.gated and plain.w13_rows == 256
    assert plain.w13_shape == (256, 384) and plain.w2_shape == (384, 256)
    turned = MoEConfig(
        **{**GOOD, "hidden": 384},
        activation="gpt_oss",
        w13_layout="interleaved",
        w13_transposed=True,
        w2_transposed=True,
    )
    assert turned.w13_shape == (384, 512) and turned.w2_shape == (256, 384)


def test_combine_mode() -> None:
    def mode(**changes: Any) -> str:
        sizes = {"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8}
        return MoEConfig(**{**sizes, "num_pes": 8, "max_tokens": 64, **changes}).combine_mode

    assert mode(combine="direct") == "direct"
    assert mode(combine="prereduced", intermediate=2048) == "prereduced"
    # "auto": 0.75 * 2/3 * 7/8 * 1869 = 817.7 is where NVLink stops being the bound.
    assert [mode(intermediate=i) for i in (768, 816, 824, 2048)] == [
        "prereduced",
        "prereduced",
        "direct",
        "direct",
    ]
    assert mode(num_pes=1) == "direct"
    assert mode(top_k=1) == "direct"


@pytest.mark.parametrize("rows", [128, 300])
def test_ring_rows_are_whole_blocks(rows: int) -> None:
    with pytest.raises(ValueError, match=f"ring_rows={rows}: must be"):
        MoEConfig(**GOOD, ring_rows=rows)


FEATURES: list[tuple[str, dict[str, Any]]] = [
    ("activation", {"activation": "gelu_tanh"}),
    ("activation", {"activation": "gpt_oss"}),
    ("activation", {"activation": "swiglu_clamped", "activation_limit": 7.0}),
    ("activation", {"activation": "relu2"}),
    ("weight_at", {"weight_at": "combine"}),
    ("w13_layout", {"w13_layout": "up_gate"}),
    ("w13_layout", {"w13_layout": "interleaved"}),
    ("w13_transposed", {"w13_transposed": True}),
    ("w2_transposed", {"w2_transposed": True}),
    ("fc1_bias", {"fc1_bias": True}),
    ("fc2_bias", {"fc2_bias": True}),
    ("combine", {"combine": "prereduced"}),
    ("replicated", {"expert_map": [[(0, 0), (1, 0)], *((0, i) for i in range(1, 8))]}),
]
TABLES = {
    "activation": "KERNEL_ACTIVATIONS",
    "weight_at": "KERNEL_WEIGHT_AT",
    "w13_layout": "KERNEL_W13_LAYOUTS",
    "w13_transposed": "KERNEL_W13_TRANSPOSED",
    "w2_transposed": "KERNEL_W2_TRANSPOSED",
    "fc1_bias": "KERNEL_FC1_BIAS",
    "fc2_bias": "KERNEL_FC2_BIAS",
    "combine": "KERNEL_COMBINE",
    "replicated": "KERNEL_REPLICATED",
}


@pytest.mark.parametrize(("name", "change"), FEATURES)
def test_kernel_support_follows_its_table(
    name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value outside the table is refused by name; inside it, taken."""
    cfg = MoEConfig(**{**GOOD, **change})
    value = getattr(cfg, name)
    rest = tuple(v for v in getattr(checks_module, TABLES[name]) if v != value)
    monkeypatch.setattr(checks_module, TABLES[name], rest)
    with pytest.raises(ValueError, match=f"{name}={value!r}: the kernel of this version runs "):
        check_kernel_support(cfg)
    monkeypatch.setattr(checks_module, TABLES[name], (*rest, value))
    check_kernel_support(cfg)


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
def test_kernel_support_of_sizes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = MoEConfig(**{**GOOD, name: 72})
    monkeypatch.setattr(checks_module, "KERNEL_SIZE_MULTIPLE", 64)
    with pytest.raises(ValueError, match=f"{name}=72: the kernel .* multiples of 64 only"):
        check_kernel_support(cfg)
    monkeypatch.setattr(checks_module, "KERNEL_SIZE_MULTIPLE", 8)
    check_kernel_support(cfg)
    check_kernel_support(MoEConfig(**GOOD))
