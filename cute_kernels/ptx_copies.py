"""Proxy fences, bulk and tensor copies, and mbarriers, by their PTX ISA names.

Bulk copies act once per executing *thread*: call them under ``elect_one`` or in lanes that each own
a copy. Addresses as in ``ptx``.
"""

from cutlass import Int32, Int64, cute
from cutlass.cute.arch import inline_ptx

from megamoe.cute_kernels.ptx import shared_ptr


def fence_proxy_async_global() -> None:
    """Orders generic and asynchronous accesses to global memory of this thread."""
    inline_ptx("fence.proxy.async.global;")


def fence_proxy_async_shared() -> None:
    """Orders generic and asynchronous accesses to shared memory of this thread."""
    inline_ptx("fence.proxy.async.shared::cta;")


def fence_tensormap_acquire(map_address: Int64) -> None:
    """Makes a tensor map that the host wrote to global memory usable by this thread's copies."""
    inline_ptx(
        "fence.proxy.tensormap::generic.acquire.sys [{$r0}], 128;", read_only_args=[map_address]
    )


def prefetch_tensormap(map_address: Int64) -> None:
    """Brings a tensor map into the descriptor cache."""
    inline_ptx("prefetch.tensormap [{$r0}];", read_only_args=[map_address])


def tma_load_4d(smem: Int32, map_address: Int64, c0, c1, c2, c3, mbarrier: Int32) -> None:
    """Box at ``(c0 innermost … c3)`` to shared memory; its bytes complete on ``mbarrier``."""
    inline_ptx(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r6}];",
        read_only_args=[smem, map_address, c0, c1, c2, c3, mbarrier],
    )


def tma_load_5d(smem: Int32, map_address: Int64, c0, c1, c2, c3, c4, mbarrier: Int32) -> None:
    """Box at ``(c0 innermost … c4)`` to shared memory; its bytes complete on ``mbarrier``."""
    inline_ptx(
        "cp.async.bulk.tensor.5d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[smem, map_address, c0, c1, c2, c3, c4, mbarrier],
    )


def tma_load_2d(smem: Int32, map_address: Int64, c0, c1, mbarrier: Int32) -> None:
    """Box at ``(c0 innermost, c1)`` to shared memory; its bytes complete on ``mbarrier``."""
    inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}];",
        read_only_args=[smem, map_address, c0, c1, mbarrier],
    )


def tma_load_4d_to_pair(smem: Int32, map_address: Int64, c0, c1, c2, c3, mbarrier: Int32) -> None:
    """As ``tma_load_4d``, to the same place in both CTAs of a cluster, on the barrier of each."""
    inline_ptx(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r6}], 3;",
        read_only_args=[smem, map_address, c0, c1, c2, c3, mbarrier],
    )


def tma_load_2d_to_pair(smem: Int32, map_address: Int64, c0, c1, mbarrier: Int32) -> None:
    """As ``tma_load_2d``, to the same place in both CTAs of a cluster, on the barrier of each."""
    inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".multicast::cluster [{$r0}], [{$r1}, {{$r2}, {$r3}}], [{$r4}], 3;",
        read_only_args=[smem, map_address, c0, c1, mbarrier],
    )


def tma_prefetch_4d(map_address: Int64, c0, c1, c2, c3) -> None:
    """Bring the box at ``(c0 innermost … c3)`` to L2."""
    inline_ptx(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [{$r0}, {{$r1}, {$r2}, {$r3}, {$r4}}];",
        read_only_args=[map_address, c0, c1, c2, c3],
    )


def tma_prefetch_5d(map_address: Int64, c0, c1, c2, c3, c4) -> None:
    """Bring the box at ``(c0 innermost … c4)`` to L2."""
    inline_ptx(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile"
        " [{$r0}, {{$r1}, {$r2}, {$r3}, {$r4}, {$r5}}];",
        read_only_args=[map_address, c0, c1, c2, c3, c4],
    )


def tma_store_2d(map_address: Int64, c0, c1, smem: Int32) -> None:
    """Box at ``(c0 innermost, c1)`` from shared memory, in this thread's bulk group."""
    inline_ptx(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
        " [{$r0}, {{$r1}, {$r2}}], [{$r3}];",
        read_only_args=[map_address, c0, c1, smem],
    )


def bulk_load(smem: Int32, address: Int64, nbytes: Int32, mbarrier: Int32) -> None:
    """``nbytes`` (multiple of 16) from global, a peer's too; they complete on ``mbarrier``."""
    inline_ptx(
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[smem, address, nbytes, mbarrier],
    )


def bulk_store(address: Int64, smem: Int32, nbytes: Int32) -> None:
    """``nbytes`` (multiple of 16) from shared to global, in this thread's bulk group."""
    inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[address, smem, nbytes],
    )


def bulk_commit() -> None:
    """Closes this thread's bulk group."""
    inline_ptx("cp.async.bulk.commit_group;")


def bulk_wait(pending: int) -> None:
    """Waits until at most ``pending`` of this thread's groups are incomplete: writes visible."""
    inline_ptx(f"cp.async.bulk.wait_group {pending};")


def bulk_wait_read(pending: int) -> None:
    """As ``bulk_wait``, but only the reads of shared memory: frees it, announces nothing."""
    inline_ptx(f"cp.async.bulk.wait_group.read {pending};")


# ---- mbarriers --------------------------------------------------------------------------------


def mbarrier_init(mbarrier: Int32, count: int) -> None:
    """One thread; follow with ``fence_mbarrier_init`` and a CTA barrier."""
    inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[mbarrier, count])


def fence_mbarrier_init() -> None:
    """Makes initialised mbarriers visible to the asynchronous proxy."""
    inline_ptx("fence.mbarrier_init.release.cluster;")


def mbarrier_arrive(mbarrier: Int32) -> None:
    """One arrival, release at CTA scope."""
    inline_ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];", read_only_args=[mbarrier])


def mbarrier_arrive_expect_tx(mbarrier: Int32, nbytes) -> None:
    """One arrival that also announces ``nbytes`` of asynchronous writes."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[mbarrier, nbytes],
    )


def mbarrier_arrive_at(mbarrier: Int32, rank: Int32) -> None:
    """One arrival at CTA ``rank``'s barrier of the same place, release at cluster scope."""
    inline_ptx(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1};"
        " mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote]; }",
        read_only_args=[mbarrier, rank],
    )


def store_at(address: Int32, rank: Int32, value: Int32) -> None:
    """Store a word at the same place of CTA ``rank``'s shared memory."""
    inline_ptx(
        "{ .reg .b32 remote; mapa.shared::cluster.u32 remote, {$r0}, {$r1};"
        " st.shared::cluster.b32 [remote], {$r2}; }",
        read_only_args=[address, rank, value],
    )


def mbarrier_try_wait_cluster(mbarrier: Int32, parity: Int32) -> Int32:
    """1 once the phase of ``parity`` is complete, acquire at cluster scope; may suspend."""
    return inline_ptx(
        "{ .reg .pred p;"
        " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [{$r0}], {$r1};"
        " selp.b32 {$w0}, 1, 0, p; }",
        write_only_types=[Int32],
        read_only_args=[mbarrier, parity],
    )


def cluster_sync() -> None:
    """Barrier of all threads of a cluster: what each did before is visible to all after."""
    inline_ptx("barrier.cluster.arrive.release.aligned;")
    inline_ptx("barrier.cluster.wait.acquire.aligned;")


def mbarrier_wait(mbarrier: Int32, parity: Int32) -> None:
    """Waits for the phase of ``parity`` to complete, acquire at CTA scope."""
    cute.arch.mbarrier_wait(shared_ptr(Int64, mbarrier, 8), parity)
