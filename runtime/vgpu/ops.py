"""A decoded instruction: what it reads and writes, and how its code is emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from megamoe.runtime.vgpu.codegen import Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ptx_ast import Instruction, Label, Mem, Not, Pair, Reg, Vec

TYPES = {
    "b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64",
    "f16", "f16x2", "bf16", "bf16x2", "f32", "f64", "pred",
}  # fmt: skip


@dataclass
class Op:
    """One instruction, decoded.

    ``sync``: a block starts here, because it may have to wait for ``lanes`` of its own warp or
    (``wait``) for others.
    ``alone``: the block holds nothing else. ``targets``: where a branch goes (instruction
    numbers), chosen by ``index`` if there are several; ``ends``: control never falls through.
    ``direct``: registers it takes from the register file itself.
    """

    ins: Instruction
    emit: Callable[[Emitter], None]
    reads: set[int] = field(default_factory=set)
    writes: set[int] = field(default_factory=set)
    sync: str = ""
    alone: bool = False
    targets: tuple[int, ...] = ()
    index: Reg | None = None
    ends: bool = False
    pure: bool = True
    direct: set[int] = field(default_factory=set)


def registers(operand: object) -> Iterable[Reg]:
    """All registers inside an operand."""
    if isinstance(operand, Reg):
        yield operand
    elif isinstance(operand, Vec):
        for item in operand.items:
            yield from registers(item)
    elif isinstance(operand, Pair):
        yield from registers(operand.first)
        yield from registers(operand.second)
    elif isinstance(operand, Not):
        yield from registers(operand.operand)
    elif isinstance(operand, Mem):
        yield from registers(operand.base)
        for item in operand.extra:
            yield from registers(item)


def make(
    ins: Instruction, emit: Callable[[Emitter], None], dests: int = 1, pure: bool = True
) -> Op:
    """An op whose first ``dests`` operands are destinations and the others sources."""
    reads = {r.index for op in ins.operands[dests:] for r in registers(op)}
    writes = {r.index for op in ins.operands[:dests] for r in registers(op)}
    if any(isinstance(op, Label) for op in ins.operands):
        raise unsupported(ins, "a label is not a value")
    return Op(ins, emit, reads, writes, pure=pure)


def count(ins: Instruction, *allowed: int) -> None:
    """Refuse a wrong number of operands."""
    if len(ins.operands) not in allowed:
        raise unsupported(ins, f"{len(ins.operands)} operands, allowed: {allowed}")


def the_types(ins: Instruction, op: Opcode, n: int) -> list[str]:
    """The type modifiers in order; refuses another number of them."""
    found = [m for m in op.mods if m in TYPES]
    if len(found) != n:
        raise unsupported(ins, f"needs {n} type modifiers")
    return found


def uint(kind: str) -> str:
    """The unsigned form of a type: ``b32``, ``s32`` → ``u32``; ``pred`` → ``p``."""
    return "p" if kind == "pred" else f"u{kind[1:]}"


def form(kind: str) -> str:
    """The form in which a type is computed: ``b32`` → ``u32``, others as they are."""
    return uint(kind) if kind[0] in "p" or (kind[0] == "b" and kind[1] != "f") else kind


def mask_of(kind: str) -> int:
    """All ones of the type's width."""
    return (1 << int(kind[1:])) - 1
