"""Epilogue of fc2: rows go from the registers to ``comb`` of their source PEs (direct combine), or
to ``pool_y``, from where combine-send sums and sends them (pre-reduced).

Pieces past the block's valid rows are skipped; inside a piece, unused rows are selected away.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies
from megamoe.cute_kernels.bias import fc2_bias
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.dgrad_weights import send_weight_gradients
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.smem import (
    BF16_BYTES,
    HALF_ROWS,
    PIECE_TOKENS,
    ROW_ENTRY_BYTES,
    STAGING_BUFFERS,
)
from megamoe.cute_kernels.staging import (
    GROUP_COLUMNS,
    HALF_ACCUMULATORS,
    PIECES,
    VALUES,
    finish_stores,
    group_barrier,
    make_values,
    row_entries,
    staging,
    store_piece,
    store_piece_by_tma,
)
from megamoe.cute_kernels.sync import aborted


@cute.jit
def row_targets(c: Context, row: Int32) -> tuple[Int64, Int64]:
    """Where a pool row goes: ``comb[token][k]`` and ``done[token]`` of its source PE."""
    source, token, k, _ = ptx.ld_i32x4(c.row_meta(row))
    index = Int64(token) * c.problem.top_k + k
    done = Int64(c.bank * c.problem.max_tokens + token) * 4
    return (
        c.peer(source, "comb") + index * (c.problem.hidden * BF16_BYTES),
        c.peer(source, "done") + done,
    )


@cute.jit
def row_biases(c: Context, thread: Int32, expert: Int32, column: Int32) -> tuple[Float32, Float32]:
    """fc2 bias of the thread's two weight rows from ``column`` on."""
    pair = (Float32(0.0), Float32(0.0))
    if cutlass.const_expr(c.problem.bias2 != "none" and not c.problem.backward):
        first = column + 16 * (thread // 32) + (thread % 32 >> 2)
        pair = (fc2_bias(c, expert, first), fc2_bias(c, expert, first + 8))
    return pair


@cute.jit
def piece_values(
    acc: cute.Tensor,
    values: cute.Tensor,
    piece: cutlass.Constexpr[int],
    half: cutlass.Constexpr[int],
    bias: tuple[Float32, Float32],
):
    """The 16 values of one piece, bias added, in the order ``store_piece`` wants."""
    for i in cutlass.range_constexpr(VALUES):
        source = half * HALF_ACCUMULATORS + piece * VALUES + i
        values[i] = acc[source] + bias[(i // 2) % 2]


@cute.jit
def fc2_to_pool(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    expert: Int32,
    block: Int32,
    n: Int32,
    rows: Int32,
):
    """Rows of y of this warpgroup's columns to ``pool_y``; then count in ``y_ready``."""
    values = make_values()
    for half in cutlass.range_constexpr(c.config.halves):
        column = n * c.config.block_n + half * HALF_ROWS + group * GROUP_COLUMNS
        if column < c.problem.hidden:
            if cutlass.const_expr(half == 1):
                # This half starts with buffer 0 again, whichever was used last.
                if thread == 0:
                    ptx_copies.bulk_wait_read(0)
            bias = row_biases(c, thread, expert, column)
            for piece in cutlass.range_constexpr(PIECES):
                if piece * PIECE_TOKENS < rows:
                    piece_values(acc, values, piece, half, bias)
                    row = block * BLOCK_M + piece * PIECE_TOKENS
                    buffer = staging(c, group, piece % STAGING_BUFFERS)
                    store_piece_by_tma(
                        c.map("pool_y_piece"), column, row, buffer, thread, group, values, False
                    )
    finish_stores(c.counter("y_ready", block), thread)


@cute.jit
def fc2_to_sources(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    expert: Int32,
    block: Int32,
    n: Int32,
    rows: Int32,
    suppress: Int32,
):
    """Rows of y, 64 columns of each half, straight to the source PEs; then count, and the
    warpgroup that completes the block signals ``done`` of each of its rows.

    ``suppress`` ≠ 0: this PE gave up on the epoch; nothing may reach a peer.
    """
    entries = row_entries(c, group)
    target = Int64(0)
    done = Int64(0)
    if (thread < rows) & (suppress == 0):
        target, done = row_targets(c, block * BLOCK_M + thread)
    ptx.sts_i64(entries + thread * ROW_ENTRY_BYTES, target)
    # Orders thread 0's wait for the stores of an fc1 tile before the first write to a buffer.
    group_barrier(group)
    values = make_values()
    for half in cutlass.range_constexpr(c.config.halves):
        column = n * c.config.block_n + half * HALF_ROWS + group * GROUP_COLUMNS
        if column < c.problem.hidden:
            if cutlass.const_expr(half == 1):
                # This half starts with buffer 0 again; an odd number of pieces would reuse the
                # buffer that slower threads still read.
                group_barrier(group)
            bias = row_biases(c, thread, expert, column)
            for piece in cutlass.range_constexpr(PIECES):
                if piece * PIECE_TOKENS < rows:
                    piece_values(acc, values, piece, half, bias)
                    buffer = staging(c, group, piece % STAGING_BUFFERS)
                    store_piece(buffer, thread, values, False)
                    group_barrier(group)
                    send_piece(c, buffer, entries, thread, piece, column)
    count_block(c, thread, group, block, done)


@cute.jit
def fc2_epilogue(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    expert: Int32,
    block: Int32,
    n: Int32,
    rows: Int32,
):
    """The epilogue of the problem's combine mode; in dgrad also the rows' scalars, once."""
    if cutlass.const_expr(c.problem.backward):
        if (n == 0) & (group == 0):
            send_weight_gradients(c, thread, expert, block, rows)
    if cutlass.const_expr(c.problem.prereduced):
        fc2_to_pool(c, acc, thread, group, expert, block, n, rows)
    else:
        # Whoever fed this tile with unready data had seen ``abort`` before math got it.
        suppress = aborted(c.guard)
        fc2_to_sources(c, acc, thread, group, expert, block, n, rows, suppress)


@cute.jit
def send_piece(
    c: Context,
    buffer: Int32,
    entries: Int32,
    thread: Int32,
    piece: cutlass.Constexpr[int],
    column: Int32,
):
    """Copy a staged piece to its rows, 16 bytes a thread: 8 threads write 128 bytes of a row."""
    chunk = thread % 8
    for step in cutlass.range_constexpr(PIECE_TOKENS // 16):
        token = step * 16 + thread // 8
        target = ptx.lds_i64(entries + (piece * PIECE_TOKENS + token) * ROW_ENTRY_BYTES)
        v0, v1, v2, v3 = ptx.lds_i32x4(buffer + token * 128 + ((chunk ^ (token & 7)) << 4))
        if (target != 0) & (column + chunk * 8 < c.problem.hidden):
            ptx.st_i32x4(target + Int64(column * BF16_BYTES + chunk * 16), v0, v1, v2, v3)


@cute.jit
def count_block(c: Context, thread: Int32, group: Int32, block: Int32, done: Int64):
    """Count this warpgroup's part of the block; the last one releases ``done`` of every row, whose
    address its thread has (0 = none)."""
    entries = row_entries(c, group)
    group_barrier(group)
    if thread == 0:
        earlier = ptx.atom_acq_rel(c.counter("y_ready", block), Int32(1))
        last = earlier == c.y_target() - 1
        ptx.sts_i32(entries, Int32(last))
    group_barrier(group)
    if (ptx.lds_i32(entries) == 1) & (done != 0):
        ptx.red_release(done, Int32(1), "sys")
    group_barrier(group)
