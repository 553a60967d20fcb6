"""Words of a route record and of a row's metadata.

A record goes from a source PE to a PE with experts. With the full pool, one per (token, PE):

    token, K × packed (local expert, position) or −1 for slots elsewhere, K × weight[, comb slot]

With a ring pool there is one per row, because rows are placed in pool order:

    token · K + k, packed (local expert, position), weight, mask of the token's k on that PE[, comb
    slot]

The ``comb slot`` (pre-reduced combine) says where the PE's sum goes among the token's. Lists are
ordered by (first) local expert, then token.
"""

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.routing import Pair

RING_PACKED = 1
RING_WEIGHT = 2
RING_MASK = 3
RING_SLOT = 4

# Metadata of a row: source PE, token, k, weight and, pre-reduced, mask of the token's k here, slot.
META_MASK = 4
META_SLOT = 5


@cute.jit
def pack_place(c: Context, pair: Pair, position: Int32) -> Int32:
    """(local expert, position) of a pair in one word, −1 for a masked slot."""
    packed = Int32(-1)
    if pair.pe >= 0:
        packed = (pair.local << c.problem.position_bits) | position
    return packed


@cute.jit
def weight_bits(c: Context, pair: Pair) -> Int32:
    """Router weight of a pair; masked slots' weights are not read."""
    weight = Int32(0)
    if pair.pe >= 0:
        index = Int64(pair.token) * c.problem.top_k + pair.k
        weight = ptx.ld_i32(c.weights + index * 4)
    return weight


@cute.jit
def comb_slot(c: Context, pair: Pair) -> Int32:
    """Where this PE's contribution goes among its token's: PEs in ascending order."""
    slot = Int32(0)
    for k in cutlass.range_constexpr(c.problem.top_k):
        other_leads = cute.arch.shuffle_sync(pair.leader, pair.first_lane + k)
        other_pe = cute.arch.shuffle_sync(pair.pe, pair.first_lane + k)
        if (other_leads == 1) & (other_pe < pair.pe):
            slot += 1
    return slot


@cute.jit
def token_record(c: Context, pair: Pair, position: Int32) -> list:
    """Words of the record of the pair's (token, PE); all 32 lanes must call it together."""
    packed = pack_place(c, pair, position)
    weight = weight_bits(c, pair)
    words = [pair.token]
    weight_words = []
    for k in cutlass.range_constexpr(c.problem.top_k):
        other_packed = cute.arch.shuffle_sync(packed, pair.first_lane + k)
        other_pe = cute.arch.shuffle_sync(pair.pe, pair.first_lane + k)
        entry = Int32(-1)
        if other_pe == pair.pe:
            entry = other_packed
        words.append(entry)
        weight_words.append(cute.arch.shuffle_sync(weight, pair.first_lane + k))
    words = words + weight_words
    if cutlass.const_expr(c.problem.prereduced):
        words.append(comb_slot(c, pair))
    return words + [Int32(0)] * (c.problem.record_words - len(words))


@cute.jit
def row_record(c: Context, pair: Pair, position: Int32) -> list:
    """Words of the record of the pair's row; all 32 lanes must call it together."""
    mask = Int32(0)
    for k in cutlass.range_constexpr(c.problem.top_k):
        if cute.arch.shuffle_sync(pair.pe, pair.first_lane + k) == pair.pe:
            mask = mask | Int32((1 << k) - (1 << 32 if k == 31 else 0))
    words = [
        pair.token * c.problem.top_k + pair.k,
        pack_place(c, pair, position),
        weight_bits(c, pair),
        mask,
    ]
    if cutlass.const_expr(c.problem.prereduced):
        words.append(comb_slot(c, pair))
    return words + [Int32(0)] * (c.problem.record_words - len(words))


@cute.jit
def record_token(c: Context, record: Int64) -> Int32:
    """Token of a record."""
    token = ptx.ld_i32(record)
    if cutlass.const_expr(c.problem.ring_blocks > 0):
        token = token // c.problem.top_k
    return token


@cute.jit
def row_of(c: Context, packed: Int32, source: Int32) -> Int32:
    """Pool row of a packed (local expert, position) from ``source``; −1 if it has none. Rows
    count all rows of the call, also with a ring."""
    p = c.problem
    row = Int32(-1)
    if packed >= 0:
        expert = packed >> p.position_bits
        position = packed & ((1 << p.position_bits) - 1)
        block = ptx.lds_i32(c.smem + c.shared.block_prefix + expert * 4)
        segment = ptx.lds_i32(c.smem + c.shared.segment + (expert * p.num_pes + source) * 4)
        row = (block << 7) + segment + position
    return row


@cute.jit
def receive_rows(c: Context, record: Int64, source: Int32) -> Int32:
    """Lane k (with a ring lane 0) gets its row of the record, or −1, and writes its metadata."""
    p = c.problem
    row = Int32(-1)
    token = record_token(c, record)
    k = lane()
    weight = Int32(0)
    mask = Int32(0)
    slot = Int32(0)
    if cutlass.const_expr(p.ring_blocks > 0):
        if lane() == 0:
            row = row_of(c, ptx.ld_i32(record + 4 * RING_PACKED), source)
            k = ptx.ld_i32(record) - token * p.top_k
            weight = ptx.ld_i32(record + 4 * RING_WEIGHT)
            mask = ptx.ld_i32(record + 4 * RING_MASK)
            if cutlass.const_expr(p.prereduced):
                slot = ptx.ld_i32(record + 4 * RING_SLOT)
    else:
        if lane() < p.top_k:
            row = row_of(c, ptx.ld_i32(record + Int64(1 + lane()) * 4), source)
            weight = ptx.ld_i32(record + Int64(1 + p.top_k + lane()) * 4)
            if cutlass.const_expr(p.prereduced):
                slot = ptx.ld_i32(record + 4 * (1 + 2 * p.top_k))
        mask = Int32(cute.arch.vote_ballot_sync(row >= 0))
    if row >= 0:
        meta = c.row_meta(row)
        ptx.st_i32x4(meta, source, token, k, weight)
        if cutlass.const_expr(p.prereduced):
            ptx.st_i32x4(meta + 4 * META_MASK, mask, slot, Int32(0), Int32(0))
            ptx.st_i32(token_row(c, source, token, k), row)
    return row


def token_row(c: Context, source: Int32, token: Int32, k: Int32) -> Int64:
    """Address of the word that holds the pool row of (source, token, k)."""
    p = c.problem
    index = (Int64(source) * p.max_tokens + token) * p.top_k + k
    return c.loc("token_rows") + index * 4
