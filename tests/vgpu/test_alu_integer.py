"""Integer, logic, bit and select instructions against Python integers."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import check

rng = np.random.default_rng(1)
EDGE32 = [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF, 0x12345678]
R32 = rng.permutation(np.concatenate([EDGE32, rng.integers(0, 1 << 32, 20)])).astype(np.uint64)
S32 = rng.permutation(R32)
T32 = rng.permutation(R32)
EDGE64 = [0, 1, 63, 64, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 32]
R64 = np.array(EDGE64 + [int(x) for x in rng.integers(0, 1 << 63, 24)], np.uint64)
S64 = rng.permutation(R64)
R16 = rng.integers(0, 1 << 16, 32).astype(np.uint16)
S16 = rng.permutation(R16)
AMOUNTS = np.array([0, 1, 4, 31, 32, 33, 63, 64, 200, 0xFFFFFFFF], np.uint64)


def s(x: int, w: int) -> int:
    """Signed value of w bits."""
    return x - (x >> (w - 1) << w)


def tdiv(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


BIN = {16: ("h", R16, S16), 32: ("r", R32, S32), 64: ("d", R64, S64)}


@pytest.mark.parametrize("w", [16, 32, 64])
def test_add_sub_mul_min_max(w: int) -> None:
    c, a, b = BIN[w]
    two = f"%{c}0, %{c}1, %{c}2"
    for k in "us":
        t = f"{k}{w}"
        check(f"add.{t} {two};", c, c + c, [a, b], lambda x, y: x + y)
        check(f"sub.{t} {two};", c, c + c, [a, b], lambda x, y: x - y)
        check(f"mul.lo.{t} {two};", c, c + c, [a, b], lambda x, y: x * y)
        v = (lambda x: s(x, w)) if k == "s" else (lambda x: x)
        check(f"mul.hi.{t} {two};", c, c + c, [a, b], lambda x, y, v=v: v(x) * v(y) >> w)
        check(f"min.{t} {two};", c, c + c, [a, b], lambda x, y, v=v: min(v(x), v(y)))
        check(f"max.{t} {two};", c, c + c, [a, b], lambda x, y, v=v: max(v(x), v(y)))
        check(f"mad.lo.{t} %{c}0, %{c}1, %{c}2, %{c}1;", c, c + c, [a, b], lambda x, y: x * y + x)
        nz = np.where(b == 0, b.dtype.type(3), b)
        if k == "u":
            check(f"div.{t} {two};", c, c + c, [a, nz], lambda x, y: x // y)
            check(f"rem.{t} {two};", c, c + c, [a, nz], lambda x, y: x % y)
        else:
            nz = np.where(s_array(nz, w) == -1, nz.dtype.type(7), nz)
            check(f"div.{t} {two};", c, c + c, [a, nz], lambda x, y, v=v: tdiv(v(x), v(y)))
            check(
                f"rem.{t} {two};", c, c + c, [a, nz],
                lambda x, y, v=v: v(x) - v(y) * tdiv(v(x), v(y)),
            )  # fmt: skip
    check(f"neg.s{w} %{c}0, %{c}1;", c, c, [a], lambda x: -x)
    check(f"abs.s{w} %{c}0, %{c}1;", c, c, [a], lambda x: abs(s(x, w)))


def s_array(x: np.ndarray, w: int) -> np.ndarray:
    return x.astype(f"u{w // 8}").view(f"i{w // 8}")


@pytest.mark.parametrize("k", ["u", "s"])
def test_wide_multiplication(k: str) -> None:
    v = s if k == "s" else (lambda x, w: x)
    check(f"mul.wide.{k}32 %d0, %r1, %r2;", "d", "rr", [R32, S32],
          lambda x, y: v(x, 32) * v(y, 32))  # fmt: skip
    check(f"mul.wide.{k}16 %r0, %h1, %h2;", "r", "hh", [R16, S16],
          lambda x, y: v(x, 16) * v(y, 16))  # fmt: skip
    check(f"mad.wide.{k}32 %d0, %r1, %r2, %d3;", "d", "rrd", [R32, S32, R64],
          lambda x, y, z: v(x, 32) * v(y, 32) + z)  # fmt: skip
    check(f"mad.hi.{k}32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32],
          lambda x, y, z: (v(x, 32) * v(y, 32) >> 32) + z)  # fmt: skip


def test_saturating_add() -> None:
    def clamp(x: int) -> int:
        return max(-(1 << 31), min((1 << 31) - 1, x))

    check(
        "add.sat.s32 %r0, %r1, %r2;", "r", "rr", [R32, S32], lambda x, y: clamp(s(x, 32) + s(y, 32))
    )
    check(
        "sub.sat.s32 %r0, %r1, %r2;", "r", "rr", [R32, S32], lambda x, y: clamp(s(x, 32) - s(y, 32))
    )


def test_carry_chains() -> None:
    check(
        "{ .reg .b32 a, b, c, d; mov.b64 {a,b}, %d1; mov.b64 {c,d}, %d2;"
        "add.cc.u32 a, a, c; addc.u32 b, b, d; mov.b64 %d0, {a,b}; }",
        "d", "dd", [R64, S64], lambda x, y: x + y,
    )  # fmt: skip
    check(
        "{ .reg .b32 a, b, c, d; mov.b64 {a,b}, %d1; mov.b64 {c,d}, %d2;"
        "sub.cc.u32 a, a, c; subc.u32 b, b, d; mov.b64 %d0, {a,b}; }",
        "d", "dd", [R64, S64], lambda x, y: x - y,
    )  # fmt: skip


def test_wide_product_by_carries() -> None:
    """128-bit product of 64-bit numbers in 32-bit pieces, the low 64 bits checked."""
    code = """{ .reg .b32 a, b, c, d, lo, hi;
    mov.b64 {a,b}, %d1; mov.b64 {c,d}, %d2;
    mul.lo.u32 lo, a, c; mul.hi.u32 hi, a, c;
    mad.lo.u32 hi, a, d, hi; mad.lo.u32 hi, b, c, hi; mov.b64 %d0, {lo,hi}; }"""
    check(code, "d", "dd", [R64, S64], lambda x, y: x * y)
    code = """{ .reg .b32 a, b, lo, hi; mov.b64 {a,b}, %d1;
    mad.lo.cc.u32 lo, %r2, %r3, a; madc.hi.u32 hi, %r2, %r3, b; mov.b64 %d0, {lo,hi}; }"""
    check(code, "d", "drr", [R64, S32, T32], lambda x, y, z: x + y * z)
    code = """{ .reg .b32 a, b, lo, hi; mov.b64 {a,b}, %d1;
    mad.lo.cc.u32 lo, %r2, %r3, a; madc.lo.cc.u32 hi, %r2, 1, b; addc.u32 %r0, 0, 0; }"""

    def carry_out(x: int, y: int, z: int) -> int:
        low = (y * z & 0xFFFFFFFF) + (x & 0xFFFFFFFF)
        return (x >> 32) + y + (low >> 32) >> 32

    check(code, "r", "drr", [R64, S32, T32], carry_out)
    code = """{ .reg .b32 a, b; mov.b64 {a,b}, %d1;
    mad.hi.cc.u32 a, %r2, %r3, a; addc.u32 %r0, b, 0; }"""
    check(code, "r", "drr", [R64, S32, T32],
          lambda x, y, z: (x >> 32) + ((y * z >> 32) + (x & 0xFFFFFFFF) >> 32))  # fmt: skip


@pytest.mark.parametrize("w", [16, 32, 64])
def test_logic_and_shifts(w: int) -> None:
    c, a, b = BIN[w]
    two = f"%{c}0, %{c}1, %{c}2"
    check(f"and.b{w} {two};", c, c + c, [a, b], lambda x, y: x & y)
    check(f"or.b{w} {two};", c, c + c, [a, b], lambda x, y: x | y)
    check(f"xor.b{w} {two};", c, c + c, [a, b], lambda x, y: x ^ y)
    check(f"not.b{w} %{c}0, %{c}1;", c, c, [a], lambda x: ~x)
    check(f"cnot.b{w} %{c}0, %{c}1;", c, c, [a], lambda x: int(x == 0))
    three = f"%{c}0, %{c}1, %r2"
    check(f"shl.b{w} {three};", c, c + "r", [a, AMOUNTS], lambda x, n: x << min(n, w))
    check(f"shr.u{w} {three};", c, c + "r", [a, AMOUNTS], lambda x, n: x >> min(n, w))
    check(f"shr.b{w} {three};", c, c + "r", [a, AMOUNTS], lambda x, n: x >> min(n, w))
    check(f"shr.s{w} {three};", c, c + "r", [a, AMOUNTS], lambda x, n: s(x, w) >> min(n, w))
    check(f"shl.b{w} %{c}0, %{c}1, 5;", c, c, [a], lambda x: x << 5)
    check(f"shr.s{w} %{c}0, %{c}1, 7;", c, c, [a], lambda x: s(x, w) >> 7)


def test_funnel_shifts() -> None:
    three = "%r0, %r1, %r2, %r3"
    for wrap in (True, False):
        word = "wrap" if wrap else "clamp"

        def n(x: int, wrap: bool = wrap) -> int:
            return x & 31 if wrap else min(x, 32)

        check(f"shf.l.{word}.b32 {three};", "r", "rrr", [R32, S32, AMOUNTS],
              lambda a, b, c, n=n: (b << 32 | a) << n(c) >> 32)  # fmt: skip
        check(f"shf.r.{word}.b32 {three};", "r", "rrr", [R32, S32, AMOUNTS],
              lambda a, b, c, n=n: (b << 32 | a) >> n(c))  # fmt: skip


@pytest.mark.parametrize("w", [32, 64])
def test_bit_fields_and_counts(w: int) -> None:
    c, a, b = BIN[w]
    pos = np.array([0, 1, 8, 31, 30, 40, 63, 64, 255], np.uint64)
    length = np.array([0, 1, 4, 8, 16, 31, 32, 33], np.uint64)

    def bfe(x: int, p: int, n: int) -> int:
        p, n = p & 255, n & 255
        return x >> p & ((1 << n) - 1)

    def bfe_s(x: int, p: int, n: int) -> int:
        p, n = p & 255, n & 255
        if n == 0:
            return 0
        sign = x >> min(p + n - 1, w - 1) & 1
        out = 0
        for i in range(w):
            out |= (x >> p + i & 1 if i < n and p + i < w else sign) << i
        return out

    check(f"bfe.u{w} %{c}0, %{c}1, %r2, %r3;", c, c + "rr", [a, pos, length], bfe)
    check(f"bfe.s{w} %{c}0, %{c}1, %r2, %r3;", c, c + "rr", [a, pos, length], bfe_s)

    def bfi(x: int, y: int, p: int, n: int) -> int:
        m = ((1 << (n & 255)) - 1) << (p & 255)
        return y & ~m | x << (p & 255) & m

    check(f"bfi.b{w} %{c}0, %{c}1, %{c}2, %r3, %r4;", c, c + c + "rr", [a, b, pos, length], bfi)
    check(f"brev.b{w} %{c}0, %{c}1;", c, c, [a], lambda x: int(f"{x:0{w}b}"[::-1], 2))
    check(f"clz.b{w} %r0, %{c}1;", "r", c, [a], lambda x: w - x.bit_length())
    check(f"popc.b{w} %r0, %{c}1;", "r", c, [a], lambda x: x.bit_count())
    check(f"bfind.u{w} %r0, %{c}1;", "r", c, [a], lambda x: x.bit_length() - 1)
    check(
        f"bfind.s{w} %r0, %{c}1;", "r", c, [a],
        lambda x: (x if s(x, w) >= 0 else ~x & ((1 << w) - 1)).bit_length() - 1,
    )  # fmt: skip
    check(
        f"bfind.shiftamt.u{w} %r0, %{c}1;", "r", c, [a],
        lambda x: w - x.bit_length() if x else 0xFFFFFFFF,
    )  # fmt: skip


def test_prmt_and_lop3() -> None:
    def prmt(a: int, b: int, c: int) -> int:
        raw = (b << 32 | a).to_bytes(8, "little")
        out = []
        for i in range(4):
            k = c >> 4 * i & 15
            byte = raw[k & 7]
            out.append((255 if byte & 128 else 0) if k & 8 else byte)
        return int.from_bytes(bytes(out), "little")

    check("prmt.b32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32], prmt)
    check("prmt.b32 %r0, %r1, %r2, 0x5410;", "r", "rr", [R32, S32],
          lambda a, b: prmt(a, b, 0x5410))  # fmt: skip
    check("prmt.b32 %r0, %r1, %r2, 0x9A3F;", "r", "rr", [R32, S32],
          lambda a, b: prmt(a, b, 0x9A3F))  # fmt: skip
    for lut in (0x00, 0xEA, 0x96, 0xFF, 0x1B):
        check(
            f"lop3.b32 %r0, %r1, %r2, %r3, {lut};", "r", "rrr", [R32, S32, T32],
            lambda a, b, c, lut=lut: sum(
                (lut >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i
                for i in range(32)
            ),
        )  # fmt: skip


def test_dot_products() -> None:
    def dp4a(a: int, b: int, c: int) -> int:
        pick = lambda x, i: s(x >> 8 * i & 255, 8)  # noqa: E731
        return c + sum(pick(a, i) * pick(b, i) for i in range(4))

    check("dp4a.s32.s32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32], dp4a)
    check(
        "dp4a.u32.u32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32],
        lambda a, b, c: c + sum((a >> 8 * i & 255) * (b >> 8 * i & 255) for i in range(4)),
    )  # fmt: skip


CMP = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("op", list(CMP))
@pytest.mark.parametrize("k", ["u32", "s32", "u64", "s64", "u16", "s16"])
def test_setp_selp(op: str, k: str) -> None:
    w = int(k[1:])
    c, a, b = BIN[w]
    b = np.where(np.arange(32) % 3 == 0, a, b)
    v = (lambda x: s(x, w)) if k[0] == "s" else (lambda x: x)
    check(
        f"setp.{op}.{k} %p0, %{c}1, %{c}2; selp.b32 %r0, 7, 9, %p0;", "r", c + c, [a, b],
        lambda x, y: 7 if CMP[op](v(x), v(y)) else 9,
    )  # fmt: skip


def test_setp_combinations_and_set() -> None:
    check(
        "setp.lt.u32 %p1, %r3, 100; setp.gt.and.s32 %p0|%p2, %r1, %r2, !%p1;"
        "selp.u32 %r4, 1, 0, %p0; selp.u32 %r5, 2, 0, %p2; or.b32 %r0, %r4, %r5;",
        "r", "rrr", [R32, S32, T32],
        lambda a, b, c: (1 if s(a, 32) > s(b, 32) and c >= 100 else 0)
        | (2 if not s(a, 32) > s(b, 32) and c >= 100 else 0),
    )  # fmt: skip
    check("set.lo.u32.u32 %r0, %r1, %r2;", "r", "rr", [R32, S32],
          lambda a, b: 0xFFFFFFFF if a < b else 0)  # fmt: skip
    check("slct.u32.s32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32],
          lambda a, b, c: a if s(c, 32) >= 0 else b)  # fmt: skip
    check(
        "setp.eq.u32 %p0, %r1, %r2; setp.lt.u32 %p1, %r1, 1000; xor.pred %p2, %p0, %p1;"
        "not.pred %p3, %p2; and.pred %p4, %p3, %p0; or.pred %p5, %p4, %p1; selp.b32 %r0,1,0,%p5;",
        "r", "rr", [R32, S32],
        lambda a, b: int((not ((a == b) ^ (a < 1000)) and a == b) or a < 1000),
    )  # fmt: skip


def test_mov_packing_and_guards() -> None:
    check("mov.b64 %d0, {%r1, %r2};", "d", "rr", [R32, S32], lambda a, b: b << 32 | a)
    check("mov.b32 %r0, {%h1, %h2};", "r", "hh", [R16, S16], lambda a, b: b << 16 | a)
    check("mov.b64 {%r0, _}, %d1;", "r", "d", [R64], lambda a: a)
    check("mov.b64 {_, %r0}, %d1;", "r", "d", [R64], lambda a: a >> 32)
    check(
        "mov.b64 {%h1,%h2,%h3,%h4}, %d1; mov.b64 %d0, {%h4,%h3,%h2,%h1};", "d", "d", [R64],
        lambda a: sum((a >> 16 * i & 0xFFFF) << 16 * (3 - i) for i in range(4)),
    )  # fmt: skip
    check(
        "setp.gt.u32 %p0, %r1, %r2; mov.u32 %r0, 5; @%p0 add.u32 %r0, %r1, 1;"
        "@!%p0 sub.u32 %r0, %r0, %r2;",
        "r", "rr", [R32, S32], lambda a, b: a + 1 if a > b else 5 - b,
    )  # fmt: skip


def test_sad_and_mul24() -> None:
    check("sad.u32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32],
          lambda a, b, c: abs(a - b) + c)  # fmt: skip
    check("sad.s32 %r0, %r1, %r2, %r3;", "r", "rrr", [R32, S32, T32],
          lambda a, b, c: abs(s(a, 32) - s(b, 32)) + c)  # fmt: skip
    check("mul24.lo.u32 %r0, %r1, %r2;", "r", "rr", [R32, S32],
          lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))  # fmt: skip
    check("mul24.hi.u32 %r0, %r1, %r2;", "r", "rr", [R32, S32],
          lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF) >> 16)  # fmt: skip
    check("mul24.lo.s32 %r0, %r1, %r2;", "r", "rr", [R32, S32],
          lambda a, b: s(a & 0xFFFFFF, 24) * s(b & 0xFFFFFF, 24))  # fmt: skip
