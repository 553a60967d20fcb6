"""reduce: at the source PE, sum each token's contributions in ascending k, in fp32, and write y.

Tokens t with t mod grid = CTA belong to a CTA; its warps (two service warps, and math warps once
they have no tile left) claim them in order. Who sums a token changes no bit of it. ``done`` of a
token counts complete contributions; how many to expect follows from the token's own ids, so masked
slots cost nothing.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx, ptx_copies, ptx_values
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.routing import load_id, place_of
from megamoe.cute_kernels.smem import BF16_BYTES, CTRL_REDUCE
from megamoe.cute_kernels.sync import aborted, wait_at_least

WARP_BYTES = 32 * 16
LOADS_IN_FLIGHT = 8
"""Contributions whose 16-byte pieces are loaded before the first is added."""


@cute.jit
def sum_columns(
    address: Int64,
    mask: Int32,
    weight: Float32,
    count: cutlass.Constexpr[int],
    weighted: cutlass.Constexpr[bool],
    offset: Int32,
) -> tuple:
    """fp32 sums of 8 columns over the contributions in ``mask``, ascending.

    Lane i holds the address and (``weighted``) the router weight of contribution i < ``count``;
    the columns are ``offset`` bytes into it. All lanes must call it together; a lane with an
    empty ``mask`` loads nothing.
    """
    sums = [Float32(0.0)] * 8
    for start in cutlass.range_constexpr(0, count, LOADS_IN_FLIGHT):
        loaded = []
        for k in cutlass.range_constexpr(start, min(start + LOADS_IN_FLIGHT, count)):
            row = cute.arch.shuffle_sync(address, k)
            loaded.append(ptx.ld_i32x4_if((mask >> k) & 1, row + offset))
        for k in cutlass.range_constexpr(start, min(start + LOADS_IN_FLIGHT, count)):
            piece = loaded[k - start]
            for i in cutlass.range_constexpr(8):
                value = ptx_values.bf16_to_f32(piece[i // 2], i % 2 == 1)
                if cutlass.const_expr(weighted):
                    value = value * cute.arch.shuffle_sync(weight, k)
                sums[i] = sums[i] + value
    return tuple(sums)


def store_sums(address: Int64, s: tuple) -> None:
    """Eight sums as bf16, 16 bytes."""
    packed = [ptx_values.pack_bf16x2(s[i], s[i + 1]) for i in range(0, 8, 2)]
    ptx.st_i32x4(address, packed[0], packed[1], packed[2], packed[3])


@cute.jit
def claim(c: Context, counter: cutlass.Constexpr[int]) -> Int32:
    """The CTA's next unclaimed item (CTA, CTA + grid, …) of a counter in the control area."""
    index = Int32(0)
    if lane() == 0:
        index = ptx.atoms_add_i32(c.smem + c.shared.ctrl + counter, Int32(1))
    return c.cta + cute.arch.shuffle_sync(index, 0) * c.grid


@cute.jit
def write_token(c: Context, token: Int32, mask: Int32):
    """Sum one token's contributions and write its row of y."""
    p = c.problem
    row_bytes = p.hidden * BF16_BYTES
    slots = p.comb_slots
    comb = c.sym("comb") + (Int64(token) * slots + lane()) * row_bytes
    y = c.y + Int64(token) * row_bytes
    residual = c.residual + Int64(token) * row_bytes
    weighted = p.weight_at == "combine" and not p.prereduced and not p.backward
    weight = Float32(0.0)
    if cutlass.const_expr(weighted):
        # A masked slot's weight may be anything: it is never multiplied with.
        if (mask >> lane()) & 1 == 1:
            index = Int64(token) * p.top_k + lane()
            weight = ptx_values.bits_to_f32(ptx.ld_i32(c.weights + index * 4))
    for step in cutlass.range(0, row_bytes, WARP_BYTES, unroll=1):
        offset = step + lane() * 16
        inside = Int32(offset < row_bytes)
        s = sum_columns(comb, mask * inside, weight, slots, weighted, offset)
        if c.residual != 0:
            added = ptx.ld_i32x4_if(inside, residual + offset)
            s = tuple(s[i] + ptx_values.bf16_to_f32(added[i // 2], i % 2 == 1) for i in range(8))
        if inside == 1:
            store_sums(y + offset, s)


@cute.jit
def contributions(c: Context, token: Int32) -> Int32:
    """Mask of the ``comb`` slots that a token's contributions go to, from its own ids."""
    p = c.problem
    expert = Int32(-1)
    if lane() < p.top_k:
        expert = load_id(c, token, lane())
    mask = Int32(0)
    if cutlass.const_expr(p.prereduced):
        # One contribution per PE that serves a slot of the token, from slot 0 on.
        pe = Int32(-1)
        if expert >= 0:
            pe = place_of(c, expert, token) >> 16
        leads = Int32(pe >= 0)
        for k in cutlass.range_constexpr(p.top_k):
            other = cute.arch.shuffle_sync(pe, k)
            if (other == pe) & (k < lane()):
                leads = Int32(0)
        count = Int32(cute.arch.popc(Int32(cute.arch.vote_ballot_sync(leads == 1))))
        mask = Int32((Int64(1) << Int64(count)) - 1)
    else:
        mask = Int32(cute.arch.vote_ballot_sync(expert >= 0))
    return mask


@cute.jit
def write_weight_gradients(c: Context, token: Int32):
    """d_topk_weights of a token, which came with its contributions; 0 for masked slots."""
    p = c.problem
    if lane() < p.top_k:
        index = Int64(token) * p.top_k + lane()
        bits = Int32(0)
        if load_id(c, token, lane()) >= 0:
            bits = ptx.ld_i32(c.sym("d_topk") + index * 4)
        ptx.st_i32(c.d_topk + index * 4, bits)


@cute.jit
def reduce_role(c: Context):
    """The whole role of one warp."""
    p = c.problem
    ptx_copies.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
    skip = ptx.lds_i32(c.smem + c.shared.skip)
    token = c.tokens
    if skip == 0:
        token = claim(c, CTRL_REDUCE)
    while token < c.tokens:
        mask = contributions(c, token)
        ok = wait_at_least(
            c.guard,
            c.sym("done") + Int64(c.bank * p.max_tokens + token) * 4,
            Int32(cute.arch.popc(mask)),
            "sys",
            int(Phase.DONE),
            Int32(-1),
            token,
        )
        if (ok == 1) & (aborted(c.guard) == 0):
            write_token(c, token, mask)
            if cutlass.const_expr(p.backward):
                write_weight_gradients(c, token)
        token = claim(c, CTRL_REDUCE)
