"""Barriers, mbarriers, fences, register reallocation, spins and the deadlock report."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, run, u64_params

from megamoe.runtime.vgpu import Deadlock, Kernel, SyncError, VgpuError, World
from megamoe.runtime.vgpu.schedule import StarveScheduler

START = "mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; shr.u32 %r1, %r0, 5;\n"
SCHEDULES = [("round_robin", 0), ("random", 1), ("random", 2), ("starve", 1), ("starve", 2)]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_named_barriers_producer_consumer(schedule: str, seed: int) -> None:
    out = np.zeros(1, np.uint32)
    body = (
        START
        + """
    .shared .align 4 .b32 cell;
    setp.ne.u32 %p0, %r1, 0; @%p0 bra CONSUMER;
    mov.u32 %r2, 0;
    LOOP: st.shared.u32 [cell], %r2; bar.arrive 1, 64; bar.sync 2, 64;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10; @%p1 bra LOOP; bra.uni DONE;
    CONSUMER: mov.u32 %r3, 0; mov.u32 %r2, 0; mov.u32 %r9, 1;
    LOOP2: bar.sync %r9, 64; ld.shared.u32 %r4, [cell]; add.u32 %r3, %r3, %r4;
    bar.arrive 2, 64; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10; @%p1 bra LOOP2;
    st.global.u32 [%d0], %r3;
    DONE:
    """
    )
    run(entry(body, u64_params(1)), [out], block=64, schedule=schedule, seed=seed)
    assert out[0] == 45


def test_bar_red_and_exited_threads() -> None:
    out = np.zeros(3, np.uint32)
    body = (
        START
        + """
    setp.ge.u32 %p0, %r0, 96; @%p0 exit;
    setp.lt.u32 %p1, %r0, 10;
    barrier.cta.red.popc.u32 %r2, 0, %p1; barrier.cta.red.or.pred %p2, 0, %p1;
    barrier.cta.red.and.pred %p3, 0, !%p1;
    selp.u32 %r3, 1, 0, %p2; selp.u32 %r4, 1, 0, %p3;
    st.global.u32 [%d0], %r2; st.global.u32 [%d0+4], %r3; st.global.u32 [%d0+8], %r4;
    """
    )
    run(entry(body, u64_params(1)), [out], block=128)
    assert out.tolist() == [10, 1, 0]


MBAR = """
.shared .align 8 .b64 bars[4];
"""
WAIT = """{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [bars+%s], %s, 1000;
@P bra.uni D; bra.uni W; D: }"""


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_mbarrier_pipeline(schedule: str, seed: int) -> None:
    out = np.zeros(1, np.uint32)
    body = (
        START
        + f"""
    .shared .align 4 .b32 cell;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra GO;
    mbarrier.init.shared.b64 [bars], 1; mbarrier.init.shared.b64 [bars+8], 32;
    fence.mbarrier_init.release.cluster;
    GO: bar.sync 0;
    mov.u32 %r2, 0; mov.u32 %r5, 0; mov.u32 %r6, 1;
    setp.ne.u32 %p0, %r1, 0; @%p0 bra CONSUMER;
    LOOP: {WAIT % (8, "%r6")}
    st.shared.u32 [cell], %r2; elect.sync _|%p3, -1; @%p3 mbarrier.arrive.shared.b64 _, [bars];
    xor.b32 %r6, %r6, 1; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10; @%p1 bra LOOP;
    bra.uni DONE;
    CONSUMER: mov.u32 %r3, 0;
    LOOP2: {WAIT % (0, "%r5")}
    ld.shared.u32 %r4, [cell]; add.u32 %r3, %r3, %r4; mbarrier.arrive.shared.b64 %d4, [bars+8];
    xor.b32 %r5, %r5, 1; add.u32 %r2, %r2, 1; setp.lt.u32 %p1, %r2, 10; @%p1 bra LOOP2;
    st.global.u32 [%d0], %r3;
    DONE:
    """
    )
    text = entry(body, u64_params(1), head=MBAR)
    run(text, [out], block=64, schedule=schedule, seed=seed)
    assert out[0] == 45


def test_mbarrier_tokens_counts_and_transactions() -> None:
    out = np.zeros(8, np.uint32)
    body = (
        START
        + """
    setp.ne.u32 %p0, %r0, 0; @%p0 exit;
    mbarrier.init.shared.b64 [bars], 3;
    mbarrier.arrive.shared.b64 %d1, [bars], 2;
    mbarrier.pending_count.b64 %r8, %d1; st.global.u32 [%d0+20], %r8;
    mbarrier.test_wait.shared.b64 %p1, [bars], %d1; selp.u32 %r2, 1, 0, %p1;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 64;
    mbarrier.arrive.expect_tx.shared.b64 %d2, [bars], 64;
    mbarrier.test_wait.shared.b64 %p1, [bars], %d2; selp.u32 %r3, 1, 0, %p1;
    mbarrier.test_wait.parity.shared.b64 %p1, [bars], 0; selp.u32 %r4, 1, 0, %p1;
    mbarrier.test_wait.parity.shared.b64 %p1, [bars], 1; selp.u32 %r5, 1, 0, %p1;
    mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bars], 16;
    mbarrier.arrive.shared.b64 _, [bars], 3;
    mbarrier.test_wait.parity.shared.b64 %p1, [bars], 1; selp.u32 %r6, 1, 0, %p1;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bars], 16;
    mbarrier.test_wait.parity.shared.b64 %p1, [bars], 1; selp.u32 %r7, 1, 0, %p1;
    st.global.v4.u32 [%d0], {%r2, %r3, %r4, %r5};
    st.global.u32 [%d0+16], %r6; st.global.u32 [%d0+24], %r7;
    mbarrier.inval.shared.b64 [bars]; mbarrier.init.shared.b64 [bars], 1;
    """
    )
    run(entry(body, u64_params(1), head=MBAR), [out])
    assert out.tolist() == [0, 1, 1, 0, 0, 3, 1, 0]


def test_cluster_barrier_and_remote_shared_memory() -> None:
    out = np.zeros(4, np.uint32)
    head = MBAR + ".shared .align 4 .b32 cell;\n"
    body = (
        START
        + f"""
    mov.u32 %r2, %cluster_ctarank; xor.b32 %r3, %r2, 1; mov.u32 %r4, cell; mov.u32 %r9, bars;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra GO; mbarrier.init.shared.b64 [bars], 1;
    GO: barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;
    mapa.shared::cluster.u32 %r5, %r4, %r3; mapa.shared::cluster.u32 %r10, %r9, %r3;
    add.u32 %r6, %r2, 70; @%p0 bra REST; st.shared::cluster.u32 [%r5], %r6;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r10];
    REST: {WAIT % (0, 0)}
    ld.shared.u32 %r7, [cell]; getctarank.shared::cluster.u32 %r11, %r5;
    mov.u32 %r12, %ctaid.x; mad.wide.u32 %d1, %r12, 4, %d0; mad.lo.u32 %r7, %r11, 1000, %r7;
    st.global.u32 [%d1], %r7;
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    )
    run(entry(body, u64_params(1), head=head), [out], block=64, grid=4, cluster=2)
    assert out.tolist() == [1071, 70, 1071, 70]


def test_setmaxnreg_pool() -> None:
    body = (
        START
        + """
    setp.lt.u32 %p0, %r0, 128; @%p0 bra SERVICE;
    setmaxnreg.inc.sync.aligned.u32 232; bra.uni DONE;
    SERVICE: setmaxnreg.dec.sync.aligned.u32 40; DONE:
    """
    )
    text = entry(body, u64_params(1))
    run(text, [0], block=384, registers=168)
    with pytest.raises(Deadlock, match="register pool"):
        run(text.replace("inc.sync.aligned.u32 232", "inc.sync.aligned.u32 248"), [0], block=384,
            registers=168)  # fmt: skip


def test_spin_between_pes_with_release_acquire_and_nanosleep() -> None:
    flags = [np.zeros(2, np.uint32) for _ in range(2)]
    body = """
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r0, %tid.x;
    st.global.u32 [%d1+4], 41; st.release.sys.global.u32 [%d1], 1;
    WAIT: ld.acquire.sys.global.u32 %r1, [%d0]; setp.ne.u32 %p0, %r1, 0; @%p0 bra GO;
    nanosleep.u32 64; bra.uni WAIT;
    GO: ld.global.u32 %r2, [%d0+4]; setp.ne.u32 %p0, %r2, 41; @%p0 trap;
    fence.acq_rel.sys; fence.proxy.async; fence.proxy.async.global; membar.gl; fence.sc.gpu;
    """
    for schedule, seed in SCHEDULES:
        world = World(pes=2, schedule=schedule, seed=seed)
        for pe in range(2):
            flags[pe][:] = 0
            world.register(flags[pe], name="flags", pe=pe)
        kernel = Kernel.from_ptx(entry(body, u64_params(2)))
        for pe in range(2):
            world.launch(
                pe=pe, kernel=kernel, grid=2, block=64, args=[flags[pe], flags[1 - pe]]
            )  # fmt: skip
        report = world.run()
        assert report.launches == {0: 1, 1: 1}


def test_deadline_in_a_spin_expires() -> None:
    out = np.zeros(2, np.uint64)
    body = """
    ld.param.u64 %d0, [p0]; mov.u64 %d1, %globaltimer; add.u64 %d2, %d1, 300000000000;
    WAIT: ld.acquire.sys.global.u64 %d3, [%d0]; setp.ne.u64 %p0, %d3, 0; @%p0 bra GO;
    mov.u64 %d4, %globaltimer; setp.lt.u64 %p1, %d4, %d2; @%p1 bra WAIT;
    GO: mov.u64 %d5, 9; st.global.u64 [%d0+8], %d5;
    """
    run(entry(body, u64_params(1)), [out])
    assert out.tolist() == [0, 9]


def test_deadline_around_try_wait_expires() -> None:
    out = np.zeros(1, np.uint32)
    body = (
        START
        + """
    setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [bars], 1; bar.sync 0;
    mov.u64 %d1, %globaltimer; add.u64 %d2, %d1, 1000000000;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [bars], 0; @%p1 trap;
    mov.u64 %d4, %globaltimer; setp.lt.u64 %p1, %d4, %d2; @%p1 bra WAIT;
    st.global.u32 [%d0], 3;
    """
    )
    run(entry(body, u64_params(1), head=MBAR), [out])
    assert out[0] == 3


def test_missing_arrive_is_reported_with_the_line() -> None:
    body = (
        START
        + f""".loc 1 5 0
    setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [bars], 2; bar.sync 0;
    @%p0 mbarrier.arrive.shared.b64 _, [bars];
    .loc 1 42 0
    {WAIT % (0, 0)}
    """
    )
    text = entry(body, u64_params(1), head=MBAR) + '.file 1 "/x/kern.py"\n'
    line = next(i for i, s in enumerate(text.split("\n"), 1) if "try_wait" in s)
    with pytest.raises(Deadlock) as e:
        run(text, [0], block=64, roles={0: "producer", 1: "math"})
    message = str(e.value)
    assert f"PTX line {line}, kern.py:42" in message
    assert "1 of 2 arrivals pending" in message and "phase 0" in message
    assert "warp 0 (producer)" in message and "warp 1 (math)" in message
    assert e.value.report.text == message


def test_other_deadlocks() -> None:
    with pytest.raises(Deadlock, match="barrier 3: 32 arrived of 64 threads"):
        run(entry(START + "setp.eq.u32 %p0, %r1, 1; @%p0 exit; bar.sync 3, 64;", u64_params(1)),
            [0], block=64)  # fmt: skip
    spin = """ld.param.u64 %d0,[p0]; W: ld.volatile.global.u32 %r1,[%d0]; setp.eq.u32 %p0,%r1,0;
    @%p0 bra W;"""
    with pytest.raises(Deadlock, match="polls in vain"):
        run(entry(spin, u64_params(1)), [np.zeros(1, np.uint32)])
    half = START + "setp.lt.u32 %p0, %r0, 16; @%p0 bra X; bar.warp.sync -1; X: bar.sync 0;"
    with pytest.raises(Deadlock, match="other lanes of the warp"):
        run(entry(half, u64_params(1)), [0])
    two = """mov.u32 %r0, %ctaid.x; ld.param.u64 %d0, [p0]; atom.global.add.u32 %r1, [%d0], 1;
    W: ld.relaxed.gpu.global.u32 %r2, [%d0]; setp.lt.u32 %p0, %r2, 64; @%p0 bra W;"""
    run(entry(two, u64_params(1)), [np.zeros(1, np.uint32)], grid=2, sms=2)
    with pytest.raises(Deadlock, match="CTAs have not started"):
        run(entry(two, u64_params(1)), [np.zeros(1, np.uint32)], grid=2, sms=1, smem=200000)


def test_misuse_is_an_error() -> None:
    cases = {
        "mbarrier.arrive.shared.b64 _, [bars];": "no initialised mbarrier",
        "mbarrier.init.shared.b64 [bars], 0;": "count 0",
        "mbarrier.init.shared.b64 [bars], 1; mbarrier.arrive.shared.b64 _, [bars], 2;": "arrivals",
        "bar.sync 16;": "barrier 16",
        "bar.sync 1, 33;": "33 threads",
        "trap;": "trap",
    }
    for code, text in cases.items():
        body = START + "setp.ne.u32 %p0, %r0, 0; @%p0 exit; " + code
        with pytest.raises(VgpuError, match=text):
            run(entry(body, u64_params(1), head=MBAR), [0])
    with pytest.raises(SyncError, match="expects"):
        run(entry(START + "setp.eq.u32 %p0, %r1, 0; @%p0 bra A; bar.sync 1, 64; exit;"
                  "A: bar.sync 1, 96;", u64_params(1)), [0], block=96)  # fmt: skip


def test_a_loop_without_effect_is_a_deadlock() -> None:
    spin = """ld.param.u64 %d0,[p0]; W: ld.global.u32 %r1,[%d0]; setp.eq.u32 %p0,%r1,0;
    @%p0 bra W;"""
    with pytest.raises(Deadlock, match="without any effect"):
        run(entry(spin, u64_params(1)), [np.zeros(1, np.uint32)], stall_instructions=20000)


def test_work_that_looks_at_the_same_flag_is_no_spin() -> None:
    """200 steps that each poll an abort word that stays 0: the deadline must not expire."""
    out = np.zeros(2, np.uint32)
    body = """
    ld.param.u64 %d0, [p0]; mov.u64 %d1, %globaltimer; add.u64 %d2, %d1, 300000000000;
    mov.u32 %r5, 0;
    STEP: ld.acquire.sys.global.u32 %r1, [%d0]; setp.ne.u32 %p0, %r1, 0; @%p0 trap;
    mov.u64 %d3, %globaltimer; setp.gt.u64 %p1, %d3, %d2; @%p1 trap;
    add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 200; @%p2 bra STEP;
    st.global.u32 [%d0+4], %r5;
    """
    run(entry(body, u64_params(1)), [out])
    assert out[1] == 200


@pytest.mark.parametrize("completion", ["late", "random"])
def test_a_counting_spin_does_not_starve_late_copies(completion: str) -> None:
    out = np.zeros(40, np.uint32)
    head = MBAR + ".shared .align 128 .b8 buf[64];\n"
    body = (
        START
        + """
    setp.ne.u32 %p0, %r0, 0; setp.ge.u32 %p3, %r0, 32;
    @%p0 bra A; mbarrier.init.shared.b64 [bars], 1; A: bar.sync 0;
    @%p3 bra COUNT; @%p0 bra B; mov.u32 %r2, buf; mov.u32 %r3, bars;
    mbarrier.arrive.expect_tx.shared.b64 _, [bars], 64;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%d0], 64, [%r3];
    B: """
        + WAIT % (0, 0)
        + """
    st.global.u32 [%d0+128], 7; exit;
    COUNT: mov.u32 %r6, 0;
    C: add.u32 %r6, %r6, 1; ld.volatile.global.u32 %r7, [%d0+128]; setp.eq.u32 %p1, %r7, 0;
    @%p1 bra C;
    """
    )
    run(entry(body, u64_params(1), head=head), [out], block=64, completion=completion)
    assert out[32] == 7


@pytest.mark.parametrize("completion", ["eager", "late"])
def test_a_starved_warp_comes_after_those_that_still_wait(completion: str) -> None:
    """Warp 0 copies, then sets a flag; warp 1 polls the flag; both and warp 2 then take a number.
    Whoever is starved takes the last one, though warp 2 could always run."""
    head = MBAR + ".shared .align 128 .b8 buf[64];\n"
    body = (
        START
        + """
    and.b32 %r9, %r0, 31; setp.ne.u32 %p0, %r9, 0; @%p0 exit;
    setp.eq.u32 %p1, %r1, 1; @%p1 bra POLL; setp.eq.u32 %p2, %r1, 2; @%p2 bra TAKE;
    mbarrier.init.shared.b64 [bars], 1; mov.u32 %r2, buf; mov.u32 %r3, bars;
    mbarrier.arrive.expect_tx.shared.b64 _, [bars], 64;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%d0], 64, [%r3];
    """
        + WAIT % (0, 0)
        + """
    st.release.gpu.global.u32 [%d0+64], 1; bra.uni TAKE;
    POLL: nanosleep.u32 20; ld.acquire.gpu.global.u32 %r4, [%d0+64];
    setp.eq.u32 %p3, %r4, 0; @%p3 bra POLL;
    TAKE: atom.global.add.u32 %r5, [%d0+68], 1; mul.wide.u32 %d1, %r1, 4; add.u64 %d1, %d1, %d0;
    st.global.u32 [%d1+72], %r5;
    """
    )
    starved = set()
    for seed in range(12):
        out = np.zeros(24, np.uint32)
        run(entry(body, u64_params(1), head=head), [out], block=96, schedule="starve",
            seed=seed, completion=completion)  # fmt: skip
        taken = out[18:21].tolist()
        victim = StarveScheduler(seed).victim % 3
        if victim > 0:  # the flag is warp 0's, so warp 1 is behind it whoever is starved
            assert taken[victim] == 2
        starved.add(victim)
    assert starved == {0, 1, 2}


def test_all_threads_may_be_counted_or_not() -> None:
    body = START + "setp.eq.u32 %p0, %r1, 0; @%p0 bra A; bar.sync 0; exit; A: bar.sync 0, 96;"
    run(entry(body, u64_params(1)), [0], block=96)


def test_runs_are_reproduced_by_seed() -> None:
    body = (
        START
        + """
    atom.global.add.u32 %r2, [%d0], 1; mov.u32 %r5, %ctaid.x; mad.lo.u32 %r6, %r5, 64, %r0;
    mad.wide.u32 %d1, %r6, 4, %d0; st.global.u32 [%d1+4], %r2; bar.sync 0;
    atom.global.add.u32 %r2, [%d0], 1;
    """
    )

    def order(seed: int) -> bytes:
        out = np.zeros(1 + 256, np.uint32)
        run(entry(body, u64_params(1)), [out], block=64, grid=4, schedule="random", seed=seed)
        return out.tobytes()

    assert order(1) == order(1)
    assert len({order(s) for s in range(4)}) > 1
