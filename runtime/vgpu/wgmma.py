"""wgmma: shared-memory matrix descriptors, operand fetch, accumulator and register fragments.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": "Matrix Descriptor Format",
"Strides", "Shared Memory Matrix Layout" and "Register Fragments". Addresses are bytes in the
CTA's shared window; `smem` is that window as a uint8 array whose index is the address.

A matrix in shared memory is made of 8-row (or 8-column) atoms of 16, 32, 64 or 128 bytes by 8,
swizzled by XOR of absolute address bits. K-major operands have `sbo` from 8 rows to the next 8
rows, and without swizzle `lbo` from one 16-byte column to the next. MN-major operands (16-bit
types only) have, swizzled, `lbo` from one swizzle span along M/N to the next and `sbo` from 8 k to
the next 8 k; without swizzle `sbo` steps 8 elements along M/N and `lbo` 8 along k.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megamoe.runtime.vgpu import convert
from megamoe.runtime.vgpu.boxplan import swizzled

U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

ELEMENT_BYTES = {
    "bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1,
}  # fmt: skip
_SWIZZLE_BYTES = (0, 128, 64, 32)  # by the two descriptor bits 62–63
_CHUNK = np.dtype("c16")  # any 16-byte dtype that numpy gathers quickly
K_BYTES = 32  # every dense wgmma reads 32 bytes of k per row


@dataclass(frozen=True)
class SmemDesc:
    """A decoded 64-bit matrix descriptor; all fields in bytes."""

    start: int
    lbo: int
    sbo: int
    swizzle: int


@lru_cache(maxsize=4096)
def decode(desc: int) -> SmemDesc:
    """Decode a descriptor: start bits 0–13, lbo 16–29, sbo 32–45 (each × 16), swizzle 62–63."""
    if desc >> 49 & 7:
        raise ValueError(
            f"matrix descriptor {desc:#018x}: base offset {desc >> 49 & 7} is not supported; "
            "align the swizzle pattern to its repeat (1024, 512 or 256 bytes)"
        )
    if desc & 0x3FF1_C000_C000_C000:
        raise ValueError(f"matrix descriptor {desc:#018x} has reserved bits set")
    field = 0x3FFF
    return SmemDesc(
        start=(desc & field) << 4,
        lbo=(desc >> 16 & field) << 4,
        sbo=(desc >> 32 & field) << 4,
        swizzle=_SWIZZLE_BYTES[desc >> 62 & 3],
    )


def encode(start: int, lbo: int, sbo: int, swizzle: int) -> int:
    """The inverse of `decode`, for tests and hand-written PTX."""
    code = _SWIZZLE_BYTES.index(swizzle)
    return (start >> 4 & 0x3FFF) | (lbo >> 4) << 16 | (sbo >> 4) << 32 | code << 62


@lru_cache(maxsize=1024)
def _chunk_index(
    phase: int, rows: int, mn_major: bool, lbo: int, sbo: int, swizzle: int, k_bytes: int
) -> I32:
    """Index, in 16-byte chunks from the last multiple of 1024 before the start, of a slab.

    K-major: [rows, k_bytes/16] chunks of consecutive k. MN-major (16-bit elements): [16, rows/8]
    chunks of 8 consecutive rows at one k. `phase` is start % 1024: the swizzle works on absolute
    addresses, and its pattern repeats every 1024 bytes at most.
    """
    if not mn_major:
        row = np.arange(rows)[:, None]
        column = np.arange(k_bytes // 16)[None, :]
        pitch = swizzle or 16
        offset = row // 8 * sbo + row % 8 * pitch + column * (16 if swizzle else lbo)
    else:
        k = np.arange(k_bytes // 2)[:, None]
        group = np.arange(rows // 8)[None, :]
        if swizzle:
            span = swizzle // 16
            offset = group % span * 16 + group // span * lbo + k % 8 * swizzle + k // 8 * sbo
        else:
            offset = group * sbo + k % 8 * 16 + k // 8 * lbo
    address = swizzled((phase + offset).astype(np.int64), swizzle)
    return (address // 16).astype(np.int32)


def operand_bytes(
    smem: U8, desc: int, rows: int, mn_major: bool, k_bytes: int = K_BYTES
) -> NDArray[np.uint8]:
    """The raw operand: uint8 [rows, k_bytes] K-major, or uint8 [k, 2*rows] MN-major (16-bit).

    IndexError if the operand reaches beyond `smem`.
    """
    d = decode(desc)
    base = d.start & ~1023
    index = _chunk_index(d.start & 1023, rows, mn_major, d.lbo, d.sbo, d.swizzle, k_bytes)
    chunks = smem[base : len(smem) & ~15].view(_CHUNK)
    return chunks[index].view(np.uint8).reshape(index.shape[0], -1)


def operand_addresses(
    desc: int, rows: int, mn_major: bool, k_bytes: int = K_BYTES
) -> NDArray[np.int64]:
    """Byte addresses, flat, of the 16-byte chunks that `operand_bytes` reads."""
    d = decode(desc)
    index = _chunk_index(d.start & 1023, rows, mn_major, d.lbo, d.sbo, d.swizzle, k_bytes)
    return (index.astype(np.int64) * 16 + (d.start & ~1023)).ravel()


def to_float(raw: NDArray[np.uint8], dtype: str) -> F32:
    """Bytes [..., n * size] of wgmma type `dtype` as exact float32 [..., n]."""
    if dtype == "bf16":
        return convert.f32_from_bf16(raw.view(np.uint16))
    if dtype == "f16":
        return raw.view(np.float16).astype(np.float32)
    if dtype == "tf32":
        return convert.f32_from_tf32(raw.view(np.uint32))
    if dtype == "e4m3":
        return convert.f32_from_e4m3(raw)
    if dtype == "e5m2":
        return convert.f32_from_e5m2(raw)
    if dtype in ("s8", "u8"):
        return raw.view(np.int8 if dtype == "s8" else np.uint8).astype(np.float32)
    raise ValueError(f"wgmma element type {dtype!r}: allowed are {', '.join(ELEMENT_BYTES)}")


def fetch(
    smem: U8, desc: int, rows: int, dtype: str, mn_major: bool = False, k_bytes: int = K_BYTES
) -> F32:
    """Operand A (rows = 64) or B (rows = N, so Bᵀ) as float32 [rows, k].

    K = k_bytes / element size: 16 for 16-bit types, 8 for tf32, 32 for 8-bit ones. An MN-major
    result is a transposed view, which numpy's matrix product takes without a copy.
    """
    if mn_major and ELEMENT_BYTES[dtype] != 2:
        raise ValueError(f"wgmma: transposed operands exist for 16-bit types only, not {dtype}")
    value = to_float(operand_bytes(smem, desc, rows, mn_major, k_bytes), dtype)
    return value.T if mn_major else value


# ---- fragments ----------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _d_gather(n: int) -> tuple[I32, I32]:
    """Flat index into D[64, n] of [warp, register, lane], and its inverse."""
    warp, reg, lane = np.ix_(np.arange(4), np.arange(n // 2), np.arange(32))
    row = 16 * warp + lane // 4 + 8 * (reg // 2 % 2)
    column = 8 * (reg // 4) + 2 * (lane % 4) + reg % 2
    forward = (row * n + column).astype(np.int32)
    inverse = np.empty(64 * n, np.int32)
    inverse[forward.ravel()] = np.arange(64 * n, dtype=np.int32)
    return forward, inverse.reshape(64, n)


def d_to_regs(d: NDArray[np.generic]) -> NDArray[np.generic]:
    """Accumulator D [64, N] of any 32-bit type → registers [4 warps, N/2, 32 lanes].

    Register i of a lane is row 16·warp + lane/4 + 8·(i/2 % 2), column 8·(i/4) + 2·(lane%4) + i%2.
    """
    return np.ascontiguousarray(d).reshape(-1).take(_d_gather(d.shape[1])[0])


def regs_to_d(regs: NDArray[np.generic]) -> NDArray[np.generic]:
    """Inverse of `d_to_regs`: [4, N/2, 32] → [64, N]."""
    return np.ascontiguousarray(regs).reshape(-1).take(_d_gather(regs.shape[1] * 2)[1])


def d_to_regs_f16(d: NDArray[np.generic]) -> U32:
    """f16 accumulator: float [64, N] → uint32 [4, N/4, 32], two neighbouring columns a register."""
    halves = convert.f16_from_f32(np.asarray(d, np.float32)).astype(np.uint32)
    wide = np.asarray(d_to_regs(halves), np.uint32)
    return wide[:, 0::2] | wide[:, 1::2] << np.uint32(16)


def regs_to_d_f16(regs: U32) -> F32:
    """Inverse of `d_to_regs_f16`: uint32 [4, N/4, 32] → float32 [64, N]."""
    wide = np.empty((4, regs.shape[1] * 2, 32), np.uint16)
    wide[:, 0::2] = (regs & np.uint32(0xFFFF)).astype(np.uint16)
    wide[:, 1::2] = (regs >> np.uint32(16)).astype(np.uint16)
    return convert.f32_from_f16(regs_to_d(wide))


def a_from_regs(regs: U32, dtype: str) -> F32:
    """Operand A from registers: uint32 [4 warps, 4, 32 lanes] → float32 [64, K].

    Register r holds 4 bytes of k of row 16·warp + lane/4 + 8·(r%2), from byte 16·(r/2) + 4·(lane%4)
    on: the same picture for 16-bit (K = 16), 8-bit (K = 32) and tf32 (K = 8) elements.
    """
    # [warp, khalf, rowhalf, g, q] → rows (warp, rowhalf, g), words (khalf, q)
    words = np.asarray(regs, np.uint32).reshape(4, 2, 2, 8, 4).transpose(0, 2, 3, 1, 4)
    return to_float(np.ascontiguousarray(words).reshape(64, 8).view(np.uint8), dtype)
