"""The one description of an expert-parallel MoE layer that every part of megamoe reads.

Legend of the names used in shape suffixes all over the package:

    T   tokens of this PE in this call        H   hidden size
    E   experts in all                        I   intermediate size of one expert
    K   experts per token (top-k)             G   fc1 rows: 2*I (gate and up), or I if not gated
    P   PEs of the expert-parallel group      L   experts of one PE (E_local)

Importing this module needs neither torch nor the kernel compiler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, get_args

from megamoe.expert_map import (
    Place,
    checked_replicas,
    contiguous_expert_map,
    integer,
    place_of_row,
)

if TYPE_CHECKING:
    import torch

Activation = Literal["silu", "gelu_tanh", "relu", "gpt_oss", "swiglu_clamped", "relu2"]
W13Layout = Literal["gate_up", "up_gate", "interleaved"]
WeightAt = Literal["act", "combine"]
InvalidIds = Literal["mask", "error"]
Combine = Literal["auto", "direct", "prereduced"]
BiasDtype = Literal["bf16", "fp32"]
CombineMode = Literal["direct", "prereduced"]

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
NON_GATED: tuple[Activation, ...] = ("relu2",)
CLAMPED: tuple[Activation, ...] = ("gpt_oss", "swiglu_clamped")
GPT_OSS_ALPHA = 1.702
RING_MULTIPLE = 128  # rows of one block of the kernel's pool
MMA_FLOPS_PER_NVLINK_BYTE = 1869  # 700 TF of bf16 to 375 GB/s, both achieved rates
GPT_OSS_LIMIT = 7.0
MAX_TOP_K = 32
MAX_PES = 64
SIZE_MULTIPLE = 8  # of H and I: rows are whole 16-byte pieces, as bulk and tensor copies want
MAX_ROWS = 2**31 - 1  # a row number is a 32-bit integer on the device


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, allowed))}")


def _positive(name: str, value: Any) -> float:
    """``value`` as a finite float > 0, or ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r}: must be a finite number > 0")
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}={value!r}: must be a finite number > 0")
    return number


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes, placement and conventions of one expert-parallel MoE layer. Hashable, never mutated.

    What the kernel of this version runs of it: `megamoe.checks.check_kernel_support`.

    Args:
        hidden: H, a multiple of 8.
        intermediate: I, a multiple of 8. w13 of one expert is ``[2I, H]`` (``[I, H]`` if not
            gated), w2 is ``[H, I]``.
        num_experts: E, over all PEs.
        top_k: K <= min(32, E).
        num_pes: P <= 64, all inside one NVLink domain.
        max_tokens: Tmax, the most tokens one PE brings in one call; the same on every PE.
        activation: of gate g and up u, both fc1 outputs with their bias:
            ``"silu"`` g·sigmoid(g)·u; ``"gelu_tanh"`` gelu(g)·u, gelu in its tanh form;
            ``"relu"`` max(g, 0)·u, exact on small integers;
            ``"gpt_oss"`` g·sigmoid(alpha·g)·(u + 1) after g = min(g, limit) and
            u = clamp(u, -limit, limit);
            ``"swiglu_clamped"`` g·sigmoid(g)·u after the same clamps;
            ``"relu2"`` max(g, 0)², not gated: there is no u.
        activation_alpha: of ``"gpt_oss"`` only.
        activation_limit: of ``"gpt_oss"`` (None becomes 7.0) and ``"swiglu_clamped"`` (must be
            given); None for all others.
        w13_layout: order of the 2I rows of w13 and of its bias: ``"gate_up"`` (all gate rows
            first), ``"up_gate"``, or ``"interleaved"`` (g, u, g, u, ...). Not gated: ``"gate_up"``.
        w13_transposed: w13 of one expert is ``[H, 2I]`` (or ``[H, I]``): `w13_layout` then orders
            the columns.
        w2_transposed: w2 of one expert is ``[I, H]``.
        fc1_bias: a tensor b13 ``[E, 2I]`` (or ``[E, I]``), in the order of `w13_layout`, is added
            to the fc1 outputs.
        fc2_bias: a tensor b2 ``[E, H]`` is added to every fc2 row.
        bias_dtype: of both biases in a `megamoe.Session`: ``"bf16"`` or ``"fp32"``.
        weight_at: where the router weight w is applied: ``"act"`` multiplies the activation before
            it is rounded, y = sum_k (W2·(w·act) + b2); ``"combine"`` multiplies the fc2 row in
            the final sum, y = sum_k w·(W2·act + b2). Without b2 the same maths.
        expert_map: per expert one place (PE, local index), or a sequence of places (replicas, see
            `megamoe.expert_map`), in any order and uneven; None is `contiguous_expert_map`. Every
            (PE, 0..L-1) appears exactly once. A PE may hold no expert, or one expert twice.
        capacity: rows of the pool of each PE, without the padding that the kernel adds per
            expert; None is `worst_case_rows`, which always fits. A call that needs more raises
            the same error on every PE; rows are never dropped.
        ring_rows: None: the pool holds every row of a call. Else rows of a ring pool, a multiple of
            128, at least 256: its blocks are used again as soon as their experts' work is done, so
            far less memory serves the same calls; a token may then be fetched once per expert.
        invalid_ids: what an id >= E means: ``"error"`` (a `ValueError`, before the launch on CPU
            tensors, else at the next look at the kernel's status, as no id of a CUDA tensor is
            read on the host) or ``"mask"``. Either way the slot contributes nothing.
        combine: ``"direct"`` sends every fc2 row back, ``"prereduced"`` sends one sum per
            (token, expert PE); ``"auto"`` lets the runtime choose (`combine_mode`). The same
            maths, other rounding points.

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
    activation_alpha: float = GPT_OSS_ALPHA
    activation_limit: float | None = None
    w13_layout: W13Layout = "gate_up"
    w13_transposed: bool = False
    w2_transposed: bool = False
    fc1_bias: bool = False
    fc2_bias: bool = False
    bias_dtype: BiasDtype = "bf16"
    weight_at: WeightAt = "act"
    expert_map: Sequence[Any] | None = None
    capacity: int | None = None
    invalid_ids: InvalidIds = "error"
    combine: Combine = "auto"
    ring_rows: int | None = None

    def __post_init__(self) -> None:
        def normalise(name: str, low: int, high: int | None = None) -> None:
            object.__setattr__(self, name, integer(name, getattr(self, name), low, high))

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
        for name, allowed in (
            ("activation", ACTIVATIONS),
            ("w13_layout", get_args(W13Layout)),
            ("weight_at", get_args(WeightAt)),
            ("invalid_ids", get_args(InvalidIds)),
            ("combine", get_args(Combine)),
            ("bias_dtype", get_args(BiasDtype)),
        ):
            _choice(name, getattr(self, name), allowed)
        for name in ("w13_transposed", "w2_transposed", "fc1_bias", "fc2_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")
        self._check_activation()
        if self.expert_map is not None:
            replicas = checked_replicas(
                self.expert_map, num_experts=self.num_experts, num_pes=self.num_pes
            )
            # One spelling for one placement: a lone place is a pair, so equal maps compare equal.
            spelled = tuple(places[0] if len(places) == 1 else places for places in replicas)
            object.__setattr__(self, "expert_map", spelled)
        if self.capacity is not None:
            normalise("capacity", 1, MAX_ROWS)
        if self.ring_rows is not None:
            normalise("ring_rows", 2 * RING_MULTIPLE, MAX_ROWS)
            if self.ring_rows % RING_MULTIPLE:
                raise ValueError(
                    f"ring_rows={self.ring_rows}: must be a multiple of {RING_MULTIPLE}"
                )

    def _check_activation(self) -> None:
        """Layout, alpha and limit against the activation; fills in the limit of gpt_oss."""
        name = self.activation
        if not self.gated and self.w13_layout != "gate_up":
            raise ValueError(
                f"w13_layout={self.w13_layout!r}: must be 'gate_up' for activation={name!r}, "
                "which has no up rows"
            )
        alpha = _positive("activation_alpha", self.activation_alpha)
        object.__setattr__(self, "activation_alpha", alpha)
        if name != "gpt_oss" and alpha != GPT_OSS_ALPHA:
            raise ValueError(
                f"activation_alpha={alpha}: only activation='gpt_oss' has one, not {name!r}"
            )
        limit = self.activation_limit
        if name == "gpt_oss" and limit is None:
            limit = GPT_OSS_LIMIT
        if name not in CLAMPED:
            if limit is not None:
                raise ValueError(
                    f"activation_limit={limit!r}: must be None for activation={name!r}; "
                    f"{' and '.join(map(repr, CLAMPED))} have one"
                )
            return
        if limit is None:
            raise ValueError(f"activation_limit=None: must be given for activation={name!r}")
        object.__setattr__(self, "activation_limit", _positive("activation_limit", limit))

    @property
    def gated(self) -> bool:
        """Whether w13 holds gate and up rows (2I) or one kind of rows (I)."""
        return self.activation not in NON_GATED

    @property
    def w13_rows(self) -> int:
        """Rows of w13 of one expert: 2I, or I if not gated."""
        return self.intermediate * (2 if self.gated else 1)

    @property
    def w13_shape(self) -> tuple[int, int]:
        """Shape of w13 of one expert as the engine stores it."""
        shape = (self.w13_rows, self.hidden)
        return shape[::-1] if self.w13_transposed else shape

    @property
    def w2_shape(self) -> tuple[int, int]:
        """Shape of w2 of one expert as the engine stores it."""
        shape = (self.hidden, self.intermediate)
        return shape[::-1] if self.w2_transposed else shape

    @property
    def combine_mode(self) -> CombineMode:
        """How results return: ``combine``, or for ``"auto"`` the rule of the timing model.

        Summing where the experts are pays while the layer is bound by NVLink, that is for
        I < 0.75·I*, with I* = 2/3·(1 - 1/P)·MMA rate/NVLink rate (about 1,090 at 8 PEs).
        """
        if self.combine != "auto":
            return self.combine
        balance = 2 / 3 * (1 - 1 / self.num_pes) * MMA_FLOPS_PER_NVLINK_BYTE
        pays = self.top_k > 1 and self.intermediate < 0.75 * balance
        return "prereduced" if pays else "direct"

    @cached_property
    def replicas(self) -> tuple[tuple[Place, ...], ...]:
        """The places (PE, local index) of every expert, in the order of ``expert_map``."""
        places = self.expert_map
        if places is None:
            places = contiguous_expert_map(num_experts=self.num_experts, num_pes=self.num_pes)
        return checked_replicas(places, num_experts=self.num_experts, num_pes=self.num_pes)

    @property
    def replicated(self) -> bool:
        """Whether an expert has more than one place."""
        return self.num_slots > self.num_experts

    @property
    def num_slots(self) -> int:
        """Places in all, over all PEs: E, or more with replicas."""
        return sum(map(len, self.replicas))

    @property
    def placement(self) -> tuple[Place, ...]:
        """(PE, local index) of every expert, where each has one place.

        Raises:
            ValueError: an expert has replicas; see `replicas` and `route_of`.
        """
        if self.replicated:
            raise ValueError(
                f"expert_map has {self.num_slots} places for num_experts={self.num_experts}: "
                "with replicas an expert has no single place"
            )
        return tuple(places[0] for places in self.replicas)

    def route_of(self, pe: int, token: int, expert: int) -> Place:
        """The (PE, local index) that computes the row of ``expert`` for token ``token`` of ``pe``.

        >>> cfg = MoEConfig(hidden=64, intermediate=64, num_experts=2, top_k=1, num_pes=3,
        ...                 max_tokens=8, expert_map=[[(0, 0), (1, 0)], (1, 1)])
        >>> cfg.route_of(0, 5, 0), cfg.route_of(2, 5, 0), cfg.route_of(2, 5, 1)
        ((0, 0), (1, 0), (1, 1))
        """
        pe = integer("pe", pe, 0, self.num_pes - 1)
        token = integer("token", token, 0)
        expert = integer("expert", expert, 0, self.num_experts - 1)
        return place_of_row(self.replicas[expert], pe=pe, token=token)

    @property
    def experts_per_pe(self) -> tuple[int, ...]:
        """L of every PE, replicas counted; may be uneven, and 0."""
        owners = [pe for places in self.replicas for pe, _ in places]
        return tuple(owners.count(pe) for pe in range(self.num_pes))

    def local_experts(self, pe: int) -> tuple[int, ...]:
        """Global ids of the experts of ``pe``, by local index; an id repeats if ``pe`` holds two
        replicas of it."""
        pe = integer("pe", pe, 0, self.num_pes - 1)
        mine = sorted(
            (local, expert)
            for expert, places in enumerate(self.replicas)
            for owner, local in places
            if owner == pe
        )
        return tuple(expert for _, expert in mine)

    @property
    def worst_case_rows(self) -> int:
        """P*Tmax*K: every slot of every token on one PE. Reached if a token may name one expert
        in several slots, so this is what always fits."""
        return self.num_pes * self.max_tokens * self.top_k

    @property
    def worst_case_distinct_rows(self) -> int:
        """P*Tmax*min(K, distinct experts of a PE), for the fullest PE: enough when the ids of
        every token are distinct, as every top-k router gives them."""
        distinct = max(len(set(self.local_experts(pe))) for pe in range(self.num_pes))
        return self.num_pes * self.max_tokens * min(self.top_k, distinct)

    @property
    def pool_rows(self) -> int:
        """Rows the pool of each PE must hold, before padding: ``capacity`` or the worst case."""
        return self.worst_case_rows if self.capacity is None else self.capacity

    def expert_map_tensor(self) -> torch.Tensor:
        """The placement as int32 ``[E, 2]`` on the CPU, columns (PE, local index).

        Raises:
            ValueError: an expert has replicas.
        """
        import torch

        return torch.tensor(self.placement, dtype=torch.int32)
