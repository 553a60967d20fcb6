"""wgmma.py against the canonical layouts of the PTX ISA, element by element."""

from __future__ import annotations

import numpy as np
import pytest
from wgmma_reference import SIZES, place, raw_values

from megamoe.runtime.vgpu import wgmma


@pytest.mark.parametrize("dtype", list(SIZES))
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rows", [8, 64, 200])
def test_k_major_operand(dtype: str, swizzle: int, rows: int) -> None:
    raw, want = raw_values(rows, dtype, rows)
    lbo, sbo = (128, 256) if swizzle == 0 else (16, 8 * swizzle)
    for start in (1024, 5120 + (swizzle - 32 if swizzle else 16)):  # first and last k slab
        smem = place(raw, start, False, swizzle, lbo, sbo)
        got = wgmma.fetch(smem, wgmma.encode(start, lbo, sbo, swizzle), rows, dtype)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rows", [8, 64, 136, 256])
def test_mn_major_operand(swizzle: int, rows: int) -> None:
    raw, want = raw_values(rows, "bf16", rows)
    if swizzle:
        lbo, sbo = 16 * swizzle, 8 * swizzle  # (span × 16 k) blocks
    else:
        lbo, sbo = 128, 256
    if rows * 2 < swizzle:
        lbo = 16
    for start in (2048, 2048 + 16 * swizzle):
        smem = place(raw, start, True, swizzle, lbo, sbo)
        desc = wgmma.encode(start, lbo, sbo, swizzle)
        got = wgmma.fetch(smem, desc, rows, "bf16", mn_major=True)
        assert got.shape == (rows, 16)
        np.testing.assert_array_equal(got, want)
        chunks = wgmma.operand_addresses(desc, rows, True)
        touched = np.zeros(len(smem), bool)
        touched[(chunks[:, None] + np.arange(16)).ravel()] = True
        assert touched.sum() == rows * 32
        assert (smem[~touched] == 0xEE).all()


def test_descriptor_fields() -> None:
    d = wgmma.decode(wgmma.encode(0x1F40, 0x2000, 0x400, 64))
    assert (d.start, d.lbo, d.sbo, d.swizzle) == (0x1F40, 0x2000, 0x400, 64)
    with pytest.raises(ValueError, match="base offset 3"):
        wgmma.decode(3 << 49)
    with pytest.raises(ValueError, match="reserved"):
        wgmma.decode(1 << 52)
    with pytest.raises(ValueError, match="16-bit types only"):
        wgmma.fetch(np.zeros(4096, np.uint8), 0, 64, "tf32", mn_major=True)
    with pytest.raises(IndexError):
        wgmma.fetch(np.zeros(4096, np.uint8), wgmma.encode(3072, 16, 1024, 128), 64, "bf16")


@pytest.mark.parametrize("n", [8, 24, 128, 256])
def test_accumulator_fragment(n: int) -> None:
    d = np.arange(64 * n, dtype=np.float32).reshape(64, n)
    regs = wgmma.d_to_regs(d)
    assert regs.shape == (4, n // 2, 32)
    assert regs.dtype == np.float32
    for warp in range(4):
        for i in (0, 1, 2, 3, n // 2 - 1):
            for lane in (0, 1, 5, 31):
                row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
                col = 8 * (i // 4) + 2 * (lane % 4) + (i & 1)
                assert regs[warp, i, lane] == d[row, col]
    np.testing.assert_array_equal(wgmma.regs_to_d(regs), d)


def test_f16_accumulator_fragment() -> None:
    d = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    regs = wgmma.d_to_regs_f16(d)
    assert regs.shape == (4, 4, 32)
    for warp, i, lane in ((0, 0, 0), (1, 1, 7), (3, 3, 31), (2, 2, 13)):
        row, col = 16 * warp + lane // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (lane % 4)
        pair = np.array([regs[warp, i, lane]], np.uint32).view(np.float16)
        assert pair.tolist() == [d[row, col], d[row, col + 1]]
    np.testing.assert_array_equal(wgmma.regs_to_d_f16(regs), d)


@pytest.mark.parametrize("dtype", ["bf16", "tf32", "e4m3"])
def test_a_from_registers(dtype: str) -> None:
    raw, want = raw_values(64, dtype, 3)
    size = SIZES[dtype]
    by_row = raw.view(np.uint8).reshape(64, 32)
    regs = np.zeros((4, 4, 32), np.uint32)
    for warp in range(4):
        for lane in range(32):
            for i in range(16 // size):  # PTX ISA: element a_i, 4/size elements a register
                reg, part = i // (4 // size), i % (4 // size)
                row = 16 * warp + lane // 4 + 8 * (reg % 2)
                k = (lane % 4) * (4 // size) + part + (16 // size) * (reg // 2)
                code = by_row[row].view(raw.dtype)[k]
                regs[warp, reg, lane] |= np.uint32(int(code) << (8 * size * part))
    np.testing.assert_array_equal(wgmma.a_from_regs(regs, dtype), want)
