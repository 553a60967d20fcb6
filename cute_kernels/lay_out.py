"""The layout of the pool: who waits for the routes, and where each row will lie.

The layout is the same on every CTA, so each computes its own copy in shared memory.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import Phase, Status
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.routing import warp_inclusive_sum
from megamoe.cute_kernels.sync import claim_status, wait_at_least, write_status

LOAD_BATCH = 8
"""Counts of this many sources are loaded before the first is used, to overlap their latency."""


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
def lay_out(c: Context):
    """Segments of the pool: experts in order, padded to BLOCK_M; inside one, sources in order.

    Worked example, 2 sources, local experts with rows (source 0, source 1) = (100, 60), (0, 5):
    expert_rows = 160, 5; block_prefix = 0, 2, 3; segment = 0, 100 | 0, 0.
    """
    problem = c.problem
    num_pes = problem.num_pes
    first_slot = c.slot_base(c.pe)
    experts = c.local_experts()
    counts = c.route_counts()
    carry = Int32(0)
    base = Int32(0)
    while base < experts:
        expert = base + lane()
        rows = Int32(0)
        for batch in cutlass.range(ceil_div(num_pes, LOAD_BATCH), unroll=1):
            loaded = []
            for i in cutlass.range_constexpr(min(LOAD_BATCH, num_pes)):
                source = batch * LOAD_BATCH + i
                count = Int32(0)
                if (expert < experts) & (source < num_pes):
                    index = source * problem.num_slots + first_slot + expert
                    count = ptx.ld_i32(counts + Int64(index) * 4)
                loaded.append(count)
            for i in cutlass.range_constexpr(min(LOAD_BATCH, num_pes)):
                source = batch * LOAD_BATCH + i
                if (expert < experts) & (source < num_pes):
                    entry = expert * num_pes + source
                    ptx.sts_i32(c.smem + c.shared.segment + entry * 4, rows)
                rows += loaded[i]
        blocks = (rows + BLOCK_M - 1) // BLOCK_M
        inclusive = warp_inclusive_sum(blocks)
        if expert < experts:
            ptx.sts_i32(c.smem + c.shared.expert_rows + expert * 4, rows)
            ptx.sts_i32(c.smem + c.shared.block_prefix + expert * 4, carry + inclusive - blocks)
        carry += cute.arch.shuffle_sync(inclusive, 31)
        base += 32
    if lane() == 0:
        ptx.sts_i32(c.smem + c.shared.block_prefix + experts * 4, carry)
    for source in cutlass.range(num_pes, unroll=1):
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
