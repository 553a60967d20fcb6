"""Bit-true number conversions and approximations of PTX, vectorised over numpy arrays.

Every function takes and returns arrays (any shape) or numpy scalars. Narrow formats are raw bits:
bf16 and f16 `uint16`, e4m3 and e5m2 `uint8`, tf32 `uint32`; f32 is `float32`.
Source: PTX ISA, sections "cvt" (rounding, `.relu`, `.satfinite`, NaN results), "Alternate
floating-point data formats" and the pages of the `.approx` instructions.

NaN results are canonical, as "cvt" says: bf16 and f16 0x7FFF, tf32 0x7FFFFFFF, e4m3 and e5m2 0x7F.
The approximations are computed in double precision and rounded once: at least as accurate as the
hardware's, so equal only within the error that the PTX ISA states for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

_SIGN32 = np.uint32(0x80000000)
_ABS32 = np.uint32(0x7FFFFFFF)
_INF32 = np.uint32(0x7F800000)


def _bits32(x: ArrayLike) -> U32:
    return np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)


def _round_high_bits(u: U32, drop: int, rounding: str) -> U32:
    """Clear the low `drop` bits of f32 bit patterns, rounding the magnitude into the rest."""
    keep = np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    unit = (1 << drop) - 1
    if rounding == "rz":
        return u & keep
    if rounding == "rn":  # ties to even
        bias: U32 = np.uint32(unit >> 1) + (u >> np.uint32(drop) & np.uint32(1))
    elif rounding == "rna":  # ties away from zero
        bias = np.full_like(u, (unit >> 1) + 1)
    elif rounding in ("rm", "rp"):  # towards -inf / +inf: the magnitude grows on one side only
        grows = (u & _SIGN32) != 0 if rounding == "rm" else (u & _SIGN32) == 0
        bias = np.where(grows, np.uint32(unit), np.uint32(0))
    else:
        raise ValueError(f"rounding={rounding!r}: allowed are rn, rz, rna, rm, rp")
    finite = (u & _ABS32) < _INF32  # never carry out of an infinity
    return np.where(finite, u + bias, u) & keep


def _narrow_f32(
    x: ArrayLike, drop: int, rounding: str, relu: bool, satfinite: bool, nan: int
) -> U32:
    """f32 with fewer mantissa bits, as f32 bit patterns whose low `drop` bits are zero."""
    u = _bits32(x)
    out = _round_high_bits(u, drop, rounding)
    if satfinite:
        biggest = np.uint32((0x7F7FFFFF >> drop) << drop)
        out = np.where((out & _ABS32) > biggest, (out & _SIGN32) | biggest, out)
    if relu:
        out = np.where((u & _SIGN32) != 0, np.uint32(0), out)
    is_nan = (u & _ABS32) > _INF32
    if is_nan.any():
        out = np.where(is_nan, np.uint32(nan), out)
    return out


# ---- bf16, f16, tf32 ----------------------------------------------------------------------------


def bf16_from_f32(
    x: ArrayLike, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> U16:
    """`cvt.{rn,rz,rm,rp}{.relu}{.satfinite}.bf16.f32`: float32 → uint16 bits."""
    wide = _narrow_f32(x, 16, rounding, relu, satfinite, 0x7FFF0000)
    return (wide >> np.uint32(16)).astype(np.uint16)


def f32_from_bf16(bits: ArrayLike) -> F32:
    """bf16 bits (uint16) → float32, exact."""
    wide = np.asarray(bits, np.uint16).astype(np.uint32)
    return np.left_shift(wide, np.uint32(16)).view(np.float32)


def bf16x2_from_f32(
    hi: ArrayLike, lo: ArrayLike, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> U32:
    """`cvt.rn.bf16x2.f32 d, a, b`: a = `hi` into the upper half, b = `lo` into the lower half."""
    top = _narrow_f32(hi, 16, rounding, relu, satfinite, 0x7FFF0000)
    return top | _narrow_f32(lo, 16, rounding, relu, satfinite, 0x7FFF0000) >> np.uint32(16)


def f16_from_f32(
    x: ArrayLike, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> U16:
    """`cvt.{rn,rz,rm,rp}{.relu}{.satfinite}.f16.f32`: float32 → uint16 bits."""
    x = np.asarray(x, np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = x.astype(np.float16)
    bits = near.view(np.uint16)
    if rounding != "rn":
        back = near.astype(np.float32)
        grew, shrank = np.abs(back) > np.abs(x), np.abs(back) < np.abs(x)
        if rounding == "rz":
            step = -grew.astype(np.int32)
        elif rounding in ("rm", "rp"):
            outward = np.signbit(x) if rounding == "rm" else ~np.signbit(x)
            step = np.where(outward, shrank.astype(np.int32), -grew.astype(np.int32))
        else:
            raise ValueError(f"rounding={rounding!r}: allowed are rn, rz, rm, rp")
        # Neighbouring magnitudes have neighbouring bit patterns, infinity included.
        bits = (bits.astype(np.int32) + step).astype(np.uint16)
    if satfinite:
        over = (bits & np.uint16(0x7FFF)) >= 0x7C00
        bits = np.where(over, (bits & np.uint16(0x8000)) | np.uint16(0x7BFF), bits)
    if relu:
        bits = np.where(np.signbit(x), np.uint16(0), bits)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits)


def f32_from_f16(bits: ArrayLike) -> F32:
    """f16 bits (uint16) → float32, exact."""
    return np.ascontiguousarray(bits, np.uint16).view(np.float16).astype(np.float32)


def f16x2_from_f32(
    hi: ArrayLike, lo: ArrayLike, rounding: str = "rn", relu: bool = False, satfinite: bool = False
) -> U32:
    """`cvt.rn.f16x2.f32 d, a, b`: a = `hi` into the upper half, b = `lo` into the lower half."""
    top = f16_from_f32(hi, rounding, relu, satfinite).astype(np.uint32)
    return top << np.uint32(16) | f16_from_f32(lo, rounding, relu, satfinite).astype(np.uint32)


def tf32_from_f32(
    x: ArrayLike, rounding: str = "rna", relu: bool = False, satfinite: bool = False
) -> U32:
    """`cvt.{rna,rn,rz}{.relu}{.satfinite}.tf32.f32`: float32 → uint32 bits, low 13 bits zero."""
    return _narrow_f32(x, 13, rounding, relu, satfinite, 0x7FFFFFFF)


def f32_from_tf32(bits: ArrayLike) -> F32:
    """What a tensor core reads from a `.tf32` operand: the low 13 bits are ignored."""
    return (np.ascontiguousarray(bits, np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


# ---- e4m3, e5m2 ---------------------------------------------------------------------------------


def _fp8_values(exponent_bits: int) -> F32:
    """float32 value of each of the 256 codes."""
    mantissa_bits = 7 - exponent_bits
    bias = (1 << (exponent_bits - 1)) - 1
    code = np.arange(256)
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    implicit = np.where(exponent > 0, 1 << mantissa_bits, 0)
    power = np.maximum(exponent, 1) - bias - mantissa_bits
    value = np.where(code < 128, 1.0, -1.0) * np.ldexp((implicit + mantissa).astype(float), power)
    if exponent_bits == 4:  # e4m3 has no infinity, and only one NaN pattern per sign
        value[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        value[top & (mantissa == 0)] = np.copysign(np.inf, value[top & (mantissa == 0)])
        value[top & (mantissa != 0)] = np.nan
    return value.astype(np.float32)


_E4M3 = _fp8_values(4)
_E5M2 = _fp8_values(5)


def _fp8_from_f32(x: ArrayLike, exponent_bits: int, largest_code: int, relu: bool) -> U8:
    x = np.asarray(x, np.float32)
    values = (_E4M3 if exponent_bits == 4 else _E5M2)[: largest_code + 1]
    mantissa_bits = 7 - exponent_bits
    least = 2 - (1 << (exponent_bits - 1))  # exponent of the smallest normal
    wide = np.where(np.isfinite(x), np.abs(x), np.float32(values[-1])).astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, least)
    quantum = np.ldexp(1.0, exponent - mantissa_bits)
    rounded = np.minimum(np.rint(wide / quantum) * quantum, float(values[-1]))
    code = np.searchsorted(values, rounded.astype(np.float32)).astype(np.uint8)
    negative = np.signbit(x)
    code = np.where(negative, np.uint8(0) if relu else code | np.uint8(0x80), code)
    return np.where(np.isnan(x), np.uint8(0x7F), code).astype(np.uint8)


def e4m3_from_f32(x: ArrayLike, relu: bool = False) -> U8:
    """`cvt.rn.satfinite{.relu}.e4m3x2.f32`, one half: float32 → uint8 bits, at most ±448."""
    return _fp8_from_f32(x, 4, 0x7E, relu)


def e5m2_from_f32(x: ArrayLike, relu: bool = False) -> U8:
    """`cvt.rn.satfinite{.relu}.e5m2x2.f32`, one half: float32 → uint8 bits, at most ±57344."""
    return _fp8_from_f32(x, 5, 0x7B, relu)


def f32_from_e4m3(bits: ArrayLike) -> F32:
    """e4m3 bits (uint8) → float32, exact."""
    return _E4M3[np.asarray(bits, np.uint8)]


def f32_from_e5m2(bits: ArrayLike) -> F32:
    """e5m2 bits (uint8) → float32, exact."""
    return _E5M2[np.asarray(bits, np.uint8)]


def fp8x2_from_f32(hi: ArrayLike, lo: ArrayLike, kind: str, relu: bool = False) -> U16:
    """`cvt.rn.satfinite{.relu}.{e4m3x2,e5m2x2}.f32 d, a, b`; a = `hi` into the upper byte."""
    narrow = e4m3_from_f32 if kind == "e4m3" else e5m2_from_f32
    return narrow(hi, relu).astype(np.uint16) << np.uint16(8) | narrow(lo, relu).astype(np.uint16)


def fp8x2_from_f16x2(bits: ArrayLike, kind: str, relu: bool = False) -> U16:
    """`cvt.rn.satfinite{.relu}.{e4m3x2,e5m2x2}.f16x2`: uint32 → uint16."""
    u = np.asarray(bits, np.uint32)
    hi = f32_from_f16((u >> np.uint32(16)).astype(np.uint16))
    return fp8x2_from_f32(hi, f32_from_f16(u.astype(np.uint16)), kind, relu)


def f16x2_from_fp8x2(bits: ArrayLike, kind: str, relu: bool = False) -> U32:
    """`cvt.rn{.relu}.f16x2.{e4m3x2,e5m2x2}`: uint16 → uint32, exact."""
    u = np.asarray(bits, np.uint16)
    widen = f32_from_e4m3 if kind == "e4m3" else f32_from_e5m2
    hi = widen((u >> np.uint16(8)).astype(np.uint8))
    return f16x2_from_f32(hi, widen(u.astype(np.uint8)), relu=relu)


# ---- integers -----------------------------------------------------------------------------------

_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def int_from_float(x: ArrayLike, rounding: str, bits: int, signed: bool) -> NDArray[np.generic]:
    """`cvt.{rni,rzi,rmi,rpi}.{s,u}N.{f16,bf16,f32,f64}`: clamped to the range of the result.

    `x` is float32 or float64; the result has dtype int{bits} or uint{bits}. NaN gives 0, or
    1 << (bits-1) where the source is f64 or the result has 64 bits.
    """
    x = np.asarray(x)
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    info = np.iinfo(dtype)
    whole = _ROUND[rounding](x.astype(np.float64))
    over, under = whole >= float(info.max), whole <= float(info.min)
    with np.errstate(invalid="ignore"):
        out = np.where(over | under | np.isnan(whole), 0.0, whole).astype(dtype)
    out = np.where(over, dtype.type(info.max), np.where(under, dtype.type(info.min), out))
    top = dtype.type(info.min) if signed else dtype.type(1 << (bits - 1))
    nan = top if bits == 64 or x.dtype == np.float64 else dtype.type(0)
    return np.where(np.isnan(whole), nan, out)


def saturate_int(x: ArrayLike, bits: int, signed: bool) -> NDArray[np.generic]:
    """`cvt.sat` between integers: clamp `x` to the range of the narrower result."""
    dtype = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    info = np.iinfo(dtype)
    x = np.asarray(x)
    low, high = max(info.min, np.iinfo(x.dtype).min), min(info.max, np.iinfo(x.dtype).max)
    return np.clip(x, low, high).astype(dtype)


# ---- approximations -----------------------------------------------------------------------------


def flush_f32(x: ArrayLike) -> F32:
    """`.ftz`: subnormal f32 become zeros of the same sign."""
    u = _bits32(x)
    tiny = (u & np.uint32(0x7F800000)) == 0
    return np.where(tiny, u & _SIGN32, u).view(np.float32)


def _approx(fn: np.ufunc, x: ArrayLike, ftz: bool) -> F32:
    source = flush_f32(x) if ftz else np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        out = fn(source.astype(np.float64)).astype(np.float32)
    out = np.where(np.isnan(out), np.float32(np.nan), out)
    return flush_f32(out) if ftz else out


def ex2_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`ex2.approx{.ftz}.f32`: 2**x."""
    return _approx(np.exp2, x, ftz)


def lg2_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`lg2.approx{.ftz}.f32`."""
    return _approx(np.log2, x, ftz)


def rcp_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`rcp.approx{.ftz}.f32`, also the exact `rcp.rn.f32` with ftz=False."""
    return _approx(np.reciprocal, x, ftz)


def sqrt_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`sqrt.approx{.ftz}.f32`, also the exact `sqrt.rn.f32` with ftz=False."""
    return _approx(np.sqrt, x, ftz)


def rsqrt_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`rsqrt.approx{.ftz}.f32`: 1/sqrt(x); -0 gives -infinity."""
    source = flush_f32(x) if ftz else np.asarray(x, np.float32)
    with np.errstate(all="ignore"):
        out = (1.0 / np.sqrt(source.astype(np.float64))).astype(np.float32)
    return np.where(np.isnan(out), np.float32(np.nan), out)


def tanh_approx(x: ArrayLike) -> F32:
    """`tanh.approx.f32`; subnormals are supported, so there is no flush."""
    return _approx(np.tanh, x, False)


def sin_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`sin.approx{.ftz}.f32`, x in radians."""
    return _approx(np.sin, x, ftz)


def cos_approx(x: ArrayLike, ftz: bool = True) -> F32:
    """`cos.approx{.ftz}.f32`, x in radians."""
    return _approx(np.cos, x, ftz)
