"""The one description of an expert-parallel MoE layer that every part of megamoe reads.

Legend of the names used in shape suffixes all over the package:

    T   tokens of this PE in this call        H   hidden size
    E   experts in all                        I   intermediate size of one expert
    K   experts per token (top-k)             G   2*I, gate rows first, then up rows
    P   PEs of the expert-parallel group      L   experts of one PE (E_local)

Importing this module needs neither torch nor the kernel compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Activation = Literal["silu", "relu"]
WeightAt = Literal["act", "combine"]
InvalidIds = Literal["mask", "error"]

MAX_TOP_K = 32
MAX_PES = 64
SIZE_MULTIPLE = 64  # of H and I, in this version of the kernel
MAX_ROWS = 2**31 - 1  # a row number is a 32-bit integer on the device


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
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


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def contiguous_expert_map(*, num_experts: int, num_pes: int) -> tuple[tuple[int, int], ...]:
    """Place experts in order, PE by PE; the first ``E % P`` PEs get one more.

    Returns ``E`` pairs (PE, local index). Ten experts on four PEs are split 3, 3, 2, 2:

    >>> contiguous_expert_map(num_experts=10, num_pes=4)[5:8]
    ((1, 2), (2, 0), (2, 1))
    """
    base, extra = divmod(num_experts, num_pes)
    return tuple(
        (pe, local) for pe in range(num_pes) for local in range(base + 1 if pe < extra else base)
    )


def _checked_expert_map(
    expert_map: Any, *, num_experts: int, num_pes: int
) -> tuple[tuple[int, int], ...]:
    """Pairs of plain ints that cover every (PE, 0..L-1) exactly once, or ``ValueError``."""
    try:
        pairs = [tuple(pair) for pair in expert_map]
    except TypeError:
        raise ValueError(
            f"expert_map={expert_map!r}: must be a sequence of (pe, local_index) pairs"
        ) from None
    if len(pairs) != num_experts:
        raise ValueError(
            f"expert_map has {len(pairs)} entries: must be num_experts={num_experts} pairs "
            "(pe, local_index)"
        )
    owner: dict[tuple[int, int], int] = {}
    for expert, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"expert_map[{expert}]={pair!r}: must be a pair (pe, local_index)")
        pe = _integer(f"expert_map[{expert}].pe", pair[0], 0, num_pes - 1)
        local = _integer(f"expert_map[{expert}].local_index", pair[1], 0, num_experts - 1)
        if (pe, local) in owner:
            raise ValueError(
                f"expert_map[{expert}]={(pe, local)}: already the place of expert "
                f"{owner[pe, local]}; must give every expert a place of its own"
            )
        owner[pe, local] = expert
    for pe in range(num_pes):
        used = sorted(local for owner_pe, local in owner if owner_pe == pe)
        if used != list(range(len(used))):
            raise ValueError(
                f"expert_map: local indices of PE {pe} are {used}: must be 0..{len(used) - 1} "
                "without gaps"
            )
    return tuple((operator.index(pe), operator.index(local)) for pe, local in pairs)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, placement and conventions of one expert-parallel MoE layer. Hashable, never mutated.

    Args:
        hidden: H, a multiple of 64.
        intermediate: I, a multiple of 64. w13 of one expert is ``[2I, H]``, w2 is ``[H, I]``.
        num_experts: E, over all PEs.
        top_k: K <= min(32, E).
        num_pes: P <= 64, all inside one NVLink domain.
        max_tokens: Tmax, the most tokens one PE brings in one call; the same on every PE.
        activation: ``"silu"``: silu(gate) * up; ``"relu"``: relu(gate) * up, which is exact on
            small integers.
        weight_at: where the router weight is applied: ``"act"`` multiplies the activation before
            it is rounded, ``"combine"`` multiplies the fc2 row in the final sum. The same maths.
            The kernel of this version runs ``"act"`` only (`megamoe.checks.check_kernel_support`).
        expert_map: one (PE, local index) per expert, in any order and uneven; None is
            `contiguous_expert_map`. Every (PE, 0..L-1) appears exactly once: no replicas yet.
            A PE may own no expert.
        capacity: rows of the pool of each PE, without the padding that the kernel adds per
            expert; None is `worst_case_rows`, which always fits. A call that needs more raises
            the same error on every PE; rows are never dropped.
        invalid_ids: what an id >= E means: ``"error"`` (a `ValueError`, before the launch on CPU
            tensors, else at the next look at the kernel's status, as no id of a CUDA tensor is
            read on the host) or ``"mask"``. Either way the slot contributes nothing.

    Raises:
        ValueError: names the argument, its value and what is allowed.

    >>> cfg = MoEConfig(hidden=64, intermediate=64, num_experts=10, top_k=2, num_pes=4,
    ...                 max_tokens=8)
    >>> cfg.experts_per_pe, cfg.local_experts(1), cfg.worst_case_rows
    ((3, 3, 2, 2), (3, 4, 5), 64)
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_pes: int
    max_tokens: int
    activation: Activation = "silu"
    weight_at: WeightAt = "act"
    expert_map: Sequence[tuple[int, int]] | None = None
    capacity: int | None = None
    invalid_ids: InvalidIds = "error"

    def __post_init__(self) -> None:
        def normalise(name: str, low: int, high: int | None = None) -> None:
            object.__setattr__(self, name, _integer(name, getattr(self, name), low, high))

        normalise("hidden", 1)
        normalise("intermediate", 1)
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            if value % SIZE_MULTIPLE:
                raise ValueError(f"{name}={value}: must be a multiple of {SIZE_MULTIPLE}")
        normalise("num_experts", 1)
        normalise("top_k", 1, MAX_TOP_K)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k}: must be <= num_experts={self.num_experts}")
        normalise("num_pes", 1, MAX_PES)
        normalise("max_tokens", 1)
        if self.worst_case_rows > MAX_ROWS:
            raise ValueError(
                f"max_tokens={self.max_tokens}: num_pes * max_tokens * top_k is "
                f"{self.worst_case_rows}, must be <= {MAX_ROWS}"
            )
        _choice("activation", self.activation, ("silu", "relu"))
        _choice("weight_at", self.weight_at, ("act", "combine"))
        _choice("invalid_ids", self.invalid_ids, ("mask", "error"))
        if self.expert_map is not None:
            checked = _checked_expert_map(
                self.expert_map, num_experts=self.num_experts, num_pes=self.num_pes
            )
            object.__setattr__(self, "expert_map", checked)
        if self.capacity is not None:
            normalise("capacity", 1, MAX_ROWS)

    @property
    def placement(self) -> tuple[tuple[int, int], ...]:
        """(PE, local index) of every expert: ``expert_map``, or the contiguous default."""
        if self.expert_map is not None:
            return tuple(self.expert_map)
        return contiguous_expert_map(num_experts=self.num_experts, num_pes=self.num_pes)

    @property
    def experts_per_pe(self) -> tuple[int, ...]:
        """L of every PE; may be uneven, and 0."""
        owners = [pe for pe, _ in self.placement]
        return tuple(owners.count(pe) for pe in range(self.num_pes))

    def local_experts(self, pe: int) -> tuple[int, ...]:
        """Global ids of the experts of ``pe``, by local index."""
        pe = _integer("pe", pe, 0, self.num_pes - 1)
        mine = sorted(
            (local, expert) for expert, (owner, local) in enumerate(self.placement) if owner == pe
        )
        return tuple(expert for _, expert in mine)

    @property
    def worst_case_rows(self) -> int:
        """P*Tmax*K: every slot of every token on one PE. Reached if a token may name one expert
        in several slots, so this is what always fits."""
        return self.num_pes * self.max_tokens * self.top_k

    @property
    def worst_case_distinct_rows(self) -> int:
        """P*Tmax*min(K, L) of the fullest PE: enough when the ids of every token are distinct,
        as every top-k router gives them. Smaller than `worst_case_rows` only if L < K."""
        return self.num_pes * self.max_tokens * min(self.top_k, max(self.experts_per_pe))

    @property
    def pool_rows(self) -> int:
        """Rows the pool of each PE must hold, before padding: ``capacity`` or the worst case."""
        return self.worst_case_rows if self.capacity is None else self.capacity

    def expert_map_tensor(self) -> torch.Tensor:
        """The placement as int32 ``[E, 2]`` on the CPU, columns (PE, local index)."""
        import torch

        return torch.tensor(self.placement, dtype=torch.int32)
