"""reduce: at the source PE, sum each token's contributions in ascending k, in fp32, and write y.

Two service warps a CTA, a token at a time. ``done`` of a token counts complete contributions; how
many to expect follows from the token's own ids, so masked slots cost nothing.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import Phase
from megamoe.cute_kernels.context import Context, lane
from megamoe.cute_kernels.routing import load_id
from megamoe.cute_kernels.smem import BF16_BYTES
from megamoe.cute_kernels.sync import aborted, wait_at_least

REDUCE_WARPS = 2
LOADS_IN_FLIGHT = 8
"""Contributions whose 16-byte pieces are loaded before the first is added."""


@cute.jit
def sum_columns(c: Context, first: Int64, mask: Int32) -> tuple:
    """fp32 sums of 8 columns over the slots in ``mask``, ascending; ``first`` is slot 0."""
    top_k = c.problem.top_k
    row_bytes = c.problem.hidden * BF16_BYTES
    sums = [Float32(0.0)] * 8
    for start in cutlass.range_constexpr(0, top_k, LOADS_IN_FLIGHT):
        loaded = []
        for k in cutlass.range_constexpr(start, min(start + LOADS_IN_FLIGHT, top_k)):
            loaded.append(ptx.ld_i32x4_if((mask >> k) & 1, first + k * row_bytes))
        for piece in loaded:
            for i in cutlass.range_constexpr(8):
                sums[i] = sums[i] + ptx.bf16_to_f32(piece[i // 2], i % 2 == 1)
    return tuple(sums)


@cute.jit
def reduce_role(c: Context, warp: Int32):
    """The whole role of reduce warp ``warp`` (0 or 1) of this CTA."""
    problem = c.problem
    row_bytes = problem.hidden * BF16_BYTES
    ptx.mbarrier_wait(c.smem + c.shared.layout_ready, Int32(0))
    skip = ptx.lds_i32(c.smem + c.shared.skip)
    token = c.cta * REDUCE_WARPS + warp
    if skip == 1:
        token = c.tokens
    while token < c.tokens:
        expert = Int32(-1)
        if lane() < problem.top_k:
            expert = load_id(c, token, lane())
        mask = Int32(cute.arch.vote_ballot_sync(expert >= 0))
        ok = wait_at_least(
            c.guard,
            c.sym("done") + Int64(c.bank * problem.max_tokens + token) * 4,
            Int32(cute.arch.popc(mask)),
            "sys",
            int(Phase.DONE),
            Int32(-1),
            token,
        )
        if (ok == 1) & (aborted(c.guard) == 0):
            comb = c.sym("comb") + Int64(token) * (problem.top_k * row_bytes)
            y = c.y + Int64(token) * row_bytes
            for chunk in cutlass.range(lane(), row_bytes // 16, 32, unroll=1):
                s = sum_columns(c, comb + chunk * 16, mask)
                ptx.st_i32x4(
                    y + chunk * 16,
                    ptx.pack_bf16x2(s[0], s[1]),
                    ptx.pack_bf16x2(s[2], s[3]),
                    ptx.pack_bf16x2(s[4], s[5]),
                    ptx.pack_bf16x2(s[6], s[7]),
                )
        token += c.grid * REDUCE_WARPS
