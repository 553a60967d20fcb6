"""What one compiled forward kernel is fixed to: the problem and the kernel config.

Letters: P PEs, T tokens, H hidden, I intermediate, E experts, K top-k, S expert slots (all PEs),
M pool rows. Pure integers: nothing here imports the compiler.
"""

from dataclasses import dataclass

from megamoe.cute_kernels.arith import ceil_div, round_up

BLOCK_M = 128
"""Pool rows (tokens) of one output tile; every expert's pool segment is padded to it."""
BLOCK_N = 256
"""Weight rows of one tile: 128 gate and 128 up rows in fc1, 256 output columns in fc2."""
BLOCK_K = 64
"""Reduction elements of one pipeline stage: one 128-byte swizzle row of bf16."""
ACTIVATIONS = ("silu", "relu")
MAX_PES = 64
MAX_TOP_K = 32
MAX_SEND_CTAS = 16
"""CTAs that count and send (DESIGN §4): more only lengthen the prefix over chunks."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Static sizes of a forward kernel.

    Args:
        hidden: H, a multiple of 64.
        intermediate: I, a multiple of 64.
        num_experts: E over all PEs.
        experts_per_pe: largest number of experts any PE holds (E_local).
        top_k: K, 1 to 32.
        num_pes: P, 1 to 64.
        max_tokens: Tmax, tokens a PE may pass in one call.
        pool_rows: M, rows of the expert-major pool, a multiple of BLOCK_M.
        capacity_checked: False when M is the worst case, so that no call can overflow the pool.
        activation: ``"silu"`` or ``"relu"``, both gated.

    Raises:
        ValueError: a size outside the ranges above; names the field, the value and what is allowed.
    """

    hidden: int
    intermediate: int
    num_experts: int
    experts_per_pe: int
    top_k: int
    num_pes: int
    max_tokens: int
    pool_rows: int
    capacity_checked: bool = False
    activation: str = "silu"

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: {allowed}")

        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            need(value > 0 and value % 64 == 0, name, "must be a positive multiple of 64")
        need(1 <= self.top_k <= MAX_TOP_K, "top_k", f"must be 1 to {MAX_TOP_K}")
        need(1 <= self.num_pes <= MAX_PES, "num_pes", f"must be 1 to {MAX_PES}")
        need(self.num_experts >= 1, "num_experts", "must be at least 1")
        need(self.top_k <= self.num_experts, "top_k", "must not exceed num_experts")
        need(
            ceil_div(self.num_experts, self.num_pes) <= self.experts_per_pe <= self.num_experts,
            "experts_per_pe",
            "must hold all experts on num_pes PEs",
        )
        need(self.max_tokens >= 1, "max_tokens", "must be at least 1")
        need(
            self.pool_rows >= BLOCK_M and self.pool_rows % BLOCK_M == 0,
            "pool_rows",
            f"must be a positive multiple of {BLOCK_M}",
        )
        need(self.activation in ACTIVATIONS, "activation", f"must be one of {ACTIVATIONS}")
        need(
            self.position_bits + max(1, (self.experts_per_pe - 1).bit_length()) <= 31,
            "max_tokens",
            "max_tokens * top_k * experts_per_pe must stay below 2**31 (route record packing)",
        )

    @property
    def position_bits(self) -> int:
        """Bits of a row's position among one source's rows of one expert, in a route record."""
        return max(1, (self.max_tokens * self.top_k - 1).bit_length())

    @property
    def record_words(self) -> int:
        """int32 words of a route record: token, K packed slots, K weights, to 16 bytes."""
        return round_up(1 + 2 * self.top_k, 4)

    @property
    def fc1_tiles(self) -> int:
        """fc1 tiles of one M-block: BLOCK_N weight rows are half gate, half up."""
        return ceil_div(self.intermediate, BLOCK_N // 2)

    @property
    def fc2_tiles(self) -> int:
        """fc2 tiles of one M-block."""
        return ceil_div(self.hidden, BLOCK_N)

    @property
    def pool_blocks(self) -> int:
        return self.pool_rows // BLOCK_M


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Tunable choices of a forward kernel that change no result.

    Args:
        stages: depth of the TMA → WGMMA pipeline, 48 KB each.
        service_registers, math_registers: ``setmaxnreg`` of the two kinds of warpgroup.
        lag_waves: how many waves of fc1 tiles lie between fc1 and fc2 of an M-block.
        ring_slots: row-copy slots of at most 4 KB in recv-and-place.
        poll_sleep_ns: pause between two polls of a cross-CTA word.
    """

    stages: int = 4
    service_registers: int = 56
    math_registers: int = 224
    lag_waves: int = 1
    ring_slots: int = 3
    poll_sleep_ns: int = 64

    def __post_init__(self) -> None:
        for name, low, high in (
            ("stages", 2, 8),
            ("lag_waves", 1, 64),
            ("ring_slots", 2, 16),
            ("poll_sleep_ns", 0, 1_000_000),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name}={value}: must be {low} to {high}")
        for name in ("service_registers", "math_registers"):
            value = getattr(self, name)
            if value % 8 or not 24 <= value <= 240:
                raise ValueError(f"{name}={value}: setmaxnreg takes multiples of 8 from 24 to 240")
        registers = 128 * self.service_registers + 256 * self.math_registers
        if registers > 65536:
            raise ValueError(
                f"math_registers={self.math_registers}: 128·service + 256·math = {registers} "
                "registers exceed the 65536 of an SM"
            )
