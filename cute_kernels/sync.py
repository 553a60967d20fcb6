"""Waiting with a deadline, the abort word, and the status record.

Every wait for a word that another CTA or PE writes goes through ``wait_at_least``. It polls with
acquire, so what the word announces is visible afterwards; it gives up when this PE's abort word is
set or the deadline has passed. The first waiter to give up writes the status record and sets the
abort word; from then on every wait of this PE returns at once and nothing more is sent to peers.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
from cutlass import Int32, Int64, cute

from megamoe.cute_kernels import ptx
from megamoe.cute_kernels.abi import Status, StatusWord


class NamedBarrier(IntEnum):
    """Ids of the CTA's named barriers; 0 is the whole CTA (``bar.sync 0``)."""

    CTA = 0
    MATH_0 = 1
    MATH_1 = 2


@dataclass(frozen=True)
class Guard:
    """What a bounded wait needs: the abort word, the status record, the deadline."""

    abort: Int64
    status: Int64
    epoch: Int32
    timeout_ns: Int64
    poll_sleep_ns: cutlass.Constexpr[int]


@cute.jit
def aborted(guard: Guard) -> Int32:
    """1 once this PE has given up on the epoch."""
    return ptx.ld_relaxed(guard.abort, "gpu")


@cute.jit
def claim_status(guard: Guard, code: Int32) -> Int32:
    """1 for the first thread of the PE that reports: the first cause is the one to tell."""
    old = cute.arch.atomic_cas(
        ptx.global_ptr(Int32, guard.status, 4), cmp=Int32(0), val=code, sem="relaxed", scope="gpu"
    )
    return Int32(old == 0)


@cute.jit
def write_status(
    guard: Guard, phase: Int32, peer: Int32, expected: Int32, seen: Int32, index: Int32
):
    """Fill the record that ``claim_status`` won."""
    cta, _, _ = cute.arch.block_idx()
    ptx.st_i32(guard.status + 4 * StatusWord.PHASE, phase)
    ptx.st_i32(guard.status + 4 * StatusWord.PEER, peer)
    ptx.st_i32(guard.status + 4 * StatusWord.EPOCH, guard.epoch)
    ptx.st_i32(guard.status + 4 * StatusWord.EXPECTED, expected)
    ptx.st_i32(guard.status + 4 * StatusWord.SEEN, seen)
    ptx.st_i32(guard.status + 4 * StatusWord.INDEX, index)
    ptx.st_i32(guard.status + 4 * StatusWord.CTA, cta)


@cute.jit
def wait_at_least(
    guard: Guard,
    word: Int64,
    target: Int32,
    scope: cutlass.Constexpr[str],
    phase: cutlass.Constexpr[int],
    peer: Int32,
    index: Int32,
) -> Int32:
    """Poll ``word`` with acquire at ``scope`` until it is ≥ ``target`` (as a 32-bit distance).

    Returns 1, or 0 if this PE gave up. ``peer`` and ``index`` go into the status record. The
    distance is signed, so an epoch that wraps past 2³² still compares right.
    """
    seen = ptx.ld_acquire(word, scope)
    ok = Int32(1)
    deadline = Int64(0)
    if seen - target < 0:
        deadline = ptx.globaltimer() + guard.timeout_ns
    while (seen - target < 0) & (ok == 1):
        ptx.nanosleep(Int32(guard.poll_sleep_ns))
        seen = ptx.ld_acquire(word, scope)
        if seen - target < 0:
            if aborted(guard) != 0:
                ok = Int32(0)
            if (guard.timeout_ns > 0) & (ptx.globaltimer() > deadline) & (ok == 1):
                ok = Int32(0)
                if claim_status(guard, Int32(Status.TIMEOUT)) == 1:
                    write_status(guard, Int32(phase), peer, target, seen, index)
                ptx.st_relaxed(guard.abort, Int32(1), "gpu")
    return ok
