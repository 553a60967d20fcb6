"""Integer and bit operations on lanes that numpy has no single operation for.

Unsigned arrays stand for raw bits. ``s*`` functions take Python numbers, the others arrays (and
numbers where numpy broadcasts them).
"""

from __future__ import annotations

import numpy as np


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
