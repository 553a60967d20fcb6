"""The tables by which the kernel finds an expert's slot: who serves which expert for whom."""

from collections.abc import Iterator, Sequence

Replicas = Sequence[Sequence[tuple[int, int]]]
"""For every expert the (PE, local index) of each of its slots, one or more."""


def routing_tables(replicas: Replicas, *, pe: int, num_pes: int) -> Iterator[tuple[str, list[int]]]:
    """Local regions of PE ``pe`` and their values.

    A slot is packed as PE << 16 | local index. ``expert_map`` holds the slot that serves the
    expert for this PE's tokens: the only one, or this PE's own (the first by local index); −1 if
    the replicas in ``replica[replica_start[e] : replica_start[e + 1]]`` take turns.

    >>> tables = dict(routing_tables([[(0, 0)], [(0, 1), (1, 0)]], pe=1, num_pes=2))
    >>> tables["expert_map"], tables["replica"], tables["slot_base"]
    ([0, 65536], [0, 1, 65536], [0, 2, 3])
    """
    packed = [[owner << 16 | local for owner, local in slots] for slots in replicas]
    expert_map = []
    for slots in packed:
        own = sorted(word for word in slots if word >> 16 == pe)
        expert_map.append(own[0] if own else slots[0] if len(slots) == 1 else -1)
    starts = [0]
    for slots in packed:
        starts.append(starts[-1] + len(slots))
    owners = [word >> 16 for slots in packed for word in slots]
    yield "expert_map", expert_map
    yield "replica_start", starts
    yield "replica", [word for slots in packed for word in slots]
    yield "slot_base", [sum(owner < first for owner in owners) for first in range(num_pes + 1)]
