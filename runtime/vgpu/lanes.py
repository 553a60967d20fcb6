"""Helpers that generated code calls: 32-lane arithmetic that numpy has no single operation for.

Unsigned arrays stand for raw bits. ``s*`` functions take one Python number, the others arrays
(and numbers where numpy broadcasts them).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from megamoe.runtime.vgpu import convert

U1, U2, U4, U8 = np.uint8, np.uint16, np.uint32, np.uint64
I1, I2, I4, I8 = np.int8, np.int16, np.int32, np.int64
F2, F4, F8, PB = np.float16, np.float32, np.float64, np.bool_
LANES = np.arange(32, dtype=np.uint32)
LANE_IS = [i == LANES for i in range(32)]
ALL_TRUE = np.ones(32, np.bool_)
ALL_FALSE = np.zeros(32, np.bool_)
BYTES_TRUE = ALL_TRUE.tobytes()
BYTES_FALSE = ALL_FALSE.tobytes()
minimum, maximum = np.minimum, np.maximum
_BITS32 = np.uint64(1) << np.arange(32, dtype=np.uint64)


# -- kinds of values ---------------------------------------------------------------------------
def full_p(p):
    """A predicate for all lanes."""
    return ALL_TRUE if p else ALL_FALSE


def widen(x, dtype):
    """A number or array as an array."""
    return x if type(x) is np.ndarray else np.full(32, x, dtype)


def choose(p, a, b, dtype):
    """Per-lane select of numbers or arrays."""
    if type(a) is not np.ndarray:
        a = dtype(a)
    if type(b) is not np.ndarray:
        b = dtype(b)
    return np.where(p, a, b)


def merge(m, new, old, dtype):
    """The new value in lanes ``m``, the old one elsewhere."""
    if type(old) is np.ndarray:
        out = old.copy()
    elif type(old) is type(new) and old == new:
        return new
    elif type(old) in (int, bool):
        out = np.full(32, old, dtype)
    else:
        # A row of a matrix product, or a register that an asynchronous wgmma owns.
        out = old.array().copy() if hasattr(old, "array") else np.zeros(32, dtype)
    if type(new) is np.ndarray:
        np.copyto(out, new, where=m)
    else:
        out[m] = new
    return out


def bits_of(p):
    """A predicate array as an integer mask."""
    return int.from_bytes(np.packbits(p, bitorder="little").tobytes(), "little")


@lru_cache(maxsize=4096)
def mask_array(bits):
    """An integer mask as a predicate array (shared, never written)."""
    return (np.uint32(bits) >> LANES & np.uint32(1)).astype(np.bool_)


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


# -- integers ----------------------------------------------------------------------------------
def sdiv(a, b):
    """Signed division of numbers, towards zero; by zero gives -1 (undefined in PTX)."""
    if b == 0:
        return -1
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def srem(a, b):
    """Remainder of numbers with the sign of the dividend."""
    return a - b * sdiv(a, b) if b else a


def vsdiv(a, b):
    """Signed division of arrays, towards zero."""
    with np.errstate(all="ignore"):
        q = a // b
        return q + ((q * b != a) & ((a < 0) != (b < 0)))


def vsrem(a, b):
    """Remainder of arrays with the sign of the dividend."""
    with np.errstate(all="ignore"):
        return np.fmod(a, b)


def mulhi(a, b, signed):
    """High 64 bits of 64-bit products of arrays (numbers broadcast)."""
    a, b = np.broadcast_arrays(np.asarray(a), np.asarray(b))
    kind = np.int64 if signed else np.uint64
    pairs = zip(a.astype(kind).tolist(), b.astype(kind).tolist(), strict=True)
    return np.array([x * y >> 64 & 0xFFFFFFFFFFFFFFFF for x, y in pairs], np.uint64)


def brev(x, width):
    """Bit reversal of a number."""
    return int(f"{x:0{width}b}"[::-1], 2)


def vbrev(x):
    """Bit reversal of an array."""
    width = x.dtype.itemsize * 8
    return np.array([brev(v, width) for v in x.tolist()], x.dtype)


def vpopc(x):
    """Set bits of each lane."""
    return np.bitwise_count(x).astype(np.uint32)


def vclz(x):
    """Leading zeros of each lane."""
    width = x.dtype.itemsize * 8
    return np.array([width - v.bit_length() for v in x.tolist()], np.uint32)


def sbfe(a, b, c, width, signed):
    """Bit field extract of numbers; ``a`` as raw bits."""
    pos, length = b & 255, c & 255
    top = min(pos + length - 1, width - 1)
    sign = 0 if not signed or length == 0 else a >> top & 1
    field = a >> pos & ((1 << length) - 1)
    avail = max(0, min(length, width - pos))
    if sign:
        field |= -1 << avail
    return field & ((1 << width) - 1)


def vbfe(a, b, c, signed):
    """Bit field extract of arrays."""
    width = a.dtype.itemsize * 8
    b, c = np.broadcast_to(b, 32).tolist(), np.broadcast_to(c, 32).tolist()
    return np.array(
        [sbfe(x, y, z, width, signed) for x, y, z in zip(a.tolist(), b, c, strict=True)], a.dtype
    )


def sbfi(a, b, c, d, width):
    """Insert the low ``d`` bits of ``a`` into ``b`` at position ``c``."""
    pos, length = c & 255, d & 255
    field = ((1 << length) - 1) << pos & ((1 << width) - 1)
    return b & ~field | (a << pos) & field


def vbfi(a, b, c, d):
    """Bit field insert of arrays."""
    width = a.dtype.itemsize * 8
    b, c, d = (np.broadcast_to(x, 32).tolist() for x in (b, c, d))
    rows = zip(a.tolist(), b, c, d, strict=True)
    return np.array([sbfi(w, x, y, z, width) for w, x, y, z in rows], a.dtype)


def sbfind(a, width, signed, shiftamt):
    """Position of the highest significant bit, all ones if there is none."""
    if signed and a >> (width - 1):
        a = ~a & ((1 << width) - 1)
    n = a.bit_length() - 1
    if n < 0:
        return 0xFFFFFFFF
    return width - 1 - n if shiftamt else n


def vbfind(a, signed, shiftamt):
    """bfind of arrays."""
    width = a.dtype.itemsize * 8
    return np.array([sbfind(x, width, signed, shiftamt) for x in a.tolist()], np.uint32)


def lop3(a, b, c, lut):
    """Three-input logic of arrays or numbers; the table's bit is ``a*4 + b*2 + c``."""
    out = a & 0
    for i in range(8):
        if lut >> i & 1:
            out = out | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def slop3(a, b, c, lut):
    """lop3 of numbers."""
    return lop3(a, b, c, lut) & 0xFFFFFFFF


def sshf(a, b, n, left, wrap):
    """Funnel shift of numbers: ``b`` is the high word."""
    n = n & 31 if wrap else min(n, 32)
    both = b << 32 | a
    return (both << n >> 32 if left else both >> n) & 0xFFFFFFFF


def vshf(a, b, n, left, wrap):
    """Funnel shift of arrays."""
    n = np.asarray(n, np.uint64)
    n = n & np.uint64(31) if wrap else np.minimum(n, np.uint64(32))
    both = np.asarray(b, np.uint64) << np.uint64(32) | np.asarray(a, np.uint64)
    return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)


def _prmt_mode(c, mode):
    n = c & 3
    if mode == "f4e":
        picks = [n, n + 1, n + 2, n + 3]
    elif mode == "b4e":
        picks = [n, (n - 1) & 7, (n - 2) & 7, (n - 3) & 7]
    elif mode == "rc8":
        picks = [n] * 4
    elif mode == "ecl":
        picks = [max(n, i) for i in range(4)]
    elif mode == "ecr":
        picks = [min(n, i) for i in range(4)]
    elif mode == "rc16":
        picks = [2 * (n & 1), 2 * (n & 1) + 1] * 2
    else:
        return [c >> 4 * i & 15 for i in range(4)]
    return picks


def sprmt(a, b, c, mode=""):
    """Byte permute of numbers."""
    both = b << 32 | a
    out = 0
    for i, pick in enumerate(_prmt_mode(c, mode)):
        byte = both >> 8 * (pick & 7) & 255
        if pick & 8:
            byte = 255 * (byte >> 7)
        out |= byte << 8 * i
    return out


def vprmt(a, b, c, mode=""):
    """Byte permute of arrays; a selector that is one number is done in bulk."""
    a, b = (
        np.broadcast_to(np.asarray(a, np.uint32), 32),
        np.broadcast_to(np.asarray(b, np.uint32), 32),
    )
    if isinstance(c, int):
        both = np.empty((32, 2), np.uint32)
        both[:, 0], both[:, 1] = a, b
        raw = both.view(np.uint8)
        picks = _prmt_mode(c, mode)
        out = raw[:, [p & 7 for p in picks]]
        for i, pick in enumerate(picks):
            if pick & 8:
                out[:, i] = 255 * (out[:, i] >> 7)
        return np.ascontiguousarray(out).view(np.uint32).ravel()
    rows = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return np.array([sprmt(x, y, z, mode) for x, y, z in rows], np.uint32)


def dp(a, b, c, a_signed, b_signed, n, hi=0):
    """dp4a / dp2a of arrays."""
    a, b = (np.broadcast_to(np.asarray(x, np.uint32), 32).copy() for x in (a, b))
    bb = b.view(np.int8 if b_signed else np.uint8).reshape(32, 4).astype(np.int64)
    if n == 4:
        aa = a.view(np.int8 if a_signed else np.uint8).reshape(32, 4).astype(np.int64)
    else:
        aa = a.view(np.int16 if a_signed else np.uint16).reshape(32, 2).astype(np.int64)
        bb = bb[:, 2 * hi : 2 * hi + 2]
    return ((aa * bb).sum(1) + np.asarray(c, np.int64)).astype(np.uint32)


# -- float -------------------------------------------------------------------------------------
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


# -- across lanes ------------------------------------------------------------------------------
@lru_cache(maxsize=4096)
def shuffle_plan(mode, b, c):
    """Source lane and in-range predicate of every lane, for one lane operand and clamp."""
    return _shuffle(mode, b, c)


def _shuffle(mode, b, c):
    lane = LANES.astype(np.int64)
    b, c = np.asarray(b, np.int64) & 31, np.asarray(c, np.int64)
    clamp, seg = c & 31, c >> 8 & 31
    top, low = lane & seg | clamp & ~seg & 31, lane & seg
    if mode == "up":
        j = lane - b
        p = j >= top
    elif mode == "down":
        j = lane + b
        p = j <= top
    elif mode == "bfly":
        j = lane ^ b
        p = j <= top
    else:
        j = low | b & ~seg & 31
        p = j <= top
    return np.where(p, j, lane), p


def shuffle(src, mode, b, c):
    """shfl.sync of an array: value and predicate."""
    if type(b) is int and type(c) is int:
        j, p = shuffle_plan(mode, b, c)
    else:
        j, p = _shuffle(mode, b, c)
    return src[j], p


def ballot(p, bits):
    """Lanes of ``bits`` in which the predicate holds."""
    if type(p) is not np.ndarray:
        return bits if p else 0
    return bits_of(p) & bits


def match_any(x, bits):
    """For each lane the lanes of ``bits`` with the same value."""
    lane_bits = mask_array(bits)
    same = (x[:, None] == x[None, :]) & lane_bits[None, :]
    return (same * _BITS32[None, :]).sum(1).astype(np.uint32)


def match_all(x, bits):
    """True if all lanes of ``bits`` hold one value."""
    vals = x[mask_array(bits)]
    return bool((vals == vals[0]).all())


def redux(x, op, bits, signed):
    """Reduction over the lanes of ``bits``: one number."""
    vals = x[mask_array(bits)]
    if op == "add":
        return int(vals.astype(np.int64 if signed else np.uint64).sum()) & 0xFFFFFFFF
    fn = {"min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
          "or": np.bitwise_or, "xor": np.bitwise_xor}[op]  # fmt: skip
    return int(fn.reduce(vals)) & 0xFFFFFFFF


# -- conversions that must round once ----------------------------------------------------------
_U1, _U16, _BELOW_HALF = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)


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
