"""MoEConfig: sizes and placement, what it derives and what it refuses (CASES I4, I9, S1, S2).

Replicas: test_expert_map. Activation, layouts, biases: test_config_features."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from megamoe import MoEConfig
from megamoe.config import contiguous_expert_map

GOOD: dict[str, Any] = {
    "hidden": 512,
    "intermediate": 256,
    "num_experts": 8,
    "top_k": 4,
    "num_pes": 4,
    "max_tokens": 64,
}


def refused(match: str, **change: Any) -> None:
    with pytest.raises(ValueError, match=match):
        MoEConfig(**{**GOOD, **change})


def test_derived_values() -> None:
    cfg = MoEConfig(**GOOD)
    assert cfg.experts_per_pe == (2, 2, 2, 2)
    assert [cfg.local_experts(pe) for pe in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert cfg.worst_case_rows == cfg.pool_rows == 4 * 64 * 4
    assert cfg.worst_case_distinct_rows == 4 * 64 * 2
    assert replace(cfg, capacity=100).pool_rows == 100


def test_uneven_split_and_fewer_experts_than_pes() -> None:
    """I9: 10 experts on 4 PEs, and 2 experts on 4 PEs."""
    ten = MoEConfig(**{**GOOD, "num_experts": 10})
    assert ten.experts_per_pe == (3, 3, 2, 2)
    assert ten.local_experts(1) == (3, 4, 5)
    assert ten.worst_case_distinct_rows == 4 * 64 * 3  # the ceiling, not the floor
    two = MoEConfig(**{**GOOD, "num_experts": 2, "top_k": 2})
    assert two.experts_per_pe == (1, 1, 0, 0)
    assert two.local_experts(3) == ()


@pytest.mark.parametrize("num_experts", [1, 7, 64, 1024])
@pytest.mark.parametrize("num_pes", [1, 3, 33, 64])
def test_contiguous_map_covers_every_place_once(num_experts: int, num_pes: int) -> None:
    places = contiguous_expert_map(num_experts=num_experts, num_pes=num_pes)
    assert len(places) == len(set(places)) == num_experts
    cfg = MoEConfig(
        **{**GOOD, "num_experts": num_experts, "num_pes": num_pes, "top_k": 1, "expert_map": places}
    )
    assert sum(cfg.experts_per_pe) == num_experts
    assert max(cfg.experts_per_pe) - min(cfg.experts_per_pe) <= 1


@pytest.mark.parametrize("name", ["hidden", "intermediate"])
@pytest.mark.parametrize("size", [1, 33, 100, 1408 // 2 + 4, 7167])
def test_sizes_off_the_grid_are_refused_with_the_rule(name: str, size: int) -> None:
    """S1, S2: never zeros in the tail; every width of the reports is taken."""
    refused(f"{name}={size}: must be a multiple of 8", **{name: size})
    for good in (8, 64, 96, 192, 224, 320, 448, 704, 2880, 3584, 7168):
        assert getattr(MoEConfig(**{**GOOD, name: good}), name) == good


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden": 0}, "hidden=0: must be an integer >= 1"),
        ({"hidden": 512.0}, "hidden=512.0: must be an integer"),
        ({"hidden": True}, "hidden=True: must be an integer"),
        ({"hidden": "512"}, "hidden='512': must be an integer"),
        ({"num_experts": 0, "top_k": 1}, "num_experts=0: must be an integer >= 1"),
        ({"top_k": 0}, r"top_k=0: must be an integer in 1\.\.32"),
        ({"top_k": 33, "num_experts": 64}, r"top_k=33: must be an integer in 1\.\.32"),
        ({"top_k": 4, "num_experts": 2}, "top_k=4: must be <= num_experts=2"),
        ({"num_pes": 0}, r"num_pes=0: must be an integer in 1\.\.64"),
        ({"num_pes": 65, "num_experts": 72}, r"num_pes=65: must be an integer in 1\.\.64"),
        ({"max_tokens": 0}, "max_tokens=0: must be an integer >= 1"),
        ({"max_tokens": 2**28}, "max_tokens=268435456: .* 4294967296, must be <= 2147483647"),
        ({"activation": "gelu"}, "activation='gelu': must be one of 'silu', 'gelu_tanh', 'relu'"),
        ({"weight_at": "router"}, "weight_at='router': must be one of 'act', 'combine'"),
        ({"invalid_ids": "drop"}, "invalid_ids='drop': must be one of 'mask', 'error'"),
        ({"capacity": 0}, "capacity=0: must be an integer in 1"),
    ],
)
def test_bad_values_name_argument_value_and_rule(change: dict[str, Any], match: str) -> None:
    refused(match, **change)


def test_frozen_and_keyword_only() -> None:
    cfg = MoEConfig(**GOOD)
    with pytest.raises(FrozenInstanceError):
        cfg.hidden = 64  # type: ignore[misc]
    with pytest.raises(TypeError):
        MoEConfig(512, 256, 8, 4, 4, 64)  # type: ignore[misc]


def test_local_experts_refuses_other_pes() -> None:
    with pytest.raises(ValueError, match=r"pe=4: must be an integer in 0\.\.3"):
        MoEConfig(**GOOD).local_experts(4)


def test_importing_the_package_loads_neither_compiler_nor_torch() -> None:
    code = "import sys, megamoe; print(sorted({'torch', 'cutlass', 'cuda'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
