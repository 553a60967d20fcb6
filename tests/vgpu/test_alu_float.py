"""Floating-point arithmetic, comparisons and conversions against numpy and torch."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from vgpu_harness import check

rng = np.random.default_rng(2)
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-40, 3.4e38, 0.5]
A = np.array(SPECIAL + list(rng.normal(size=22) * 10), np.float32)
B = rng.permutation(A)
C = rng.permutation(A)
A64, B64, C64 = (x.astype(np.float64) for x in (A, B, C))


def f(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def bits(x) -> int:
    return int(np.float32(x).view(np.uint32))


def same(fn):
    """A reference on float32 numbers that gives raw bits."""

    def ref(*args: float) -> int:
        with np.errstate(all="ignore"):
            return bits(fn(*(np.float32(a) for a in args)))

    return ref


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def test_arithmetic_f32_f64() -> None:
    two = "%r0, %r1, %r2"
    for name, fn in {"add": np.add, "sub": np.subtract, "mul": np.multiply}.items():
        check(f"{name}.f32 {two};", "r", "rr", [A, B], same(fn))
        check(f"{name}.rn.f32 {two};", "r", "rr", [A, B], same(fn))
        check(
            f"{name}.f64 %d0, %d1, %d2;", "d", "dd", [A64, B64],
            lambda x, y, fn=fn: int(np.float64(fn(np.float64(x), np.float64(y))).view(np.uint64)),
        )  # fmt: skip
    check(f"div.rn.f32 {two};", "r", "rr", [A, B], same(np.divide))
    check("neg.f32 %r0, %r1;", "r", "r", [A], same(np.negative))
    check("abs.f32 %r0, %r1;", "r", "r", [A], same(np.abs))
    check("add.f32 %r0, %r1, 0f3F800000;", "r", "r", [A], same(lambda x: x + np.float32(1)))
    check("copysign.f32 %r0, %r1, %r2;", "r", "rr", [A, B], same(lambda x, y: np.copysign(y, x)))


def test_ftz() -> None:
    def flush(x: np.float32) -> np.float32:
        return np.copysign(np.float32(0), x) if abs(x) < np.finfo(np.float32).tiny else x

    tiny = np.array([1e-40, -1e-39, 1e-20, 2.0], np.float32)
    small = np.array([1e-20, 1.0, 1e-19, 1e-38], np.float32)
    check("mul.ftz.f32 %r0, %r1, %r2;", "r", "rr", [tiny, small],
          same(lambda x, y: flush(flush(x) * flush(y))))  # fmt: skip


def round32(x: Fraction) -> np.float32:
    """Nearest float32 of an exact value, ties to even, by way of integers."""
    if x == 0:
        return np.float32(0)
    sign, mag = (-1, -x) if x < 0 else (1, x)
    e = mag.numerator.bit_length() - mag.denominator.bit_length()
    e -= mag < Fraction(2) ** e
    e = max(e, -126)
    q = mag / Fraction(2) ** (e - 23)
    n = q.numerator // q.denominator
    rest = q - n
    n += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and n & 1)
    return np.float32(sign * math.ldexp(n, e - 23)) if n < 1 << 25 else np.float32(np.inf)


def test_fma_rounds_once() -> None:
    x = rng.integers(0x3F800000, 0x40000000, 32).astype(np.uint32).view(np.float32)
    y = rng.integers(0x3F800000, 0x40000000, 32).astype(np.uint32).view(np.float32)
    z = -(x * y) * np.float32(0.75)
    # Products with a sum exactly half-way up to a tiny rest: double rounding gets these wrong.
    x[:4] = np.float32(1 + 2**-12)
    y[:4] = np.float32(1 + 2**-12)
    z[:4] = np.float32([2**-50, -(2**-50), 2**-60, 0])
    check("fma.rn.f32 %r0, %r1, %r2, %r3;", "r", "rrr", [x, y, z],
          lambda a, b, c: bits(round32(Fraction(a) * Fraction(b) + Fraction(c))))  # fmt: skip
    check("mad.rn.f32 %r0, %r1, %r2, %r3;", "r", "rrr", [x, y, z],
          lambda a, b, c: bits(round32(Fraction(a) * Fraction(b) + Fraction(c))))  # fmt: skip


def directed(x: Fraction, mode: str) -> np.float32:
    near = round32(x)
    if Fraction(float(near)) == x:
        return near
    above = Fraction(float(near)) > x
    up = mode == "rp" or (mode == "rz" and x < 0)
    if above and not up:
        return np.nextafter(near, np.float32(-np.inf))
    return np.nextafter(near, np.float32(np.inf)) if not above and up else near


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
def test_directed_rounding(mode: str) -> None:
    x, y, z = rng.normal(size=(3, 32)).astype(np.float32)
    x[:3], y[:3], z[:3] = np.float32(1), np.float32(1), np.float32([2**-50, -(2**-50), 0])
    three = [x, y, z]

    def exact(v: Fraction) -> int:
        return bits(directed(v, mode))

    check(f"fma.{mode}.f32 %r0, %r1, %r2, %r3;", "r", "rrr", three,
          lambda a, b, c: exact(Fraction(a) * Fraction(b) + Fraction(c)))  # fmt: skip
    check(f"add.{mode}.f32 %r0, %r1, %r2;", "r", "rr", [x, z],
          lambda a, b: exact(Fraction(a) + Fraction(b)))  # fmt: skip
    check(f"sub.{mode}.f32 %r0, %r1, %r2;", "r", "rr", [x, z],
          lambda a, b: exact(Fraction(a) - Fraction(b)))  # fmt: skip
    check(f"mul.{mode}.f32 %r0, %r1, %r2;", "r", "rr", [x, y],
          lambda a, b: exact(Fraction(a) * Fraction(b)))  # fmt: skip


def test_min_max() -> None:
    def lower(x: np.float32, y: np.float32) -> np.float32:
        if np.isnan(x) or np.isnan(y):
            return np.float32(y if np.isnan(x) else x)
        return min((x, y), key=lambda v: (v, not np.signbit(v)))

    def nan_max(x: np.float32, y: np.float32) -> np.float32:
        if np.isnan(x) or np.isnan(y):
            return np.float32(np.nan)
        return max((x, y), key=lambda v: (v, not np.signbit(v)))

    check("min.f32 %r0, %r1, %r2;", "r", "rr", [A, B], same(lower))
    check("max.NaN.f32 %r0, %r1, %r2;", "r", "rr", [A, B], same(nan_max))


F_CMP = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b and a == a and b == b,
    "lt": lambda a, b: a < b, "ge": lambda a, b: a >= b,
    "equ": lambda a, b: not (a < b or a > b), "neu": lambda a, b: a != b,
    "ltu": lambda a, b: not a >= b, "gtu": lambda a, b: not a <= b,
    "num": lambda a, b: a == a and b == b, "nan": lambda a, b: a != a or b != b,
}  # fmt: skip


@pytest.mark.parametrize("op", list(F_CMP))
def test_setp(op: str) -> None:
    a, b = A.copy(), B.copy()
    b[::4] = a[::4]
    check(f"setp.{op}.f32 %p0, %r1, %r2; selp.b32 %r0, 1, 0, %p0;", "r", "rr", [a, b],
          lambda x, y: int(F_CMP[op](x, y)))  # fmt: skip
    ab, bb = (torch.tensor(x).bfloat16() for x in (a, b))
    ua, ub = (x.view(torch.int16).numpy().view(np.uint16) for x in (ab, bb))
    widen = lambda u: f(u << 16)  # noqa: E731
    check(f"setp.{op}.bf16 %p0, %h1, %h2; selp.b32 %r0, 1, 0, %p0;", "r", "hh", [ua, ub],
          lambda x, y: int(F_CMP[op](widen(x), widen(y))))  # fmt: skip


def test_approximations() -> None:
    x = np.array([0.0, 1.0, -1.0, 0.5, 3.25, -7.5, 10.0, 100.0, np.inf, -np.inf], np.float32)
    p = np.abs(x)
    check("ex2.approx.ftz.f32 %r0, %r1;", "r", "r", [x], same(lambda v: np.exp2(np.float64(v))))
    check("lg2.approx.f32 %r0, %r1;", "r", "r", [p], same(lambda v: np.log2(np.float64(v))))
    check("rcp.approx.ftz.f32 %r0, %r1;", "r", "r", [x], same(lambda v: 1 / np.float64(v)))
    check("rcp.rn.f32 %r0, %r1;", "r", "r", [x], same(lambda v: 1 / np.float64(v)))
    check("sqrt.rn.f32 %r0, %r1;", "r", "r", [p], same(lambda v: np.sqrt(np.float64(v))))
    check("rsqrt.approx.f32 %r0, %r1;", "r", "r", [p],
          same(lambda v: 1 / np.sqrt(np.float64(v))))  # fmt: skip
    check("tanh.approx.f32 %r0, %r1;", "r", "r", [x], same(lambda v: np.tanh(np.float64(v))))
    fin = x[:8]
    check("sin.approx.f32 %r0, %r1;", "r", "r", [fin], same(lambda v: np.sin(np.float64(v))))
    check("cos.approx.f32 %r0, %r1;", "r", "r", [fin], same(lambda v: np.cos(np.float64(v))))


def torch_bits(x: torch.Tensor) -> int:
    return int(x.view(torch.int16)) & 0xFFFF


def test_half_precision() -> None:
    normal = rng.normal(size=(3, 32)).astype(np.float32)
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        t = torch.tensor(normal).to(dtype)
        a, b, c = t.view(torch.int16).numpy().view(np.uint16)

        def val(u: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.tensor(u - (u >> 15 << 16), dtype=torch.int16).view(dtype)

        two = "%h0, %h1, %h2"
        check(f"add.rn.{kind} {two};", "h", "hh", [a, b],
              lambda x, y, v=val: torch_bits(v(x) + v(y)))  # fmt: skip
        check(f"sub.rn.{kind} {two};", "h", "hh", [a, b],
              lambda x, y, v=val: torch_bits(v(x) - v(y)))  # fmt: skip
        check(f"mul.rn.{kind} {two};", "h", "hh", [a, b],
              lambda x, y, v=val: torch_bits(v(x) * v(y)))  # fmt: skip
        check(
            f"fma.rn.{kind} {two}, %h3;", "h", "hhh", [a, b, c],
            lambda x, y, z, v=val, d=dtype: torch_bits(
                (v(x).double() * v(y).double() + v(z).double()).to(d)
            ),
        )  # fmt: skip
        check(f"neg.{kind} %h0, %h1;", "h", "h", [a], lambda x: x ^ 0x8000)
        pairs = [(a[i].item() | b[i].item() << 16) for i in range(32)]
        others = [(c[i].item() | a[i].item() << 16) for i in range(32)]

        def packed(fn, v=val):
            return lambda x, y: (
                torch_bits(fn(v(x & 0xFFFF), v(y & 0xFFFF)))
                | torch_bits(fn(v(x >> 16), v(y >> 16))) << 16
            )

        for name, fn in {"add": torch.add, "mul": torch.mul, "max": torch.maximum}.items():
            rn = "" if name == "max" else ".rn"
            both = [np.array(pairs, np.uint64), np.array(others, np.uint64)]
            check(f"{name}{rn}.{kind}x2 %r0, %r1, %r2;", "r", "rr", both, packed(fn))


def test_conversions_between_floats() -> None:
    x = np.concatenate([A[:6], rng.normal(size=26).astype(np.float32) * 100])
    t = torch.tensor(x)
    bf = {bits(v): torch_bits(w) for v, w in zip(x, t.bfloat16(), strict=True)}
    check("cvt.rn.bf16.f32 %h0, %r1;", "h", "r", [x], lambda v: bf[bits(v)])
    check("cvt.rn.f16.f32 %h0, %r1;", "h", "r", [x],
          lambda v: int(np.float16(np.float32(v)).view(np.uint16)))  # fmt: skip
    check("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", "r", "rr", [x, x[::-1]],
          lambda hi, lo: bf[bits(hi)] << 16 | bf[bits(lo)])  # fmt: skip
    check("cvt.rn.relu.bf16x2.f32 %r0, %r1, %r2;", "r", "rr", [x, x[::-1]],
          lambda hi, lo: _relu_pair(bf, hi, lo))  # fmt: skip
    u = np.array(list(bf.values())[:30], np.uint16)
    check("cvt.f32.bf16 %r0, %h1;", "r", "h", [u], lambda v: v << 16)
    check("cvt.f32.f16 %r0, %h1;", "r", "h", [u],
          lambda v: bits(np.uint16(v).view(np.float16)))  # fmt: skip
    check("cvt.f64.f32 %d0, %r1;", "d", "r", [x],
          lambda v: int(np.float64(np.float32(v)).view(np.uint64)))  # fmt: skip
    check("cvt.rn.f32.f64 %r0, %d1;", "r", "d", [x.astype(np.float64) / 3],
          lambda v: bits(np.float32(v)))  # fmt: skip
    check("cvt.rna.tf32.f32 %r0, %r1;", "r", "r", [x[6:]],
          lambda v: (bits(v) + 0x1000) & 0xFFFFE000)  # fmt: skip
    e4 = torch.tensor(x[6:]).to(torch.float8_e4m3fn).view(torch.uint8)
    e4 = {bits(v): int(w) for v, w in zip(x[6:], e4, strict=True)}
    keep = x[6:][np.abs(x[6:]) < 440]
    check("cvt.rn.satfinite.e4m3x2.f32 %h0, %r1, %r2;", "h", "rr", [keep, keep[::-1]],
          lambda hi, lo: e4[bits(hi)] << 8 | e4[bits(lo)])  # fmt: skip


def _relu_pair(bf: dict, hi: float, lo: float) -> int:
    one = lambda v: bf[bits(v)] if v > 0 else 0  # noqa: E731
    return one(hi) << 16 | one(lo)


def test_conversions_with_integers() -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 1e10, -1e10, np.nan, 3.999, -3.999], np.float32)

    def to_int(v: float, how, lo: int, hi: int) -> int:
        if v != v:
            return 0
        return int(max(lo, min(hi, how(v))))

    for mode, how in {"rzi": math.trunc, "rni": round, "rmi": math.floor, "rpi": math.ceil}.items():
        check(f"cvt.{mode}.s32.f32 %r0, %r1;", "r", "r", [x],
              lambda v, how=how: to_int(v, how, -(1 << 31), (1 << 31) - 1))  # fmt: skip
        check(f"cvt.{mode}.u32.f32 %r0, %r1;", "r", "r", [x],
              lambda v, how=how: to_int(v, how, 0, (1 << 32) - 1))  # fmt: skip
    n = rng.integers(0, 1 << 32, 32).astype(np.uint64)
    check("cvt.rn.f32.s32 %r0, %r1;", "r", "r", [n],
          lambda v: bits(round32(Fraction(v - (v >> 31 << 32)))))  # fmt: skip
    check("cvt.rn.f32.u32 %r0, %r1;", "r", "r", [n], lambda v: bits(round32(Fraction(v))))
    check("cvt.rn.f64.s64 %d0, %d1;", "d", "d", [n],
          lambda v: struct.unpack("<Q", struct.pack("<d", v))[0])  # fmt: skip
    big = np.array([(1 << 24) + 1, (1 << 25) - 1, 0xFFFFFFFF], np.uint64)
    check("cvt.rz.f32.u32 %r0, %r1;", "r", "r", [big],
          lambda v: bits(v >> v.bit_length() - 24 << v.bit_length() - 24))  # fmt: skip


def test_integer_conversions() -> None:
    n = rng.integers(0, 1 << 32, 32).astype(np.uint64)
    m = rng.integers(0, 1 << 63, 32).astype(np.uint64)

    def s(x: int, w: int) -> int:
        x &= (1 << w) - 1
        return x - (x >> (w - 1) << w)

    def cut16(x: int) -> int:
        return max(0, min(65535, x))

    check("cvt.u64.u32 %d0, %r1;", "d", "r", [n], lambda v: v)
    check("cvt.s64.s32 %d0, %r1;", "d", "r", [n], lambda v: s(v, 32))
    check("cvt.u32.u64 %r0, %d1;", "r", "d", [m], lambda v: v)
    check("cvt.u16.u32 %h0, %r1;", "h", "r", [n], lambda v: v)
    check("cvt.s8.s32 %h0, %r1;", "h", "r", [n], lambda v: s(v, 8))
    check("cvt.s16.s8 %h0, %h1;", "h", "h", [n & np.uint64(0xFFFF)], lambda v: s(v, 8))
    check("cvt.s32.s8 %r0, %r1;", "r", "r", [n], lambda v: s(v, 8))
    check("cvt.u32.u8 %r0, %r1;", "r", "r", [n], lambda v: v & 255)
    check("cvt.u32.u16 %r0, %h1;", "r", "h", [n & np.uint64(0xFFFF)], lambda v: v)
    check("cvt.sat.s8.s32 %r0, %r1;", "r", "r", [n], lambda v: max(-128, min(127, s(v, 32))))
    check("cvt.sat.u8.s32 %r0, %r1;", "r", "r", [n], lambda v: max(0, min(255, s(v, 32))))
    check("cvt.pack.sat.u16.s32 %r0, %r1, %r2;", "r", "rr", [n, n[::-1]],
          lambda a, b: cut16(s(a, 32)) << 16 | cut16(s(b, 32)))  # fmt: skip


def test_testp() -> None:
    classes = {
        "finite": np.isfinite, "infinite": np.isinf, "notanumber": np.isnan,
        "number": lambda v: not np.isnan(v), "subnormal": lambda v: 0 < abs(v) < 1.17549435e-38,
    }  # fmt: skip
    for name, fn in classes.items():
        check(f"testp.{name}.f32 %p0, %r1; selp.b32 %r0, 1, 0, %p0;", "r", "r", [A],
              lambda v, fn=fn: int(fn(v)))  # fmt: skip
