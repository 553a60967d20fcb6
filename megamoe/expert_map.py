"""Where experts live: one place per expert, or several (replicas), and which one a row goes to.

A *place* (or slot) is (PE, local index). A row of a replicated expert is computed at exactly one of
its places: on the row's own PE if that holds the expert (the first place by local index), else at
the place number (token index mod number of places), in the order of the map (DESIGN §1). The rule
reads nothing but the map, the PE and the token's index, so every PE and every run decide alike.

Importing this module needs neither torch nor the kernel compiler.
"""

from __future__ import annotations

import operator
from typing import Any

Place = tuple[int, int]


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int within ``low..high``, or ``ValueError`` naming the argument."""
    allowed = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
    if isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be {allowed}")
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be {allowed}") from None
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={number}: must be {allowed}")
    return number


def contiguous_expert_map(*, num_experts: int, num_pes: int) -> tuple[Place, ...]:
    """Place experts in order, PE by PE; the first ``E % P`` PEs get one more.

    Returns ``E`` pairs (PE, local index). Ten experts on four PEs are split 3, 3, 2, 2:

    >>> contiguous_expert_map(num_experts=10, num_pes=4)[5:8]
    ((1, 2), (2, 0), (2, 1))
    """
    base, extra = divmod(num_experts, num_pes)
    return tuple(
        (pe, local) for pe in range(num_pes) for local in range(base + 1 if pe < extra else base)
    )


def _entry_places(expert: int, entry: Any) -> list[Any]:
    """The places named by one entry of a map: a pair, or a sequence of pairs."""
    name = f"expert_map[{expert}]"
    try:
        parts = list(entry)
    except TypeError:
        raise ValueError(f"{name}={entry!r}: must be (pe, local_index), or several") from None
    if not parts:
        raise ValueError(f"{name} is empty: every expert needs at least one place")
    pairs = parts if hasattr(parts[0], "__iter__") else [parts]
    for pair in pairs:
        if not hasattr(pair, "__len__") or len(pair) != 2:
            shown = tuple(pair) if hasattr(pair, "__iter__") else pair
            raise ValueError(f"{name}={shown!r}: must be a pair (pe, local_index)")
    return pairs


def checked_replicas(
    expert_map: Any, *, num_experts: int, num_pes: int
) -> tuple[tuple[Place, ...], ...]:
    """The places of every expert, as plain ints, that cover every (PE, 0..L-1) exactly once.

    Args:
        expert_map: E entries, each a pair (PE, local index) or a sequence of such pairs. A PE may
            hold one expert at several places (load balancers do that) and may hold none.

    Raises:
        ValueError: names the entry, its value and what is allowed.

    >>> checked_replicas([(0, 0), [(1, 0), (0, 1)]], num_experts=2, num_pes=2)
    (((0, 0),), ((1, 0), (0, 1)))
    """
    try:
        entries = list(expert_map)
    except TypeError:
        raise ValueError(
            f"expert_map={expert_map!r}: must be a sequence of (pe, local_index) pairs"
        ) from None
    if len(entries) != num_experts:
        raise ValueError(
            f"expert_map has {len(entries)} entries: must be num_experts={num_experts}, each a "
            "pair (pe, local_index) or several"
        )
    named = [_entry_places(expert, entry) for expert, entry in enumerate(entries)]
    num_slots = sum(map(len, named))
    owner: dict[Place, int] = {}
    replicas: list[tuple[Place, ...]] = []
    for expert, pairs in enumerate(named):
        places = []
        for pair in pairs:
            pe = integer(f"expert_map[{expert}].pe", pair[0], 0, num_pes - 1)
            local = integer(f"expert_map[{expert}].local_index", pair[1], 0, num_slots - 1)
            if (pe, local) in owner:
                raise ValueError(
                    f"expert_map[{expert}]={(pe, local)}: already the place of expert "
                    f"{owner[pe, local]}; every place must hold one expert"
                )
            owner[pe, local] = expert
            places.append((pe, local))
        replicas.append(tuple(places))
    for pe in range(num_pes):
        used = sorted(local for owner_pe, local in owner if owner_pe == pe)
        if used != list(range(len(used))):
            raise ValueError(
                f"expert_map: local indices of PE {pe} are {used}: must be 0..{len(used) - 1} "
                "without gaps"
            )
    return tuple(replicas)


def place_of_row(places: tuple[Place, ...], *, pe: int, token: int) -> Place:
    """The place that computes a row of token ``token`` of PE ``pe``: the rule at the top.

    >>> [place_of_row(((0, 0), (2, 0), (2, 1)), pe=1, token=t) for t in range(4)]
    [(0, 0), (2, 0), (2, 1), (0, 0)]
    >>> place_of_row(((0, 0), (2, 1), (2, 0)), pe=2, token=7)
    (2, 0)
    """
    own = [place for place in places if place[0] == pe]
    return min(own) if own else places[token % len(places)]
