"""tensormap.replace and tensormap.cp_fenceproxy, on vgpu's own encoding of a tensor map.

Source: PTX ISA, "tensormap.replace", "tensormap.cp_fenceproxy". A map that is being edited may
break the encode rules for a while (a new address before the new sizes), so the fields are changed
as raw numbers; the rules apply when a copy uses the map.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megamoe.runtime.vgpu.access import Access, region_of
from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import NAMESPACE, Emitter
from megamoe.runtime.vgpu.errors import SyncError
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, make
from megamoe.runtime.vgpu.ops_memory import address
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction
from megamoe.runtime.vgpu.sync import active, lane_values
from megamoe.runtime.vgpu.tensormap import BYTES, ENCODED, FIELDS, replaced

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp

_WORD = 16


def space_of(op: Opcode) -> str:
    """The state space an instruction names, else generic."""
    if op.has("shared::cta"):
        return "shared"
    return "global" if op.has("global") else "generic"


def replace(
    w: Warp, ins: Instruction, space: str, where: Any, field: str, index: int, value: Any
) -> None:
    """Change one field of the map that each active lane names."""
    detector = w.world.detector
    load, store = (Access(ins, kind, space, BYTES) for kind in ("ld", "st"))
    for lane, (at, new) in zip(active(w), lane_values(w, where, value), strict=True):
        region, off = region_of(w, load, at, lane)
        try:
            edited = replaced(region.data[off : off + BYTES].tobytes(), field, index, new)
        except ValueError as error:
            raise SyncError(f"{w.place(lane)}: {ins.opcode}: {error} ({w.source(ins)})") from error
        if detector is not None:
            touch(w, load, region, off)
            touch(w, store, region, off)
        region.data[off : off + BYTES] = memoryview(edited)


def touch(w: Warp, a: Access, region: Any, off: int) -> None:
    """Tell the detector of the bytes that hold a map, in words that its shadow memory knows."""
    part = Access(a.ins, a.kind, a.space, _WORD)
    for step in range(0, ENCODED, _WORD):
        w.world.detector.access(w, part, region, off + step, None)  # type: ignore[union-attr]


def copy_and_release(w: Warp, ins: Instruction, target: Any, source: Any) -> None:
    """The warp copies a map from shared to global memory. It is one write of the warp, which each
    of its lanes has behind it (`.sync`), and a release in a pattern with a proxy fence."""
    (dst, src) = lane_values(w, target, source)[0]
    read, write = Access(ins, "ld", "shared", BYTES), Access(ins, "st", "global", BYTES)
    from_region, from_off = region_of(w, read, src)
    to_region, to_off = region_of(w, write, dst)
    if w.world.detector is not None:
        touch(w, read, from_region, from_off)
        touch(w, write, to_region, to_off)
        w.world.detector.warp_sync(w, ins, w.cur.bits)
    data = from_region.data[from_off : from_off + BYTES]
    to_region.data[to_off : to_off + BYTES] = data
    w.stored[to_region.tally] += BYTES


def decode_replace(ins: Instruction, op: Opcode) -> Op:
    """tensormap.replace.tile.field{.space}.b1024.type [map], {ord,} value."""
    field = next((m for m in op.mods if m in FIELDS), "")
    if not field or not op.has("tile") or not op.has("b1024"):
        raise unsupported(ins, f"fields are {', '.join(FIELDS)}, in .tile mode")
    indexed = FIELDS[field] > 1
    count(ins, 3 if indexed else 2)
    where, *rest = ins.operands
    index = 0
    if indexed:
        if not isinstance(rest[0], Imm):
            raise unsupported(ins, "the ordinal must be an immediate")
        index = rest[0].value
    kind = "u64" if op.has("b64") else "u32"

    def emit(e: Emitter) -> None:
        at, value = address(e, where, False)[0], e.val(rest[-1], kind)
        e.line(
            f"tensormap_replace(w,{e.const(ins, 'I')},{space_of(op)!r},{at},{field!r},{index},"
            f"{value})"
        )

    return make(ins, emit, 0, pure=False)


def decode_copy(ins: Instruction, op: Opcode) -> Op:
    """tensormap.cp_fenceproxy.global.shared::cta...sync.aligned [to], [from], 128."""
    count(ins, 3)
    target, source, size = ins.operands
    if not isinstance(size, Imm) or size.value != BYTES:
        raise unsupported(ins, "the size must be 128")

    def emit(e: Emitter) -> None:
        if not e.full:
            e.line(f"if w.lanes_missing({0xFFFFFFFF}): return -1")
        to, at = address(e, target, False)[0], address(e, source, False)[0]
        e.line(f"tensormap_copy(w,{e.const(ins, 'I')},{to},{at})")

    made = make(ins, emit, 0, pure=False)
    made.sync = "lanes"
    return made


NAMESPACE["tensormap_replace"] = replace
NAMESPACE["tensormap_copy"] = copy_and_release
DECODERS: dict[str, Decoder] = {
    "tensormap.replace": decode_replace,
    "tensormap.cp_fenceproxy": decode_copy,
}
