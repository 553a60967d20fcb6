"""Litmus programs: asynchronous copies, proxies, groups, wgmma."""

from litmus_flags import READ, WRITE, st
from litmus_harness import Litmus, elected, until, wait

from megamoe.runtime.vgpu.wgmma import encode

EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r12], {};\n"
PLAIN_ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r12];\n"
LOAD = (
    "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [{src}], {n}, [%r12];\n"
)
STORE = "cp.async.bulk.global.shared::cta.bulk_group [{dst}], [{src}], 16;\n"
COMMIT = "cp.async.bulk.commit_group;\n"
WAIT = "cp.async.bulk.wait_group {};\n"
WAIT_READ = "cp.async.bulk.wait_group.read {};\n"
FILL = "mov.u32 %r3, 7; st.shared.v4.u32 [%r10], {%r3, %r3, %r3, %r3};\n"
FENCE = "fence.proxy.async.{};\n"
SMEM, GMEM = FENCE.format("shared::cta"), FENCE.format("global")
LDS = "ld.shared.u32 %r4, [%r10];\n"


def load(src: str = "%d0", n: int = 16) -> str:
    """A bulk load with its expected bytes."""
    return EXPECT.format(n) + LOAD.format(src=src, n=n)


def store(dst: str = "%d0", src: str = "%r10") -> str:
    """A committed bulk store."""
    return STORE.format(dst=dst, src=src) + COMMIT


SENT = FILL + SMEM + store()
ACQ = until("ld.acquire.gpu.global.u32")
REL = st(".release.gpu")

# A warpgroup's product of two tiles of zeros: A 64x16 at buf, B 8x16 behind it, no swizzle.
ACC = ", ".join(f"%x{i}" for i in range(4))
ZERO = "".join(f"mov.b32 %x{i}, 0;\n" for i in range(4))
DESC_A, DESC_B = encode(0, 128, 256, 0), encode(0, 128, 256, 0)
FILL_TILES = """
setp.ne.u32 %p28, %r1, 0;
mad.lo.u32 %r5, %r0, 16, %r10; mov.u32 %r3, 0; st.shared.v4.u32 [%r5], {%r3, %r3, %r3, %r3};
@%p28 bra T; mad.lo.u32 %r5, %r20, 16, %r11; st.shared.v4.u32 [%r5], {%r3, %r3, %r3, %r3}; T:
"""
DESCS = f"""
shr.u32 %r6, %r10, 4; cvt.u64.u32 %d6, %r6; or.b64 %d6, %d6, {DESC_A};
shr.u32 %r6, %r11, 4; cvt.u64.u32 %d7, %r6; or.b64 %d7, %d7, {DESC_B};
"""
FENCE_REGS = "wgmma.fence.sync.aligned;\n"
MMA = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
    f"{{{ACC}}}, %d6, %d7, 1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\n"
)
MMA_WAIT = "wgmma.wait_group.sync.aligned 0;\n"
ONLY_0 = "setp.ne.u32 %p29, %r0, 0; @%p29 bra X;\n{}X:\n"
USE = ONLY_0.format("st.global.b32 [%d0], %x0;\n")
BAR = "bar.sync 0;\n"
OVERWRITE = ONLY_0.format("mov.u32 %r3, 1; st.shared.u32 [%r10], %r3;\n")


def mma(name: str, code: str, verdict: str, says: str = "") -> Litmus:
    """A program of one warpgroup; every warp runs the same code."""
    return Litmus(name, "warp", ("", "", "", ""), verdict, says, full=True, setup=code,
                  barriers=True)  # fmt: skip


GOOD = FILL_TILES + SMEM + BAR + DESCS + ZERO + FENCE_REGS + MMA

NEW_BARRIER = "mbarrier.init.shared::cta.b64 [%r12], 1;\n"

TABLE = [
    # Loads and their mbarrier.
    Litmus("barrier_init_no_fence", "cta", (NEW_BARRIER + load() + wait() + LDS,), "race",
           "fence"),
    Litmus("barrier_init_mbarrier_fence", "cta",
           (NEW_BARRIER + "fence.mbarrier_init.release.cluster;\n" + load() + wait() + LDS,),
           "clean"),
    Litmus("barrier_init_proxy_fence", "cta", (NEW_BARRIER + SMEM + load() + wait() + LDS,),
           "clean"),
    Litmus("bulk_load", "warp", (elected(load()) + wait() + LDS,), "clean", full=True,
           barriers=True),
    Litmus("bulk_load_no_wait", "warp", (elected(load()) + LDS,), "race", "wait on mbarrier",
           full=True, barriers=True),
    Litmus("bulk_load_no_expect", "warp",
           (elected(LOAD.format(src="%d0", n=16) + PLAIN_ARRIVE) + wait() + LDS,), "transaction",
           "expect", full=True, barriers=True),
    Litmus("bulk_load_expects_too_little", "warp",
           (elected(EXPECT.format(16) + LOAD.format(src="%d0", n=32)) + wait() + LDS,),
           "fault", full=True, barriers=True),
    Litmus("bulk_load_twice", "cta", (load() + wait() + load() + wait(1) + LDS,), "clean",
           barriers=True),
    Litmus("bulk_load_waits_for_the_first_only", "cta",
           (load() + wait() + load() + LDS,), "race", "wait on mbarrier", barriers=True),
    Litmus("bulk_load_over_a_generic_write", "warp",
           (elected(FILL + load()) + wait() + LDS,), "race", "proxies", full=True, barriers=True),
    Litmus("bulk_load_over_a_fenced_write", "warp",
           (elected(FILL + SMEM + load()) + wait() + LDS,), "clean", full=True, barriers=True),
    Litmus("bulk_load_while_others_read", "warp",
           (elected(load()) + wait() + LDS + elected(load()), ""), "race", "bar.warp.sync",
           full=True, barriers=True),
    Litmus("bulk_load_after_others_have_read", "warp",
           (elected(load()) + wait() + LDS + "bar.warp.sync -1;\n" + elected(load()) + wait(1),),
           "clean", full=True, barriers=True),
    Litmus("source_overwritten_under_a_load", "cta",
           (load() + WRITE + wait(),), "race", "wait on mbarrier", barriers=True),
    Litmus("source_overwritten_after_the_load", "cta", (load() + wait() + WRITE,), "clean",
           barriers=True),
    # Stores: proxy crossing and groups.
    Litmus("bulk_store", "cta", (SENT + WAIT.format(0),), "clean"),
    Litmus("bulk_store_no_proxy_fence", "cta", (FILL + store() + WAIT.format(0),), "race",
           "fence.proxy.async"),
    Litmus("bulk_store_fence_of_the_wrong_space", "cta", (FILL + GMEM + store(),), "race",
           "shared::cta"),
    Litmus("bulk_store_fence_by_the_issuer_only", "warp",
           (FILL.replace("%r10", "%r10"), elected(SMEM + store()),), "race", full=True),
    Litmus("writers_fence_then_barrier_then_store", "warp",
           (elected(FILL) + SMEM + BAR, BAR + elected(store() + WAIT_READ.format(0))), "clean",
           full=True),
    Litmus("writers_barrier_then_issuer_fences", "warp",
           (elected(FILL) + BAR, BAR + elected(SMEM + store() + WAIT_READ.format(0))), "clean",
           full=True),
    Litmus("writers_barrier_and_nobody_fences", "warp",
           (elected(FILL) + BAR, BAR + elected(store())), "race", "proxies", full=True),
    Litmus("source_reused_after_wait_read", "cta", (SENT + WAIT_READ.format(0) + FILL,), "clean"),
    Litmus("source_reused_at_once", "cta", (SENT + FILL,), "race", "wait_group"),
    Litmus("source_reused_after_too_weak_a_wait", "cta", (SENT + WAIT_READ.format(1) + FILL,),
           "race", "wait_group"),
    Litmus("result_read_after_wait", "cta", (SENT + WAIT.format(0) + READ,), "clean"),
    Litmus("result_read_after_wait_read", "cta", (SENT + WAIT_READ.format(0) + READ,), "race",
           "without .read"),
    Litmus("uncommitted_group", "cta",
           (FILL + SMEM + STORE.format(dst="%d0", src="%r10") + WAIT.format(0) + READ,), "race",
           "wait_group"),
    # The lanes of one instruction: the same store many times, or different ones to one place.
    Litmus("bulk_store_repeated_by_all_lanes", "warp",
           (elected(FILL) + SMEM + "bar.warp.sync -1;\n" + store() + WAIT.format(0),), "clean",
           full=True),
    Litmus("bulk_stores_of_two_lanes_to_one_place", "warp",
           (f"mad.lo.u32 %r5, %r0, 16, %r10;\n{FILL.replace('%r10', '%r5')}" + SMEM
            + "bar.warp.sync -1;\n" + store(src="%r5") + WAIT.format(0),), "race",
           "asynchronous write", full=True),
    Litmus("bulk_store_repeated_and_one_lane_waits", "warp",
           (elected(FILL) + SMEM + "bar.warp.sync -1;\n" + store()
            + elected(WAIT.format(0) + READ),), "race", "wait_group", full=True),
    Litmus("first_of_two_groups", "cta",
           (SENT + store("%d0+64") + WAIT.format(1) + READ + WAIT_READ.format(0),), "clean"),
    Litmus("second_of_two_groups", "cta",
           (SENT + store("%d0+64") + WAIT.format(1) + "ld.global.u32 %r4, [%d0+64];\n",), "race"),
    Litmus("wait_by_another_lane", "lane",
           (SENT + "bar.warp.sync 3;\n", "bar.warp.sync 3;\n" + WAIT.format(0) + READ), "race",
           "issuing lane"),
    Litmus("wait_by_the_lane_then_syncwarp", "lane",
           (SENT + WAIT.format(0) + "bar.warp.sync 3;\n", "bar.warp.sync 3;\n" + READ), "clean"),
    # The end of a CTA frees its shared memory.
    Litmus("exit_under_a_bulk_store", "cta", (SENT,), "lifetime", "or .read by the issuing lane"),
    Litmus("exit_after_wait_read", "cta", (SENT + WAIT_READ.format(0),), "clean"),
    Litmus("exit_under_the_second_of_two_stores", "cta",
           (SENT + store("%d0+64") + WAIT_READ.format(1),), "lifetime"),
    Litmus("exit_under_an_uncommitted_store", "cta",
           (FILL + SMEM + STORE.format(dst="%d0", src="%r10") + WAIT.format(0),), "lifetime"),
    Litmus("exit_after_a_wait_by_another_lane", "lane",
           (SENT + "bar.warp.sync 3;\n", "bar.warp.sync 3;\n" + WAIT.format(0)), "lifetime"),
    Litmus("exit_of_the_issuer_before_others", "warp",
           (elected(SENT) + BAR, BAR + elected(WAIT.format(0))), "lifetime", full=True),
    Litmus("exit_under_a_bulk_load", "cta", (load(),), "lifetime", "wait on mbarrier",
           barriers=True),
    Litmus("exit_under_the_second_of_two_loads", "cta", (load() + wait() + load(),), "lifetime",
           barriers=True),
    Litmus("exit_after_another_warp_has_waited", "warp", (elected(load()), wait()), "clean",
           full=True, barriers=True),
    # Stores announced to another CTA.
    Litmus("store_wait_release", "cta", (SENT + WAIT.format(0) + REL, ACQ + READ), "clean"),
    Litmus("store_wait_read_release", "cta", (SENT + WAIT_READ.format(0) + REL, ACQ + READ),
           "race", "without .read"),
    Litmus("store_release_no_wait", "cta", (SENT + REL, ACQ + READ), "race", "wait_group"),
    Litmus("store_to_peer", "pe",
           (SENT + WAIT.format(0) + st(".release.sys"),
            until("ld.acquire.sys.global.u32") + READ), "clean"),
    Litmus("async_to_async_across_ctas", "cta",
           (SENT + WAIT.format(0) + REL, ACQ + load() + wait()), "race", "proxies",
           barriers=True),
    Litmus("async_to_async_fence_at_the_reader", "cta",
           (SENT + WAIT.format(0) + REL, ACQ + GMEM + load() + wait()), "clean", barriers=True),
    Litmus("async_to_async_fence_at_the_writer", "cta",
           (SENT + WAIT.format(0) + GMEM + REL, ACQ + load() + wait()), "race", "proxies",
           barriers=True),
    # Generic data fetched by a copy.
    Litmus("generic_to_bulk_load", "cta", (WRITE + REL, ACQ + GMEM + load() + wait()), "clean",
           barriers=True),
    Litmus("generic_to_bulk_load_no_fence", "cta", (WRITE + REL, ACQ + load() + wait()), "race",
           "async.global", barriers=True),
    Litmus("generic_to_bulk_load_fence_at_the_writer", "cta",
           (WRITE + GMEM + REL, ACQ + load() + wait()), "race", "async.global", barriers=True),
    Litmus("generic_to_bulk_load_fence_before_acquire", "cta",
           (WRITE + REL, GMEM + ACQ + load() + wait()), "race", "proxies", barriers=True),
    Litmus("generic_to_bulk_load_fence_by_another_lane", "lane",
           ("bar.warp.sync 3;\n" + WRITE + "bar.warp.sync 3; bar.warp.sync 3;\n" + load() + wait(),
            "bar.warp.sync 3; bar.warp.sync 3;\n" + GMEM + "bar.warp.sync 3;\n"), "clean",
           barriers=True),
    Litmus("generic_to_bulk_load_fence_by_an_unsynchronised_lane", "lane",
           ("bar.warp.sync 3;\n" + WRITE + "bar.warp.sync 3;\n" + load() + "bar.warp.sync 3;\n",
            "bar.warp.sync 3; bar.warp.sync 3;\n" + GMEM + "bar.warp.sync 3;\n"), "race",
           "proxies", barriers=True),
    # Reductions by the copy engine.
    Litmus("two_bulk_reductions", "cta", (
        FILL + SMEM + "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r10],"
        " 16;\n" + COMMIT + WAIT.format(0),) * 2, "clean"),
    Litmus("bulk_reduction_against_a_store", "cta", (
        FILL + SMEM + "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%d0], [%r10],"
        " 16;\n" + COMMIT + WAIT.format(0), WRITE), "race"),
    # cp.async.
    Litmus("cp_async", "cta",
           ("cp.async.ca.shared.global [%r10], [%d0], 16; cp.async.commit_group;\n"
            "cp.async.wait_group 0;\n" + LDS,), "clean"),
    Litmus("cp_async_no_wait", "cta",
           ("cp.async.ca.shared.global [%r10], [%d0], 16; cp.async.commit_group;\n" + LDS,),
           "race", "cp.async.wait_group"),
    Litmus("cp_async_no_barrier", "warp",
           (elected("cp.async.ca.shared.global [%r10], [%d0], 16; cp.async.wait_all;\n"), LDS),
           "race", full=True),
    Litmus("cp_async_mbarrier", "warp",
           (elected("cp.async.ca.shared.global [%r10], [%d0], 16;\n"
                    "cp.async.mbarrier.arrive.noinc.shared.b64 [%r12];\n"), wait() + LDS),
           "clean", full=True, barriers=True),
    Litmus("cp_async_after_the_arrive", "warp",
           (elected("cp.async.mbarrier.arrive.noinc.shared.b64 [%r12];\n"
                    "cp.async.ca.shared.global [%r10], [%d0], 16;\n"), wait() + LDS),
           "race", full=True, barriers=True),
    # wgmma.
    mma("wgmma", GOOD + MMA_WAIT + USE, "clean"),
    mma("wgmma_no_proxy_fence",
        FILL_TILES + BAR + DESCS + ZERO + FENCE_REGS + MMA + MMA_WAIT, "race", "proxies"),
    mma("wgmma_no_barrier",
        FILL_TILES + SMEM + DESCS + ZERO + FENCE_REGS + MMA + MMA_WAIT, "race", "bar"),
    mma("wgmma_no_register_fence", FILL_TILES + SMEM + BAR + DESCS + ZERO + MMA + MMA_WAIT,
        "register_race", "wgmma.fence"),
    mma("wgmma_register_fence_too_early",
        FILL_TILES + SMEM + BAR + DESCS + ZERO + FENCE_REGS + "add.u32 %x1, %x1, 0;\n" + MMA
        + MMA_WAIT, "register_race"),
    mma("wgmma_zeros_moved_behind_the_fence",
        FILL_TILES + SMEM + BAR + DESCS + FENCE_REGS + ZERO + MMA + MMA_WAIT, "clean"),
    mma("wgmma_accumulator_changed_between_groups",
        GOOD + MMA_WAIT + "add.u32 %x1, %x1, 0;\n" + MMA + MMA_WAIT, "register_race"),
    mma("wgmma_accumulator_changed_and_fenced",
        GOOD + MMA_WAIT + "add.u32 %x1, %x1, 0;\n" + FENCE_REGS + MMA + MMA_WAIT, "clean"),
    mma("wgmma_accumulator_read_early", GOOD + USE + MMA_WAIT, "fault"),
    mma("wgmma_wait_leaves_it_in_flight",
        GOOD + MMA_WAIT.replace("0;", "1;") + USE + MMA_WAIT, "fault"),
    mma("wgmma_operand_overwritten_early", GOOD + OVERWRITE + MMA_WAIT, "race",
        "wgmma.wait_group"),
    mma("wgmma_wait_covers_the_warpgroup", GOOD + MMA_WAIT + OVERWRITE, "clean"),
    mma("wgmma_operand_released", GOOD + MMA_WAIT + BAR + OVERWRITE, "clean"),
    mma("wgmma_on_unwritten_memory",
        "setp.ge.u32 %p29, %r20, 9; @%p29 bra Y;\n" + FILL_TILES + "Y:\n" + SMEM + BAR + DESCS
        + ZERO + FENCE_REGS + MMA + MMA_WAIT, "poison_read"),
    # Copies carry what was never written.
    Litmus("unwritten_bytes_copied_and_read", "warp", (elected(load("%d2")) + wait() + LDS,),
           "poison_read", "asynchronous write", full=True, barriers=True),
    Litmus("unwritten_bytes_copied_only", "warp", (elected(load("%d2")) + wait(),), "clean",
           full=True, barriers=True),
    Litmus("unwritten_bytes_sent_to_the_host", "cta", (SMEM + store() + WAIT.format(0),),
           "poison_read", "data[0]"),
    Litmus("unwritten_bytes_moved_inside_the_pe", "cta",
           (SMEM + store("%d2") + WAIT.format(0),), "clean"),
]  # fmt: skip
