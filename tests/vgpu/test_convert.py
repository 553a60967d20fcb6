"""convert.py against torch's conversions and against formulas on exact fractions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megamoe.runtime.vgpu import convert as cv

SPECIAL = [
    0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x00000001, 0x80000001,
    0x007FFFFF, 0x3F808000, 0x3F818000, 0x3F80C000, 0x3F801000, 0x3F803000, 0x477FE000, 0x477FF000,
    0x33000000, 0x33000001, 0x43E00000, 0x43E80000, 0x43E80001, 0x47600000, 0x47700000,
]  # fmt: skip


def floats(n: int = 20000, seed: int = 1) -> np.ndarray:
    """float32 [n + specials]: random bit patterns without NaN, half of them near 1."""
    rng = np.random.default_rng(seed)
    u = rng.integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    x = u.view(np.float32)
    near = (rng.standard_normal(n) * 2.0 ** rng.integers(-20, 17, n)).astype(np.float32)
    x = np.where(np.isnan(x) | (np.arange(n) % 2 == 0), near, x)
    return np.concatenate([x, np.array(SPECIAL, np.uint32).view(np.float32)])


NANS = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)


def torch_bits(x: np.ndarray, dtype: torch.dtype, raw: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x).to(dtype).view(raw).numpy()


def test_bf16_and_f16_nearest_equal_torch() -> None:
    x = floats()
    want = torch_bits(x, torch.bfloat16, torch.int16).view(np.uint16)
    np.testing.assert_array_equal(cv.bf16_from_f32(x), want)
    want = torch_bits(x, torch.float16, torch.int16).view(np.uint16)
    np.testing.assert_array_equal(cv.f16_from_f32(x), want)


def test_nan_is_canonical() -> None:
    for relu in (False, True):
        for sat in (False, True):
            assert (cv.bf16_from_f32(NANS, relu=relu, satfinite=sat) == 0x7FFF).all()
            assert (cv.f16_from_f32(NANS, relu=relu, satfinite=sat) == 0x7FFF).all()
            assert (cv.tf32_from_f32(NANS, relu=relu, satfinite=sat) == 0x7FFFFFFF).all()
        assert (cv.e4m3_from_f32(NANS, relu) == 0x7F).all()
        assert (cv.e5m2_from_f32(NANS, relu) == 0x7F).all()


@pytest.mark.parametrize("bits", [16])
def test_widening_is_exact_for_every_code(bits: int) -> None:
    u = np.arange(1 << bits, dtype=np.uint32).astype(np.uint16)
    t = torch.from_numpy(u.view(np.int16))
    np.testing.assert_array_equal(cv.f32_from_bf16(u), t.view(torch.bfloat16).float().numpy())
    np.testing.assert_array_equal(cv.f32_from_f16(u), t.view(torch.float16).float().numpy())


@pytest.mark.parametrize(
    ("narrow", "widen"),
    [
        (cv.bf16_from_f32, cv.f32_from_bf16),
        (cv.f16_from_f32, cv.f32_from_f16),
        (cv.tf32_from_f32, cv.f32_from_tf32),
    ],
)
def test_directed_rounding_brackets_the_value(
    narrow: Callable[..., np.ndarray], widen: Callable[..., np.ndarray]
) -> None:
    x = floats()
    x = x[np.isfinite(x)]
    down, up = widen(narrow(x, "rm")), widen(narrow(x, "rp"))
    zero, near = widen(narrow(x, "rz")), widen(narrow(x, "rn"))
    assert (down <= x).all()
    assert (up >= x).all()
    np.testing.assert_array_equal(zero, np.where(np.signbit(x), up, down))
    exact = x == near
    np.testing.assert_array_equal(exact, down == up)
    assert ((near == down) | (near == up)).all()
    inside = np.isfinite(down) & np.isfinite(up)
    a, b, mid = (v[inside].astype(np.float64) for v in (down, up, x))
    closer_down = (mid - a) < (b - mid)
    closer_up = (mid - a) > (b - mid)
    assert (near[inside][closer_down] == down[inside][closer_down]).all()
    assert (near[inside][closer_up] == up[inside][closer_up]).all()


def test_relu_and_satfinite() -> None:
    x = floats()
    for narrow, widen, biggest in (
        (cv.bf16_from_f32, cv.f32_from_bf16, 0x7F7F),
        (cv.f16_from_f32, cv.f32_from_f16, 0x7BFF),
    ):
        plain = narrow(x)
        relu = narrow(x, relu=True)
        np.testing.assert_array_equal(relu, np.where(np.signbit(x), 0, plain))
        sat = narrow(x, satfinite=True)
        assert np.isfinite(widen(sat)).all()
        over = ~np.isfinite(widen(plain))
        np.testing.assert_array_equal(sat[~over], plain[~over])
        np.testing.assert_array_equal(sat[over] & 0x7FFF, biggest)


def test_tf32_ties_away() -> None:
    x = np.array([0x3F801000, 0xBF801000, 0x3F800FFF, 0x3F803000], np.uint32).view(np.float32)
    want = [0x3F802000, 0xBF802000, 0x3F800000, 0x3F804000]
    np.testing.assert_array_equal(cv.tf32_from_f32(x), np.array(want, np.uint32))
    want = [0x3F800000, 0xBF800000, 0x3F800000, 0x3F804000]
    np.testing.assert_array_equal(cv.tf32_from_f32(x, "rn"), np.array(want, np.uint32))


@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)],
)
def test_fp8_equals_torch_after_saturation(kind: str, dtype: torch.dtype, limit: float) -> None:
    x = floats()
    narrow = cv.e4m3_from_f32 if kind == "e4m3" else cv.e5m2_from_f32
    widen = cv.f32_from_e4m3 if kind == "e4m3" else cv.f32_from_e5m2
    want = torch_bits(np.clip(x, -limit, limit), dtype, torch.uint8)
    np.testing.assert_array_equal(narrow(x), want)
    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(dtype).float().numpy()
    np.testing.assert_array_equal(widen(codes), values)
    # pairs: a goes into the upper byte; f16x2 in between is exact
    hi, lo = x[:64], x[64:128]
    pair = cv.fp8x2_from_f32(hi, lo, kind)
    np.testing.assert_array_equal(pair, narrow(hi).astype(np.uint16) * 256 + narrow(lo))
    halves = cv.f16x2_from_fp8x2(pair, kind)
    np.testing.assert_array_equal(cv.f32_from_f16(halves >> np.uint32(16)), widen(narrow(hi)))
    np.testing.assert_array_equal(cv.fp8x2_from_f16x2(halves, kind), pair)


def test_packed_pairs_put_the_first_operand_on_top() -> None:
    hi, lo = floats(64, 2), floats(64, 3)
    for pair, one in (
        (cv.bf16x2_from_f32, cv.bf16_from_f32),
        (cv.f16x2_from_f32, cv.f16_from_f32),
    ):
        want = one(hi).astype(np.uint32) * 65536 + one(lo)
        np.testing.assert_array_equal(pair(hi, lo), want)


def test_float_to_int_clamps_and_maps_nan() -> None:
    x = np.array([0.5, 1.5, -0.5, -1.5, 3e9, -3e9, np.inf, -np.inf, np.nan, 2147483648], np.float32)
    got = cv.int_from_float(x, "rni", 32, True)
    top, low = 2**31 - 1, -(2**31)
    assert got.tolist() == [0, 2, 0, -2, top, low, top, low, 0, top]
    assert cv.int_from_float(x, "rzi", 32, True).tolist()[:4] == [0, 1, 0, -1]
    assert cv.int_from_float(x, "rmi", 32, True).tolist()[:4] == [0, 1, -1, -2]
    assert cv.int_from_float(x, "rpi", 32, True).tolist()[:4] == [1, 2, 0, -1]
    assert cv.int_from_float(x, "rzi", 32, False).tolist()[4:9] == [3 * 10**9, 0, 2**32 - 1, 0, 0]
    assert cv.int_from_float(x, "rzi", 64, True).tolist()[6:9] == [2**63 - 1, -(2**63), -(2**63)]
    assert cv.int_from_float(x, "rzi", 64, False).tolist()[6:9] == [2**64 - 1, 0, 2**63]
    assert cv.int_from_float(x, "rzi", 8, True).tolist()[4:6] == [127, -128]


def test_integer_saturation() -> None:
    x = np.array([-300, -1, 0, 200, 70000], np.int32)
    assert cv.saturate_int(x, 8, True).tolist() == [-128, -1, 0, 127, 127]
    assert cv.saturate_int(x, 16, False).tolist() == [0, 0, 0, 200, 65535]
    assert cv.saturate_int(np.array([2**32 - 1], np.uint32), 32, True).tolist() == [2**31 - 1]


def test_approximations() -> None:
    x = np.linspace(-20, 20, 401, dtype=np.float32)
    np.testing.assert_allclose(cv.ex2_approx(x), 2.0 ** x.astype(float), rtol=1e-7)
    np.testing.assert_allclose(cv.tanh_approx(x), np.tanh(x.astype(float)), rtol=1e-7)
    np.testing.assert_allclose(cv.sin_approx(x), np.sin(x.astype(float)), atol=1e-7)
    np.testing.assert_allclose(cv.cos_approx(x), np.cos(x.astype(float)), atol=1e-7)
    pos = np.abs(x) + np.float32(0.125)
    np.testing.assert_allclose(cv.lg2_approx(pos), np.log2(pos.astype(float)), rtol=1e-6)
    np.testing.assert_array_equal(cv.rcp_approx(pos, False), np.float32(1) / pos)
    np.testing.assert_array_equal(cv.sqrt_approx(pos, False), np.sqrt(pos))
    np.testing.assert_allclose(cv.rsqrt_approx(pos), pos.astype(float) ** -0.5, rtol=1e-7)


def test_flush_to_zero_in_and_out() -> None:
    tiny = np.array([0x00000001, 0x807FFFFF], np.uint32).view(np.float32)
    assert cv.flush_f32(tiny).view(np.uint32).tolist() == [0, 0x80000000]
    assert cv.rcp_approx(tiny).tolist() == [np.inf, -np.inf]
    assert cv.rsqrt_approx(tiny).tolist() == [np.inf, -np.inf]
    assert cv.lg2_approx(tiny[:1]).tolist() == [-np.inf]
    assert cv.ex2_approx(np.float32(-127.0)) == 0.0
    assert cv.ex2_approx(np.float32(-127.0), ftz=False) == np.float32(2.0**-127)
