"""combine-send (pre-reduced combine): at the expert PE, sum the rows of one (token, source PE) in
ascending k, in fp32, send the sum to the source, and signal ``done``.

Pool blocks b with b mod grid = CTA belong to a CTA; its warps claim them in order and wait until
their rows are complete (``y_ready``). ``finished`` counts a token's complete rows on this PE;
whoever counts the last one sends the token. All of its rows are visible then: each was acquired by
the warp that counted it, and the counting is acq_rel.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies, ptx_values
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.combine import WARP_BYTES, claim, store_sums, sum_columns
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.layout import block_prefix, make_expert_cursor
from megamoe.cute_kernels.problem import BLOCK_M
from megamoe.cute_kernels.records import META_MASK, token_row
from megamoe.cute_kernels.smem import BF16_BYTES, CTRL_SEND
from megamoe.cute_kernels.sync import aborted, wait_at_least


@cute.jit
def send_token(c: Context, source: Int32, token: Int32, mask: Int32, slot: Int32):
    """Sum the token's rows on this PE (k in ``mask``), store the sum to the source's ``comb``."""
    p = c.problem
    row_bytes = p.hidden * BF16_BYTES
    address = Int64(0)
    weight = Float32(0.0)
    if (mask >> lane()) & 1 == 1:
        row = ptx.ld_i32(token_row(c, source, token, lane()))
        address = c.loc("pool_y") + Int64(row) * row_bytes
        _, _, _, bits = ptx.ld_i32x4(c.row_meta(row))
        weight = ptx_values.bits_to_f32(bits)
    target = c.peer(source, "comb") + (Int64(token) * p.comb_slots + slot) * row_bytes
    weighted = p.weight_at == "combine" and not p.backward
    for step in cutlass.range(0, row_bytes, WARP_BYTES, unroll=1):
        offset = step + lane() * 16
        inside = Int32(offset < row_bytes)
        s = sum_columns(address, mask * inside, weight, p.top_k, weighted, offset)
        if inside == 1:
            store_sums(target + offset, s)
    cute.arch.sync_warp()
    if lane() == 0:
        done = c.peer(source, "done") + Int64(c.bank * p.max_tokens + token) * 4
        ptx.red_release(done, Int32(1), "sys")


@cute.jit
def send_block(c: Context, block: Int32, rows: Int32):
    """Count the block's rows as finished; send the tokens that are complete with them."""
    p = c.problem
    for first in cutlass.range(0, rows, 32, unroll=1):
        row = first + lane()
        source = Int32(0)
        token = Int32(0)
        mask = Int32(0)
        slot = Int32(0)
        complete = Int32(0)
        if row < rows:
            meta = c.row_meta(block * BLOCK_M + row)
            source, token, _, _ = ptx.ld_i32x4(meta)
            mask, slot, _, _ = ptx.ld_i32x4(meta + 4 * META_MASK)
            finished = c.counter("finished", source * p.max_tokens + token)
            earlier = ptx.atom_acq_rel(finished, Int32(1))
            complete = Int32(earlier + 1 == Int32(cute.arch.popc(mask)))
        # What a lane acquired must be visible to the lanes that sum.
        cute.arch.sync_warp()
        left = Int32(cute.arch.vote_ballot_sync(complete == 1))
        while left != 0:
            turn = Int32(cute.arch.popc((left & (-left)) - 1))
            send_token(
                c,
                cute.arch.shuffle_sync(source, turn),
                cute.arch.shuffle_sync(token, turn),
                cute.arch.shuffle_sync(mask, turn),
                cute.arch.shuffle_sync(slot, turn),
            )
            left = left & (left - 1)


@cute.jit
def combine_send_role(c: Context):
    """The whole role of one warp."""
    ptx_copies.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
    blocks = block_prefix(c, c.local_experts())
    cursor = make_expert_cursor()
    block = claim(c, CTRL_SEND)
    while block < blocks:
        cursor.seek(c, block)
        rows = cursor.rows(c, block)
        ok = wait_at_least(
            c.guard,
            c.counter("y_ready", block),
            Int32(c.y_target()),
            "gpu",
            int(Phase.Y_READY),
            c.pe,
            block,
        )
        if (ok == 1) & (aborted(c.guard) == 0):
            send_block(c, block, rows)
        block = claim(c, CTRL_SEND)
