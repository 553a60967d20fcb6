"""Atomic read-modify-write operations, lane by lane in ascending order."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu import lanes_float as ln
from megamoe.runtime.vgpu.access import SHIFT, Access, fault, region_of

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp

_FLOAT = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def operation(op: str, kind: str) -> Callable[..., int]:
    """The function (old, b[, c]) → new on raw bits of an atomic of a type."""
    if kind.startswith(("f", "bf")):
        return _float_operation(op, kind)
    width = int(kind[1:])
    m = (1 << width) - 1
    if kind[0] == "s":
        half = 1 << width - 1

        def signed(x: int) -> int:
            return (x ^ half) - half
    else:

        def signed(x: int) -> int:
            return x

    table: dict[str, Callable[..., int]] = {
        "add": lambda old, b: (old + b) & m,
        "min": lambda old, b: old if signed(old) <= signed(b) else b,
        "max": lambda old, b: old if signed(old) >= signed(b) else b,
        "and": lambda old, b: old & b,
        "or": lambda old, b: old | b,
        "xor": lambda old, b: old ^ b,
        "exch": lambda old, b: b,
        "inc": lambda old, b: 0 if old >= b else old + 1,
        "dec": lambda old, b: b if old == 0 or old > b else old - 1,
        "cas": lambda old, b, c: c if old == b else old,
    }
    return table[op]


def _float_operation(op: str, kind: str) -> Callable[..., int]:
    fn = {"add": np.add, "min": np.fmin, "max": np.fmax}[op]
    if kind in _FLOAT:
        dtype = _FLOAT[kind]
        bits = f"u{np.dtype(dtype).itemsize}"

        def plain(old: int, b: int) -> int:
            x, y = (np.array(v, bits).view(dtype) for v in (old, b))
            return int(fn(x, y).astype(dtype).view(bits))

        return plain
    if kind == "f16x2":

        def halves(old: int, b: int) -> int:
            x, y = (np.array([v], "u4").view(np.float16) for v in (old, b))
            return int(fn(x, y).view("u4")[0])

        return halves
    bits = "u4" if kind == "bf16x2" else "u2"

    def brains(old: int, b: int) -> int:
        x, y = (ln.bf16_values(np.array([v], bits)) for v in (old, b))
        return int(ln.bf16_bits(fn(x, y)).view(bits)[0])

    return brains


def atomic(w: Warp, a: Access, fn: Callable[..., int], address: Any, args: list, mask: Any) -> Any:
    """Apply ``fn`` at each active lane's address; the old values (a number if one lane)."""
    active = range(32) if mask is None else np.flatnonzero(mask).tolist()
    old = np.zeros(32, f"u{a.size}")
    changed = False
    many = type(address) is np.ndarray
    columns = [x.tolist() if type(x) is np.ndarray else None for x in args]
    for lane in active:
        addr = int(address[lane]) if many else address
        region, off = region_of(w, a, addr, lane)
        if not region.writable:
            raise fault(w, a, addr, lane, "read-only memory")
        cells, at = region.cells[a.size], off >> SHIFT[a.size]
        before = cells[at]
        values = [x if c is None else c[lane] for x, c in zip(args, columns, strict=True)]
        after = fn(before, *values)
        if after != before:
            cells[at] = after
            changed = True
        old[lane] = before
        w.stored[region.tally] += a.size
        if w.world.detector is not None:
            w.world.detector.access(w, a, region, np.array([off]), np.array([lane]))
    if changed:
        w.world.progress += 1
    elif a.kind == "atom":
        w.poll(a, address.tobytes() if many else address, old.tobytes())
    return old
