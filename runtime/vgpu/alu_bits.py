"""Funnel shifts, bit fields, counts, permutes, three-input logic, dot products."""

from __future__ import annotations

from megamoe.runtime.vgpu.alu import Decoder, simple
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, the_types, uint
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction


def shf(ins: Instruction, op: Opcode) -> Op:
    """Funnel shifts."""
    if op.has("l") == op.has("r") or op.has("wrap") == op.has("clamp"):
        raise unsupported(ins, "needs one of .l .r and one of .wrap .clamp")
    args = f"{{}},{{}},{{}},{op.has('l')},{op.has('wrap')}"
    return simple(ins, "u32", ["u32"] * 3, f"sshf({args})", f"vshf({args})")


def bits(ins: Instruction, op: Opcode) -> Op:
    """Bit fields, counts, permutes and three-input logic."""
    name = op.family
    kinds = [m for m in op.mods if m[0] in "bus" and m[1:].isdigit()]
    kind = kinds[0] if kinds else "b32"
    u, width = uint(kind), int(kind[1:])
    signed = kind[0] == "s"
    if name == "bfe":
        vector = f"vbfe({{}},{{}},{{}},{signed})"
        return simple(ins, u, [u, "u32", "u32"], f"sbfe({{}},{{}},{{}},{width},{signed})", vector)
    if name == "bfi":
        scalar = f"sbfi({{}},{{}},{{}},{{}},{width})"
        return simple(
            ins, u, [u, u, "u32", "u32"], scalar, f"vbfi(widen({{}},U{width // 8}),{{}},{{}},{{}})"
        )
    if name == "bfind":
        tail = f"{signed},{op.has('shiftamt')}"
        return simple(ins, "u32", [u], f"sbfind({{}},{width},{tail})", f"vbfind({{}},{tail})")
    if name == "brev":
        return simple(ins, u, [u], f"brev({{}},{width})", "vbrev({})")
    if name == "clz":
        return simple(ins, "u32", [u], f"{width}-{{}}.bit_length()", "vclz({})")
    if name == "popc":
        return simple(ins, "u32", [u], "({}).bit_count()", "vpopc({})")
    if name == "prmt":
        mode = next((m for m in op.mods if m != "b32"), "")
        args = f"{{}},{{}},{{}},{mode!r}"
        return simple(ins, "u32", ["u32"] * 3, f"sprmt({args})", f"vprmt({args})")
    if name == "lop3":
        if not isinstance(ins.operands[-1], Imm):
            raise unsupported(ins, "the table must be an immediate")
        args = "{},{},{},{}"
        return simple(ins, "u32", ["u32"] * 4, f"slop3({args})", f"lop3({args})")
    raise unsupported(ins, "not supported")


def dot(ins: Instruction, op: Opcode) -> Op:
    """dp4a and dp2a."""
    a, b = the_types(ins, op, 2)
    n = 4 if op.family == "dp4a" else 2
    args = f"{{}},{{}},{{}},{a == 's32'},{b == 's32'},{n},{int(op.has('hi'))}"
    return simple(ins, "u32", ["u32"] * 3, None, f"dp({args})")


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("lop3", "bfe", "bfi", "bfind", "brev", "clz", "popc", "prmt"), bits),
    "shf": shf,
    "dp4a": dot,
    "dp2a": dot,
}
