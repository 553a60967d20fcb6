"""Small instructions that other tests do not need, and: no family is accepted without a test."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from vgpu_harness import check, entry, run, u64_params

from megamoe.runtime.vgpu import VgpuError, isa

THREAD = "ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; mad.wide.u32 %d1, %r0, 4, %d0;"


def test_every_accepted_family_is_named_in_a_test() -> None:
    sources = Path(__file__).parent.rglob("*.py")
    text = "\n".join(f.read_text() for f in sources)
    missing = [f for f in isa.FAMILIES if not re.search(rf"(?<![\w.]){re.escape(f)}(?![\w])", text)]
    assert not missing


SYNCS = ["bar.sync", "bar.cta.sync", "barrier.sync.aligned", "barrier.cta.sync", "barrier.sync"]
ARRIVES = ["bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive.aligned"]


@pytest.mark.parametrize("schedule", ["round_robin", "random", "starve"])
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("arrive", ARRIVES)
def test_spellings_of_named_barriers(sync: str, arrive: str, schedule: str) -> None:
    """Warp 0 writes and arrives, warp 1 waits and reads."""
    body = f"""
{THREAD}
setp.lt.u32 %p0, %r0, 32;
@!%p0 bra READ;
add.u32 %r1, %r0, 32; shl.b32 %r2, %r1, 2; mov.u32 %r3, buf; add.u32 %r3, %r3, %r2;
st.shared.u32 [%r3], %r0;
{arrive} 3, 64;
bra DONE;
READ:
shl.b32 %r2, %r0, 2; mov.u32 %r3, buf; add.u32 %r3, %r3, %r2;
{sync} 3, 64;
ld.shared.u32 %r4, [%r3];
st.global.u32 [%d1], %r4;
DONE:
"""
    out = np.full(64, 99, np.uint32)
    text = entry(body, u64_params(1), ".shared .align 4 .b8 buf[512];")
    run(text, [out], block=64, schedule=schedule)
    np.testing.assert_array_equal(out, np.r_[np.full(32, 99), np.arange(32)])


@pytest.mark.parametrize("red", ["bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red"])
def test_reductions_over_a_barrier(red: str) -> None:
    body = f"""
{THREAD}
setp.lt.u32 %p0, %r0, 21;
{red}.popc.u32 %r1, 1, 64, %p0;
{red}.and.pred %p1, 1, 64, %p0; selp.u32 %r2, 100, 0, %p1;
{red}.or.pred %p2, 1, 64, !%p0; selp.u32 %r3, 1000, 0, %p2;
add.u32 %r1, %r1, %r2; add.u32 %r1, %r1, %r3;
st.global.u32 [%d1], %r1;
"""
    out = np.zeros(64, np.uint32)
    run(entry(body, u64_params(1)), [out], block=64)
    assert (out == 1021).all()


def test_arrive_drop_lowers_the_count_of_later_phases() -> None:
    """Two threads arrive in phase 0, one of them for the last time."""
    wait = "{l}: mbarrier.test_wait.parity.shared::cta.b64 %p2, [bar], {p};\n@!%p2 bra {l};"
    body = f"""
{THREAD}
setp.eq.u32 %p0, %r0, 0; setp.eq.u32 %p1, %r0, 1;
@%p0 mbarrier.init.shared::cta.b64 [bar], 2;
bar.sync 0;
@%p0 mbarrier.arrive_drop.shared::cta.b64 %d3, [bar];
@%p1 mbarrier.arrive.shared::cta.b64 %d3, [bar];
{wait.format(l="W0", p=0)}
bar.sync 0;
@%p1 mbarrier.arrive.shared::cta.b64 %d3, [bar];
{wait.format(l="W1", p=1)}
st.global.u32 [%d1], 1;
"""
    out = np.zeros(64, np.uint32)
    run(entry(body, u64_params(1), ".shared .align 8 .b64 bar;"), [out], block=64)
    assert (out == 1).all()


def test_hints_and_fences_change_nothing() -> None:
    body = f"""
{THREAD}
griddepcontrol.wait;
ldu.global.u32 %r1, [%d1];
createpolicy.fractional.L2::evict_first.b64 %d2, 1.0;
prefetch.global.L2 [%d1]; prefetchu.L1 [%d1];
applypriority.global.L2::evict_normal [%d0], 128;
fence.proxy.tensormap::generic.release.gpu;
fence.proxy.tensormap::generic.acquire.gpu [%d0], 128;
pmevent 3;
griddepcontrol.launch_dependents;
add.u32 %r1, %r1, 1;
st.global.L2::cache_hint.u32 [%d1], %r1, %d2;
"""
    out = np.arange(32, dtype=np.uint32)
    run(entry(body, u64_params(1)), [out])
    np.testing.assert_array_equal(out, np.arange(1, 33))


def test_brkpt_and_trap_stop_the_run() -> None:
    for stop in ("brkpt", "trap"):
        with pytest.raises(VgpuError, match=stop):
            run(entry(f"{THREAD}\n{stop};", u64_params(1)), [np.zeros(1, np.uint32)])


def test_discard_may_leave_anything_but_only_there() -> None:
    """discard.global.L2 destroys 128 bytes; the bytes after them stay."""
    data = np.arange(64, dtype=np.uint32)
    run(entry(f"{THREAD}\ndiscard.global.L2 [%d0], 128;", u64_params(1)), [data])
    np.testing.assert_array_equal(data[32:], np.arange(32, 64))


def test_24_bit_and_packed_products() -> None:
    a = [0x123456, 0xFFFFFF, 0x800000, 7]
    b = [0x00FEDC, 0xFFFFFF, 0x7FFFFF, 0xFFFFFE]
    c = [1, 2, 3, 4]

    def signed(x: int) -> int:
        x &= 0xFFFFFF
        return x - (1 << 24) if x >> 23 else x

    check("mad24.lo.u32 %r0, %r1, %r2, %r3;", "r", "rrr", [a, b, c], lambda x, y, z: x * y + z)
    check(
        "mad24.hi.s32 %r0, %r1, %r2, %r3;", "r", "rrr", [a, b, c],
        lambda x, y, z: (signed(x) * signed(y) >> 16) + z,
    )  # fmt: skip

    def dot(x: int, y: int, z: int, half: int) -> int:
        halves = [(x >> s & 0xFFFF) for s in (0, 16)]
        octets = [(y >> 8 * (2 * half + i) & 0xFF) for i in range(2)]
        return z + sum(p * q for p, q in zip(halves, octets, strict=True))

    words = [0x12345678, 0xFFFF0001, 0x80007FFF]
    for half, name in enumerate(("lo", "hi")):
        check(
            f"dp2a.{name}.u32.u32 %r0, %r1, %r2, %r3;", "r", "rrr", [words, a, c],
            lambda x, y, z, half=half: dot(x, y, z, half),
        )  # fmt: skip
