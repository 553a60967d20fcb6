"""Hand-written PTX for cp.async.bulk, cp.reduce.async.bulk, their groups and transaction counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import Deadlock, MemoryFault, SyncError

SHARED = ".shared .align 1024 .b8 buf[8192]; .shared .align 8 .b64 bar;"
POLICIES = ["eager", "late", "random"]


def kernel(body: str, params: int) -> str:
    """%r0 = thread, %r1 = buffer, %r2 = barrier, %d0 … = parameters; one thread initialises bar."""
    loads = "\n".join(f"ld.param.u64 %d{i}, [p{i}];" for i in range(params))
    setup = f"""
mov.u32 %r0, %tid.x; mov.u32 %r1, buf; mov.u32 %r2, bar;
{loads}
setp.eq.u32 %p0, %r0, 0;
@%p0 mbarrier.init.shared::cta.b64 [%r2], 1;
fence.mbarrier_init.release.cluster;
bar.sync 0;
"""
    return entry(setup + body, u64_params(params), SHARED)


def wait(parity: int, label: str = "WAIT") -> str:
    return f"""
{label}: mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r2], {parity};
@!%p5 bra {label};
"""


def words(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)


ROUND_TRIP = (
    """
@!%p0 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 2048;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 1024, [%r2];
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
    [%r1+1024], [%d0+1024], 1024, [%r2];
LOADED:"""
    + wait(0)
    + """
@!%p0 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1+1024], 1024;
cp.async.bulk.global.shared::cta.bulk_group [%d1+1024], [%r1], 1024;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
)


@pytest.mark.parametrize("completion", POLICIES)
def test_load_wait_store(completion: str) -> None:
    src, dst = words(512), np.zeros(512, np.uint32)
    world = run(kernel(ROUND_TRIP, 2), [src, dst], block=64, completion=completion)
    np.testing.assert_array_equal(dst, np.roll(src, 256))
    report = world.report
    assert report.async_bytes["cp.async.bulk.global.shared::cta.bulk_group"] == 2048


def test_bytes_may_arrive_before_they_are_expected() -> None:
    """The transaction count goes negative; the phase completes with arrival and expect only."""
    body = (
        """
@!%p0 bra W;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 64, [%r2];
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r2], 32;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 32;
W:"""
        + wait(0)
        + """
ld.shared.u32 %r5, [%r1+60];
st.global.u32 [%d1], %r5;
"""
    )
    for completion in POLICIES:
        src, dst = words(16), np.zeros(1, np.uint32)
        run(kernel(body, 2), [src, dst], completion=completion)
        assert dst[0] == src[15]


@pytest.mark.parametrize("expected", [48, 96])
def test_a_wrong_byte_count_is_a_deadlock(expected: int) -> None:
    body = f"""
@!%p0 bra W;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {expected};
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 64, [%r2];
W:""" + wait(0)
    with pytest.raises(Deadlock, match=f"tx {expected - 64} bytes"):
        run(kernel(body, 1), [words(16)])


def test_later_phases_and_three_producers() -> None:
    """A barrier of count 3 used for four phases, each with its own bytes."""
    steps = []
    for phase in range(4):
        steps.append(
            f"""
setp.lt.u32 %p1, %r0, 3;
@!%p1 bra GO{phase};
mad.lo.u32 %r5, %r0, 128, %r1;
mul.wide.u32 %d8, %r0, 128;
add.u64 %d9, %d0, %d8;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes
    [%r5], [%d9+{384 * phase}], 128, [%r3];
GO{phase}:
"""
            + wait(phase & 1, f"W{phase}").replace("%r2", "%r3")
            + f"""
mad.lo.u32 %r6, %r0, 4, %r1;
ld.shared.u32 %r7, [%r6];
mad.wide.u32 %d10, %r0, 4, %d1;
st.global.u32 [%d10+{384 * phase}], %r7;
bar.sync 0;
"""
        )
    setup = "add.u32 %r3, %r1, 4096;\n@%p0 mbarrier.init.shared::cta.b64 [%r3], 3;\nbar.sync 0;\n"
    for completion in POLICIES:
        for schedule in ("round_robin", "random", "starve"):
            src, dst = words(384), np.zeros(384, np.uint32)
            run(
                kernel(setup + "".join(steps), 2), [src, dst], block=96,
                completion=completion, schedule=schedule,
            )  # fmt: skip
            np.testing.assert_array_equal(dst, src)


GROUPS = """
@!%p0 bra DONE;
st.shared.u32 [%r1], 11;
st.shared.u32 [%r1+16], 22;
fence.proxy.async.shared::cta;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1], 16;
cp.async.bulk.commit_group;
cp.async.bulk.global.shared::cta.bulk_group [%d0+16], [%r1+16], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group{first};
st.shared.u32 [%r1], 33;
cp.async.bulk.wait_group{second};
ld.global.u32 %r5, [%d0+16];
st.global.u32 [%d1], %r5;
cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize("completion", POLICIES)
def test_wait_group_read_frees_the_source_only(completion: str) -> None:
    for first, second in ((".read 1", " 0"), (" 1", " 0"), (".read 0", " 0")):
        dst, seen = np.zeros(8, np.uint32), np.zeros(1, np.uint32)
        text = kernel(GROUPS.format(first=first, second=second), 2)
        run(text, [dst, seen], completion=completion)
        assert dst[[0, 4]].tolist() == [11, 22]  # never the overwritten 33
        assert seen[0] == 22


def test_a_forgotten_wait_shows_under_the_late_policy() -> None:
    """Without any wait the late policy overwrites the source first; .read alone leaves the
    destination unwritten for a while."""
    dst, seen = np.zeros(8, np.uint32), np.zeros(1, np.uint32)
    no_read = GROUPS.format(first=" 2", second=" 0")
    run(kernel(no_read, 2), [dst, seen], completion="late")
    assert dst[0] == 33
    dst, seen = np.zeros(8, np.uint32), np.zeros(1, np.uint32)
    no_write = GROUPS.format(first=".read 1", second=".read 0")
    run(kernel(no_write, 2), [dst, seen], completion="late")
    assert (dst[4], seen[0]) == (22, 0)


def test_groups_belong_to_threads() -> None:
    """Every lane copies its own 16 bytes and waits for its own group."""
    body = """
mad.lo.u32 %r5, %r0, 16, %r1;
add.u32 %r6, %r0, 100;
st.shared.v4.u32 [%r5], {%r6, %r0, %r0, %r6};
fence.proxy.async.shared::cta;
mul.wide.u32 %d8, %r0, 16;
add.u64 %d9, %d0, %d8;
cp.async.bulk.global.shared::cta.bulk_group [%d9], [%r5], 16;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
ld.global.u32 %r7, [%d9];
mad.wide.u32 %d10, %r0, 4, %d1;
st.global.u32 [%d10], %r7;
"""
    for completion in POLICIES:
        dst, seen = np.zeros((64, 4), np.uint32), np.zeros(64, np.uint32)
        run(kernel(body, 2), [dst, seen], block=64, completion=completion)
        np.testing.assert_array_equal(seen, np.arange(100, 164))
        np.testing.assert_array_equal(dst[:, 2], np.arange(64))


REDUCTIONS = {
    "add.u32": lambda a, b: a + b,
    "add.u64": lambda a, b: (a.view("u8") + b.view("u8")).view("u4"),
    "min.s32": lambda a, b: np.minimum(a.view("i4"), b.view("i4")).view("u4"),
    "max.u32": np.maximum,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b64": np.bitwise_xor,
    "inc.u32": lambda a, b: np.where(a >= b, 0, a + 1).astype("u4"),
}


@pytest.mark.parametrize("op", list(REDUCTIONS))
def test_integer_reductions_into_memory(op: str) -> None:
    body = f"""
@!%p0 bra W;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [%r2];
W: {wait(0)}
@!%p0 bra DONE;
cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%d1], [%r1], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
    new, old = words(64, 1), words(64, 2)
    want = REDUCTIONS[op](old, new)
    run(kernel(body, 2), [new, old])
    np.testing.assert_array_equal(old, want)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [("add.f32", torch.float32), ("add.noftz.bf16", torch.bfloat16), ("add.noftz.f16", torch.half),
     ("add.f64", torch.float64), ("max.bf16", torch.bfloat16), ("min.f16", torch.half)],
)  # fmt: skip
def test_float_reductions_into_memory(op: str, dtype: torch.dtype) -> None:
    body = f"""
@!%p0 bra W;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 256;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%d0], 256, [%r2];
W: {wait(0)}
@!%p0 bra DONE;
cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%d1], [%r1], 256;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""
    g = torch.Generator().manual_seed(0)
    n = 256 // dtype.itemsize
    new, old = (torch.randn(n, generator=g).to(dtype) for _ in range(2))
    fn = {"add": torch.add, "max": torch.maximum, "min": torch.minimum}[op[:3]]
    want = fn(old, new)
    raw = old.view(torch.uint8).numpy()
    run(kernel(body, 2), [new.view(torch.uint8).numpy(), raw])
    assert torch.equal(old, want)


CLUSTER = """
mov.u32 %r8, %cluster_ctarank;
mad.lo.u32 %r10, %r0, 4, %r1;
mad.lo.u32 %r11, %r8, 1000, %r0;
st.shared.u32 [%r10], %r11;
fence.proxy.async.shared::cta;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
@!%p0 bra W;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 128;
xor.b32 %r12, %r8, 1;
add.u32 %r13, %r1, 1024;
mapa.shared::cluster.u32 %r14, %r13, %r12;
mapa.shared::cluster.u32 %r15, %r2, %r12;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14], [%r1], 128, [%r15];
W: {wait}
ld.shared.u32 %r16, [%r10+1024];
mad.lo.u32 %r17, %r8, 32, %r0;
mad.wide.u32 %d8, %r17, 4, %d0;
st.global.u32 [%d8], %r16;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""


@pytest.mark.parametrize("completion", POLICIES)
def test_shared_to_the_other_cta_of_a_cluster(completion: str) -> None:
    dst = np.zeros(64, np.uint32)
    text = kernel(CLUSTER.format(wait=wait(0)), 1)
    run(text, [dst], grid=2, cluster=2, completion=completion)
    np.testing.assert_array_equal(dst, np.r_[1000:1032, 0:32])


def test_multicast_reaches_the_ctas_of_the_mask() -> None:
    body = f"""
mov.u32 %r8, %cluster_ctarank;
st.shared.u32 [%r1], 7;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
setp.eq.u32 %p1, %r8, 2;
setp.eq.u32 %p2, %r8, 1;
or.pred %p3, %p1, %p2;
and.pred %p3, %p3, %p0;
@%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 64;
and.pred %p4, %p1, %p0;
mov.u16 %h1, 6;
@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
    [%r1], [%d0], 64, [%r2], %h1;
or.pred %p3, %p1, %p2;
@!%p3 bra OUT;
{wait(0)}
OUT:
ld.shared.u32 %r9, [%r1];
mad.wide.u32 %d8, %r8, 4, %d1;
@%p0 st.global.u32 [%d8], %r9;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
"""
    for completion in POLICIES:
        src, dst = words(16), np.zeros(4, np.uint32)
        run(kernel(body, 2), [src, dst], grid=4, cluster=4, completion=completion)
        assert dst.tolist() == [7, src[0], src[0], 7]


LOAD = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"


@pytest.mark.parametrize(
    ("copy", "error", "text"),
    [
        (f"{LOAD} [%r1], [%d0], 24, [%r2];", MemoryFault, "24 bytes"),
        (f"{LOAD} [%r1+8], [%d0], 16, [%r2];", MemoryFault, "not aligned to 16"),
        (f"{LOAD} [%r1], [%d0+8], 16, [%r2];", MemoryFault, "not aligned to 16"),
        (f"{LOAD} [%r1], [%d0+48], 32, [%r2];", MemoryFault, "out of bounds"),
        (f"{LOAD} [%r1+8176], [%d0], 64, [%r2];", MemoryFault, "out of bounds"),
        (f"{LOAD} [%r1], [%d0], 16, [%r1];", SyncError, "no initialised mbarrier"),
        (
            "cp.async.bulk.global.shared::cta.bulk_group [%d0+64], [%r1], 16;",
            MemoryFault,
            "past the end",
        ),
    ],
)
def test_faults(copy: str, error: type[Exception], text: str) -> None:
    body = f"@!%p0 bra DONE;\n{copy}\nDONE:\n"
    with pytest.raises(error, match=text):
        run(kernel(body, 1), [words(16)])
