"""The address space: regions of bytes, per PE (global), per CTA (shared) and per launch (params).

Addresses are flat 64-bit numbers, so a pointer to a peer's memory is just a number. Shared memory
has its own 32-bit window: the CTA's rank in its cluster in bits 24 and up, the offset below, so
that a CTA's own addresses are valid in ``shared::cluster`` as well. Generic addresses of shared
and local memory are those numbers plus ``SHARED_WINDOW`` and ``LOCAL_WINDOW``.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from megamoe.runtime.vgpu.errors import LaunchError

GLOBAL_BASE = 0x7000_0000_0000
PE_STRIDE = 1 << 38
PARAM_WINDOW = 0x6000_0000_0000
SHARED_WINDOW = 0x0100_0000_0000
LOCAL_WINDOW = 0x0200_0000_0000
WINDOW_SIZE = 1 << 32
GUARD = 4096
ALIGN = 256
_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Region:
    """One allocation: ``[base, end)``, its bytes and typed views of them."""

    __slots__ = (
        "array", "base", "cells", "data", "end", "itemsize", "kind", "name", "pe", "released",
        "shadow", "shape", "tally", "views", "writable",
    )  # fmt: skip

    def __init__(
        self, base: int, data: np.ndarray, name: str, pe: int, kind: str = "global"
    ) -> None:
        self.base, self.end = base, base + len(data)
        self.data, self.name, self.pe, self.kind = data, name, pe, kind
        self.writable = bool(data.flags.writeable)
        # Where a warp counts bytes of this region: one place per PE for global memory, the last
        # for all that is on the chip.
        self.tally = pe if kind == "global" else -1
        self.array: Any = None
        self.itemsize = 1
        self.shape: tuple[int, ...] = (len(data),)
        self.released = False
        self.shadow: Any = None
        # Index with the access size. Whole elements only: a tail shorter than one is reached
        # through a narrower view.
        self.views: dict[int, Any] = {}
        self.cells: dict[int, Any] = {}
        for size, code in _CODES.items():
            part = data[: len(data) // size * size]
            self.views[size] = part.view(f"u{size}")
            cell: Any = part.data
            self.cells[size] = cell.cast(code) if len(part) else cell
        # 16-byte rows for ld.v4.b32 and ld.v2.b64, 8-byte rows for v2.b32.
        self.views[16] = data[: len(data) // 16 * 16].reshape(-1, 16)

    def where(self, address: int) -> str:
        """``name[i, j]`` of an address inside the region, in the registered array's elements."""
        off = address - self.base
        item, rest = divmod(off, self.itemsize)
        index = [int(i) for i in np.unravel_index(item, self.shape)] if self.shape else [0]
        text = f"{self.name}[{', '.join(map(str, index))}]"
        return text + (f"+{rest} bytes" if rest else "")


class AddressSpace:
    """All global memory of all PEs, with lookup by address."""

    def __init__(self, pes: int) -> None:
        self.pes = pes
        self.bases: list[int] = []
        self.regions: list[Region] = []
        self.next = [GLOBAL_BASE + pe * PE_STRIDE for pe in range(pes)]
        self.next_param = PARAM_WINDOW
        self.last = self.add_at(0x5000_0000_0000, np.zeros(1, np.uint8), "nothing", -1, "none")
        self.released: list[Region] = []
        self.by_pointer: dict[int, Region] = {}

    def add_at(self, base: int, data: np.ndarray, name: str, pe: int, kind: str) -> Region:
        """Insert a region at a fixed address."""
        region = Region(base, data, name, pe, kind)
        at = bisect_right(self.bases, base)
        self.bases.insert(at, base)
        self.regions.insert(at, region)
        return region

    def add(self, data: np.ndarray, name: str, pe: int, kind: str = "global") -> Region:
        """Insert bytes at the next free address of a PE, with a gap that catches overruns."""
        if not 0 <= pe < self.pes:
            raise LaunchError(f"pe={pe}: the world has {self.pes} PEs")
        base = self.next[pe]
        self.next[pe] = -(-(base + len(data) + GUARD) // ALIGN) * ALIGN
        return self.add_at(base, data, name, pe, kind)

    def add_params(self, data: np.ndarray, pe: int) -> Region:
        """Insert a launch's parameter block."""
        base = self.next_param
        self.next_param += -(-(len(data) + GUARD) // ALIGN) * ALIGN
        return self.add_at(base, data, "params", pe, "param")

    def remove(self, region: Region) -> None:
        """Release a region; later accesses to it are reported as use after release."""
        at = bisect_right(self.bases, region.base) - 1
        del self.bases[at], self.regions[at]
        region.released = True
        if self.last is region:
            self.last = self.regions[0]
        if region.kind == "global":
            self.released.append(region)

    def find(self, address: int) -> Region | None:
        """The live region that holds an address."""
        last = self.last
        if last.base <= address < last.end:
            return last
        at = bisect_right(self.bases, address) - 1
        if at >= 0:
            region = self.regions[at]
            if address < region.end:
                self.last = region
                return region
        return None

    def describe(self, address: int) -> str:
        """What an address is, in words, for error messages."""
        region = self.find(address)
        if region is not None:
            return region.where(address)
        for old in self.released:
            if old.base <= address < old.end:
                return f"{old.where(address)} after its release"
        at = bisect_right(self.bases, address) - 1
        near = self.regions[at] if at >= 0 else None
        if near is not None and near.kind != "none" and address - near.end < GUARD:
            size = near.end - near.base
            return f"{address - near.end} bytes past the end of {near.name} ({size} bytes)"
        if at + 1 < len(self.regions) and self.bases[at + 1] - address <= GUARD:
            after = self.regions[at + 1]
            return f"{after.base - address} bytes before {after.name}"
        return "no allocation"


def byte_view(array: Any) -> tuple[np.ndarray, int, int, tuple[int, ...]]:
    """The bytes of a numpy array or CPU torch tensor, without a copy.

    Returns (bytes, offset of the first element in them, item size, shape). Arrays with gaps
    between rows are covered from their first to their last element.
    """
    if hasattr(array, "data_ptr"):
        array = _torch_to_numpy(array)
    if not isinstance(array, np.ndarray):
        raise LaunchError(f"cannot register a {type(array).__name__}: pass numpy or CPU torch")
    if array.size == 0:
        return np.zeros(0, np.uint8), 0, array.itemsize, array.shape
    if any(s < 0 for s in array.strides):
        raise LaunchError("arrays with negative strides cannot be registered")
    span = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True))
    span += array.itemsize
    flat = np.lib.stride_tricks.as_strided(
        array.reshape(-1)[:1].view(np.uint8) if array.flags.c_contiguous else _first(array),
        (span,),
        (1,),
        writeable=array.flags.writeable,
    )
    shape = array.shape if array.flags.c_contiguous else (span // array.itemsize,)
    return flat, 0, array.itemsize, shape


def _first(array: np.ndarray) -> np.ndarray:
    first = array[(slice(0, 1),) * array.ndim]
    return np.lib.stride_tricks.as_strided(first, (1,), (array.itemsize,)).view(np.uint8)


def _torch_to_numpy(tensor: Any) -> np.ndarray:
    import torch

    if tensor.device.type != "cpu":
        raise LaunchError(f"only CPU tensors can be registered, not {tensor.device}")
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()]).numpy()
