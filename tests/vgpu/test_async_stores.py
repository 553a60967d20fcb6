"""Hand-written PTX for cp.async and its groups, st.async and red.async."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import MemoryFault, SyncError, UnsupportedInstruction

SHARED = ".shared .align 128 .b8 buf[4096]; .shared .align 8 .b64 bar;"
POLICIES = ["eager", "late", "random"]


def kernel(body: str, count: int = 1) -> str:
    """%r0 thread, %r1 buffer, %r2 barrier of `count`, %d0 p0, %d1 p1, %d2 thread · 16."""
    setup = f"""
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1];
mov.u32 %r0, %tid.x; mov.u32 %r1, buf; mov.u32 %r2, bar;
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], {count};
shl.b32 %r3, %r0, 4; add.u32 %r4, %r1, %r3; cvt.u64.u32 %d2, %r3;
add.u64 %d3, %d0, %d2; add.u64 %d4, %d1, %d2;
bar.sync 0;
"""
    return entry(setup + body, u64_params(2), SHARED)


DUMP = """
ld.shared.v4.u32 {%r20, %r21, %r22, %r23}, [%r4];
st.global.v4.u32 [%d4], {%r20, %r21, %r22, %r23};
"""
WAIT = """
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r2], 0;
@!%p5 bra WAIT;
"""


def rows(n: int = 32) -> np.ndarray:
    return np.arange(1, 4 * n + 1, dtype=np.uint32).reshape(n, 4)


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize("finish", ["cp.async.commit_group;\ncp.async.wait_group 0;",
                                    "cp.async.wait_all;"])  # fmt: skip
def test_copies_of_every_size(finish: str, completion: str) -> None:
    body = f"""
cp.async.cg.shared.global [%r4], [%d3], 16;
cp.async.ca.shared::cta.global [%r4+1024], [%d3], 4;
cp.async.ca.shared.global.L2::128B [%r4+1032], [%d3+8], 8;
{finish}
{DUMP}
ld.shared.u32 %r20, [%r4+1024]; ld.shared.v2.u32 {{%r21, %r22}}, [%r4+1032];
st.global.u32 [%d4+512], %r20; st.global.v2.u32 [%d4+520], {{%r21, %r22}};
"""
    src, dst = rows(), np.zeros((64, 4), np.uint32)
    run(kernel(body), [src, dst], completion=completion)
    np.testing.assert_array_equal(dst[:32], src)
    np.testing.assert_array_equal(dst[32:][:, [0, 2, 3]], src[:, [0, 2, 3]])
    assert not dst[32:, 1].any()


def test_source_size_below_the_copy_fills_with_zeros() -> None:
    body = f"""
st.shared.v4.u32 [%r4], {{-1, -1, -1, -1}};
and.b32 %r6, %r0, 3; shl.b32 %r6, %r6, 2;
cp.async.cg.shared.global [%r4], [%d3], 16, %r6;
cp.async.commit_group;
cp.async.wait_group 0;
{DUMP}
"""
    src, dst = rows(), np.zeros((32, 4), np.uint32)
    run(kernel(body), [src, dst], completion="late")
    keep = np.arange(4) < (np.arange(32) % 4)[:, None]
    np.testing.assert_array_equal(dst, np.where(keep, src, 0))


@pytest.mark.parametrize("completion", POLICIES)
def test_groups_complete_in_order(completion: str) -> None:
    body = f"""
cp.async.cg.shared.global [%r4], [%d3], 16;
cp.async.commit_group;
cp.async.cg.shared.global [%r4+512], [%d3+512], 16;
cp.async.commit_group;
cp.async.wait_group 1;
{DUMP}
cp.async.wait_group 0;
add.u32 %r4, %r4, 512; add.u64 %d4, %d4, 512;
{DUMP}
"""
    src, dst = rows(64), np.zeros((64, 4), np.uint32)
    run(kernel(body), [src, dst], completion=completion)
    np.testing.assert_array_equal(dst, src)


def test_a_missing_wait_shows_under_the_late_policy() -> None:
    body = f"""
st.shared.v4.u32 [%r4], {{0, 0, 0, 0}};
cp.async.cg.shared.global [%r4], [%d3], 16;
cp.async.commit_group;
{DUMP}
"""
    dst = np.full((32, 4), 7, np.uint32)
    run(kernel(body), [rows(), dst], completion="late")
    assert not dst.any()


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize(("form", "count"), [(".noinc", 32), ("", 1)])
def test_arrive_when_the_copies_of_a_thread_are_done(
    form: str, count: int, completion: str
) -> None:
    """.noinc counts against the barrier's 32; the plain form adds itself to the pending count."""
    arrive = "" if form else "@%p0 mbarrier.arrive.shared::cta.b64 %d9, [%r2];"
    body = f"""
cp.async.cg.shared.global [%r4], [%d3], 16;
cp.async.mbarrier.arrive{form}.shared::cta.b64 [%r2];
bar.warp.sync -1;
{arrive}
{WAIT}
{DUMP}
"""
    src, dst = rows(), np.zeros((32, 4), np.uint32)
    run(kernel(body, count), [src, dst], completion=completion)
    np.testing.assert_array_equal(dst, src)


def test_misaligned_copy() -> None:
    with pytest.raises(MemoryFault, match="aligned"):
        run(kernel("cp.async.cg.shared.global [%r4+8], [%d3], 16;"), [rows(), rows()])


CLUSTER = """
mov.u32 %r8, %cluster_ctarank; xor.b32 %r9, %r8, 1;
mapa.shared::cluster.u32 %r10, %r4, %r9;
mapa.shared::cluster.u32 %r11, %r2, %r9;
mad.lo.u32 %r12, %r8, 1000, %r0;
{prepare}
@%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
{store}
{wait}
shl.b32 %r13, %r8, 9; cvt.u64.u32 %d8, %r13; add.u64 %d4, %d4, %d8;
{dump}
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize("width", ["b32", "b64", "v4.b32", "v2.u32"])
def test_st_async_to_the_other_cta(width: str, completion: str) -> None:
    value, size = {
        "b32": ("%r12", 4), "b64": ("%d7", 8), "v4.b32": ("{%r12, %r0, %r8, %r12}", 16),
        "v2.u32": ("{%r12, %r8}", 8),
    }[width]  # fmt: skip
    store = (
        "mov.b64 %d7, {%r12, %r8};\n"
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{width} [%r10], {value}, [%r11];"
    )
    text = CLUSTER.format(
        prepare="st.shared.v4.u32 [%r4], {9, 9, 9, 9};", bytes=32 * size, store=store,
        wait=WAIT, dump=DUMP,
    )  # fmt: skip
    dst = np.zeros((2, 32, 4), np.uint32)
    run(kernel(text), [rows(), dst], grid=2, cluster=2, completion=completion)
    lane = np.arange(32)
    for cta in range(2):
        other = 1 - cta
        first = other * 1000 + lane
        full = np.full((32, 4), 9)
        words = {
            "b32": [first], "b64": [first, other + 0 * lane], "v2.u32": [first, other + 0 * lane],
            "v4.b32": [first, lane, other + 0 * lane, first],
        }[width]  # fmt: skip
        for i, word in enumerate(words):
            full[:, i] = word
        np.testing.assert_array_equal(dst[cta], full)


@pytest.mark.parametrize("completion", POLICIES)
@pytest.mark.parametrize(
    ("op", "fn"),
    [("add.u32", lambda old, x: old + x.sum()), ("min.s32", lambda old, x: min(old, x.min())),
     ("max.u32", lambda old, x: max(old, x.max())), ("or.b32", lambda old, x: old | x.max() | 31)],
)  # fmt: skip
def test_red_async_to_the_other_cta(op: str, fn, completion: str) -> None:
    """All lanes reduce into one word of the other CTA."""
    store = f"""
mapa.shared::cluster.u32 %r14, %r1, %r9;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op} [%r14], %r0, [%r11];
"""
    text = CLUSTER.format(
        prepare="st.shared.v4.u32 [%r4], {5, 9, 9, 9};", bytes=128, store=store, wait=WAIT,
        dump=DUMP,
    )  # fmt: skip
    dst = np.zeros((2, 32, 4), np.uint32)
    run(kernel(text), [rows(), dst], grid=2, cluster=2, completion=completion)
    assert dst[:, 0, 0].tolist() == [fn(5, np.arange(32))] * 2
    assert (dst[:, 1:, 0] == 5).all()


def test_refusals() -> None:
    form = "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes"
    for op in ("add.b32", "min.u64", "inc.s32"):
        with pytest.raises(UnsupportedInstruction, match="no operation"):
            run(kernel(f"{form}.{op} [%r4], %r0, [%r2];"), [rows(), rows()])
    elsewhere = "mov.u32 %r9, 1; mapa.shared::cluster.u32 %r10, %r4, %r9;"
    store = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r10], %r0, [%r2];"
    first = "mov.u32 %r8, %cluster_ctarank; setp.eq.u32 %p1, %r8, 0;"
    with pytest.raises(SyncError, match="different CTAs"):
        run(
            kernel(f"{elsewhere} {first} @%p1 {store}"), [rows(), rows()], grid=2, cluster=2
        )  # fmt: skip
