"""matrix.py against the per-lane sentences of the PTX ISA, written as plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megamoe.runtime.vgpu import matrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_lane_by_lane_and_stmatrix_inverts_it(count: int, trans: bool) -> None:
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 256, (8 * count, 16)).astype(np.uint8)
    m = rows.view(np.uint16).reshape(count, 8, 8)
    regs = matrix.ldmatrix(rows, trans)
    assert regs.shape == (count, 32)
    for j in range(count):
        for lane in range(32):
            g, q = lane // 4, lane % 4
            if trans:
                lo, hi = m[j, 2 * q, g], m[j, 2 * q + 1, g]
            else:
                lo, hi = m[j, g, 2 * q], m[j, g, 2 * q + 1]
            assert regs[j, lane] == int(lo) | int(hi) << 16
    np.testing.assert_array_equal(matrix.stmatrix(regs, trans), rows)


def test_movmatrix_transposes() -> None:
    m = np.arange(64, dtype=np.uint16).reshape(8, 8)
    reg = m.reshape(-1).view(np.uint32)
    out = matrix.movmatrix_trans(reg)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(8, 8), m.T)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_mma_m16n8k16_fragments(name: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a = torch.randint(-8, 8, (16, 16), generator=g).to(dtype)
    b = torch.randint(-8, 8, (16, 8), generator=g).to(dtype)  # [k, n]
    c = torch.randint(-8, 8, (16, 8), generator=g).float()
    abits = a.view(torch.int16).numpy().view(np.uint16)
    bbits = b.view(torch.int16).numpy().view(np.uint16)
    ra, rb = np.zeros((4, 32), np.uint32), np.zeros((2, 32), np.uint32)
    rc, want = np.zeros((4, 32), np.float32), np.zeros((4, 32), np.float32)
    d = (a.float() @ b.float() + c).numpy()
    for lane in range(32):
        grp, tid = lane // 4, lane % 4
        for i in range(8):  # PTX ISA: element a_i
            row = grp if i < 2 or 4 <= i < 6 else grp + 8
            col = tid * 2 + (i & 1) + (8 if i >= 4 else 0)
            ra[i // 2, lane] |= np.uint32(int(abits[row, col]) << 16 * (i % 2))
        for i in range(4):  # element b_i
            k = tid * 2 + (i & 1) + (8 if i >= 2 else 0)
            rb[i // 2, lane] |= np.uint32(int(bbits[k, grp]) << 16 * (i % 2))
        for i in range(4):  # element c_i
            row, col = grp + (8 if i >= 2 else 0), tid * 2 + (i & 1)
            rc[i, lane], want[i, lane] = c[row, col], d[row, col]
    np.testing.assert_array_equal(matrix.mma_m16n8k16(ra, rb, rc, name), want)
