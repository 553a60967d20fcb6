"""Helpers that generated code calls: kinds of values, masks, and operations across lanes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

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
