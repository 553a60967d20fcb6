"""recv-and-place: wait for the routes, lay out the pool, fetch each token row once, store it to
each of its expert rows.

One or two warps a CTA. The layout is the same on every CTA, so the first warp of each computes a
copy in shared memory and hands it to the other roles through the ``layout_ready`` mbarrier. Records
are then shared out over the place warps of all CTAs ("workers") in (local expert, rotated source,
token) order; the sources rotate by PE so that not all PEs pull from the same one at once.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.arith import ceil_div
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.lay_out import await_routes, lay_out, pools_fit, save_counts
from megamoe.cute_kernels.pipelines import await_cluster_phase
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.records import receive_rows, record_token
from megamoe.cute_kernels.smem import BF16_BYTES, copy_bytes
from megamoe.cute_kernels.sync import (
    aborted,
    wait_at_least,
)


@dataclass
class RecordCursor:
    """Walks this worker's records in (expert, rotated source, index) order; with a ring pool, where
    that must be the order of the rows, sources are not rotated.

    ``before`` is the number of records in earlier segments modulo ``workers``: record r of the
    whole order belongs to worker r mod workers.
    """

    worker: Int32
    workers: Int32

    expert: Int32
    turn: Int32
    source: Int32
    index: Int32
    count: Int32
    first: Int32
    before: Int32
    valid: Int32

    @cute.jit
    def open_segment(self, c: Context):
        """Load the current (expert, source) segment and find this worker's first record in it."""
        self.source = self.turn
        if cutlass.const_expr(c.problem.ring_blocks == 0):
            self.source = self.turn + c.pe
            if self.source >= c.problem.num_pes:
                self.source = self.source - c.problem.num_pes
        entry = self.source * (c.problem.experts_per_pe + 1) + self.expert
        address = c.smem + c.shared.primary + entry * 4
        self.first = ptx.lds_i32(address)
        self.count = ptx.lds_i32(address + 4) - self.first
        self.index = self.worker - self.before
        if self.index < 0:
            self.index = self.index + self.workers

    @cute.jit
    def settle(self, c: Context, experts: Int32):
        """Go on to the next segment while the current one has no further record of this worker."""
        while (self.valid == 1) & (self.index >= self.count):
            self.before = (self.before + self.count) % self.workers
            self.turn = self.turn + 1
            if self.turn == c.problem.num_pes:
                self.turn = Int32(0)
                self.expert = self.expert + 1
            if self.expert >= experts:
                self.valid = Int32(0)
            else:
                self.open_segment(c)

    @cute.jit
    def start(self, c: Context, experts: Int32):
        """Find the first record."""
        if experts > 0:
            self.valid = Int32(1)
            self.open_segment(c)
            self.settle(c, experts)

    @cute.jit
    def advance(self, c: Context, experts: Int32):
        """Step to the next record."""
        self.index = self.index + self.workers
        self.settle(c, experts)

    @cute.jit
    def address(self, c: Context) -> Int64:
        """Address of the current record."""
        record = Int64(self.first + self.index)
        return c.records(self.source) + record * (c.problem.record_words * 4)


@cute.jit
def save_record(c: Context, cursor: RecordCursor):
    """Keep the cursor's record for the backward: a later call overwrites the bank it lies in."""
    p = c.problem
    if lane() < p.record_words // 4:
        record = Int64(cursor.source) * p.max_records + cursor.first + cursor.index
        target = c.saved_region("route") + record * (p.record_words * 4) + lane() * 16
        v0, v1, v2, v3 = ptx.ld_i32x4(cursor.address(c) + lane() * 16)
        ptx.st_i32x4(target, v0, v1, v2, v3)


def make_cursor(worker: Int32, workers: Int32) -> RecordCursor:
    """A cursor before its first record."""
    zero = Int32(0)
    return RecordCursor(
        worker=worker,
        workers=workers,
        expert=zero,
        turn=zero,
        source=zero,
        index=zero,
        count=zero,
        first=zero,
        before=zero,
        valid=zero,
    )


@dataclass
class RowRing:
    """Slots of row pieces in shared memory: loads run ahead of stores by all slots but one.

    ``piece`` is the next piece to load of the load cursor's record; ``load_slot`` and
    ``store_slot`` name the slots, ``parity`` the phase of the store side's ``ring_full``;
    ``base`` and ``full`` are the shared addresses of the warp's slots and their barriers.
    """

    base: Int32
    full: Int32

    piece: Int32
    load_slot: Int32
    store_slot: Int32
    parity: Int32
    slots: cutlass.Constexpr[int]

    @cute.jit
    def issue(self, c: Context, cursor: RecordCursor):
        """Load the next piece from the source PE; ``cursor`` must be valid."""
        size = copy_bytes(c.problem)
        row_bytes = c.problem.hidden * BF16_BYTES
        token = record_token(c, cursor.address(c))
        offset = self.piece * size
        nbytes = row_bytes - offset
        if nbytes > size:
            nbytes = Int32(size)
        source = c.peer(cursor.source, "x") + Int64(token) * row_bytes + offset
        full = self.full + self.load_slot * 8
        with cute.arch.elect_one():
            ptx_copies.mbarrier_arrive_expect_tx(full, nbytes)
            ptx_copies.bulk_load(self.base + self.load_slot * size, source, nbytes, full)
        self.load_slot = self.load_slot + 1
        if self.load_slot == self.slots:
            self.load_slot = Int32(0)
        self.piece = self.piece + 1

    @cute.jit
    def step_store(self):
        """The store side moves to the next slot."""
        self.store_slot = self.store_slot + 1
        if self.store_slot == self.slots:
            self.store_slot = Int32(0)
            self.parity = self.parity ^ 1


@cute.jit
def announce(c: Context, row: Int32):
    """Count a complete row in its block: ``bulk_wait`` has shown this lane that its bulk writes
    are complete, which includes the proxy fence; the release passes that on."""
    if row >= 0:
        ptx.red_release(c.counter("x_ready", row // BLOCK_M), Int32(1), "gpu")


@cute.jit
def await_free_block(c: Context, block: Int32):
    """Ring pool: wait until fc2 of the block that lies where ``block`` will is done."""
    earlier = block - c.problem.ring_blocks
    wait_at_least(
        c.guard,
        c.counter("y_ready", earlier),
        Int32(c.y_target()),
        "gpu",
        int(Phase.FREE),
        c.pe,
        earlier,
    )
    # Its rows were read asynchronously; the stores that replace them are asynchronous too. Every
    # lane has polled and fences itself.
    ptx_copies.fence_proxy_async_global()


@cute.jit
def place_rows(c: Context, warp: Int32):
    """Copy rows: per piece wait for its load, store it to every row of the record, and load the
    next piece into the slot whose stores are complete. A record's rows are announced one piece
    late, so that a store is always in flight."""
    problem = c.problem
    size = copy_bytes(problem)
    row_bytes = problem.hidden * BF16_BYTES
    pieces = ceil_div(row_bytes, size)
    experts = c.local_experts()
    warps = c.config.place_warps
    loads = make_cursor(c.cta * warps + warp, c.grid * warps)
    stores = make_cursor(c.cta * warps + warp, c.grid * warps)
    ring = RowRing(
        base=c.smem + c.shared.ring + warp * (c.config.ring_slots * size),
        full=c.smem + c.shared.ring_full + warp * (c.config.ring_slots * 8),
        piece=Int32(0),
        load_slot=Int32(0),
        store_slot=Int32(0),
        parity=Int32(0),
        slots=c.config.ring_slots,
    )
    loads.start(c, experts)
    stores.start(c, experts)
    for _ in cutlass.range(c.config.ring_slots - 1, unroll=1):
        if loads.valid == 1:
            ring.issue(c, loads)
            if ring.piece == pieces:
                ring.piece = Int32(0)
                loads.advance(c, experts)
    complete_row = Int32(-1)
    open_block = Int32(-1)
    while stores.valid == 1:
        row = receive_rows(c, stores.address(c), stores.source)
        if cutlass.const_expr(problem.saves):
            save_record(c, stores)
        if cutlass.const_expr(problem.ring_blocks > 0):
            block = cute.arch.shuffle_sync(row, 0) // BLOCK_M
            if block != open_block:
                open_block = block
                if block >= problem.ring_blocks:
                    # Nothing may be held back while this warp waits: an earlier block may need it.
                    ptx_copies.bulk_wait(0)
                    announce(c, complete_row)
                    complete_row = Int32(-1)
                    await_free_block(c, block)
        for piece in cutlass.range(pieces, unroll=1):
            ptx_copies.mbarrier_wait(ring.full + ring.store_slot * 8, ring.parity)
            offset = piece * size
            nbytes = row_bytes - offset
            if nbytes > size:
                nbytes = Int32(size)
            if row >= 0:
                stored = c.stored_block(row // BLOCK_M) * BLOCK_M + row % BLOCK_M
                target = c.pool_x() + Int64(stored) * row_bytes + offset
                slot = ring.base + ring.store_slot * size
                ptx_copies.bulk_store(target, slot, nbytes)
            ptx_copies.bulk_commit()
            ptx_copies.bulk_wait(1)
            if piece == 0:
                announce(c, complete_row)
            cute.arch.sync_warp()
            if loads.valid == 1:
                ring.issue(c, loads)
                if ring.piece == pieces:
                    ring.piece = Int32(0)
                    loads.advance(c, experts)
            ring.step_store()
        complete_row = row
        stores.advance(c, experts)
    ptx_copies.bulk_wait(0)
    announce(c, complete_row)


@cute.jit
def agree(c: Context, ok: Int32) -> Int32:
    """1 if there is work for both CTAs of the cluster: they fill and release each other's stages,
    so neither may go on where the other has given up on the routes."""
    partner = 1 - c.cta % 2
    if lane() == 0:
        ptx_copies.store_at(c.smem + c.shared.partner_ok, partner, ok)
        ptx_copies.mbarrier_arrive_at(c.smem + c.shared.partner_ready, partner)
    await_cluster_phase(c.smem + c.shared.partner_ready, Int32(0))
    return ok * ptx.lds_i32(c.smem + c.shared.partner_ok)


@cute.jit
def make_layout(c: Context) -> Int32:
    """Await the routes and lay out the pool for all roles of the CTA; 1 if there is work."""
    ok = await_routes(c)
    if ok == 1:
        if cutlass.const_expr(c.problem.saves):
            save_counts(c)
        if cutlass.const_expr(c.problem.capacity_checked):
            ok = pools_fit(c)
    if cutlass.const_expr(c.config.cluster_size > 1):
        ok = agree(c, ok)
    if ok == 1:
        lay_out(c)
    else:
        # Nothing to do for anybody: no block, and reduce must not wait for contributions.
        if lane() == 0:
            ptx.sts_i32(
                c.smem + c.shared.block_prefix + c.local_experts() * 4,
                Int32(0),
            )
    cute.arch.sync_warp()
    if lane() == 0:
        ptx.sts_i32(c.smem + c.shared.skip, Int32(ok == 0))
        ptx_copies.mbarrier_arrive(c.smem + c.shared.layout_ready)
    return ok


@cute.jit
def recv_and_place(c: Context, warp: Int32):
    """The whole role of place warp ``warp``; the first makes the layout."""
    ok = Int32(0)
    if warp == 0:
        ok = make_layout(c)
    elif cutlass.const_expr(c.config.place_warps > 1):
        ptx_copies.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
        ok = 1 - ptx.lds_i32(c.smem + c.shared.skip)
    if ok == 1:
        # The rows of x were written by generic stores and are read by bulk copies, which any lane
        # may be elected to issue; all lanes are ordered behind every ``arrive`` by now.
        ptx_copies.fence_proxy_async_global()
        if aborted(c.guard) == 0:
            place_rows(c, warp)
