"""Every PTX instruction the kernels name themselves, by its PTX ISA name.

Addresses are plain integers: ``Int64`` for global memory (own or a peer's), ``Int32`` for the
CTA's shared memory. Bulk copies (``cp_async_bulk_*``) act once per executing *thread*: call them
under ``elect_one`` or in lanes that each own a copy.
"""

import math

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.arch import inline_ptx

LOG2_E = math.log2(math.e)


def global_ptr(dtype, address: Int64, align: int):
    """A typed global pointer to ``address``, ``align`` bytes aligned."""
    return cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=align)


def shared_ptr(dtype, address: Int32, align: int):
    """A typed shared pointer to ``address``, ``align`` bytes aligned."""
    return cute.make_ptr(dtype, address, cutlass.AddressSpace.smem, assumed_align=align)


# ---- scalar and vector accesses -------------------------------------------------------------


def ld_i32(address: Int64) -> Int32:
    """Weak 4-byte load."""
    return cute.arch.load(global_ptr(Int32, address, 4), Int32)


def ld_u16(address: Int64) -> Int32:
    """Weak 2-byte load, zero-extended."""
    return inline_ptx(
        "{ .reg .b16 h; ld.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def ld_i64(address: Int64) -> Int64:
    """Weak 8-byte load."""
    return cute.arch.load(global_ptr(Int64, address, 8), Int64)


def st_i32(address: Int64, value: Int32) -> None:
    """Weak 4-byte store."""
    cute.arch.store(global_ptr(Int32, address, 4), value)


def ld_i32x4(address: Int64) -> tuple[Int32, Int32, Int32, Int32]:
    """Weak 16-byte load, 16-byte aligned."""
    return inline_ptx(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def st_i32x4(address: Int64, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """Weak 16-byte store, 16-byte aligned; the address may be a peer's."""
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


def ld_f32x4(address: Int64) -> tuple[Float32, Float32, Float32, Float32]:
    """Weak 16-byte load of floats, 16-byte aligned."""
    return inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def st_f32x4(address: Int64, a: Float32, b: Float32, c: Float32, d: Float32) -> None:
    """Weak 16-byte store of floats, 16-byte aligned."""
    inline_ptx(
        "st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, a, b, c, d],
    )


def copy_b16(target: Int64, source: Int64) -> None:
    """Copy two bytes, 2-byte aligned, from global to global."""
    inline_ptx(
        "{ .reg .b16 h; ld.global.b16 h, [{$r1}]; st.global.b16 [{$r0}], h; }",
        read_only_args=[target, source],
    )


def ld_i32x4_if(condition: Int32, address: Int64) -> tuple[Int32, Int32, Int32, Int32]:
    """Weak 16-byte load where ``condition`` ≠ 0, zeros elsewhere: a select, so that what lies at
    an unused address can never spread, and no branch, so that several loads are in flight."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0;"
        " mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @p ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Int32] * 4,
        read_only_args=[condition, address],
    )


def st_i16(address: Int64, value: Int32) -> None:
    """Weak 2-byte store of the lower half of ``value``."""
    inline_ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.b16 [{$r0}], h; }",
        read_only_args=[address, value],
    )


def ld_f32x4_if(condition: Int32, address: Int64) -> tuple[Float32, Float32, Float32, Float32]:
    """As ``ld_i32x4_if``, four floats."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0;"
        " mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        " @p ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r1}]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[condition, address],
    )


def ld_i32x2_if(condition: Int32, address: Int64) -> tuple[Int32, Int32]:
    """As ``ld_i32x4_if``, 8 bytes, 8-byte aligned."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        " @p ld.global.v2.b32 {{$w0}, {$w1}}, [{$r1}]; }",
        write_only_types=[Int32] * 2,
        read_only_args=[condition, address],
    )


def ld_f32_if(condition: Int32, address: Int64) -> Float32:
    """As ``ld_i32x4_if``, one float."""
    return inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; mov.b32 {$w0}, 0;"
        " @p ld.global.b32 {$w0}, [{$r1}]; }",
        write_only_types=[Float32],
        read_only_args=[condition, address],
    )


def st_f32x4_if(condition: Int32, address: Int64, a, b, c, d) -> None:
    """Weak 16-byte store of four floats where ``condition`` ≠ 0, 16-byte aligned."""
    inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0;"
        " @p st.global.v4.b32 [{$r1}], {{$r2}, {$r3}, {$r4}, {$r5}}; }",
        read_only_args=[condition, address, a, b, c, d],
    )


def st_i32x2_if(condition: Int32, address: Int64, a: Int32, b: Int32) -> None:
    """Weak 8-byte store where ``condition`` ≠ 0, 8-byte aligned."""
    inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r0}, 0; @p st.global.v2.b32 [{$r1}], {{$r2}, {$r3}}; }",
        read_only_args=[condition, address, a, b],
    )


def lds_i32(address: Int32) -> Int32:
    """4-byte load from shared memory."""
    return cute.arch.load(shared_ptr(Int32, address, 4), Int32)


def lds_i64(address: Int32) -> Int64:
    """8-byte load from shared memory."""
    return cute.arch.load(shared_ptr(Int64, address, 8), Int64)


def lds_f32x2(address: Int32) -> tuple[Float32, Float32]:
    """Two consecutive floats from shared memory, 8-byte aligned."""
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32] * 2,
        read_only_args=[address],
    )


def lds_i32x4(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """16-byte load from shared memory."""
    return inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def sts_i32(address: Int32, value: Int32) -> None:
    """4-byte store to shared memory."""
    cute.arch.store(shared_ptr(Int32, address, 4), value)


def sts_i64(address: Int32, value: Int64) -> None:
    """8-byte store to shared memory."""
    cute.arch.store(shared_ptr(Int64, address, 8), value)


def sts_f32(address: Int32, value: Float32) -> None:
    """4-byte float store to shared memory."""
    cute.arch.store(shared_ptr(Float32, address, 4), value)


def sts_zero_x4(address: Int32) -> None:
    """16 bytes of zeros to shared memory, 16-byte aligned."""
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};",
        read_only_args=[address, Int32(0)],
    )


def lds_f32(address: Int32) -> Float32:
    """4-byte float load from shared memory."""
    return cute.arch.load(shared_ptr(Float32, address, 4), Float32)


def st_f32(address: Int64, value: Float32) -> None:
    """Weak 4-byte float store."""
    cute.arch.store(global_ptr(Float32, address, 4), value)


def ld_f32(address: Int64) -> Float32:
    """Weak 4-byte float load."""
    return cute.arch.load(global_ptr(Float32, address, 4), Float32)


def atoms_add_i32(address: Int32, value: Int32) -> Int32:
    """Relaxed CTA-scope atomic add in shared memory; returns the old value."""
    return cute.arch.atomic_add(shared_ptr(Int32, address, 4), value, sem="relaxed", scope="cta")


# ---- synchronising accesses -----------------------------------------------------------------


def ld_acquire(address: Int64, scope: str) -> Int32:
    """``ld.acquire`` at ``scope`` ("gpu" inside a PE, "sys" across PEs)."""
    return cute.arch.load(global_ptr(Int32, address, 4), Int32, sem="acquire", scope=scope)


def ld_relaxed(address: Int64, scope: str) -> Int32:
    """``ld.relaxed`` at ``scope``."""
    return cute.arch.load(global_ptr(Int32, address, 4), Int32, sem="relaxed", scope=scope)


def st_release(address: Int64, value: Int32, scope: str) -> None:
    """``st.release`` at ``scope``."""
    cute.arch.store(global_ptr(Int32, address, 4), value, sem="release", scope=scope)


def st_relaxed(address: Int64, value: Int32, scope: str) -> None:
    """``st.relaxed`` at ``scope``."""
    cute.arch.store(global_ptr(Int32, address, 4), value, sem="relaxed", scope=scope)


def red_release(address: Int64, value: Int32, scope: str) -> None:
    """``red.release.add`` at ``scope``: an increment that announces earlier writes."""
    cute.arch.red(
        global_ptr(Int32, address, 4), value, op="add", dtype="u32", sem="release", scope=scope
    )


def atom_acq_rel(address: Int64, value: Int32) -> Int32:
    """gpu-scope ``atom.acq_rel.add``; returns the old value."""
    return cute.arch.atomic_add(global_ptr(Int32, address, 4), value, sem="acq_rel", scope="gpu")


def atom_exch_relaxed(address: Int64, value: Int32) -> Int32:
    """gpu-scope relaxed exchange; returns the old value."""
    return cute.arch.atomic_exch(global_ptr(Int32, address, 4), value, sem="relaxed", scope="gpu")


def nanosleep(ns: Int32) -> None:
    """Suspend the thread for about ``ns`` nanoseconds."""
    inline_ptx("nanosleep.u32 {$r0};", read_only_args=[ns])


def globaltimer() -> Int64:
    """Nanoseconds of the device-wide clock."""
    return Int64(cute.arch.globaltimer())


# ---- proxies, bulk and tensor copies ----------------------------------------------------------


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


# ---- fragments --------------------------------------------------------------------------------


def pack_bf16x2(low: Float32, high: Float32) -> Int32:
    """Two floats rounded to nearest even, ``low`` in the lower half."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def stmatrix_x4_trans(smem: Int32, a: Int32, b: Int32, c: Int32, d: Int32) -> None:
    """Four 8×8 bf16 fragments, transposed, to the rows that lanes 8i … 8i+7 name for matrix i."""
    inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[smem, a, b, c, d],
    )


def ldmatrix_x4_trans(smem: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 8×8 bf16 fragments, transposed, from the rows that lanes 8i … 8i+7 name for matrix i:
    what ``stmatrix_x4_trans`` stores there."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[smem],
    )


def bf16_to_f32(bits: Int32, high: bool) -> Float32:
    """One half of a bf16 pair as fp32 (exact: bf16 is the upper half of an fp32)."""
    if high:
        shifted = bits & Int32(-65536)
    else:
        shifted = bits << 16
    return bits_to_f32(shifted)


def exp2_approx(x: Float32) -> Float32:
    """``2**x``, relative error below 2⁻²² (PTX ISA ex2.approx.ftz.f32)."""
    return inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def rcp_approx(x: Float32) -> Float32:
    """``1/x``, at most 1 ulp (PTX ISA rcp.approx.ftz.f32)."""
    return inline_ptx(
        "rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x]
    )


def max_nan(a: Float32, b: Float32) -> Float32:
    """Maximum that keeps NaN."""
    return inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def min_nan(a: Float32, b: Float32) -> Float32:
    """Minimum that keeps NaN."""
    return inline_ptx(
        "min.NaN.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def bits_to_f32(bits: Int32) -> Float32:
    """The float with these bits."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


def f32_to_bits(value: Float32) -> Int32:
    """The bits of a float."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def opaque_i32(value: Int32) -> Int32:
    """The value, of which the compiler knows nothing: keeps a loop of known length a loop."""
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])
