"""Memory accesses that the kernels name themselves, by their PTX ISA names; copies and barriers are
in ``ptx_copies``, arithmetic in ``ptx_values``.

Addresses are plain integers: ``Int64`` for global memory (own or a peer's), ``Int32`` for the
CTA's shared memory.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.arch import inline_ptx


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
