"""Arithmetic, bit casts and matrix fragments, by their PTX ISA names."""

import math

from cutlass import Float32, Int32
from cutlass.cute.arch import inline_ptx

LOG2_E = math.log2(math.e)


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
