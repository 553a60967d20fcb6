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


BIAS_KINDS = {"torch.bfloat16": "bf16", "torch.float32": "f32"}
MMA_FLOPS_PER_NVLINK_BYTE = 1869
"""Ratio of the achieved rates behind the rule below: 700 TF of bf16 to 375 GB/s of NVLink."""


def combine_mode(cfg: MoEConfig) -> str:
    """``cfg.combine``, or for ``"auto"`` the rule of the timing model: summing where the experts
    are pays while the layer is bound by NVLink, that is for I < 0.75 · I*, with
    I* = ⅔ · (1 − 1/P) · MMA rate / NVLink rate (about 1,090 at 8 PEs and 375 GB/s)."""
    if cfg.combine != "auto":
        return cfg.combine
    balance = 2 / 3 * (1 - 1 / cfg.num_pes) * MMA_FLOPS_PER_NVLINK_BYTE
    pays = cfg.num_pes > 1 and cfg.top_k > 1 and cfg.intermediate < 0.75 * balance
    return "prereduced" if pays else "direct"


def kernel_problem(cfg: MoEConfig, *, b13_dtype: object = None, b2_dtype: object = None) -> Problem:
    """The forward kernel's static sizes for a layer; the same on every PE.

    Args:
        b13_dtype, b2_dtype: torch dtype of the biases, bfloat16 (also the default) or float32.

    Raises:
        ValueError: the sizes exceed what the kernel supports.
    """
    experts = max(cfg.experts_per_pe)
    return Problem(
        hidden=cfg.hidden,
        intermediate=cfg.intermediate,
        num_experts=cfg.num_experts,
        num_slots=sum(cfg.experts_per_pe),
        experts_per_pe=experts,
        top_k=cfg.top_k,
        num_pes=cfg.num_pes,
        max_tokens=cfg.max_tokens,
        pool_rows=padded_pool_rows(cfg.pool_rows, experts),
        capacity_checked=cfg.pool_rows < cfg.worst_case_rows,
        activation=cfg.activation,
        alpha=cfg.activation_alpha,
        limit=cfg.activation_limit or 0.0,
        w13_layout=cfg.w13_layout,
        w13_transposed=cfg.w13_transposed,
        w2_transposed=cfg.w2_transposed,
        bias13=BIAS_KINDS.get(str(b13_dtype), "bf16") if cfg.fc1_bias else "none",
        bias2=BIAS_KINDS.get(str(b2_dtype), "bf16") if cfg.fc2_bias else "none",
        weight_at=cfg.weight_at,
        combine=combine_mode(cfg),
    )
