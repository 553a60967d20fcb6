"""Epilogue of dgrad's first GEMM: from dh to the gradients of gate and up, and what wgrad needs.

With dh = dy · W2 in the accumulators (a row's gradient before its router weight w) and the saved
gate and up: d gate and d up of w · dh overwrite gate and up, ``wact`` = bf16(w · activation), and
the row's d_topk_weights is Σ dh · activation, of which each 64 columns leave one part. A warp
reads and overwrites only its own 16 columns of a stage, so no barrier lies between.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies, ptx_values
from megamoe.cute_kernels.activation_backward import gated_backward, plain_backward
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.dgrad_load import HALVES, SLOT_COLUMNS, UP_OFFSET, first_column
from megamoe.cute_kernels.fc1_epilogue import stage_weights
from megamoe.cute_kernels.pipelines import StagePosition, full_barrier, release
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.smem import (
    PIECE_BYTES,
    PIECE_TOKENS,
    STAGING_BUFFERS,
    a_stage_bytes,
)
from megamoe.cute_kernels.staging import (
    GROUP_WARPS,
    HALF_ACCUMULATORS,
    PIECE_OCTETS,
    PIECES,
    VALUES,
    finish_stores,
    group_barrier,
    make_values,
    row_entries,
    staging,
    store_piece,
)

TOKEN_SUMS = 2 * PIECE_OCTETS
"""Tokens of a piece that one thread holds values of."""


@cute.jit
def load_piece(buffer: Int32, thread: Int32, rows: Int32, values: cute.Tensor):
    """The inverse of ``store_piece``; rows from ``rows`` on, which nobody wrote, repeat the last
    one that counts."""
    lane_ = thread % 32
    chunk = thread // 32 * 2 + (lane_ // 8 & 1)
    for pair in cutlass.range_constexpr(PIECE_OCTETS // 2):
        token = (2 * pair + lane_ // 16) * 8 + lane_ % 8
        if token >= rows:
            token = rows - 1
        packed = ptx_values.ldmatrix_x4_trans(buffer + token * 128 + ((chunk ^ (token & 7)) << 4))
        for i in cutlass.range_constexpr(4):
            first = 2 * (i % 2) + 4 * (2 * pair + i // 2)
            values[first] = ptx_values.bf16_to_f32(packed[i], False)
            values[first + 1] = ptx_values.bf16_to_f32(packed[i], True)


@cute.jit
def store_in_turn(
    gate_buffer: Int32, up_buffer: Int32, thread: Int32, d_gate: cute.Tensor, d_up: cute.Tensor
):
    """Gradients of gate and up in turn: 128 columns, the first 64 to ``gate_buffer``.

    A warp's 16 columns become 32, four chunks of 8. Row j of chunk q is gate (j even) or up of
    column 4·(q mod 2) + j/2 of row half q/2, which another lane of the same tokens holds.
    """
    lane_ = thread % 32
    warp = thread // 32
    row = lane_ >> 2
    buffer = gate_buffer
    if warp >= 2:
        buffer = up_buffer
    chunk = 4 * (warp & 1) + lane_ // 8
    for octet in cutlass.range_constexpr(PIECE_OCTETS):
        packed = []
        for q in cutlass.range_constexpr(4):
            first = octet * 4 + 2 * (q // 2)
            source = ((4 * (q % 2) + (row >> 1)) << 2) | (lane_ & 3)
            gate = cute.arch.shuffle_sync(
                ptx_values.pack_bf16x2(d_gate[first], d_gate[first + 1]), source
            )
            bits = cute.arch.shuffle_sync(
                ptx_values.pack_bf16x2(d_up[first], d_up[first + 1]), source
            )
            if row & 1 == 0:
                bits = gate
            packed.append(bits)
        token = octet * 8 + lane_ % 8
        address = buffer + token * 128 + ((chunk ^ (token & 7)) << 4)
        ptx_values.stmatrix_x4_trans(address, packed[0], packed[1], packed[2], packed[3])


def fold(sums: list, bit: int) -> list:
    """Half of the sums, each over the two lanes that differ in ``bit``: lanes with the bit keep
    the upper half."""
    count = len(sums) // 2
    upper = lane() & bit != 0
    kept = []
    for i in range(count):
        keep = Float32(cutlass.select_(upper, sums[i + count], sums[i]))
        send = Float32(cutlass.select_(upper, sums[i], sums[i + count]))
        kept.append(keep + cute.arch.shuffle_sync_bfly(send, bit))
    return kept


@cute.jit
def store_token_sums(c: Context, thread: Int32, group: Int32, piece: Int32, sums: list):
    """Sum over the warp's columns, for every token of the piece, to ``d_rows``.

    ``sums[2·octet + i]`` is the thread's part of token 8·octet + 2·(lane mod 4) + i. Folding over
    lane bits 4, 3 and 2 leaves a lane with octet = 2·bit 4 + bit 3 and i = bit 2.
    """
    (total,) = fold(fold(fold(sums, 16), 8), 4)
    lane_ = thread % 32
    token = 8 * (lane_ >> 3) + 2 * (lane_ & 3) + (lane_ >> 2 & 1)
    entry = (group * GROUP_WARPS + thread // 32) * BLOCK_M + piece * PIECE_TOKENS + token
    ptx.sts_f32(c.smem + c.shared.d_rows + entry * 4, total)


@cute.jit
def backward_piece(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    half: cutlass.Constexpr[int],
    piece: cutlass.Constexpr[int],
    up: cute.Tensor,
    gate: cute.Tensor,
    wact: cute.Tensor,
) -> list:
    """Turns gate and up into their gradients, fills ``wact``; the thread's sums for
    ``store_token_sums``. Without a gate, ``gate`` is not touched."""
    p = c.problem
    sums = [Float32(0.0)] * TOKEN_SUMS
    for octet in cutlass.range_constexpr(PIECE_OCTETS):
        token = piece * PIECE_TOKENS + octet * 8 + (thread % 4) * 2
        weights = ptx.lds_f32x2(row_entries(c, group) + token * 4)
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(2):
                v = octet * 4 + 2 * r + i
                dh = acc[half * HALF_ACCUMULATORS + piece * VALUES + v]
                if cutlass.const_expr(p.gated):
                    act, d_gate, d_up = gated_backward(p, gate[v], up[v], dh * weights[i])
                    gate[v] = d_gate
                    up[v] = d_up
                else:
                    act, d_up = plain_backward(p, up[v], dh * weights[i])
                    up[v] = d_up
                wact[v] = act * weights[i]
                sums[2 * octet + i] = sums[2 * octet + i] + dh * act
    return sums


@cute.jit
def store_gradients(
    c: Context,
    stage: Int32,
    buffer: Int32,
    thread: Int32,
    group: Int32,
    piece: cutlass.Constexpr[int],
    column: Int32,
    row: Int32,
    up: cute.Tensor,
    gate: cute.Tensor,
    wact: cute.Tensor,
):
    """Write a piece of all outputs over the saved values and to ``buffer``, and store them."""
    p = c.problem
    gate_buffer = stage + piece * PIECE_BYTES
    up_buffer = gate_buffer + UP_OFFSET
    store_piece(buffer, thread, wact, False)
    if cutlass.const_expr(p.paired_rows):
        store_in_turn(gate_buffer, up_buffer, thread, gate, up)
    else:
        store_piece(up_buffer, thread, up, False)
        if cutlass.const_expr(p.gated):
            store_piece(gate_buffer, thread, gate, False)
    ptx_copies.fence_proxy_async_shared()
    group_barrier(group)
    if thread == 0:
        ptx_copies.tma_store_2d(c.map("wact_piece"), column, row, buffer)
        if cutlass.const_expr(p.paired_rows):
            ptx_copies.tma_store_2d(c.map("dgu_piece"), 2 * column, row, gate_buffer)
            if column + SLOT_COLUMNS // 2 < p.intermediate:
                ptx_copies.tma_store_2d(
                    c.map("dgu_piece"), 2 * column + SLOT_COLUMNS, row, up_buffer
                )
        else:
            ptx_copies.tma_store_2d(c.map("up_piece"), column, row, up_buffer)
            if cutlass.const_expr(p.gated):
                ptx_copies.tma_store_2d(c.map("gate_piece"), column, row, gate_buffer)
        ptx_copies.bulk_commit()


@cute.jit
def backward_columns(
    c: Context,
    acc: cute.Tensor,
    stage: Int32,
    thread: Int32,
    group: Int32,
    half: cutlass.Constexpr[int],
    column: Int32,
    block: Int32,
    rows: Int32,
):
    """64 columns of h, whose saved values lie at ``stage``; then their part of d_topk_weights."""
    gate = make_values()
    up = make_values()
    wact = make_values()
    for piece in cutlass.range_constexpr(PIECES):
        if piece * PIECE_TOKENS < rows:
            saved = stage + piece * PIECE_BYTES
            left = rows - piece * PIECE_TOKENS
            if cutlass.const_expr(c.problem.gated):
                load_piece(saved, thread, left, gate)
            load_piece(saved + UP_OFFSET, thread, left, up)
            sums = backward_piece(c, acc, thread, group, half, piece, up, gate, wact)
            # The store two pieces back has read its buffer; every warp has read its saved values
            # and, of the columns before, the row sums.
            if thread == 0:
                ptx_copies.bulk_wait_read(STAGING_BUFFERS - 1)
            group_barrier(group)
            store_token_sums(c, thread, group, Int32(piece), sums)
            buffer = staging(c, group, piece % STAGING_BUFFERS)
            row = block * BLOCK_M + piece * PIECE_TOKENS
            store_gradients(c, stage, buffer, thread, group, piece, column, row, up, gate, wact)
    # Thread 0: the stage and the buffers can be written again; the barrier tells the others.
    if thread == 0:
        ptx_copies.bulk_wait_read(0)
    group_barrier(group)
    if thread < rows:
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(GROUP_WARPS):
            entry = (group * GROUP_WARPS + warp) * BLOCK_M + thread
            total = total + ptx.lds_f32(c.smem + c.shared.d_rows + entry * 4)
        part = Int64(column // SLOT_COLUMNS) * c.problem.pool_rows
        ptx.st_f32(c.loc("d_weight") + (part + block * BLOCK_M + thread) * 4, total)


@cute.jit
def dgrad_epilogue(
    c: Context,
    acc: cute.Tensor,
    position: StagePosition,
    thread: Int32,
    group: Int32,
    block: Int32,
    n: Int32,
    rows: Int32,
) -> StagePosition:
    """The whole epilogue of a warpgroup; counts in ``h_ready``. Returns the position after the
    stages of saved values, of which a warpgroup uses every second and releases all."""
    stage_weights(c, thread, group, block, rows)
    if (n == 0) & (group == 0) & (thread < rows):
        target = c.dgrad_region("row_weight") + Int64(block * BLOCK_M + thread) * 4
        ptx.st_i32(target, ptx.lds_i32(row_entries(c, group) + thread * 4))
    group_barrier(group)
    for half in cutlass.range_constexpr(HALVES):
        # One copy of the code serves both warpgroups: each takes its stage and frees the other's.
        own_stage = Int32(-1)
        for slot in cutlass.range_constexpr(2):
            column = first_column(c, n, half, slot)
            if column < c.problem.intermediate:
                ptx_copies.mbarrier_wait(full_barrier(c, position.stage), position.parity)
                if group == slot:
                    own_stage = position.stage
                else:
                    release(c, position.stage)
                position.advance()
        if own_stage >= 0:
            stage = c.smem + c.shared.a + own_stage * a_stage_bytes(c.config)
            column = first_column(c, n, half, group)
            backward_columns(c, acc, stage, thread, group, half, column, block, rows)
            release(c, own_stage)
    # Thread 0 releases the row sums of all threads.
    group_barrier(group)
    finish_stores(c.counter("h_ready", block), thread)
    return position
