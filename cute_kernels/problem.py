"""What one compiled kernel is fixed to by its layer: the problem.

Letters: P PEs, T tokens, H hidden, I intermediate, E experts, K top-k, S expert slots (all PEs),
M pool rows. Pure integers: nothing here imports the compiler.
"""

from dataclasses import dataclass

from megamoe.cute_kernels.arith import ceil_div, round_up

BLOCK_M = 128
"""Pool rows (tokens) of one output tile; every expert's pool segment is padded to it."""
BLOCK_K = 64
"""Reduction elements of one pipeline stage: one 128-byte swizzle row of bf16."""
GATED_ACTIVATIONS = ("silu", "gelu_tanh", "relu", "gpt_oss", "swiglu_clamped")
PLAIN_ACTIVATIONS = ("relu2",)
CLAMPED_ACTIVATIONS = ("gpt_oss", "swiglu_clamped")
W13_LAYOUTS = ("gate_up", "up_gate", "interleaved")
BIAS_TYPES = ("none", "bf16", "f32")
MODES = ("forward", "save", "dgrad")
SIZE_MULTIPLE = 8
"""H and I: a 16-byte bf16 vector."""
MAX_PES = 64
MAX_TOP_K = 32
MAX_SEND_CTAS = 16
"""CTAs that count and send (DESIGN §4): more only lengthen the prefix over chunks."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Static sizes and conventions of a forward kernel.

    Args:
        hidden: H, a multiple of 8.
        intermediate: I, a multiple of 8.
        num_experts: E over all PEs.
        num_slots: S, expert slots of all PEs: E (0 stands for it), or more with replicas.
        experts_per_pe: largest number of slots any PE holds (E_local).
        top_k: K, 1 to 32.
        num_pes: P, 1 to 64.
        max_tokens: Tmax, tokens a PE may pass in one call.
        pool_rows: M, rows of the expert-major pool, a multiple of BLOCK_M.
        capacity_checked: False when M is the worst case, so that no call can overflow the pool.
        activation: see ``activation.py``; all but ``"relu2"`` are gated.
        alpha, limit: parameters of ``"gpt_oss"``; ``limit`` also of ``"swiglu_clamped"``.
        w13_layout: order of gate and up rows: ``"gate_up"``, ``"up_gate"``, ``"interleaved"``.
        w13_transposed: w13 is ``[E_local, H, rows]`` instead of ``[E_local, rows, H]``.
        w2_transposed: w2 is ``[E_local, I, H]`` instead of ``[E_local, H, I]``.
        bias13, bias2: type of the biases ``[E_local, rows]`` and ``[E_local, H]``, or ``"none"``.
        weight_at: where the router weight is applied, ``"act"`` or ``"combine"``.
        combine: ``"direct"``: every row goes back to its source PE; ``"prereduced"``: the rows of
            one (token, PE) are summed where the experts are, and one row goes back.
        ring_blocks: 0: the pool holds every row; else blocks of BLOCK_M rows that are used in turn,
            each again once its fc2 is done. Rows are then placed in pool order, so a token may be
            fetched once per expert.
        mode: ``"forward"``; ``"save"``: a forward that keeps what its backward needs, see
            ``saved.py``; ``"dgrad"``: its backward, as far as x and the router weights go.
        recompute: of the training modes: the forward does not keep gate and up, dgrad computes them
            again from the rows of x.

    Raises:
        ValueError: a value outside the ranges above; names the field, the value and what is
            allowed.
    """

    hidden: int
    intermediate: int
    num_experts: int
    experts_per_pe: int
    top_k: int
    num_pes: int
    max_tokens: int
    pool_rows: int
    num_slots: int = 0
    capacity_checked: bool = False
    activation: str = "silu"
    alpha: float = 1.702
    limit: float = 0.0
    w13_layout: str = "gate_up"
    w13_transposed: bool = False
    w2_transposed: bool = False
    bias13: str = "none"
    bias2: str = "none"
    weight_at: str = "act"
    combine: str = "direct"
    ring_blocks: int = 0
    mode: str = "forward"
    recompute: bool = False

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: {allowed}")

        def one_of(name: str, allowed: tuple[str, ...]) -> None:
            need(getattr(self, name) in allowed, name, f"must be one of {allowed}")

        if self.num_slots == 0:
            object.__setattr__(self, "num_slots", self.num_experts)
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            need(
                value > 0 and value % SIZE_MULTIPLE == 0,
                name,
                f"must be a positive multiple of {SIZE_MULTIPLE}",
            )
        need(1 <= self.top_k <= MAX_TOP_K, "top_k", f"must be 1 to {MAX_TOP_K}")
        need(1 <= self.num_pes <= MAX_PES, "num_pes", f"must be 1 to {MAX_PES}")
        need(self.num_experts >= 1, "num_experts", "must be at least 1")
        need(self.num_slots >= self.num_experts, "num_slots", "must be at least num_experts")
        need(self.top_k <= self.num_experts, "top_k", "must not exceed num_experts")
        need(
            ceil_div(self.num_slots, self.num_pes) <= self.experts_per_pe <= self.num_slots,
            "experts_per_pe",
            "must hold all expert slots on num_pes PEs",
        )
        need(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        need(
            self.pool_rows >= BLOCK_M and self.pool_rows % BLOCK_M == 0,
            "pool_rows",
            f"must be a positive multiple of {BLOCK_M}",
        )
        one_of("activation", GATED_ACTIVATIONS + PLAIN_ACTIVATIONS)
        if self.activation in CLAMPED_ACTIVATIONS:
            need(self.limit > 0, "limit", "must be positive with a clamped activation")
        one_of("w13_layout", W13_LAYOUTS)
        need(
            self.gated or self.w13_layout == "gate_up",
            "w13_layout",
            "must be 'gate_up' without a gate",
        )
        one_of("bias13", BIAS_TYPES)
        one_of("bias2", BIAS_TYPES)
        one_of("weight_at", ("act", "combine"))
        one_of("combine", ("direct", "prereduced"))
        need(
            self.ring_blocks == 0 or self.ring_blocks >= 2,
            "ring_blocks",
            "must be 0 (no ring) or at least 2",
        )
        one_of("mode", MODES)
        need(
            self.mode == "forward" or self.ring_blocks == 0,
            "ring_blocks",
            "must be 0 in training: the backward needs every row",
        )
        need(
            self.position_bits + max(1, (self.experts_per_pe - 1).bit_length()) <= 31,
            "max_tokens",
            "max_tokens * top_k * experts_per_pe must stay below 2**31 (route record packing)",
        )

    @property
    def gated(self) -> bool:
        """True if w13 holds gate and up rows."""
        return self.activation in GATED_ACTIVATIONS

    @property
    def paired_rows(self) -> bool:
        """True if gate and up rows alternate in shared memory too (transposed and interleaved),
        so that the epilogue pairs them by shuffles; dgrad then stores their gradients in turn."""
        return self.gated and self.w13_transposed and self.w13_layout == "interleaved"

    @property
    def w13_rows(self) -> int:
        """Rows of w13 of one expert: 2I with a gate, else I."""
        return (2 if self.gated else 1) * self.intermediate

    @property
    def position_bits(self) -> int:
        """Bits of a row's position among one source's rows of one expert, in a route record."""
        return max(1, (self.max_tokens * self.top_k - 1).bit_length())

    @property
    def record_words(self) -> int:
        """int32 words of a route record, to 16 bytes (``records.py``)."""
        if self.ring_blocks:
            return 8 if self.prereduced else 4
        return round_up(1 + 2 * self.top_k + int(self.prereduced), 4)

    @property
    def max_records(self) -> int:
        """Most records from one source: one per token or, with a ring, one per row."""
        return self.max_tokens * (self.top_k if self.ring_blocks else 1)

    @property
    def meta_words(self) -> int:
        """int32 words of a row's metadata (``records.py``)."""
        return 8 if self.prereduced else 4

    @property
    def backward(self) -> bool:
        """True for dgrad."""
        return self.mode == "dgrad"

    @property
    def saves(self) -> bool:
        """True for a forward that keeps what its backward needs."""
        return self.mode == "save"

    @property
    def recomputes(self) -> bool:
        """True for a dgrad whose first tiles are the forward's fc1 without the activation."""
        return self.backward and self.recompute

    @property
    def stores_gate_up(self) -> bool:
        """True if the epilogue of the forward's fc1 stores the pre-activations."""
        return self.recomputes or (self.saves and not self.recompute)

    @property
    def fc1_m_major(self) -> bool:
        """True if the first GEMM's weights are stored with the MMA's rows inside, not with k."""
        return not self.w2_transposed if self.backward else self.w13_transposed

    @property
    def fc2_m_major(self) -> bool:
        """The same of the second GEMM."""
        return not self.w13_transposed if self.backward else self.w2_transposed

    @property
    def mixed_majors(self) -> bool:
        """True if the kernel multiplies weights of both storages: it then needs two main loops for
        every token width."""
        majors = {self.fc1_m_major, self.fc2_m_major}
        return len(majors | ({self.w13_transposed} if self.recomputes else set())) == 2

    @property
    def fc2_parts(self) -> int:
        """Pools that the second GEMM reduces over one after the other: dgrad's gate and up."""
        return 2 if self.backward and self.gated and not self.paired_rows else 1

    @property
    def fc2_reduction(self) -> int:
        """Elements that the second GEMM reduces over in each of its pools."""
        return self.w13_rows if self.backward and self.paired_rows else self.intermediate

    @property
    def prereduced(self) -> bool:
        """True if rows are summed per (token, PE) before they go back."""
        return self.combine == "prereduced"

    @property
    def comb_slots(self) -> int:
        """Contributions a token can get: one per slot, or one per PE."""
        return min(self.top_k, self.num_pes) if self.prereduced else self.top_k

    @property
    def pool_blocks(self) -> int:
        """Blocks that the rows of a call may fill."""
        return self.pool_rows // BLOCK_M

    @property
    def stored_rows(self) -> int:
        """Rows of ``pool_x`` and ``pool_h`` in memory."""
        return min(self.ring_blocks or self.pool_blocks, self.pool_blocks) * BLOCK_M
