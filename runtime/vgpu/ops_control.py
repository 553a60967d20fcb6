"""Branches, exit, and operations between the lanes of a warp."""

from __future__ import annotations

from dataclasses import replace

from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, make
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction, Label, Not, Pair, Reg, Sink, Vec


def branch(ins: Instruction, op: Opcode) -> Op:
    """bra."""
    count(ins, 1)
    (label,) = ins.operands
    if not isinstance(label, Label):
        raise unsupported(ins, "the target is not a label of this kernel")
    made = Op(ins, lambda e: None, targets=(label.target,), ends=ins.guard is None, pure=False)
    if ins.guard is not None:
        made.reads.add(ins.guard.index)
    return made


def branch_table(ins: Instruction, op: Opcode) -> Op:
    """brx.idx: the index chooses one of the labels of a .branchtargets list."""
    count(ins, 2)
    index, table = ins.operands
    if ins.guard is not None or not isinstance(index, Reg) or not isinstance(table, Vec):
        raise unsupported(ins, "needs an index register and a .branchtargets list")
    targets = tuple(x.target for x in table.items)
    return Op(
        ins, lambda e: None, {index.index}, targets=targets, index=index, ends=True, pure=False
    )


def skip(ins: Instruction) -> Op:
    """The branch that stands for the guard of an instruction that is not plain arithmetic."""
    around = replace(ins, guard_negated=not ins.guard_negated, index=-1, operands=[])
    made = Op(around, lambda e: None, targets=(ins.index + 1,), pure=False)
    assert ins.guard is not None
    made.reads.add(ins.guard.index)
    return made


def leave(ins: Instruction, op: Opcode) -> Op:
    """ret and exit."""
    return Op(ins, lambda e: e.line("return -2"), ends=True, pure=False)


def trap(ins: Instruction, op: Opcode) -> Op:
    """trap and brkpt stop the run with an error."""
    return Op(
        ins, lambda e: e.line(f"w.trap({e.const(ins, 'I')})"), pure=False, sync="wait", alone=True
    )


def nothing(ins: Instruction, op: Opcode) -> Op:
    """Instructions without a functional effect."""
    return Op(ins, lambda e: None)


def nanosleep(ins: Instruction, op: Opcode) -> Op:
    """nanosleep ends the warp's turn."""
    return make(ins, lambda e: e.line("w.stop=True"), dests=0, pure=False)


def lanes_op(ins: Instruction, emit, dests: int = 1) -> Op:
    """An op that needs the lanes of its member mask, which is its last operand."""

    def guarded(e: Emitter) -> None:
        if not e.full:
            mask = e.val(ins.operands[-1], "u32") if e.scalar(ins.operands[-1]) else "w.cur.bits"
            e.line(f"if w.lanes_missing({mask}): return -1")
        emit(e)

    made = make(ins, guarded, dests, pure=False)
    made.sync = "lanes"
    return made


def pair(operand: object) -> tuple[object, object]:
    """``d|p`` or ``d`` as two destinations."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


def member_bits(e: Emitter, operand: object) -> str:
    """The lanes that take part: those of the mask that are active here."""
    here = "0xFFFFFFFF" if e.full else "w.cur.bits"
    if not e.scalar(operand):
        return here
    value = e.val(operand, "u32")
    return here if value == "4294967295" else f"({value}&{here})"


def elect(ins: Instruction, op: Opcode) -> Op:
    """elect.sync: the lowest lane."""
    count(ins, 2)
    d, p = pair(ins.operands[0])

    def emit(e: Emitter) -> None:
        bits = member_bits(e, ins.operands[1])
        if bits == "0xFFFFFFFF":
            e.put(d, "0", "u32", True)
            e.put(p, "LANE_IS[0]", "p", False)
            return
        leader = e.tmp(f"(({bits})&-({bits})).bit_length()-1")
        e.put(d, leader, "u32", True)
        e.put(p, f"LANE_IS[{leader}]", "p", False)

    return lanes_op(ins, emit)


def vote(ins: Instruction, op: Opcode) -> Op:
    """vote.sync in its four modes."""
    count(ins, 3)
    d, src, mask = ins.operands
    negate = isinstance(src, Not)
    src = src.operand if isinstance(src, Not) else src
    mode = op.mods[0]

    def emit(e: Emitter) -> None:
        bits = e.tmp(member_bits(e, mask))
        p = e.val(src, "p")
        if negate:
            p = f"(not {p})" if e.scalar(src) else f"(~{p})"
        got = e.tmp(f"ballot({p},{bits})")
        if mode == "ballot":
            e.put(d, got, "u32", True)
        else:
            test = {"all": f"{got}=={bits}", "any": f"{got}!=0", "uni": f"{got} in (0,{bits})"}
            e.put(d, test[mode], "p", True)

    return lanes_op(ins, emit)


def match(ins: Instruction, op: Opcode) -> Op:
    """match.any and match.all."""
    count(ins, 3)
    d, p = pair(ins.operands[0])
    u = "u" + op.mods[-1][1:]

    def emit(e: Emitter) -> None:
        bits = e.tmp(member_bits(e, ins.operands[2]))
        if op.family == "match.any.sync":
            if e.scalar(ins.operands[1]):
                e.put(d, bits, "u32", True)
            else:
                e.put(d, f"match_any({e.vec(ins.operands[1], u)},{bits})", "u32", False)
            return
        same = e.tmp(f"match_all({e.vec(ins.operands[1], u)},{bits})")
        e.put(d, f"{bits} if {same} else 0", "u32", True)
        e.put(p, same, "p", True)

    return lanes_op(ins, emit)


def shfl(ins: Instruction, op: Opcode) -> Op:
    """shfl.sync."""
    count(ins, 5)
    d, p = pair(ins.operands[0])
    src, b, c = ins.operands[1:4]
    mode = op.mods[0]
    if mode not in ("idx", "up", "down", "bfly"):
        raise unsupported(ins, "needs a mode")

    def emit(e: Emitter) -> None:
        plain = isinstance(p, Sink)
        if plain and e.scalar(src):
            e.put(d, e.val(src, "u32"), "u32", True)
            return
        whole = isinstance(c, Imm) and c.value == 31
        if mode == "idx" and plain and whole and e.scalar(b):
            lane = e.val(b, "u32")
            lane = str(int(lane) & 31) if lane.isdigit() else f"{lane}&31"
            e.put(d, f"{e.vec(src, 'u32')}.item({lane})", "u32", True)
            return
        pairname = e.tmp(
            f"shuffle({e.vec(src, 'u32')},{mode!r},{e.val(b, 'u32')},{e.val(c, 'u32')})"
        )
        e.put(d, f"{pairname}[0]", "u32", False)
        e.put(p, f"{pairname}[1]", "p", False)

    return lanes_op(ins, emit)


def redux(ins: Instruction, op: Opcode) -> Op:
    """redux.sync."""
    count(ins, 3)
    kind = op.mods[-1]
    form = "s32" if kind == "s32" else "u32"

    def emit(e: Emitter) -> None:
        bits = member_bits(e, ins.operands[2])
        x = e.vec(ins.operands[1], form)
        e.put(ins.operands[0], f"redux({x},{op.mods[0]!r},{bits},{form == 's32'})", "u32", True)

    return lanes_op(ins, emit)


def activemask(ins: Instruction, op: Opcode) -> Op:
    """activemask."""
    return make(ins, lambda e: e.put(ins.operands[0], "w.cur.bits", "u32", True), pure=False)


def warp_sync(ins: Instruction, op: Opcode) -> Op:
    """bar.warp.sync: lanes of the mask may wait at different instructions."""
    count(ins, 1)

    def emit(e: Emitter) -> None:
        mask = ins.operands[0]
        value = e.val(mask, "u32") if e.scalar(mask) else "w.cur.bits"
        if e.full:
            e.line(f"w.warp_synced({e.const(ins, 'I')})")
        else:
            e.line(f"if w.warp_sync({value},{e.const(ins, 'I')}): return -1")

    made = make(ins, emit, dests=0, pure=False)
    made.sync = "lanes"
    return made


DECODERS: dict[str, Decoder] = {
    "bra": branch, "brx.idx": branch_table, "ret": leave, "exit": leave, "trap": trap,
    "brkpt": trap, "pmevent": nothing, "nanosleep": nanosleep, "elect.sync": elect,
    "vote.sync": vote, "match.any.sync": match, "match.all.sync": match, "shfl.sync": shfl,
    "redux.sync": redux, "activemask": activemask, "bar.warp.sync": warp_sync,
}  # fmt: skip
