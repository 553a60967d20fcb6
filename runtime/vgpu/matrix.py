"""Warp-level matrix moves and mma.sync: which lane holds what.

Source: PTX ISA, "ldmatrix", "stmatrix", "movmatrix" and "Matrix Fragments for mma.m16n8k16".
A matrix is 8 rows of 16 bytes. Rows come from lanes 0–7 for the first matrix, 8–15 for the second
and so on; the engine gathers or scatters the rows, these functions map rows to registers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megamoe.runtime.vgpu import convert

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]


def ldmatrix(rows: U8, trans: bool = False) -> U32:
    """`ldmatrix.m8n8.x{1,2,4}{.trans}.b16`: rows uint8 [8·count, 16] → uint32 [count, 32 lanes].

    Lane l of matrix j gets elements (l/4, 2·(l%4)) and the next one of its row (low half first);
    with `trans` elements (2·(l%4), l/4) and (2·(l%4)+1, l/4).
    """
    halves = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 8, 8)
    if trans:
        halves = np.ascontiguousarray(halves.transpose(0, 2, 1))
    return halves.reshape(-1, 64).view(np.uint32)


def stmatrix(regs: U32, trans: bool = False) -> U8:
    """`stmatrix.m8n8.x{1,2,4}{.trans}.b16`: uint32 [count, 32] → rows uint8 [8·count, 16]."""
    halves = np.ascontiguousarray(regs, np.uint32).view(np.uint16).reshape(-1, 8, 8)
    if trans:
        halves = np.ascontiguousarray(halves.transpose(0, 2, 1))
    return halves.reshape(-1, 8).view(np.uint8)


def movmatrix_trans(reg: U32) -> U32:
    """`movmatrix.sync.aligned.m8n8.trans.b16`: uint32 [32] → uint32 [32]."""
    return ldmatrix(stmatrix(reg[None, :]), trans=True)[0]


def mma_m16n8k16(a: U32, b: U32, c: F32, dtype: str = "bf16") -> F32:
    """`mma.sync.aligned.m16n8k16.row.col.f32.{bf16,f16}.{bf16,f16}.f32`.

    a uint32 [4, 32], b uint32 [2, 32], c float32 [4, 32] → d float32 [4, 32].
    """
    widen = convert.f32_from_bf16 if dtype == "bf16" else convert.f32_from_f16
    # a: register r = (k half, row half); lane = (g, q); word = two neighbouring k
    words = np.asarray(a, np.uint32).reshape(2, 2, 8, 4).transpose(1, 2, 0, 3)
    a_mk = widen(np.ascontiguousarray(words).reshape(16, 8).view(np.uint16))
    columns = np.asarray(b, np.uint32).reshape(2, 8, 4).transpose(1, 0, 2)
    b_nk = widen(np.ascontiguousarray(columns).reshape(8, 8).view(np.uint16))
    product = np.matmul(a_mk, b_nk.T)  # [16, 8] = [(row half, g), (q, parity)]
    d = product.reshape(2, 8, 4, 2).transpose(0, 3, 1, 2).reshape(4, 32)
    return (d + c).astype(np.float32)
