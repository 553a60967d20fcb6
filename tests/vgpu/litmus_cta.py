"""Litmus programs: lanes, warps and clusters; shared memory, barriers, mbarriers."""

from litmus_harness import Litmus, elected, wait

STS = "mov.u32 %r3, 1; st.shared.u32 [%r10], %r3;\n"
LDS = "ld.shared.u32 %r4, [%r10];\n"
# Lane i writes word i, then reads word i + 1.
LANES = "mad.lo.u32 %r5, %r20, 4, %r10; st.shared.u32 [%r5], %r20;\n"
OTHER = """add.u32 %r6, %r20, 1; and.b32 %r6, %r6, 31; mad.lo.u32 %r5, %r6, 4, %r10;
ld.shared.u32 %r4, [%r5];
"""
ARRIVE = "mbarrier.arrive{}.b64 %d9, [{}];\n"


def arrive(form: str = ".shared::cta", bar: str = "%r12") -> str:
    """An arrival on an mbarrier."""
    return ARRIVE.format(form, bar)


def sink(code: str) -> str:
    """For arrivals on another CTA's barrier, which return no state."""
    return code.replace("%d9", "_")


PEER = "mov.u32 %r7, 1; mapa.shared::cluster.u32 %r8, %r10, %r7;\n"
PEER_BAR = "mov.u32 %r7, 1; mapa.shared::cluster.u32 %r9, %r12, %r7;\n"
REMOTE = PEER + "mov.u32 %r3, 1; st.shared::cluster.u32 [%r8], %r3;\n"

TABLE = [
    # Lanes of a warp.
    Litmus("lanes_with_syncwarp", "warp", (LANES + "bar.warp.sync -1;\n" + OTHER,), "clean",
           full=True),
    Litmus("lanes_without_syncwarp", "warp", (LANES + OTHER,), "race", "bar.warp.sync", full=True),
    Litmus("lanes_with_shuffle", "warp",
           (LANES + "shfl.sync.bfly.b32 %r9, %r20, 1, 31, -1;\n" + OTHER,), "race",
           "bar.warp.sync", full=True),
    Litmus("lanes_with_vote", "warp",
           (LANES + "vote.sync.ballot.b32 %r9, %p30, -1;\n" + OTHER,), "race", full=True),
    Litmus("one_lane_writes_all_read", "warp", (elected(STS) + "bar.warp.sync -1;\n" + LDS,),
           "clean", full=True),
    Litmus("one_lane_writes_all_read_no_sync", "warp", (elected(STS) + LDS,), "race", full=True),
    Litmus("all_read_one_lane_writes_no_sync", "warp",
           (elected(STS) + "bar.warp.sync -1;\n" + LDS + elected(STS),), "race", full=True),
    Litmus("all_read_one_lane_writes", "warp",
           (elected(STS) + "bar.warp.sync -1;\n" + LDS + "bar.warp.sync -1;\n" + elected(STS),),
           "clean", full=True),
    Litmus("own_words_need_no_sync", "warp", (LANES + "ld.shared.u32 %r4, [%r5];\n" + LANES,),
           "clean", full=True),
    Litmus("syncwarp_of_other_lanes", "lane",
           (STS + "bar.warp.sync 1;\n", "bar.warp.sync 2;\n" + LDS), "race", "bar.warp.sync"),
    Litmus("syncwarp_of_two_lanes", "lane",
           (STS + "bar.warp.sync 3;\n", "bar.warp.sync 3;\n" + LDS), "clean"),
    Litmus("acquire_by_another_lane", "lane",
           (STS + "mov.u32 %r5, 1; st.release.cta.global.u32 [%d1], %r5;\n",
            "LL: ld.acquire.cta.global.u32 %r2, [%d1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra LL;\n",
            "MM: ld.relaxed.cta.global.u32 %r2, [%d1]; setp.eq.u32 %p1, %r2, 0; @%p1 bra MM;\n"
            + LDS), "race", "bar.warp.sync"),
    # Warps of a CTA.
    Litmus("warps_bar_sync", "warp", (elected(STS) + "bar.sync 0;\n", "bar.sync 0;\n" + LDS),
           "clean", full=True),
    Litmus("warps_no_barrier", "warp", (elected(STS), LDS), "race", "a barrier", full=True),
    Litmus("warps_barrier_before_the_write", "warp",
           ("bar.sync 0;\n" + elected(STS), "bar.sync 0;\n" + LDS), "race", full=True),
    Litmus("warps_bar_arrive_and_sync", "warp",
           (elected(STS) + "bar.arrive 1, 64;\n", "bar.sync 1, 64;\n" + LDS), "clean", full=True),
    Litmus("warps_bar_arrive_acquires_nothing", "warp",
           (elected(STS) + "bar.sync 1, 64;\n", "bar.arrive 1, 64;\n" + LDS), "race", full=True),
    Litmus("warps_two_different_barriers", "warp",
           (elected(STS) + "bar.sync 1, 64;\n", "bar.sync 2, 64;\n" + LDS,
            "bar.sync 1, 64; bar.sync 2, 64;\n"), "clean", full=True),
    Litmus("warps_two_barriers_wrong_order", "warp",
           (elected(STS) + "bar.sync 1, 64;\n", "bar.sync 2, 64;\n" + LDS,
            "bar.sync 2, 64; bar.sync 1, 64;\n"), "race", full=True),
    Litmus("bar_red_is_a_barrier", "warp",
           (elected(STS) + "barrier.cta.red.popc.u32 %r9, 0, %p30;\n",
            "barrier.cta.red.popc.u32 %r9, 0, %p30;\n" + LDS), "clean", full=True),
    # mbarriers.
    Litmus("mbarrier", "warp", (elected(STS + arrive()), wait() + LDS), "clean", full=True,
           barriers=True),
    Litmus("mbarrier_write_after_arrive", "warp", (elected(arrive() + STS), wait() + LDS), "race",
           full=True, barriers=True),
    Litmus("mbarrier_no_wait", "warp", (elected(STS + arrive()), LDS), "race", full=True,
           barriers=True),
    Litmus("mbarrier_other_barrier", "warp",
           (elected(STS + arrive(bar="%r13")), elected(arrive()) + wait() + LDS), "race",
           full=True, barriers=True),
    Litmus("mbarrier_second_phase", "warp",
           (elected(arrive() + wait(1, "%r13").replace("1;", "0;") + STS + arrive()),
            wait(0) + elected(arrive(bar="%r13")) + wait(1) + LDS), "clean", full=True,
           barriers=True),
    Litmus("mbarrier_waits_for_the_wrong_phase", "warp",
           (elected(arrive() + wait(0, "%r13") + STS + arrive()),
            wait(0) + LDS + elected(arrive(bar="%r13"))), "race", full=True, barriers=True),
    Litmus("mbarrier_all_lanes_but_one_waits", "warp",
           (elected(STS + arrive()), elected(wait()) + LDS), "race", full=True, barriers=True),
    Litmus("mbarrier_one_waits_then_syncwarp", "warp",
           (elected(STS + arrive()), elected(wait()) + "bar.warp.sync -1;\n" + LDS), "clean",
           full=True, barriers=True),
    Litmus("mbarrier_init_without_barrier", "warp",
           (elected("mbarrier.init.shared::cta.b64 [%r12], 1;\n"
                    "mov.u32 %r5, 1; st.relaxed.cta.global.u32 [%d1], %r5;\n"),
            elected("NN: ld.relaxed.cta.global.u32 %r2, [%d1]; setp.eq.u32 %p1, %r2, 0;"
                    " @%p1 bra NN;\n" + arrive())), "race", "mbarrier", full=True),
    # Clusters.
    Litmus("cluster_barrier", "cluster",
           (elected(REMOTE) + "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n",
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n" + LDS), "clean",
           full=True, setup="barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"),
    Litmus("cluster_barrier_relaxed", "cluster",
           (elected(REMOTE)
            + "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;\n",
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n" + LDS), "race",
           "cluster", full=True),
    Litmus("cluster_no_barrier", "cluster", (elected(REMOTE), LDS), "race", "barrier.cluster",
           full=True),
    Litmus("remote_arrive", "cluster",
           (elected(REMOTE + PEER_BAR
                    + sink(arrive(".release.cluster.shared::cluster", "%r9"))),
            wait(form=".acquire.cluster") + LDS), "clean", full=True, barriers=True),
    Litmus("remote_arrive_cta_scope", "cluster",
           (elected(REMOTE + PEER_BAR + sink(arrive(".release.cta.shared::cluster", "%r9"))),
            wait(form=".acquire.cluster") + LDS), "race", ".cta scope", full=True, barriers=True),
    Litmus("remote_arrive_wait_with_cta_scope", "cluster",
           (elected(REMOTE + PEER_BAR
                    + sink(arrive(".release.cluster.shared::cluster", "%r9"))),
            wait(form=".acquire.cta") + LDS), "race", full=True, barriers=True),
    Litmus("remote_arrive_default_scope", "cluster",
           (elected(REMOTE + PEER_BAR + sink(arrive(".shared::cluster", "%r9"))), wait() + LDS),
           "clean", full=True, barriers=True),
    Litmus("st_async", "cluster",
           (elected(PEER + PEER_BAR + "mov.u32 %r3, 1;\n"
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r8], %r3,"
                    " [%r9];\n"),
            elected("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 4;\n") + wait() + LDS),
           "clean", full=True, barriers=True),
    Litmus("st_async_no_wait", "cluster",
           (elected(PEER + PEER_BAR + "mov.u32 %r3, 1;\n"
                    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r8], %r3,"
                    " [%r9];\n"),
            elected("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], 4;\n") + LDS),
           "race", "mbarrier", full=True, barriers=True),
    # Never-written shared memory.
    Litmus("unwritten_shared_memory", "warp", (LDS,), "poison_read", "smem", full=True),
]  # fmt: skip
