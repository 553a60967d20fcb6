"""From the public config to what a kernel is compiled for."""

from megamoe.config import MoEConfig
from megamoe.cute_kernels.arith import round_up
from megamoe.cute_kernels.problem import BLOCK_M, Problem


def padded_pool_rows(rows: int, experts: int) -> int:
    """Pool rows that always hold ``rows`` rows of at most ``experts`` experts, each expert's
    segment padded to BLOCK_M.

    With R rows at most min(experts, R) segments exist, each wasting at most BLOCK_M − 1 rows:

    >>> padded_pool_rows(256, 4)
    768
    """
    return round_up(rows + min(experts, rows) * (BLOCK_M - 1), BLOCK_M)


BIAS_KINDS = {"bf16": "bf16", "fp32": "f32", "torch.bfloat16": "bf16", "torch.float32": "f32"}


def bias_kind(cfg: MoEConfig, present: bool, dtype: object) -> str:
    """The kernel's name of a bias type: of ``dtype``, or of the config if that is None."""
    if not present:
        return "none"
    return BIAS_KINDS[cfg.bias_dtype if dtype is None else str(dtype)]


def ring_blocks(cfg: MoEConfig, pool_rows: int) -> int:
    """Blocks of the ring pool, 0 without one or where it would not be smaller."""
    blocks = (cfg.ring_rows or 0) // BLOCK_M
    return blocks if blocks * BLOCK_M < pool_rows else 0


def kernel_problem(cfg: MoEConfig, *, b13_dtype: object = None, b2_dtype: object = None) -> Problem:
    """The forward kernel's static sizes for a layer; the same on every PE.

    Args:
        b13_dtype, b2_dtype: torch dtype of the biases; None: as the config says.

    Raises:
        ValueError: the sizes exceed what the kernel supports.
    """
    experts = max(cfg.experts_per_pe)
    rows = padded_pool_rows(cfg.pool_rows, experts)
    return Problem(
        hidden=cfg.hidden,
        intermediate=cfg.intermediate,
        num_experts=cfg.num_experts,
        num_slots=sum(cfg.experts_per_pe),
        experts_per_pe=experts,
        top_k=cfg.top_k,
        num_pes=cfg.num_pes,
        max_tokens=cfg.max_tokens,
        pool_rows=rows,
        capacity_checked=cfg.pool_rows < cfg.worst_case_rows,
        activation=cfg.activation,
        alpha=cfg.activation_alpha,
        limit=cfg.activation_limit or 0.0,
        w13_layout=cfg.w13_layout,
        w13_transposed=cfg.w13_transposed,
        w2_transposed=cfg.w2_transposed,
        bias13=bias_kind(cfg, cfg.fc1_bias, b13_dtype),
        bias2=bias_kind(cfg, cfg.fc2_bias, b2_dtype),
        weight_at=cfg.weight_at,
        combine=cfg.combine_mode,
        ring_blocks=ring_blocks(cfg, rows),
    )
