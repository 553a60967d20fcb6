"""Litmus programs: messages through flags in global memory, with scopes, fences and atomics."""

from litmus_harness import Litmus, elected, until

WRITE = "mov.u32 %r3, 1; st.global.u32 [%d0], %r3;\n"
READ = "ld.global.u32 %r4, [%d0];\n"
ONE = "mov.u32 %r3, 1;\n"


def st(sem: str, value: int = 1, address: str = "%d1") -> str:
    """A store of a number to a flag."""
    return f"mov.u32 %r5, {value}; st{sem}.global.u32 [{address}], %r5;\n"


def message(name: str, where: str, release: str, acquire: str, verdict: str, says: str = "",
            before: str = "", after: str = "") -> Litmus:  # fmt: skip
    """Message passing: data, [before], flag store → flag load, [after], data."""
    reader = until(f"ld{acquire}.global.u32") + after + READ
    return Litmus(name, where, (WRITE + before + st(release), reader), verdict, says)


RED = "mov.u32 %r5, 1; red{sem}.global.add.u32 [%d1], %r5;\n"
ATOM = "mov.u32 %r5, 1; atom{sem}.global.add.u32 %r6, [%d1], %r5;\n"
FENCE = "fence.acq_rel.{};\n"


def red(sem: str) -> str:
    """A reduction on the flag."""
    return RED.format(sem=sem)


def atom(sem: str) -> str:
    """An atomic addition on the flag."""
    return ATOM.format(sem=sem)


TABLE = [
    # Message passing with each piece missing.
    message("mp", "cta", ".release.gpu", ".acquire.gpu", "clean"),
    message("mp_no_release", "cta", ".relaxed.gpu", ".acquire.gpu", "race", "gpu scope"),
    message("mp_no_acquire", "cta", ".release.gpu", ".relaxed.gpu", "race", "gpu scope"),
    message("mp_weak_flag", "cta", "", ".acquire.gpu", "race", "flag[0]"),
    message("mp_weak_poll", "cta", ".release.gpu", "", "race", "flag[0]"),
    message("mp_volatile", "cta", ".volatile", ".volatile", "race", "data[0]"),
    # Scopes.
    message("mp_sys_to_peer", "pe", ".release.sys", ".acquire.sys", "clean"),
    message("mp_gpu_to_peer", "pe", ".release.gpu", ".acquire.gpu", "race", "PE 0"),
    message("mp_release_gpu_acquire_sys_to_peer", "pe", ".release.gpu", ".acquire.sys", "race",
            "release with .gpu scope"),
    message("mp_release_sys_acquire_gpu_to_peer", "pe", ".release.sys", ".acquire.gpu", "race",
            "acquire with .gpu scope"),
    message("mp_cta_to_other_cta", "cta", ".release.cta", ".acquire.cta", "race",
            "release with .cta scope"),
    message("mp_cta_in_cta", "warp", ".release.cta", ".acquire.cta", "clean"),
    message("mp_cluster_scope_in_cluster", "cluster", ".release.cluster", ".acquire.cluster",
            "clean"),
    message("mp_cluster_scope_outside", "cta", ".release.cluster", ".acquire.cluster", "race"),
    # Fence-based patterns.
    message("mp_fences", "cta", ".relaxed.gpu", ".relaxed.gpu", "clean",
            before=FENCE.format("gpu"), after=FENCE.format("gpu")),
    message("mp_fence_and_acquire", "cta", ".relaxed.gpu", ".acquire.gpu", "clean",
            before=FENCE.format("gpu")),
    message("mp_release_and_fence", "cta", ".release.gpu", ".relaxed.gpu", "clean",
            after=FENCE.format("gpu")),
    message("mp_fence_writer_only", "cta", ".relaxed.gpu", ".relaxed.gpu", "race",
            before=FENCE.format("gpu")),
    message("mp_fence_reader_only", "cta", ".relaxed.gpu", ".relaxed.gpu", "race",
            after=FENCE.format("gpu")),
    message("mp_fence_cta_scope", "cta", ".relaxed.gpu", ".relaxed.gpu", "race",
            before=FENCE.format("cta"), after=FENCE.format("gpu")),
    message("mp_fence_sys_to_peer", "pe", ".relaxed.sys", ".relaxed.sys", "clean",
            before=FENCE.format("sys"), after=FENCE.format("sys")),
    message("mp_fence_gpu_to_peer", "pe", ".relaxed.sys", ".relaxed.sys", "race",
            before=FENCE.format("gpu"), after=FENCE.format("sys")),
    message("mp_membar_volatile", "cta", ".volatile", ".volatile", "clean",
            before="membar.gl;\n", after="membar.gl;\n"),
    Litmus("mp_fence_too_late", "cta",
           (WRITE + st(".relaxed.gpu") + FENCE.format("gpu"),
            until("ld.acquire.gpu.global.u32") + READ), "race"),
    Litmus("mp_data_after_release", "cta",
           (st(".release.gpu") + WRITE, until("ld.acquire.gpu.global.u32") + READ), "race"),
    Litmus("mp_read_before_acquire", "cta",
           (WRITE + st(".release.gpu"), READ + until("ld.acquire.gpu.global.u32")), "race"),
    Litmus("mp_other_flag", "cta",
           (WRITE + st(".release.gpu", address="%d1+16") + st(".relaxed.gpu"),
            until("ld.acquire.gpu.global.u32") + READ), "race"),
    # Atomics.
    Litmus("red_release", "cta", (WRITE + red(".release.gpu"),
                                  until("ld.acquire.gpu.global.u32") + READ), "clean"),
    Litmus("red_relaxed", "cta", (WRITE + red(".relaxed.gpu"),
                                  until("ld.acquire.gpu.global.u32") + READ), "race"),
    Litmus("red_default_is_relaxed", "cta", (WRITE + red(""),
                                             until("ld.acquire.gpu.global.u32") + READ), "race"),
    Litmus("two_releases_on_one_counter", "cta",
           (WRITE + red(".release.gpu"),
            "mov.u32 %r3, 1; st.global.u32 [%d0+4], %r3;\n" + red(".release.gpu"),
            until("ld.acquire.gpu.global.u32", 2) + READ + "ld.global.u32 %r4, [%d0+4];\n"),
           "clean"),
    Litmus("acq_rel_chain_is_cumulative", "cta",
           (WRITE + st(".release.gpu"),
            until("ld.relaxed.gpu.global.u32") + atom(".acq_rel.gpu"),
            until("ld.acquire.gpu.global.u32", 2) + READ), "clean"),
    Litmus("relaxed_atomic_keeps_the_release_sequence", "cta",
           (WRITE + st(".release.gpu"),
            until("ld.relaxed.gpu.global.u32") + atom(".relaxed.gpu"),
            until("ld.acquire.gpu.global.u32", 2) + READ), "clean"),
    Litmus("relaxed_atomic_releases_nothing_of_its_own", "cta",
           (st(".release.gpu"),
            until("ld.relaxed.gpu.global.u32") + WRITE + atom(".relaxed.gpu"),
            until("ld.acquire.gpu.global.u32", 2) + READ), "race"),
    Litmus("relaxed_store_breaks_the_release_sequence", "cta",
           (WRITE + st(".release.gpu"),
            until("ld.relaxed.gpu.global.u32") + st(".relaxed.gpu", 2),
            until("ld.relaxed.gpu.global.u32", 2) + "ld.acquire.gpu.global.u32 %r2, [%d1];\n"
            + READ), "race"),
    Litmus("acquire_atom_reads_the_flag", "cta",
           (WRITE + st(".release.gpu"),
            until("ld.relaxed.gpu.global.u32") + atom(".acquire.gpu") + READ), "clean"),
    Litmus("red_acquires_nothing", "cta",
           (WRITE + st(".release.gpu"),
            until("ld.relaxed.gpu.global.u32") + red(".relaxed.gpu") + READ), "race"),
    Litmus("weak_store_against_atomic", "cta", (st(""), red(".relaxed.gpu")), "race", "flag[0]"),
    Litmus("weak_load_against_atomic", "cta",
           ("ld.global.u32 %r4, [%d1];\n", red(".relaxed.gpu")), "race", "flag[0]"),
    Litmus("weak_look_then_strong_polls", "cta",
           ("ld.global.u32 %r4, [%d1];\n" + until("ld.acquire.gpu.global.u32"),
            red(".release.gpu")), "race", "weak read", full=True),
    Litmus("strong_look_then_strong_polls", "cta",
           ("ld.relaxed.gpu.global.u32 %r4, [%d1];\n" + until("ld.acquire.gpu.global.u32"),
            red(".release.gpu")), "clean", full=True),
    Litmus("atomics_do_not_race", "cta", (red(".relaxed.gpu"), red(".relaxed.gpu")), "clean"),
    Litmus("gpu_atomics_of_two_pes", "pe", (red(".relaxed.gpu"), red(".relaxed.gpu")), "race"),
    Litmus("gpu_and_sys_atomics_of_two_pes", "pe", (red(".relaxed.gpu"), red(".relaxed.sys")),
           "race"),
    Litmus("sys_atomics_of_two_pes", "pe", (red(".relaxed.sys"), red(".relaxed.sys")), "clean"),
    # Causality over three.
    Litmus("three_pes_sys", "pe",
           (WRITE + st(".release.sys"),
            until("ld.acquire.sys.global.u32") + st(".release.sys", address="%d1+4"),
            until("ld.acquire.sys.global.u32", address="%d1+4") + READ), "clean"),
    Litmus("three_pes_gpu_in_the_middle", "pe",
           (WRITE + st(".release.sys"),
            until("ld.acquire.sys.global.u32") + st(".release.gpu", address="%d1+4"),
            until("ld.acquire.sys.global.u32", address="%d1+4") + READ), "race"),
    Litmus("three_pes_no_acquire_in_the_middle", "pe",
           (WRITE + st(".release.sys"),
            until("ld.relaxed.sys.global.u32") + st(".release.sys", address="%d1+4"),
            until("ld.acquire.sys.global.u32", address="%d1+4") + READ), "race"),
    Litmus("barrier_then_release_is_cumulative", "warp",
           (elected(WRITE) + "bar.sync 1, 64;\n",
            "bar.sync 1, 64;\n" + elected(st(".release.cta")),
            elected(until("ld.acquire.cta.global.u32") + READ)), "clean", full=True),
    Litmus("release_without_the_barrier", "warp",
           (elected(WRITE), elected(st(".release.cta")),
            elected(until("ld.acquire.cta.global.u32") + READ)), "race", full=True),
    # Store buffering and independent reads: only the strong accesses themselves.
    Litmus("store_buffering_weak", "cta",
           (WRITE + "ld.global.u32 %r4, [%d0+4];\n",
            ONE + "st.global.u32 [%d0+4], %r3;\n" + READ), "race"),
    Litmus("store_buffering_relaxed", "cta",
           (st(".relaxed.gpu") + "ld.relaxed.gpu.global.u32 %r4, [%d1+4];\n",
            st(".relaxed.gpu", address="%d1+4") + "ld.relaxed.gpu.global.u32 %r4, [%d1];\n"),
           "clean"),
    Litmus("independent_reads", "cta",
           (st(".relaxed.gpu"), st(".relaxed.gpu", address="%d1+4"),
            "ld.acquire.gpu.global.u32 %r4, [%d1]; ld.acquire.gpu.global.u32 %r5, [%d1+4];\n",
            "ld.acquire.gpu.global.u32 %r4, [%d1+4]; ld.acquire.gpu.global.u32 %r5, [%d1];\n"),
           "clean"),
    Litmus("two_reads_do_not_race", "cta", (READ, READ), "clean"),
    Litmus("neighbouring_bytes_do_not_race", "cta",
           ("mov.u16 %h1, 1; st.global.u8 [%d0], %h1;\n",
            "mov.u16 %h1, 1; st.global.u8 [%d0+1], %h1;\n"), "clean"),
    Litmus("same_byte_races", "cta",
           ("mov.u16 %h1, 1; st.global.u8 [%d0+1], %h1;\n", "ld.global.u32 %r4, [%d0];\n"), "race"),
    # Never-written bytes.
    Litmus("read_of_unwritten_memory", "cta", ("ld.global.u32 %r4, [%d2];\n",), "poison_read",
           "unwritten[0]"),
    Litmus("read_after_own_write", "cta",
           ("mov.u32 %r3, 1; st.global.u32 [%d2], %r3; ld.global.u32 %r4, [%d2];\n",), "clean"),
    Litmus("read_past_own_write", "cta",
           ("mov.u32 %r3, 1; st.global.u32 [%d2], %r3; ld.global.v2.u32 {%r4, %r5}, [%d2];\n",),
           "poison_read", "unwritten[4]"),
    Litmus("atomic_on_unwritten_memory", "cta",
           ("mov.u32 %r5, 1; red.relaxed.gpu.global.add.u32 [%d2], %r5;\n",), "poison_read"),
]  # fmt: skip
