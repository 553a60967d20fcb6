"""A kernel launch: its configuration, checked, and its parameter block."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megamoe.runtime.vgpu.errors import LaunchError
from megamoe.runtime.vgpu.kernel import Kernel
from megamoe.runtime.vgpu.memory import Region
from megamoe.runtime.vgpu.ptx_ast import Param
from megamoe.runtime.vgpu.tensormap import TensorMap

SMEM_LIMIT = 232448
SM_SMEM = 233472
MAX_THREADS = 1024
SM_THREADS = 2048
REGISTERS = 65536

Dims = tuple[int, int, int]


@dataclass
class Launch:
    """One kernel launch and what its CTAs share."""

    pe: int
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem: int
    registers: int
    roles: dict[int, str]
    param_base: int
    params: dict[int, Any]
    region: Region
    globals: dict[str, int]

    @property
    def ctas_per_sm(self) -> int:
        """How many CTAs of this launch fit one SM."""
        bx, by, bz = self.block
        threads = -(-bx * by * bz // 32) * 32
        smem = self.smem + self.kernel.program.smem_dynamic
        by_registers = REGISTERS // (threads * self.registers)
        return max(1, min(32, SM_SMEM // smem, SM_THREADS // threads, by_registers))


def dims3(value: Any) -> Dims:
    """One to three dimensions as three."""
    if isinstance(value, int):
        value = (value,)
    out = tuple(int(v) for v in value)
    if not 1 <= len(out) <= 3:
        raise LaunchError(f"{value!r}: 1 to 3 dimensions")
    x, y, z = (*out, 1, 1)[:3]
    return x, y, z


def check_launch(
    kernel: Kernel, grid3: Dims, block3: Dims, cluster3: Dims, smem: int, registers: int | None
) -> int:
    """Refuse what the hardware would refuse; returns the registers per thread."""
    threads = block3[0] * block3[1] * block3[2]
    want = kernel.entry.directives.get("reqntid")
    if want is not None and tuple(want) + (1,) * (3 - len(want)) != block3:
        raise LaunchError(f"block={block3}: the kernel requires {want}")
    if not 1 <= threads <= MAX_THREADS:
        raise LaunchError(f"block={block3}: {threads} threads, allowed 1 to {MAX_THREADS}")
    for g, c in zip(grid3, cluster3, strict=True):
        if g < 1 or c < 1 or g % c:
            raise LaunchError(f"grid={grid3} is not a multiple of cluster={cluster3}")
    if cluster3[0] * cluster3[1] * cluster3[2] > 16:
        raise LaunchError(f"cluster={cluster3}: at most 16 CTAs")
    program = kernel.program
    total = program.smem_dynamic - 1024 + smem
    if total > SMEM_LIMIT or smem < 0:
        raise LaunchError(f"smem={smem}: {total} bytes with static ones, limit {SMEM_LIMIT}")
    warps = -(-threads // 32)
    if registers is None:
        limit = kernel.entry.directives.get("maxnreg", (0,))[0]
        registers = limit or min(255, REGISTERS // (32 * warps)) // 8 * 8
    if registers * 32 * warps > REGISTERS:
        raise LaunchError(
            f"registers={registers}: {warps} warps need {registers * 32 * warps} of {REGISTERS}"
        )
    return registers


def pack(kernel: Kernel, args: list[Any], address_of: Callable[[Any], int]) -> np.ndarray:
    """The parameter block."""
    params = kernel.entry.params
    if len(args) != len(params):
        names = ", ".join(f"{p.type}[{p.size}]" for p in params)
        raise LaunchError(f"{len(args)} arguments, the kernel takes {len(params)}: {names}")
    # Rounded up, so that reads of the last bytes work in any size.
    out = np.zeros(-(-max(kernel.entry.param_bytes, 8) // 16) * 16, np.uint8)
    for i, (p, value) in enumerate(zip(params, args, strict=True)):
        raw = argument(i, p, value, address_of)
        out[p.offset : p.offset + p.size] = np.frombuffer(raw, np.uint8)
    return out


def argument(i: int, p: Param, value: Any, address_of: Callable[[Any], int]) -> bytes:
    """One parameter's bytes."""
    if isinstance(value, TensorMap):
        value = value.to_bytes(address_of(value.array))
    if isinstance(value, (bytes, bytearray)):
        if len(value) > p.size:
            raise LaunchError(f"argument {i}: {len(value)} bytes for {p.size}")
        return bytes(value).ljust(p.size, b"\0")
    if isinstance(value, (float, np.floating)):
        return struct.pack("<d" if p.size == 8 else "<f", float(value))
    if isinstance(value, (bool, int, np.integer)):
        number = int(value)
        if not -(1 << 8 * p.size - 1) <= number < 1 << 8 * p.size:
            raise LaunchError(f"argument {i}: {number} does not fit in {p.size} bytes")
        return (number & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")
    if value is None:
        return bytes(p.size)
    try:
        return address_of(value).to_bytes(p.size, "little")
    except (KeyError, OverflowError) as e:
        raise LaunchError(f"argument {i}: {e}") from None
