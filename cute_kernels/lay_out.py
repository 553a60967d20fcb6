"""The layout of the pool: who waits for the routes, and where each row will lie.

The layout is the same on every CTA, so each computes its own copy in shared memory.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import Phase, Status
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.routing import warp_inclusive_sum
from megamoe.cute_kernels.segments import sum_segments
from megamoe.cute_kernels.sync import claim_status, wait_at_least, write_status


@cute.jit
def await_routes(c: Context) -> Int32:
    """Wait until every PE's ``arrive`` shows this epoch; 1, or 0 if this PE gave up."""
    ok = Int32(1)
    for peer in cutlass.range(lane(), c.problem.num_pes, 32, unroll=1):
        ok = ok & wait_at_least(
            c.guard,
            c.sym("arrive") + Int64(peer) * 4,
            c.epoch,
            "sys",
            int(Phase.ARRIVE),
            peer,
            Int32(-1),
        )
    all_ok = Int32(cute.arch.vote_all_sync(ok == 1))
    # Lane p has acquired from PE p; a vote orders no memory, this does.
    cute.arch.sync_warp()
    return all_ok


@cute.jit
def save_counts(c: Context):
    """Keep the counts for the backward, which lays out the same pool; also before a pool turns
    out too small, so that the backward finds that out too. The CTAs share the copy."""
    p = c.problem
    first = c.cta * 32 + lane()
    for source, target, words in (
        (c.route_counts(), c.saved_region("route_count"), p.num_pes * p.num_slots),
        (c.primary_counts(), c.saved_region("primary_count"), p.num_pes * p.experts_per_pe),
    ):
        for word in cutlass.range(first, words, c.grid * 32, unroll=1):
            ptx.st_i32(target + Int64(word) * 4, ptx.ld_i32(source + Int64(word) * 4))


@cute.jit
def lay_out(c: Context):
    """The pool's segments (``sum_segments``), and where each source's records begin."""
    problem = c.problem
    experts = c.local_experts()
    sum_segments(
        problem,
        c.route_counts(),
        c.slot_base(c.pe),
        experts,
        c.smem + c.shared.block_prefix,
        c.smem + c.shared.expert_rows,
        c.smem + c.shared.segment,
        True,
    )
    for source in cutlass.range(problem.num_pes, unroll=1):
        list_primaries(c, source, experts)


@cute.jit
def list_primaries(c: Context, source: Int32, experts: Int32):
    """Where each local expert's records begin in the list of ``source``: exclusive prefix."""
    problem = c.problem
    counts = c.primary_counts() + Int64(source) * (problem.experts_per_pe * 4)
    target = c.smem + c.shared.primary + source * ((problem.experts_per_pe + 1) * 4)
    carry = Int32(0)
    base = Int32(0)
    while base < experts:
        expert = base + lane()
        count = Int32(0)
        if expert < experts:
            count = ptx.ld_i32(counts + Int64(expert) * 4)
        inclusive = warp_inclusive_sum(count)
        if expert < experts:
            ptx.sts_i32(target + expert * 4, carry + inclusive - count)
        carry += cute.arch.shuffle_sync(inclusive, 31)
        base += 32
    if lane() == 0:
        ptx.sts_i32(target + experts * 4, carry)


@cute.jit
def pools_fit(c: Context) -> Int32:
    """1 if the padded segments of every PE fit its pool. All PEs see the same counts, so all
    decide alike; the first PE that is too small goes into the status record."""
    problem = c.problem
    counts = c.route_counts()
    fit = Int32(1)
    for pe in cutlass.range(problem.num_pes, unroll=1):
        needed = Int32(0)
        start = c.slot_base(pe)
        stop = c.slot_base(pe + 1)
        for slot in cutlass.range(start + lane(), stop, 32, unroll=1):
            rows = Int32(0)
            for source in cutlass.range(problem.num_pes, unroll=4):
                index = source * problem.num_slots + slot
                rows += ptx.ld_i32(counts + Int64(index) * 4)
            needed += (rows + BLOCK_M - 1) // BLOCK_M
        needed = cute.arch.shuffle_sync(warp_inclusive_sum(needed), 31) * BLOCK_M
        if (needed > problem.pool_rows) & (fit == 1):
            fit = Int32(0)
            if lane() == 0:
                if claim_status(c.guard, Int32(Status.CAPACITY)) == 1:
                    write_status(
                        c.guard,
                        Int32(Phase.NONE),
                        pe,
                        needed,
                        Int32(problem.pool_rows),
                        Int32(-1),
                    )
    return fit
