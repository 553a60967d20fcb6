"""Canonical wgmma shared-memory layouts, element by element: an independent reference."""

from __future__ import annotations

import numpy as np

from megamoe.runtime.vgpu import convert

SIZES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def canonical(row: int, k: int, size: int, mn_major: bool, swizzle: int, lbo: int, sbo: int) -> int:
    """Byte offset of an element before the swizzle, in the words of "Strides" (loops, no numpy)."""
    t = 16 // size  # elements of a 128-bit unit
    units = max(swizzle // 16, 1)
    if not mn_major:
        unit = k // t
        if swizzle:
            return (row // 8) * sbo + (row % 8) * swizzle + unit * 16 + (k % t) * size
        return (row // 8) * sbo + (row % 8) * 16 + unit * lbo + (k % t) * size
    unit = row // t
    inside = (row % t) * size
    if swizzle:
        column = (k % 8) * swizzle + (k // 8) * sbo
        return (unit // units) * lbo + (unit % units) * 16 + column + inside
    return unit * sbo + (k % 8) * 16 + (k // 8) * lbo + inside


def place(
    values: np.ndarray, start: int, mn_major: bool, swizzle: int, lbo: int, sbo: int
) -> np.ndarray:
    """A shared window of 228 KB with `values` [rows, K] (raw uint8/16/32) laid out in it."""
    smem = np.full(228 * 1024, 0xEE, np.uint8)
    size = values.dtype.itemsize
    view = smem.view(values.dtype)
    for row in range(values.shape[0]):
        for k in range(values.shape[1]):
            a = start + canonical(row, k, size, mn_major, swizzle, lbo, sbo)
            if swizzle == 128:
                a ^= (a >> 7 & 7) << 4
            elif swizzle == 64:
                a ^= (a >> 7 & 3) << 4
            elif swizzle == 32:
                a ^= (a >> 7 & 1) << 4
            view[a // size] = values[row, k]
    return smem


def raw_values(rows: int, dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random raw codes [rows, K] and their float32 values, of small integers."""
    size = SIZES[dtype]
    x = np.random.default_rng(seed).integers(0, 9, (rows, 32 // size)).astype(np.float32)
    raw = {
        "bf16": lambda: convert.bf16_from_f32(x),
        "f16": lambda: convert.f16_from_f32(x),
        "tf32": lambda: convert.tf32_from_f32(x),
        "e4m3": lambda: convert.e4m3_from_f32(x),
        "e5m2": lambda: convert.e5m2_from_f32(x * 0 + 4),
        "s8": lambda: x.astype(np.int8).view(np.uint8),
        "u8": lambda: x.astype(np.uint8),
    }[dtype]()
    return raw, (x * 0 + 4 if dtype == "e5m2" else x)
