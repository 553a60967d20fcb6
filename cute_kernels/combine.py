"""reduce: at the source PE, sum each token's contributions in ascending k, in fp32, and write y.

Tokens t with t mod grid = CTA belong to a CTA; its warps (two service warps, and math warps once
they have no tile left) claim them in order. Who sums a token changes no bit of it. ``done`` of a
token counts complete contributions; how many to expect follows from the token's own ids, so masked
slots cost nothing.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.routing import load_id
from megamoe.cute_kernels.smem import BF16_BYTES, CTRL_REDUCE
from megamoe.cute_kernels.sync import aborted, wait_at_least

LOADS_IN_FLIGHT = 8
"""Contributions whose 16-byte pieces are loaded before the first is added."""


@cute.jit
def sum_columns(c: Context, first: Int64, mask: Int32, weight: Float32) -> tuple:
    """fp32 sums of 8 columns over the slots in ``mask``, ascending; ``first`` is slot 0 and
    ``weight`` the router weight of slot k = lane."""
    p = c.problem
    row_bytes = p.hidden * BF16_BYTES
    sums = [Float32(0.0)] * 8
    for start in cutlass.range_constexpr(0, p.top_k, LOADS_IN_FLIGHT):
        loaded = []
        for k in cutlass.range_constexpr(start, min(start + LOADS_IN_FLIGHT, p.top_k)):
            loaded.append(ptx.ld_i32x4_if((mask >> k) & 1, first + k * row_bytes))
        for k in cutlass.range_constexpr(start, min(start + LOADS_IN_FLIGHT, p.top_k)):
            piece = loaded[k - start]
            for i in cutlass.range_constexpr(8):
                value = ptx.bf16_to_f32(piece[i // 2], i % 2 == 1)
                if cutlass.const_expr(p.weight_at == "combine"):
                    value = value * cute.arch.shuffle_sync(weight, k)
                sums[i] = sums[i] + value
    return tuple(sums)


@cute.jit
def claim(c: Context) -> Int32:
    """The CTA's next unclaimed token."""
    index = Int32(0)
    if lane() == 0:
        index = ptx.atoms_add_i32(c.smem + c.shared.ctrl + CTRL_REDUCE, Int32(1))
    return c.cta + cute.arch.shuffle_sync(index, 0) * c.grid


@cute.jit
def write_token(c: Context, token: Int32, mask: Int32):
    """Sum one token's contributions and write its row of y."""
    p = c.problem
    row_bytes = p.hidden * BF16_BYTES
    comb = c.sym("comb") + Int64(token) * (p.top_k * row_bytes)
    y = c.y + Int64(token) * row_bytes
    residual = c.residual + Int64(token) * row_bytes
    weight = Float32(0.0)
    if cutlass.const_expr(p.weight_at == "combine"):
        # A masked slot's weight may be anything: it is never multiplied with.
        if (mask >> lane()) & 1 == 1:
            index = Int64(token) * p.top_k + lane()
            weight = ptx.bits_to_f32(ptx.ld_i32(c.weights + index * 4))
    # All lanes take every step: the weights are shuffled inside.
    for step in cutlass.range(0, row_bytes // 16, 32, unroll=1):
        chunk = step + lane()
        inside = chunk * 16 < row_bytes
        s = sum_columns(c, comb + chunk * 16, mask * Int32(inside), weight)
        if c.residual != 0:
            added = ptx.ld_i32x4_if(Int32(inside), residual + chunk * 16)
            s = tuple(s[i] + ptx.bf16_to_f32(added[i // 2], i % 2 == 1) for i in range(8))
        if inside:
            ptx.st_i32x4(
                y + chunk * 16,
                ptx.pack_bf16x2(s[0], s[1]),
                ptx.pack_bf16x2(s[2], s[3]),
                ptx.pack_bf16x2(s[4], s[5]),
                ptx.pack_bf16x2(s[6], s[7]),
            )


@cute.jit
def reduce_role(c: Context):
    """The whole role of one warp."""
    p = c.problem
    ptx.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
    skip = ptx.lds_i32(c.smem + c.shared.skip)
    token = c.tokens
    if skip == 0:
        token = claim(c)
    while token < c.tokens:
        expert = Int32(-1)
        if lane() < p.top_k:
            expert = load_id(c, token, lane())
        mask = Int32(cute.arch.vote_ballot_sync(expert >= 0))
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
        token = claim(c)
