"""What a training forward leaves for its backward: two blocks of memory, owned by the call.

``saved_block`` is filled by the forward. dgrad overwrites ``gate`` and ``up`` with their gradients
and fills ``dgrad_block``; wgrad reads both. Row r is the same (token, k) everywhere; an expert's
segment begins at a multiple of BLOCK_M, as in the forward's pool, and its rows beyond the count
are never written. Letters as in ``problem.py``.

Which operands the gradients of the weights need (per expert, sum over its rows, in row order):

    dW13 = [dgate | dup]ᵀ · x        dW2 = dyᵀ · wact
    db13 = Σ [dgate | dup]           db2 = Σ dy, or Σ row_weight · dy if weight_at="combine"
"""

from megamoe.cute_kernels.problem import Problem
from megamoe.cute_kernels.workspace import Block


def saved_block(p: Problem) -> Block:
    """Regions that the forward writes.

    ``route_count``, ``primary_count`` and ``route`` are copies of the call's bank of the symmetric
    regions of these names (which a later call overwrites); ``gate`` and ``up`` the pre-activations,
    bias included, in natural column order (without a gate only ``up``).
    """
    gate: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("gate", "bf16", (p.pool_rows, p.intermediate)),
    )
    return Block.of(
        ("route_count", "u32", (p.num_pes, p.num_slots)),
        ("primary_count", "u32", (p.num_pes, p.experts_per_pe)),
        ("route", "i32", (p.num_pes, p.max_records, p.record_words)),
        ("x", "bf16", (p.pool_rows, p.hidden)),
        *(gate if p.gated else ()),
        ("up", "bf16", (p.pool_rows, p.intermediate)),
    )


def dgrad_block(p: Problem) -> Block:
    """Regions that dgrad writes: the rows of dy, bf16(router weight · activation), the router
    weights, and, where w13 is transposed and interleaved, the gradients of gate and up in turn
    (``dgu``; ``gate`` and ``up`` then stay as they were)."""
    paired: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("dgu", "bf16", (p.pool_rows, 2 * p.intermediate)),
    )
    return Block.of(
        ("dy", "bf16", (p.pool_rows, p.hidden)),
        ("wact", "bf16", (p.pool_rows, p.intermediate)),
        ("row_weight", "f32", (p.pool_rows,)),
        *(paired if p.paired_rows else ()),
    )
