"""What a training forward leaves for its backward: two blocks of memory, owned by the call.

``saved_block`` is filled by the forward. dgrad overwrites ``gate`` and ``up`` (which it computes
again first, with ``recompute``) with their gradients and fills ``dgrad_block``; wgrad reads both.
Row r is the same (token, k) everywhere; an expert's segment begins at a multiple of BLOCK_M, as in
the forward's pool, and its rows beyond the count are never written. Letters as in ``problem.py``.

Which operands the gradients of the weights need (per expert, sum over its rows, in row order):

    dW13 = [dgate | dup]ᵀ · x        dW2 = dyᵀ · wact
    db13 = Σ [dgate | dup]           db2 = Σ dy, or Σ row_weight · dy if weight_at="combine"
"""

from dataclasses import replace

from megamoe.cute_kernels.kernel_config import KernelConfig
from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.smem import default_config
from megamoe.cute_kernels.workspace import Block

TRAINING_MODES = ("save", "dgrad")


def saved_block(p: Problem) -> Block:
    """Regions that the forward writes.

    ``route_count``, ``primary_count`` and ``route`` are copies of the call's bank of the symmetric
    regions of these names (which a later call overwrites).
    """
    return Block.of(
        ("route_count", "u32", (p.num_pes, p.num_slots)),
        ("primary_count", "u32", (p.num_pes, p.experts_per_pe)),
        ("route", "i32", (p.num_pes, p.max_records, p.record_words)),
        ("x", "bf16", (p.pool_rows, p.hidden)),
        *(() if p.recompute else _pre_activations(p)),
    )


def _pre_activations(p: Problem) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    """``gate`` and ``up``: bf16, bias included, in natural column order; without a gate only
    ``up``. dgrad overwrites them with their gradients."""
    names = ("gate", "up") if p.gated else ("up",)
    return tuple((name, "bf16", (p.pool_rows, p.intermediate)) for name in names)


def region_block(p: Problem, region: str) -> str:
    """The block that a region lies in, ``"saved"`` or ``"dgrad"``."""
    return "saved" if any(r.name == region for r in saved_block(p).regions) else "dgrad"


def dgrad_block(p: Problem) -> Block:
    """Regions that dgrad writes: the rows of dy, bf16(router weight · activation), the router
    weights, and, where w13 is transposed and interleaved, the gradients of gate and up in turn
    (``dgu``; ``gate`` and ``up`` then stay as they were). With ``recompute`` also gate and up."""
    paired: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("dgu", "bf16", (p.pool_rows, 2 * p.intermediate)),
    )
    return Block.of(
        ("dy", "bf16", (p.pool_rows, p.hidden)),
        ("wact", "bf16", (p.pool_rows, p.intermediate)),
        ("row_weight", "f32", (p.pool_rows,)),
        *(paired if p.paired_rows else ()),
        *(_pre_activations(p) if p.recompute else ()),
    )


def mode_kernels(
    p: Problem, config: KernelConfig | None = None, *, training: bool, sms: int | None = None
) -> dict[str, tuple[Problem, KernelConfig]]:
    """Problem and config of each mode of a session; they share one workspace, as large as the
    largest.

    Args:
        config: of forwards; None, and dgrad's, follow the rule. In training none splits K: its
            counters must outlive a launch, and the modes' ends of the workspace overlap.
        sms: SMs that the rule serves (``default_config``).

    Raises:
        ValueError: no config fits, or the one given splits K in training.
    """
    if not training:
        return {"forward": (replace(p, recompute=False), config or default_config(p, sms=sms))}
    if config is not None and config.split_k > 1:
        raise ValueError(f"split_k={config.split_k}: must be 1 in training")
    kernels = {}
    for mode in ("forward", *TRAINING_MODES):
        problem = replace(p, mode=mode, recompute=p.recompute and mode != "forward")
        given = None if mode == "dgrad" else config
        chosen = given or default_config(problem, sms=sms)
        kernels[mode] = (problem, replace(chosen, split_k=1))
    return kernels
