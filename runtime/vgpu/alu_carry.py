"""Extended-precision arithmetic: add.cc, addc, sub.cc, subc, mad.cc, madc.

The carry bit is a register of its own, slot 0 of the register file.
"""

from __future__ import annotations

from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, make, mask_of, the_types, uint
from megamoe.runtime.vgpu.ptx_ast import Instruction, Reg

CARRY = Reg(0, 1, "%carry")


def product(e: Emitter, ins: Instruction, kind: str, high: bool, scalar: bool) -> str:
    """The low or high half of the product of the first two sources, as raw bits."""
    a, b = ins.operands[1:3]
    u, bits = uint(kind), int(kind[1:])
    if scalar:
        x, y = e.val(a, kind), e.val(b, kind)
        return e.tmp(f"({x}*{y}>>{bits if high else 0})&{mask_of(u)}")
    if not high:
        return e.tmp(f"{e.vec(a, u)}*{e.val(b, u)}")
    x, y = e.vec(a, kind), e.val(b, kind)
    if bits == 64:
        return e.tmp(f"mulhi({x},{y},{kind[0] == 's'})")
    wide = "I8" if kind[0] == "s" else "U8"
    return e.tmp(f"(np.multiply({x},{y},dtype={wide})>>32).astype(U4)")


def chain(ins: Instruction, op: Opcode) -> Op:
    """One link: reads the carry if the name ends in c, writes it under .cc."""
    (kind,) = the_types(ins, op, 1)
    mad = op.family.startswith("mad")
    count(ins, 4 if mad else 3)
    high = op.has("hi") or ".hi" in op.family
    if mad and high == (op.has("lo") or ".lo" in op.family):
        raise unsupported(ins, "needs .lo or .hi")
    u, m = uint(kind), mask_of(uint(kind))
    if u not in ("u32", "u64"):
        raise unsupported(ins, "32 and 64 bits only")
    sign = "-" if op.family.startswith("sub") else "+"
    takes = op.family in ("addc", "subc", "madc")
    gives = op.has("cc") or op.family.endswith(".cc")
    dst, second = ins.operands[0], ins.operands[-1]

    def emit(e: Emitter) -> None:
        scalar = e.scalars(*ins.operands[1:], *([CARRY] if takes else []))
        if mad:
            x = product(e, ins, kind, high, scalar)
        else:
            x = e.val(ins.operands[1], u) if scalar else e.vec(ins.operands[1], u)
        if scalar:
            c = f"{sign}{e.val(CARRY, 'p')}" if takes else ""
            total = e.tmp(f"{x}{sign}{e.val(second, u)}{c}")
            e.put(dst, f"{total}&{m}", u, True)
            if gives:
                e.put(CARRY, f"{total}<0" if sign == "-" else f"{total}>{m}", "p", True)
            return
        y = e.vec(second, u)
        total = e.tmp(f"{x}{sign}{y}")
        out = e.tmp(f"{total}<{x}" if sign == "+" else f"{x}<{y}")
        if takes:
            c = e.tmp(f"{e.vec(CARRY, 'p')}.astype({x}.dtype)")
            more = e.tmp(f"{total}{sign}{c}")
            out = e.tmp(f"{out}|({more}<{total})" if sign == "+" else f"{out}|({total}<{c})")
            total = more
        e.put(dst, total, u, False)
        if gives:
            e.put(CARRY, out, "p", False)

    made = make(ins, emit)
    if takes:
        made.reads.add(CARRY.index)
    if gives:
        made.writes.add(CARRY.index)
    return made


DECODERS: dict[str, Decoder] = dict.fromkeys(
    ("add.cc", "sub.cc", "addc", "subc", "mad.lo.cc", "mad.hi.cc", "madc"), chain
)
