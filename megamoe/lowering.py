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


def kernel_problem(cfg: MoEConfig) -> Problem:
    """The forward kernel's static sizes for a layer; the same on every PE.

    Raises:
        ValueError: the sizes exceed what the kernel supports.
    """
    experts = max(cfg.experts_per_pe)
    return Problem(
        hidden=cfg.hidden,
        intermediate=cfg.intermediate,
        num_experts=cfg.num_experts,
        num_slots=cfg.num_experts,
        experts_per_pe=experts,
        top_k=cfg.top_k,
        num_pes=cfg.num_pes,
        max_tokens=cfg.max_tokens,
        pool_rows=padded_pool_rows(cfg.pool_rows, experts),
        capacity_checked=cfg.pool_rows < cfg.worst_case_rows,
        activation=cfg.activation,
    )
