"""Floating-point operations on lanes: single roundings, bf16 as float32 values, classification."""

from __future__ import annotations

import numpy as np

from megamoe.runtime.vgpu import convert

_U1, _U16, _BELOW_HALF = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)


def scalar_f32(x):
    """Bits to a float32 number."""
    return np.uint32(x).view(np.float32)


def scalar_f64(x):
    """Bits to a float64 number."""
    return np.uint64(x).view(np.float64)


def scalar_f16(x):
    """Bits to a float16 number."""
    return np.uint16(x).view(np.float16)


def scalar_bf16(x):
    """bf16 bits to a float32 number."""
    return np.uint32(x << 16).view(np.float32)


def scalar_f16x2(x):
    """A packed pair, repeated for 32 lanes, as 64 float16."""
    return np.full(32, x, np.uint32).view(np.float16)


def scalar_bf16x2(x):
    """A packed pair, repeated for 32 lanes, as 64 float32."""
    return bf16_values(np.full(32, x, np.uint32))


def bf16_values(bits):
    """bf16 bits (uint16, or uint32 holding pairs) as float32 values."""
    return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x):
    """float32 values rounded to nearest even, as bf16 bits."""
    return convert.bf16_from_f32(x)


def fma32(a, b, c):
    """Fused multiply-add with one rounding.

    The product is exact in float64; the sum is rounded there, which can only differ from a single
    rounding when it lands exactly half-way between two float32 values.
    """
    p = np.asarray(a, np.float64) * b
    s = p + c
    raw = s.view(np.uint64)
    tie = (raw & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    if tie.any():
        t = s - p
        err = (p - (s - t)) + (c - t)
        up = (err > 0) == (s > 0)
        raw = np.where(tie & (err != 0), np.where(up, raw + np.uint64(1), raw - np.uint64(1)), raw)
        s = raw.view(np.float64)
    return s.astype(np.float32)


def _toward(s, rest, mode):
    """The exact sum ``s + rest`` (float64, rest tiny) rounded to float32 in one direction."""
    near = s.astype(np.float32)
    off = s - near
    off = np.where(off == 0, rest, off)
    down, up = np.float32(-np.inf), np.float32(np.inf)
    if mode == "rm":
        return np.where(off < 0, np.nextafter(near, down), near)
    if mode == "rp":
        return np.where(off > 0, np.nextafter(near, up), near)
    inward = np.where(near > 0, off < 0, off > 0)
    return np.where(inward & (off != 0), np.nextafter(near, np.float32(0)), near)


def fma_directed(a, b, c, mode):
    """fma.{rz,rm,rp}.f32; the product is exact in float64, the sum's error is kept."""
    p = np.asarray(a, np.float64) * b
    c = np.asarray(c, np.float64)
    s = p + c
    t = s - p
    rest = (p - (s - t)) + (c - t)
    return _toward(s, np.where(np.isfinite(s), rest, 0), mode)


def add_directed(a, b, mode):
    """add.{rz,rm,rp}.f32."""
    return fma_directed(a, np.float32(1), b, mode)


def sub_directed(a, b, mode):
    """sub.{rz,rm,rp}.f32."""
    return fma_directed(a, np.float32(1), -np.asarray(b, np.float32), mode)


def mul_directed(a, b, mode):
    """mul.{rz,rm,rp}.f32."""
    s = np.asarray(a, np.float64) * b
    return _toward(s, np.zeros(s.shape), mode)


def fma64(a, b, c):
    """Fused multiply-add of float64 through exact integers would be slow: use long double."""
    return (np.asarray(a, np.longdouble) * b + c).astype(np.float64)


def fma16(a, b, c):
    """Fused multiply-add of float16 (exact in float64 before the rounding)."""
    return (np.asarray(a, np.float64) * b + c).astype(np.float16)


def fma_bf16(a, b, c):
    """Fused multiply-add of bf16 values held as float32, rounded by the caller."""
    # Rounding to odd at float32 would be needed for a halfway case; float64 keeps what decides it.
    s = np.asarray(a, np.float64) * b + c
    near = s.astype(np.float32)
    raw = near.view(np.uint32)
    inexact = (near != s) & ((raw & np.uint32(0xFFFF)) == np.uint32(0x8000))
    if inexact.any():
        away = np.abs(s) > np.abs(near)
        raw = np.where(inexact, np.where(away, raw + np.uint32(1), raw - np.uint32(1)), raw)
    return raw.view(np.float32)


def bf16_round(x):
    """float32 values rounded to bf16, still as float32."""
    return (convert.bf16_from_f32(x).astype(np.uint32) << np.uint32(16)).view(np.float32)


def relu(x):
    """max(x, 0); NaN stays NaN for the conversions and becomes canonical elsewhere."""
    return np.maximum(x, x.dtype.type(0))


def sat01(x):
    """Clamp to [0, 1], NaN to 0."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1)).astype(x.dtype)


def fmin(a, b, nan):
    """PTX min: drops a NaN unless ``nan``; -0 is smaller than +0."""
    r = np.minimum(a, b) if nan else np.fmin(a, b)
    return np.where((a == b) & np.signbit(a), a, r) if (r == 0).any() else r


def fmax(a, b, nan):
    """PTX max: drops a NaN unless ``nan``; +0 is larger than -0."""
    r = np.maximum(a, b) if nan else np.fmax(a, b)
    return np.where((a == b) & ~np.signbit(a), a, r) if (r == 0).any() else r


def testp(x, what):
    """Float classification."""
    tiny = np.finfo(x.dtype).tiny
    if what == "finite":
        return np.isfinite(x)
    if what == "infinite":
        return np.isinf(x)
    if what == "number":
        return ~np.isnan(x)
    if what == "notanumber":
        return np.isnan(x)
    small = np.abs(x) < tiny
    return small & (x != 0) if what == "subnormal" else np.isfinite(x) & ~small


def bf16x2_rn(hi, lo):
    """cvt.rn.bf16x2.f32, the hot path: two roundings in one pass, NaN handled apart."""
    both = np.empty((32, 2), np.float32)
    both[:, 0], both[:, 1] = lo, hi
    u = both.view(np.uint32)
    r = u >> _U16
    r &= _U1
    r += _BELOW_HALF
    r += u
    flat = both.reshape(64)
    square = flat.dot(flat)  # NaN exactly if some lane is NaN: there are no differences in it
    if square != square:
        return convert.bf16x2_from_f32(hi, lo)
    return r.view(np.uint16)[:, 1::2].copy().view(np.uint32)[:, 0]


def f64_to_f32_odd(x):
    """float64 to float32 rounded to odd, so that a later rounding to fewer bits is right."""
    near = x.astype(np.float32)
    raw = near.view(np.uint32)
    exact = near == x
    toward = np.where(np.abs(near) > np.abs(x), raw - np.uint32(1), raw)
    return np.where(exact | ~np.isfinite(near), raw, toward | np.uint32(1)).view(np.float32)


def int_to_f32_odd(x):
    """Integers to float32 rounded to odd."""
    if x.dtype.itemsize < 8:
        return f64_to_f32_odd(x.astype(np.float64))
    out = [_odd(v) for v in x.tolist()]
    return np.array(out, np.float32)


def _odd(v):
    mag, cut = abs(v), max(0, abs(v).bit_length() - 24)
    kept = mag >> cut << cut
    if kept != mag:
        kept |= 1 << cut
    return float(kept if v >= 0 else -kept)


def int_to_f32_rz(x):
    """Integers to float32, towards zero."""
    out = []
    for v in x.tolist():
        mag, cut = abs(v), max(0, abs(v).bit_length() - 24)
        kept = mag >> cut << cut
        out.append(float(kept if v >= 0 else -kept))
    return np.array(out, np.float32)
