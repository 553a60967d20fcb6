"""Expert maps: places, replicas, and which replica computes a row (CASES A10)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megamoe import MoEConfig
from megamoe.expert_map import checked_replicas, place_of_row

GOOD: dict[str, Any] = {
    "hidden": 512,
    "intermediate": 256,
    "num_experts": 8,
    "top_k": 4,
    "num_pes": 4,
    "max_tokens": 64,
}
REDUNDANT = {**GOOD, "num_experts": 4, "top_k": 2, "num_pes": 2, "expert_map": [
    [(0, 0), (1, 1), (1, 2)], (0, 1), (0, 2), (1, 0),
]}  # fmt: skip
"""CASES A10: six slots [0, 1, 2 | 3, 0, 0] on two PEs; PE 1 holds expert 0 twice."""


def test_explicit_map() -> None:
    places = [(1, 1), (0, 0), (1, 0), (3, 0), (2, 0), (1, 2), (0, 1), (3, 1)]
    cfg = MoEConfig(**GOOD, expert_map=places)
    assert cfg.experts_per_pe == (2, 3, 1, 2)
    assert cfg.local_experts(1) == (2, 0, 5)
    assert cfg.placement == tuple(places) and not cfg.replicated and cfg.num_slots == 8
    tensor_E2 = cfg.expert_map_tensor()
    assert tensor_E2.dtype == torch.int32
    assert [tuple(pair) for pair in tensor_E2.tolist()] == places
    # Any integer type and container is taken, a lone place may stand in a list of its own, and the
    # result is hashable and equal.
    for spelling in (np.array(places), [[place] for place in places]):
        same = MoEConfig(**GOOD, expert_map=spelling)
        assert same == cfg and hash(same) == hash(cfg)


def test_every_row_has_one_place_without_replicas() -> None:
    cfg = MoEConfig(**GOOD)
    for expert, place in enumerate(cfg.placement):
        assert {cfg.route_of(pe, t, expert) for pe in range(4) for t in range(5)} == {place}


@pytest.mark.parametrize(
    ("places", "match"),
    [
        ([(0, 0)] * 7, "expert_map has 7 entries: must be num_experts=8"),
        ([(i % 4, 0) for i in range(8)], r"expert_map\[4\]=\(0, 0\): already the place of"),
        ([(i % 4, i // 4 * 2) for i in range(8)], "local indices of PE 0 are .0, 2.*without gaps"),
        ([(4, 0)] + [(i % 4, i // 4) for i in range(1, 8)], r"expert_map\[0\].pe=4.*0..3"),
        ([(-1, 0)] + [(i % 4, i // 4) for i in range(1, 8)], r"expert_map\[0\].pe=-1.*0..3"),
        ([(0, 0, 0)] * 8, r"expert_map\[0\]=\(0, 0, 0\): must be a pair"),
        ([(0.5, 0)] * 8, r"expert_map\[0\].pe=0.5"),
        (5, "expert_map=5: must be a sequence"),
        ([5] * 8, r"expert_map\[0\]=5: must be \(pe, local_index\), or several"),
        ([[]] + [(0, i) for i in range(7)], r"expert_map\[0\] is empty: every expert needs"),
        ([[(0, 0), (0, 0)]] + [(0, i) for i in range(1, 8)], "already the place of expert 0"),
        ([[(0, 0), (1, 9)]] + [(0, i) for i in range(1, 8)], r"local_index=9: .* 0\.\.8"),
        ([[(0, 0), (1, 1)]] + [(0, i) for i in range(1, 8)], "local indices of PE 1 are .1.:"),
        ([[(0, 0), 3]] + [(0, i) for i in range(1, 8)], r"expert_map\[0\]=3: must be a pair"),
    ],
)  # fmt: skip
def test_bad_maps(places: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MoEConfig(**GOOD, expert_map=places)


def test_redundant_experts_of_the_report() -> None:
    cfg = MoEConfig(**REDUNDANT)
    assert cfg.replicated and cfg.num_slots == 6 and cfg.experts_per_pe == (3, 3)
    assert cfg.replicas == (((0, 0), (1, 1), (1, 2)), ((0, 1),), ((0, 2),), ((1, 0),))
    assert cfg.local_experts(0) == (0, 1, 2) and cfg.local_experts(1) == (3, 0, 0)
    # Both PEs hold expert 0, so each uses its own: PE 1 the first of its two.
    assert {cfg.route_of(0, t, 0) for t in range(9)} == {(0, 0)}
    assert {cfg.route_of(1, t, 0) for t in range(9)} == {(1, 1)}
    # Distinct ids of a token reach at most three places of PE 0 and two of PE 1; K is 2.
    assert cfg.worst_case_distinct_rows == 2 * 64 * 2
    with pytest.raises(ValueError, match=r"6 places for num_experts=4: .*no single place"):
        _ = cfg.placement
    with pytest.raises(ValueError, match="no single place"):
        cfg.expert_map_tensor()


def test_capacity_counts_a_twice_held_expert_once() -> None:
    """A token names an expert once, so the second copy on the PE adds no row."""
    cfg = MoEConfig(**{**GOOD, "num_experts": 4, "num_pes": 2, "expert_map": [
        [(0, 0), (0, 1), (0, 2)], (0, 3), (1, 0), (1, 1),
    ]})  # fmt: skip
    assert cfg.experts_per_pe == (4, 2)
    assert cfg.worst_case_distinct_rows == 2 * 64 * 2


def test_a_pe_without_the_expert_goes_round_the_replicas_by_token() -> None:
    places = ((2, 1), (0, 0), (2, 0))
    assert [place_of_row(places, pe=1, token=t) for t in range(6)] == [*places, *places]
    assert [place_of_row(places, pe=2, token=t) for t in range(3)] == [(2, 0)] * 3
    assert [place_of_row(places, pe=0, token=t) for t in range(3)] == [(0, 0)] * 3


def test_places_of_a_map_are_all_reachable_and_counted_once() -> None:
    cfg = MoEConfig(**{**GOOD, "expert_map": [
        [(0, 0), (1, 0)], [(2, 0), (3, 0)], (0, 1), (1, 1), (2, 1), (3, 1), (3, 2),
        [(0, 2), (1, 2), (2, 2)],
    ]})  # fmt: skip
    assert sum(cfg.experts_per_pe) == cfg.num_slots == 12
    held = [expert for pe in range(4) for expert in cfg.local_experts(pe)]
    assert sorted(held) == [0, 0, 1, 1, 2, 3, 4, 5, 6, 7, 7, 7]
    for expert, places in enumerate(cfg.replicas):
        used = {cfg.route_of(pe, t, expert) for pe in range(4) for t in range(3)}
        assert used == set(places)
        for pe, local in places:
            assert cfg.local_experts(pe)[local] == expert


def test_route_of_refuses_what_does_not_exist() -> None:
    cfg = MoEConfig(**REDUNDANT)
    for args, match in (
        ((2, 0, 0), r"pe=2: must be an integer in 0\.\.1"),
        ((0, -1, 0), "token=-1: must be an integer >= 0"),
        ((0, 0, 4), r"expert=4: must be an integer in 0\.\.3"),
    ):
        with pytest.raises(ValueError, match=match):
            cfg.route_of(*args)


def test_checked_replicas_gives_plain_ints() -> None:
    (places,) = checked_replicas([np.array([[0, 1], [0, 0]])], num_experts=1, num_pes=1)
    assert places == ((0, 1), (0, 0))
    assert all(type(number) is int for place in places for number in place)
