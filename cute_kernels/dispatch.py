"""dispatch-send: count the rows, give every row its place, send route records, signal ``arrive``.

Run by all warps of a few CTAs before the roles split: on one warp it would cost tens of
microseconds. Tokens go in contiguous chunks over CTAs and over warps; counts are prefix-summed, so
no atomic decides an order. A record list for a PE is ordered by the token's first local expert
there, because pulling in token order would complete the first expert only at the very end.

dgrad follows the forward's records: it only stages the gradient of y and sends ``arrive``.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.problem import MAX_SEND_CTAS
from megamoe.cute_kernels.records import row_record, token_record
from megamoe.cute_kernels.routing import (
    Pair,
    route_pair,
    take_positions,
    tokens_per_step,
    warp_inclusive_sum,
)
from megamoe.cute_kernels.smem import BF16_BYTES, CTRL_FLAG
from megamoe.cute_kernels.sync import aborted, wait_at_least

TOKENS_PER_SEND_CTA = 64
LAST, LAST_GAVE_UP = 1, 2
"""What a sending CTA finds in ``CTRL_FLAG`` when it has finished; 0 = others are still sending."""


@cute.jit
def send_ctas(c: Context) -> Int32:
    """How many CTAs count and send: one per 64 tokens, at least one, at most 16; in dgrad, which
    sends no records, one."""
    count = (c.tokens + TOKENS_PER_SEND_CTA - 1) // TOKENS_PER_SEND_CTA
    if count > MAX_SEND_CTAS:
        count = Int32(MAX_SEND_CTAS)
    if count > c.grid:
        count = c.grid
    if count < 1:
        count = Int32(1)
    if cutlass.const_expr(c.problem.backward):
        count = Int32(1)
    return count


@cute.jit
def stage_rows(c: Context, thread: Int32):
    """All CTAs copy the caller's rows into the symmetric region, 16 bytes a lane where the
    caller's rows are 16-byte aligned, else 2."""
    warp = thread // 32
    row_bytes = c.problem.hidden * BF16_BYTES
    aligned = ((c.x | c.x_stride) & 15) == 0
    token = c.cta * c.config.warps + warp
    while token < c.tokens:
        source = c.x + Int64(token) * c.x_stride
        target = c.sym("x") + Int64(token) * row_bytes
        if aligned:
            for chunk in cutlass.range(lane(), row_bytes // 16, 32, unroll=4):
                v0, v1, v2, v3 = ptx.ld_i32x4(source + chunk * 16)
                ptx.st_i32x4(target + chunk * 16, v0, v1, v2, v3)
        else:
            for element in cutlass.range(lane(), row_bytes // 2, 32, unroll=1):
                ptx.copy_b16(target + element * 2, source + element * 2)
        token += c.grid * c.config.warps


@cute.jit
def count_rows(c: Context, first: Int32, end: Int32, rows: Int32, primaries: Int32):
    """Add this warp's tokens to its two histograms in shared memory."""
    base = first
    while base < end:
        pair = route_pair(c, base, end)
        if pair.slot >= 0:
            ptx.atoms_add_i32(rows + pair.slot * 4, Int32(1))
        if pair.primary_slot >= 0:
            ptx.atoms_add_i32(primaries + pair.primary_slot * 4, Int32(1))
        base += tokens_per_step(c.problem.top_k)


@cute.jit
def prefix_over_warps(c: Context, thread: Int32, histograms: Int32):
    """Turn the warps' counts into exclusive prefixes and publish the CTA's totals."""
    slots = c.problem.num_slots
    for column in range(thread, 2 * slots, c.config.threads):
        running = Int32(0)
        for warp in cutlass.range(c.config.warps, unroll=1):
            address = histograms + (warp * 2 * slots + column) * 4
            count = ptx.lds_i32(address)
            ptx.sts_i32(address, running)
            running += count
        ptx.st_i32(c.loc("histogram") + Int64(c.cta * 2 * slots + column) * 4, running)


@cute.jit
def total_over_ctas(c: Context, column: Int32, first: Int32, end: Int32) -> Int32:
    """Sum of one histogram column over the chunks of CTAs ``[first, end)``."""
    total = Int32(0)
    for cta in range(first, end):
        total += ptx.ld_i32(c.loc("histogram") + Int64(cta * 2 * c.problem.num_slots + column) * 4)
    return total


@cute.jit
def list_bases(c: Context, warp: Int32, senders: Int32, bases: Int32):
    """Start of each slot's records in the list for its PE: exclusive prefix over the PE's slots
    of this source's primaries. A warp takes whole PEs."""
    for pe in range(warp, c.problem.num_pes, c.config.warps):
        carry = Int32(0)
        start = c.slot_base(pe)
        stop = c.slot_base(pe + 1)
        while start < stop:
            slot = start + lane()
            count = Int32(0)
            if slot < stop:
                count = total_over_ctas(c, c.problem.num_slots + slot, Int32(0), senders)
            inclusive = warp_inclusive_sum(count)
            if slot < stop:
                ptx.sts_i32(bases + slot * 4, carry + inclusive - count)
            carry += cute.arch.shuffle_sync(inclusive, 31)
            start += 32


@cute.jit
def add_bases(c: Context, thread: Int32, senders: Int32, histograms: Int32, bases: Int32):
    """Add what earlier CTAs and earlier slots put before this CTA's rows and records."""
    slots = c.problem.num_slots
    for column in range(thread, 2 * slots, c.config.threads):
        before = total_over_ctas(c, column, Int32(0), c.cta)
        if column >= slots:
            before += ptx.lds_i32(bases + (column - slots) * 4)
        for warp in cutlass.range(c.config.warps, unroll=1):
            address = histograms + (warp * 2 * slots + column) * 4
            ptx.sts_i32(address, ptx.lds_i32(address) + before)


@cute.jit
def send_records(c: Context, first: Int32, end: Int32, rows: Int32, primaries: Int32):
    """Second pass over this warp's tokens: positions, then one record per (token, PE)."""
    base = first
    while base < end:
        pair = route_pair(c, base, end)
        position = take_positions(pair.slot, rows)
        record = take_positions(pair.primary_slot, primaries)
        send_record(c, pair, position, record)
        base += tokens_per_step(c.problem.top_k)


@cute.jit
def send_record(c: Context, pair: Pair, position: Int32, record: Int32):
    """Write the pair's record, if it has one, to its PE with 16-byte stores; ``record`` is its
    place in the list."""
    p = c.problem
    make = row_record if p.ring_blocks else token_record
    words = make(c, pair, position)
    if pair.primary_slot >= 0:
        list_index = Int64(c.bank * p.num_pes + c.pe) * p.max_records + record
        address = c.peer(pair.pe, "route") + list_index * (p.record_words * 4)
        for i in cutlass.range_constexpr(0, p.record_words, 4):
            ptx.st_i32x4(address + i * 4, words[i], words[i + 1], words[i + 2], words[i + 3])


@cute.jit
def publish_counts(c: Context, thread: Int32, senders: Int32, gave_up: Int32):
    """The last CTA to finish writes this PE's whole count row to every PE, before ``arrive``.

    With ``gave_up`` the counts are zero: some records were never written, so none may be read.
    """
    problem = c.problem
    slots = problem.num_slots
    row = c.bank * problem.num_pes + c.pe
    for slot in range(thread, slots, c.config.threads):
        count = total_over_ctas(c, slot, Int32(0), senders)
        if gave_up == 1:
            count = Int32(0)
        for pe in range(problem.num_pes):
            ptx.st_i32(c.peer(pe, "route_count") + Int64(row * slots + slot) * 4, count)
    for pe in range(problem.num_pes):
        start = c.slot_base(pe)
        stop = c.slot_base(pe + 1)
        target = c.peer(pe, "primary_count") + Int64(row * problem.experts_per_pe) * 4
        for slot in range(start + thread, stop, c.config.threads):
            count = total_over_ctas(c, slots + slot, Int32(0), senders)
            if gave_up == 1:
                count = Int32(0)
            ptx.st_i32(target + Int64(slot - start) * 4, count)


@cute.jit
def dispatch_send(c: Context, thread: Int32):
    """The whole role; every thread of every CTA calls it once, before the roles split."""
    senders = send_ctas(c)
    if c.stage_x == 1:
        stage_rows(c, thread)
    if cutlass.const_expr(not c.problem.backward):
        if c.cta < senders:
            count_and_send(c, thread, senders)
    if (c.cta < senders) | (c.stage_x == 1):
        # With staged rows every CTA must have finished before ``arrive`` may cover x.
        finishers = senders
        if c.stage_x == 1:
            finishers = c.grid
        cute.arch.sync_threads()
        if thread == 0:
            earlier = ptx.atom_acq_rel(c.loc("sent"), Int32(1))
            role = Int32(0)
            if earlier == finishers - 1:
                # One thread decides, behind the counting of all senders: whoever of them gave up
                # had set ``abort`` before.
                role = Int32(LAST)
                if aborted(c.guard) != 0:
                    role = Int32(LAST_GAVE_UP)
            ptx.sts_i32(c.smem + c.shared.ctrl + CTRL_FLAG, role)
        cute.arch.sync_threads()
        role = ptx.lds_i32(c.smem + c.shared.ctrl + CTRL_FLAG)
        if role != 0:
            if thread == 0:
                ptx.st_i32(c.loc("sent"), Int32(0))
            if cutlass.const_expr(not c.problem.backward):
                publish_counts(c, thread, senders, Int32(role == LAST_GAVE_UP))
                cute.arch.sync_threads()
            if thread < c.problem.num_pes:
                ptx.st_release(c.peer(thread, "arrive") + Int64(c.pe) * 4, c.epoch, "sys")


@cute.jit
def count_and_send(c: Context, thread: Int32, senders: Int32):
    """Both passes over this CTA's chunk of tokens."""
    slots = c.problem.num_slots
    warp = thread // 32
    histograms = c.smem
    bases = c.smem + c.config.warps * 2 * slots * 4
    for word in range(thread, c.config.warps * 2 * slots, c.config.threads):
        ptx.sts_i32(histograms + word * 4, Int32(0))
    chunk = (c.tokens + senders - 1) // senders
    stop = (c.cta + 1) * chunk
    if stop > c.tokens:
        stop = c.tokens
    per_warp = (chunk + c.config.warps - 1) // c.config.warps
    first = c.cta * chunk + warp * per_warp
    end = first + per_warp
    if end > stop:
        end = stop
    rows = histograms + warp * (2 * slots * 4)
    primaries = rows + slots * 4
    cute.arch.sync_threads()
    count_rows(c, first, end, rows, primaries)
    cute.arch.sync_threads()
    prefix_over_warps(c, thread, histograms)
    cute.arch.sync_threads()
    ok = Int32(1)
    if senders > 1:
        flags = c.loc("count_flag")
        if thread == 0:
            ptx.st_release(flags + Int64(c.cta) * 4, c.epoch, "gpu")
        if thread < senders:
            ok = wait_at_least(
                c.guard,
                flags + Int64(thread) * 4,
                c.epoch,
                "gpu",
                int(Phase.COUNT),
                c.pe,
                thread,
            )
            if ok == 0:
                ptx.sts_i32(c.smem + c.shared.ctrl + CTRL_FLAG, Int32(1))
        cute.arch.sync_threads()
        ok = Int32(ptx.lds_i32(c.smem + c.shared.ctrl + CTRL_FLAG) == 0)
    if ok == 1:
        list_bases(c, warp, senders, bases)
        cute.arch.sync_threads()
        add_bases(c, thread, senders, histograms, bases)
        cute.arch.sync_threads()
        send_records(c, first, end, rows, primaries)
