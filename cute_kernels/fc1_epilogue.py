"""Epilogue of fc1: bias, activation, router weight → ``pool_h``, stored by TMA; a saving forward
stores gate and up too, bf16, as the backward needs them; a dgrad that recomputes stores only these.

Pieces past the block's valid rows are skipped; inside a piece, unused rows go to unused pool rows.
"""

import cutlass
from cutlass import Float32, Int32, cute

from megamoe.cute_kernels import ptx, ptx_copies
from megamoe.cute_kernels.activation import gated, plain
from megamoe.cute_kernels.bias import fc1_bias
from megamoe.cute_kernels.context import Context
from megamoe.cute_kernels.kernel_config import alternating_octets, h_columns
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.smem import HALF_ROWS, PIECE_TOKENS, STAGING_BUFFERS
from megamoe.cute_kernels.staging import (
    GROUP_COLUMNS,
    HALF_ACCUMULATORS,
    PIECE_OCTETS,
    PIECES,
    VALUES,
    finish_stores,
    group_barrier,
    make_values,
    row_entries,
    staging,
    store_piece_by_tma,
)


@cute.jit
def stage_weights(c: Context, thread: Int32, group: Int32, block: Int32, rows: Int32):
    """Router weights of the block's rows to the row entries, fp32; 0 for unused rows."""
    weight_bits = Int32(0)
    if thread < rows:
        _, _, _, weight_bits = ptx.ld_i32x4(c.row_meta(block * BLOCK_M + thread))
    ptx.sts_i32(row_entries(c, group) + thread * 4, weight_bits)


@cute.jit
def token_weights(c: Context, group: Int32, token: Int32) -> tuple[Float32, Float32]:
    """Router weights of two consecutive rows of the block, or ones if applied elsewhere."""
    pair = (Float32(1.0), Float32(1.0))
    if cutlass.const_expr(c.problem.weight_at == "act"):
        pair = ptx.lds_f32x2(row_entries(c, group) + token * 4)
    return pair


@cute.jit
def row_biases(
    c: Context, thread: Int32, expert: Int32, column: Int32, part: cutlass.Constexpr[int]
) -> tuple[Float32, Float32]:
    """fc1 bias of the thread's two columns (``r`` of ``store_piece``) from ``column`` on; a narrow
    tile has one column a thread, and both are its bias."""
    lane = thread % 32
    warp = thread // 32
    p = c.problem
    narrow = h_columns(p, c.config) < GROUP_COLUMNS
    pair = (Float32(0.0), Float32(0.0))
    if cutlass.const_expr(p.bias13 != "none"):
        if cutlass.const_expr(p.paired_rows):
            first = column + 8 * warp + (lane >> 3) + 4 * ((lane >> 2) & 1)
            step = GROUP_COLUMNS // 2
        else:
            first = column + (8 if narrow else 16) * warp + (lane >> 2)
            step = 8
        bias = fc1_bias(c, expert, first, part)
        pair = (bias, bias if narrow else fc1_bias(c, expert, first + step, part))
    return pair


@cute.jit
def pair_up(acc: cute.Tensor, first: cutlass.Constexpr[int], odd_row: Int32):
    """Gate and up of one output row and two tokens, with alternating weight rows.

    Lanes l and l ^ 4 hold gate and up rows; each has rows r = 0, 1 of two tokens at
    ``acc[first …]``. The even (gate) lane keeps r = 0 and gets up of r = 0, the odd keeps r = 1.
    """
    gates, ups = [], []
    for token in cutlass.range_constexpr(2):
        keep = acc[first + token]
        send = acc[first + 2 + token]
        if odd_row == 1:
            keep = acc[first + 2 + token]
            send = acc[first + token]
        other = cute.arch.shuffle_sync_bfly(send, 4)
        gate = keep
        up = other
        if odd_row == 1:
            gate = other
            up = keep
        gates.append(gate)
        ups.append(up)
    return gates[0], gates[1], ups[0], ups[1]


@cute.jit
def pre_activations(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    first: cutlass.Constexpr[int],
    r: cutlass.Constexpr[int],
    half: cutlass.Constexpr[int],
    gate_bias: tuple[Float32, Float32],
    up_bias: tuple[Float32, Float32],
) -> tuple:
    """Gate, then up (without a gate: x), bias added, of column ``r`` and two tokens; ``first`` is
    the accumulator of the octet in the first half."""
    p = c.problem
    # Rows of up follow rows of gate by this many accumulators; octets of "up_gate" the other way.
    gate_at, up_at = 0, HALF_ACCUMULATORS
    if alternating_octets(p, c.config):
        gate_at, up_at = (2, 0) if p.w13_layout == "up_gate" else (0, 2)
    at = first + 2 * r
    if cutlass.const_expr(p.paired_rows):
        odd_row = (thread >> 2) & 1
        gate_0, gate_1, up_0, up_1 = pair_up(acc, first + r * HALF_ACCUMULATORS, odd_row)
        values = (gate_0, gate_1, up_0, up_1)
    elif cutlass.const_expr(p.gated):
        values = (acc[at + gate_at], acc[at + 1 + gate_at], acc[at + up_at], acc[at + 1 + up_at])
    else:
        at += half * HALF_ACCUMULATORS
        values = (acc[at], acc[at + 1])
    biases = (gate_bias[r], gate_bias[r], up_bias[r], up_bias[r])
    return tuple(value + bias for value, bias in zip(values, biases, strict=False))


@cute.jit
def piece_values(
    c: Context,
    acc: cute.Tensor,
    values: cute.Tensor,
    thread: Int32,
    group: Int32,
    piece: cutlass.Constexpr[int],
    half: cutlass.Constexpr[int],
    gate_bias: tuple[Float32, Float32],
    up_bias: tuple[Float32, Float32],
):
    """The 16 values of one piece (8 of a narrow tile), order as ``store_piece`` wants them."""
    p = c.problem
    columns = h_columns(p, c.config) // (GROUP_COLUMNS // 2)
    for octet in cutlass.range_constexpr(PIECE_OCTETS):
        # A thread's tokens of octet o: 8·o + 2·(lane % 4) and the next.
        token = piece * PIECE_TOKENS + octet * 8 + (thread % 4) * 2
        weights = token_weights(c, group, token)
        first = piece * VALUES + octet * 4
        for r in cutlass.range_constexpr(columns):
            pre = pre_activations(c, acc, thread, first, r, half, gate_bias, up_bias)
            for i in cutlass.range_constexpr(2):
                out = gated(p, pre[i], pre[2 + i]) if p.gated else plain(p, pre[i])
                values[octet * (2 * columns) + 2 * r + i] = out * weights[i]


@cute.jit
def save_piece(
    c: Context,
    acc: cute.Tensor,
    values: cute.Tensor,
    thread: Int32,
    group: Int32,
    piece: cutlass.Constexpr[int],
    half: cutlass.Constexpr[int],
    column: Int32,
    row: Int32,
    gate_bias: tuple[Float32, Float32],
    up_bias: tuple[Float32, Float32],
):
    """Store the pre-activations of one piece for the backward: gate, then up."""
    p = c.problem
    names = ("gate", "up") if p.gated else ("up",)
    for part in cutlass.range_constexpr(len(names)):
        for octet in cutlass.range_constexpr(PIECE_OCTETS):
            first = piece * VALUES + octet * 4
            for r in cutlass.range_constexpr(2):
                pre = pre_activations(c, acc, thread, first, r, half, gate_bias, up_bias)
                for i in cutlass.range_constexpr(2):
                    values[octet * 4 + 2 * r + i] = pre[2 * part + i]
        store_piece_by_tma(
            c.map(f"{names[part]}_piece"),
            column,
            row,
            staging(c, group, (piece * stores_of_piece(c) + part) % STAGING_BUFFERS),
            thread,
            group,
            values,
            p.paired_rows,
        )


def stores_of_piece(c: Context) -> int:
    """Stores of one piece: gate and up where the backward needs them, then h in a forward."""
    p = c.problem
    return int(p.stores_gate_up) * (2 if p.gated else 1) + int(not p.backward)


@cute.jit
def fc1_epilogue(
    c: Context,
    acc: cute.Tensor,
    thread: Int32,
    group: Int32,
    expert: Int32,
    block: Int32,
    n: Int32,
    rows: Int32,
):
    """h = bf16(act(…) · router weight) of this warpgroup's columns, and gate and up; then count in
    ``h_ready``."""
    p = c.problem
    if cutlass.const_expr(p.weight_at == "act" and not p.backward):
        stage_weights(c, thread, group, block, rows)
        group_barrier(group)
    values = make_values()
    columns = h_columns(p, c.config)
    for half in cutlass.range_constexpr(1 if p.gated else c.config.halves):
        column = n * (c.config.block_n // 2 if p.gated else c.config.block_n)
        column += half * HALF_ROWS + group * columns
        gate_bias = row_biases(c, thread, expert, column, 0)
        up_bias = row_biases(c, thread, expert, column, 1) if p.gated else gate_bias
        for piece in cutlass.range_constexpr(PIECES):
            if piece * PIECE_TOKENS < rows:
                row = c.stored_block(block) * BLOCK_M + piece * PIECE_TOKENS
                if cutlass.const_expr(p.stores_gate_up):
                    save_piece(
                        c,
                        acc,
                        values,
                        thread,
                        group,
                        piece,
                        half,
                        column,
                        row,
                        gate_bias,
                        up_bias,
                    )
                if cutlass.const_expr(not p.backward):
                    piece_values(c, acc, values, thread, group, piece, half, gate_bias, up_bias)
                    store = piece * stores_of_piece(c) + stores_of_piece(c) - 1
                    buffer = staging(c, group, store % STAGING_BUFFERS)
                    store_piece_by_tma(
                        c.map("pool_h_piece"),
                        column,
                        row,
                        buffer,
                        thread,
                        group,
                        values,
                        p.paired_rows,
                        columns,
                    )
        if cutlass.const_expr(not p.gated):
            # The second half starts with buffer 0 again, whichever was used last.
            if thread == 0:
                ptx_copies.bulk_wait_read(0)
    finish_stores(c.counter("h_ready", block), thread)
