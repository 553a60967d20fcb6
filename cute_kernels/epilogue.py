"""Epilogues of fc1 (activation → pool_h) and fc2 (rows → ``comb`` of their source PEs).

Each math warpgroup works alone: its own 128-thread barrier, staging buffers, row entries and
counts. A tile leaves in pieces of 32 tokens × 64 weight rows; tokens become rows of memory by a
transposed stmatrix into a 128-byte-swizzled staging buffer. Pieces past the block's valid rows are
skipped; inside a piece, unused rows are written to unused pool rows (fc1) or selected away (fc2).
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.activation import gated
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.problem import BLOCK_M, BLOCK_N
from megamoe.cute_kernels.smem import (
    BF16_BYTES,
    MATH_WARPGROUPS,
    PIECE_BYTES,
    PIECE_TOKENS,
    ROW_ENTRY_BYTES,
    STAGING_BUFFERS,
)
from megamoe.cute_kernels.sync import NamedBarrier

GROUP_THREADS = 128
GROUP_COLUMNS = 64
PIECES = BLOCK_M // PIECE_TOKENS
SUM_PER_PIECE = 16
"""Accumulators of one thread, one half and one piece: 4 token octets, 2 rows, 2 tokens."""


@cute.jit
def group_barrier(group: Int32):
    """Barrier of one math warpgroup; ids are static, or ptxas would count all sixteen."""
    if group == 0:
        cute.arch.barrier(barrier_id=int(NamedBarrier.MATH_0), number_of_threads=GROUP_THREADS)
    else:
        cute.arch.barrier(barrier_id=int(NamedBarrier.MATH_1), number_of_threads=GROUP_THREADS)


def staging(c: Context, group: Int32, buffer: int) -> Int32:
    """Shared address of a staging buffer."""
    return c.smem + c.shared.staging + (group * STAGING_BUFFERS + buffer) * PIECE_BYTES


def row_entries(c: Context, group: Int32) -> Int32:
    """Shared address of the warpgroup's table of one entry per row of the block."""
    return c.smem + c.shared.row_entries + group * BLOCK_M * ROW_ENTRY_BYTES


@cute.jit
def store_piece(buffer: Int32, thread: Int32, values: cute.Tensor):
    """Transposed stmatrix of 16 values a thread (order: parity + 2·row half + 4·octet).

    Lane l names the row of matrix l / 8: matrices are (row half 0, 1) × (octet o, o + 1); memory
    row = token, 16-byte chunk = 8 weight rows, chunk index XOR (token mod 8).
    """
    lane = thread % 32
    warp = thread // 32
    half = (lane // 8) & 1
    for pair in cutlass.range_constexpr(2):
        token = (2 * pair + lane // 16) * 8 + lane % 8
        chunk = warp * 2 + half
        address = buffer + token * 128 + ((chunk ^ (token & 7)) << 4)
        packed = []
        for i in cutlass.range_constexpr(4):
            # Matrix i: row half i % 2, octet 2·pair + i / 2.
            first = 2 * (i % 2) + 4 * (2 * pair + i // 2)
            packed.append(ptx.pack_bf16x2(values[first], values[first + 1]))
        ptx.stmatrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3])


@cute.jit
def fc1_epilogue(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    block: Int32,
    n: Int32,
    rows: Int32,
):
    """h = bf16(act(gate) · up · router weight) of 64 columns, stored by TMA to ``pool_h``."""
    entries = row_entries(c, group)
    weight_bits = Int32(0)
    if thread < rows:
        _, _, _, weight_bits = ptx.ld_i32x4(
            c.loc("row_meta") + Int64(block * BLOCK_M + thread) * 16
        )
    ptx.sts_i32(entries + thread * 4, weight_bits)
    group_barrier(group)
    column = n * (BLOCK_N // 2) + group * GROUP_COLUMNS
    # A thread's tokens of octet o: 8·o + 2·(lane % 4) and the next.
    first_token = (thread % 4) * 2
    values = cute.make_rmem_tensor((SUM_PER_PIECE,), Float32)
    for piece in cutlass.range_constexpr(PIECES):
        if piece * PIECE_TOKENS < rows:
            for octet in cutlass.range_constexpr(PIECE_TOKENS // 8):
                token = piece * PIECE_TOKENS + octet * 8 + first_token
                weights = ptx.lds_f32x2(entries + token * 4)
                for i in cutlass.range_constexpr(4):
                    source = piece * SUM_PER_PIECE + octet * 4 + i
                    h = gated(c.problem.activation, acc[source], acc[source + 64])
                    values[octet * 4 + i] = h * weights[i % 2]
            buffer = staging(c, group, piece % STAGING_BUFFERS)
            if thread == 0:
                ptx.bulk_wait_read(STAGING_BUFFERS - 1)
            group_barrier(group)
            store_piece(buffer, thread, values)
            ptx.fence_proxy_async_shared()
            group_barrier(group)
            if thread == 0:
                row = block * BLOCK_M + piece * PIECE_TOKENS
                ptx.tma_store_2d(c.map("pool_h_store"), column, row, buffer)
                ptx.bulk_commit()
    if thread == 0:
        ptx.bulk_wait(0)
        ptx.fence_proxy_async_global()
        ptx.red_release(c.counter("h_ready", block), Int32(1), "gpu")
    # The row entries and buffers are free for the next tile once thread 0 has got here.
    group_barrier(group)


@cute.jit
def row_target(c: Context, row: Int32) -> Int64:
    """Address of a pool row's contribution: ``comb[token][k]`` on its source PE."""
    source, token, k, _ = ptx.ld_i32x4(c.loc("row_meta") + Int64(row) * 16)
    index = Int64(token) * c.problem.top_k + k
    return c.peer(source, "comb") + index * (c.problem.hidden * BF16_BYTES)


@cute.jit
def fc2_epilogue(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
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
    if (thread < rows) & (suppress == 0):
        target = row_target(c, block * BLOCK_M + thread)
    ptx.sts_i64(entries + thread * ROW_ENTRY_BYTES, target)
    group_barrier(group)
    values = cute.make_rmem_tensor((SUM_PER_PIECE,), Float32)
    for half in cutlass.range_constexpr(2):
        column = n * BLOCK_N + half * (BLOCK_N // 2) + group * GROUP_COLUMNS
        if column < c.problem.hidden:
            for piece in cutlass.range_constexpr(PIECES):
                if piece * PIECE_TOKENS < rows:
                    for i in cutlass.range_constexpr(SUM_PER_PIECE):
                        values[i] = acc[half * 64 + piece * SUM_PER_PIECE + i]
                    buffer = staging(c, group, piece % STAGING_BUFFERS)
                    store_piece(buffer, thread, values)
                    group_barrier(group)
                    send_piece(c, buffer, entries, thread, piece, column)
            # The next half starts with buffer 0 again; an odd number of pieces would reuse the
            # buffer that slower threads still read.
            group_barrier(group)
    count_block(c, thread, group, block, rows, suppress)


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
        if target != 0:
            ptx.st_i32x4(target + Int64(column * BF16_BYTES + chunk * 16), v0, v1, v2, v3)


@cute.jit
def count_block(
    c: Context,
    thread: Int32,
    group: Int32,
    block: Int32,
    rows: Int32,
    suppress: Int32,
):
    """Count this warpgroup's part of the block; the last one releases ``done`` of every row."""
    entries = row_entries(c, group)
    target = ptx.lds_i64(entries + thread * ROW_ENTRY_BYTES)
    group_barrier(group)
    if thread == 0:
        earlier = ptx.atom_acq_rel(c.counter("y_ready", block), Int32(1))
        last = earlier == c.problem.fc2_tiles * MATH_WARPGROUPS - 1
        ptx.sts_i32(entries, Int32(last))
    group_barrier(group)
    if (ptx.lds_i32(entries) == 1) & (target != 0):
        source, token, _, _ = ptx.ld_i32x4(c.loc("row_meta") + Int64(block * BLOCK_M + thread) * 16)
        index = c.bank * c.problem.max_tokens + token
        ptx.red_release(c.peer(source, "done") + Int64(index) * 4, Int32(1), "sys")
    group_barrier(group)
