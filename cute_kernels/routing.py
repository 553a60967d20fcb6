"""One warp step of routing: 32 // K whole tokens, one lane per (token, k) pair.

Every lane learns where its pair goes by one look-up and K shuffles, so that counting and sending
see the same thing. Worked example, K = 2, experts 0…3 of which PE 0 holds 0, 1 and PE 1 holds
2, 3 (local 0, 1); a token with ids (3, 2):

    lane k=0: pe 1, local 1, leader (first slot on PE 1),  primary 0
    lane k=1: pe 1, local 0, not leader,                   primary 0
"""

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import StatusWord
from megamoe.cute_kernels.context import Context, lane

WARP = 32


@dataclass(frozen=True)
class Pair:
    """One lane's (token, k) pair.

    ``pe`` is −1 for a masked or idle slot. ``slot`` numbers all experts, PE by PE. ``leader`` is 1
    for a token's first slot on its PE. ``primary_slot`` is the slot under which the pair's record
    is listed: the leader's record is the token's one record to the PE, listed under the token's
    first local expert there; with a ring pool every row has a record of its own. −1: no record.
    """

    token: Int32
    k: Int32
    first_lane: Int32
    pe: Int32
    local: Int32
    slot: Int32
    leader: Int32
    primary_slot: Int32


def tokens_per_step(top_k: int) -> int:
    """Whole tokens that one warp step takes.

    >>> tokens_per_step(8), tokens_per_step(6), tokens_per_step(32)
    (4, 5, 1)
    """
    return WARP // top_k


@cute.jit
def load_id(c: Context, token: Int32, k: Int32) -> Int32:
    """Expert id of a slot, −1 if it is not a valid expert. Ids ≥ E are never used as an index:
    they count as masked, and the first thread to see one leaves it in the status record."""
    index = Int64(token) * c.problem.top_k + k
    wide = Int64(0)
    if c.ids_wide == 1:
        wide = ptx.ld_i64(c.ids + index * 8)
    else:
        wide = Int64(ptx.ld_i32(c.ids + index * 4))
    expert = Int32(-1)
    if (wide >= 0) & (wide < c.problem.num_experts):
        expert = Int32(wide)
    if wide >= c.problem.num_experts:
        report_invalid(c, token, k, Int32(wide))
    return expert


@cute.jit
def report_invalid(c: Context, token: Int32, k: Int32, expert: Int32):
    """Leave an id ≥ E in the status record, unless there is one. The record may lie in host
    memory, far away, so a word of this PE lets one thread a call get there: callers may mask
    thousands of slots with such ids."""
    if ptx.atom_exch_relaxed(c.loc("invalid_seen"), c.epoch) != c.epoch:
        if ptx.atom_exch_relaxed(c.guard.status + 4 * StatusWord.INVALID_IDS, Int32(1)) == 0:
            ptx.st_i32(c.guard.status + 4 * StatusWord.INVALID_TOKEN, token)
            ptx.st_i32(c.guard.status + 4 * StatusWord.INVALID_SLOT, k)
            ptx.st_i32(c.guard.status + 4 * StatusWord.INVALID_ID, expert)


@cute.jit
def place_of(c: Context, expert: Int32, token: Int32) -> Int32:
    """PE << 16 | local index of the slot that serves ``expert`` for ``token``.

    ``expert_map`` holds it, or −1 for an expert with replicas of which none is on this PE: then
    replica ``token mod replicas`` serves it.
    """
    word = ptx.ld_i32(c.loc("expert_map") + Int64(expert) * 4)
    if cutlass.const_expr(c.problem.num_slots > c.problem.num_experts):
        if word < 0:
            start = ptx.ld_i32(c.loc("replica_start") + Int64(expert) * 4)
            count = ptx.ld_i32(c.loc("replica_start") + Int64(expert + 1) * 4) - start
            word = ptx.ld_i32(c.loc("replica") + Int64(start + token % count) * 4)
    return word


@cute.jit
def route_pair(c: Context, base: Int32, end: Int32) -> Pair:
    """This lane's pair of the step that starts at token ``base``; tokens ≥ ``end`` are idle.

    All 32 lanes must call it together.
    """
    top_k = c.problem.top_k
    within = lane() // top_k
    k = lane() - within * top_k
    token = base + within
    word = Int32(-1)
    if (within < tokens_per_step(top_k)) & (token < end):
        expert = load_id(c, token, k)
        if expert >= 0:
            word = place_of(c, expert, token)
    first_lane = lane() - k
    pe = word >> 16
    local = word & 0xFFFF
    leader = Int32(word >= 0)
    primary = local
    for other_k in cutlass.range_constexpr(top_k):
        other = cute.arch.shuffle_sync(word, first_lane + other_k)
        if (other >= 0) & (word >= 0) & (other >> 16 == pe):
            if (other & 0xFFFF) < primary:
                primary = other & 0xFFFF
            if other_k < k:
                leader = Int32(0)
    slot = Int32(-1)
    primary_slot = Int32(-1)
    if word >= 0:
        base_slot = c.slot_base(pe)
        slot = base_slot + local
        if cutlass.const_expr(c.problem.ring_blocks > 0):
            primary_slot = slot
        elif leader == 1:
            primary_slot = base_slot + primary
    return Pair(
        token=token,
        k=k,
        first_lane=first_lane,
        pe=pe,
        local=local,
        slot=slot,
        leader=leader,
        primary_slot=primary_slot,
    )


@cute.jit
def take_positions(key: Int32, histogram: Int32) -> Int32:
    """Positions in lane order among lanes with the same ``key`` ≥ 0, counted on from the warp's
    running count at ``histogram[key]`` in shared memory, which is advanced.

    All 32 lanes must call it together; lanes with a negative key get an unspecified value.
    """
    same = Int32(cute.arch.match_sync(0xFFFFFFFF, key, kind="any"))
    before = Int32(cute.arch.popc(same & Int32(cute.arch.lanemask_lt())))
    position = Int32(0)
    if key >= 0:
        position = ptx.lds_i32(histogram + key * 4) + before
    cute.arch.sync_warp()
    if (key >= 0) & (before == 0):
        ptx.sts_i32(histogram + key * 4, position + Int32(cute.arch.popc(same)))
    cute.arch.sync_warp()
    return position


@cute.jit
def warp_inclusive_sum(value: Int32) -> Int32:
    """Inclusive prefix sum over the lanes of the warp."""
    total = value
    for bit in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(total, 1 << bit)
        if lane() >= (1 << bit):
            total += below
    return total
