"""st.async and red.async: stores and reductions into a cluster's shared memory with completion.

Source: PTX ISA, "st.async", "red.async". Each lane's access completes bytes on an mbarrier that
lies in the same CTA as the destination; the completion policy says when.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.asyncops import AsyncOp, span
from megamoe.runtime.vgpu.atomics import operation
from megamoe.runtime.vgpu.codegen import NAMESPACE, Emitter
from megamoe.runtime.vgpu.errors import SyncError
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.memory import Region
from megamoe.runtime.vgpu.ops import Op, count, make
from megamoe.runtime.vgpu.ops_memory import cells, size_of, the_type
from megamoe.runtime.vgpu.ops_sync import shared_address
from megamoe.runtime.vgpu.ptx_ast import Instruction
from megamoe.runtime.vgpu.sync import active, lane_values, mbarrier_at

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp

_COMBINATIONS = {
    "inc": ("u32",), "dec": ("u32",), "min": ("u32", "s32"), "max": ("u32", "s32"),
    "add": ("u32", "s32", "u64"), "and": ("b32",), "or": ("b32",), "xor": ("b32",),
}  # fmt: skip


def remote_store(
    w: Warp, ins: Instruction, dst: Any, values: list[Any], size: int, bar: Any, reduce: Any
) -> None:
    """One asynchronous store, or reduction if `reduce` is a function (old, new) → bits, a lane."""
    nbytes = size * len(values)
    for lane, (d, b, *bits) in zip(active(w), lane_values(w, dst, bar, *values), strict=True):
        if d >> 24 != b >> 24:
            raise SyncError(
                f"{w.place(lane)}: {ins.opcode}: destination and mbarrier lie in different CTAs"
                f" ({w.source(ins)})"
            )
        region, off = span(w, ins, "shared", d, nbytes, lane, nbytes, write=True)
        op = AsyncOp(
            w, ins, "st.async", partial(list, bits), writer(region, off, size, reduce),
            [(mbarrier_at(w, ins, b), nbytes)], lane,
        )  # fmt: skip
        op.track = (None, 0, nbytes, [(region, off)])
        w.world.submit(op)
    w.world.count_async(ins, nbytes * w.cur.bits.bit_count())


def writer(region: Region, off: int, size: int, reduce: Any) -> Callable[[list[int]], None]:
    """The write side of one lane."""

    def write(bits: list[int]) -> None:
        part = region.data[off : off + size * len(bits)].view(f"u{size}")
        part[:] = bits if reduce is None else [reduce(int(part[0]), bits[0])]

    return write


def remote(ins: Instruction, op: Opcode) -> Op:
    """Decode st.async{.v2,.v4} and red.async."""
    count(ins, 3)
    if not (op.has("shared::cluster") and op.has("mbarrier::complete_tx::bytes")):
        raise unsupported(ins, "needs .shared::cluster and .mbarrier::complete_tx::bytes")
    dst, value, bar = ins.operands
    kind = the_type(ins, op)
    size, items, reduce = size_of(kind), cells(value), None
    if op.family == "red.async":
        name = next((m for m in op.mods if m in _COMBINATIONS), "")
        if kind not in _COMBINATIONS.get(name, ()):
            raise unsupported(ins, f"no operation {name or '(none)'} on {kind}")
        reduce = operation(name, kind)
    width = next((int(m[1]) for m in op.mods if m in ("v2", "v4")), 1)
    if len(items) != width or width * size > 16:
        raise unsupported(ins, f"{len(items)} values of {kind}")

    def emit(e: Emitter) -> None:
        d, b = shared_address(e, dst), shared_address(e, bar)
        values = ",".join(e.val(x, f"u{8 * size}") for x in items)
        fn = "None" if reduce is None else e.const(reduce, "F")
        e.line(f"remote_store(w,{e.const(ins, 'I')},{d},[{values}],{size},{b},{fn})")

    return make(ins, emit, 0, pure=False)


NAMESPACE["remote_store"] = remote_store
DECODERS: dict[str, Decoder] = {"st.async": remote, "red.async": remote}
