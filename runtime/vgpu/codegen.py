"""Straight-line PTX to Python functions.

A *block* is compiled into one Python function for each combination of value kinds met at run time:
a register that holds the same value in all lanes is a Python ``int`` (or ``bool``), any other a
32-lane numpy array. Warp-uniform code, most of a kernel, so costs no numpy call. Two shapes exist:
``f(R, w)`` for a full warp, ``f(R, w, m)`` for a group of lanes ``m``, which merges results into
the registers that stay live.

Values are kept in *forms* (``u32``, ``s32``, ``f32``...): views are made once and kept in locals.
Arrays are never written after they were made, so registers may share them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu import convert, lanes, lanes_float, lanes_int
from megamoe.runtime.vgpu.isa import unsupported
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction, Reg, Special, Sym

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.program import Program

NAMESPACE: dict[str, Any] = {"convert": convert}
for _module in (lanes, lanes_int, lanes_float):
    NAMESPACE.update({k: v for k, v in vars(_module).items() if not k.startswith("__")})
NAMESPACE["np"] = np

_VIEW = {
    "u16": "U2", "s16": "I2", "f16": "F2", "u32": "U4", "s32": "I4", "f32": "F4",
    "u64": "U8", "s64": "I8", "f64": "F8", "u8": "U1", "s8": "I1", "p": "PB",
}  # fmt: skip
BASE_FORM = {1: "p", 16: "u16", 32: "u32", 64: "u64"}
VECTOR_SPECIALS = {"tid.x", "tid.y", "tid.z", "laneid"} | {
    f"lanemask_{k}" for k in ("eq", "lt", "le", "gt", "ge")
}


def width_of(form: str) -> int:
    """Bits of a form: ``u32`` → 32, ``bf16`` → 16, ``p`` → 1."""
    return 1 if form == "p" else int(form.lstrip("usbf").removesuffix("x2"))


class InFlight:
    """Stands in an accumulator register while an asynchronous wgmma owns it."""

    def __repr__(self) -> str:
        return "<wgmma in flight>"


IN_FLIGHT = InFlight()


class AccRow:
    """An accumulator register after a wgmma: cut out of the product when it is read."""

    __slots__ = ("index", "tile", "warp")

    def __init__(self, tile: Any, warp: int, index: int) -> None:
        self.tile, self.warp, self.index = tile, warp, index

    def array(self) -> np.ndarray:
        """The 32 lanes of the register."""
        return self.tile.row(self.warp, self.index)


class Val:
    """What a register holds at this point of the code being emitted."""

    __slots__ = ("forms", "scalar")

    def __init__(self, scalar: bool, forms: dict[str, str]) -> None:
        self.scalar = scalar
        self.forms = forms


class Emitter:
    """Collects the lines of one function."""

    def __init__(self, program: Program, full: bool, types: dict[int, type]) -> None:
        self.program = program
        self.full = full
        self.types = types
        self.lines: list[str] = []
        self.vals: dict[int, Val] = {}
        self.dirty: dict[int, Reg] = {}
        self.n = 0
        self.ins: Instruction | None = None

    # -- plumbing ----------------------------------------------------------------------------
    def line(self, text: str) -> None:
        """Append one line of the function's body."""
        self.lines.append(text)

    def tmp(self, expr: str) -> str:
        """Assign an expression to a fresh local and return its name."""
        self.n += 1
        name = f"t{self.n}"
        self.lines.append(f"{name}={expr}")
        return name

    def const(self, value: Any, stem: str = "K") -> str:
        """A name, in the functions' globals, for a Python object."""
        return self.program.constant(value, stem)

    @property
    def mask(self) -> str:
        """The expression for the active lanes: ``None`` means all."""
        return "None" if self.full else "m"

    # -- reading -----------------------------------------------------------------------------
    def reg(self, r: Reg) -> Val:
        """The value of a register, loaded from the register file on first use."""
        v = self.vals.get(r.index)
        if v is None:
            kind = self.types.get(r.index, np.ndarray)
            if kind is InFlight:
                # Reported when this code runs, not when it is compiled.
                self.line(f"w.accumulator_in_flight({r.name!r}, {self.const(self.ins, 'I')})")
            row = kind is AccRow
            name = self.tmp(f"R[{r.index}].array()" if row else f"R[{r.index}]")
            scalar = kind is int or kind is bool
            v = self.vals[r.index] = Val(scalar, {BASE_FORM[r.width]: name})
        return v

    def scalar(self, op: object) -> bool:
        """True if the operand has one value for the whole warp, known as a Python number."""
        if isinstance(op, Reg):
            return self.reg(op).scalar
        if isinstance(op, Special):
            return op.name not in VECTOR_SPECIALS
        return isinstance(op, (Imm, Sym))

    def scalars(self, *ops: object) -> bool:
        """True if all operands are scalar."""
        return all(self.scalar(op) for op in ops)

    def val(self, op: object, form: str) -> str:
        """An expression for the operand in the given form, scalar or array as it is."""
        if isinstance(op, Imm):
            return self.immediate(op, form)
        if isinstance(op, Sym):
            return self.program.symbol(op, self.ins)
        if isinstance(op, Special):
            return self.special(op, form)
        if not isinstance(op, Reg):
            assert self.ins is not None
            raise unsupported(self.ins, f"operand {op} is not a value")
        v = self.reg(op)
        found = v.forms.get(form)
        if found is None:
            base = BASE_FORM[op.width]
            if base not in v.forms:
                v.forms[base] = self.tmp(self.to_base(v, op))
            found = v.forms[base]
            if form != base:
                found = self.tmp(self.from_base(found, base, form, v.scalar))
                v.forms[form] = found
        return found

    def vec(self, op: object, form: str) -> str:
        """The operand as a 32-lane array (64 elements for the x2 forms)."""
        if not self.scalar(op):
            return self.val(op, form)
        x2 = form.endswith("x2")
        if form == "p":
            return self.tmp(f"full_p({self.val(op, 'p')})")
        base = "u32" if x2 else f"u{width_of(form)}"
        arr = self.tmp(f"np.full(32,{self.val(op, base)},{_VIEW[base]})")
        return arr if form == base else self.tmp(self.from_base(arr, base, form, False))

    def vecs(self, ops: tuple, form: str) -> list[str]:
        """Several operands in one form, at least one of them as an array."""
        if self.scalars(*ops):
            return [self.vec(ops[0], form), *(self.val(op, form) for op in ops[1:])]
        return [self.val(op, form) for op in ops]

    def immediate(self, op: Imm, form: str) -> str:
        kind, width = form[0], width_of(form)
        bits = op.value
        if kind == "p":
            return str(bool(bits))
        if op.kind == "f64" and form in ("f32", "u32", "f16", "bf16"):
            bits = int(
                np.frombuffer(bits.to_bytes(8, "little"), "<f8").astype("<f4").view("<u4")[0]
            )
        bits &= (1 << width) - 1
        if kind == "u":
            return str(bits)
        if kind == "s":
            return str(bits - (bits >> (width - 1) << width))
        if form == "f32":
            return self.const(np.uint32(bits).view(np.float32))
        if form == "f64":
            return self.const(np.uint64(bits).view(np.float64))
        if form == "f16":
            return self.const(np.uint16(bits).view(np.float16))
        if form == "bf16":
            return self.const(np.uint32(bits << 16).view(np.float32))
        return self.vec(op, form)

    def special(self, op: Special, form: str) -> str:
        if op.name in ("clock", "clock64", "globaltimer", "globaltimer_lo", "clock_hi",
                       "globaltimer_hi"):  # fmt: skip
            return self.tmp(f"w.timer({op.name!r})")
        name = self.tmp(f"w.special[{op.name!r}]")
        if form in ("u32", "b32") or op.name not in VECTOR_SPECIALS:
            return name
        return self.tmp(f"{name}.astype({_VIEW[form]})")

    def from_base(self, x: str, base: str, form: str, scalar: bool) -> str:
        width, have = width_of(form), width_of(base)
        if scalar:
            if form[0] == "u":
                return f"{x}&{(1 << width) - 1}" if width < have else x
            if form[0] == "s":
                cut = f"({x}&{(1 << width) - 1})" if width < have else x
                return f"({cut}^{1 << (width - 1)})-{1 << (width - 1)}"
            if form in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
                return f"scalar_{form}({x})"
        elif form in ("bf16", "bf16x2"):
            return f"bf16_values({x})"
        elif form == "f16x2":
            return f"{x}.view(F2)"
        elif width < have:
            return f"{x}.astype({_VIEW[form]})"
        elif width == have:
            return f"{x}.view({_VIEW[form]})"
        assert self.ins is not None
        raise unsupported(self.ins, f"a {have}-bit register where {form} is needed")

    def to_base(self, v: Val, r: Reg) -> str:
        form, x = next(iter(v.forms.items()))
        if v.scalar:
            return f"{x}&{(1 << r.width) - 1}" if form[0] == "s" else x
        if form in ("bf16", "bf16x2"):
            return f"bf16_bits({x})" if form == "bf16" else f"bf16_bits({x}).view(U4)"
        return f"{x}.view({_VIEW[BASE_FORM[r.width]]})"

    # -- writing -----------------------------------------------------------------------------
    def put(self, dst: object, expr: str, form: str, scalar: bool) -> None:
        """Assign a result to a register (nothing happens for ``_``)."""
        if not isinstance(dst, Reg):
            return
        width = 32 if form.endswith("x2") else width_of(form)
        if width != dst.width:
            base = BASE_FORM[dst.width]
            if scalar:
                expr = f"({expr})&{(1 << dst.width) - 1}"
            else:
                wide = base if form[0] == "u" or dst.width < width else f"s{dst.width}"
                expr = f"({expr}).astype({_VIEW[wide]})"
                base = wide
            form = base
        new = Val(scalar, {form: self.tmp(expr)})
        assert self.ins is not None
        if self.ins.guard is not None:
            new = self.guarded(dst, new)
        self.vals[dst.index] = new
        self.dirty[dst.index] = dst

    def guarded(self, dst: Reg, new: Val) -> Val:
        """Keep the old value where the guard is false."""
        assert self.ins is not None
        guard = self.ins.guard
        old, base = self.reg(dst), BASE_FORM[dst.width]
        if base not in new.forms:
            new.forms[base] = self.tmp(self.to_base(new, dst))
        a, b = new.forms[base], self.val(dst, base)
        p = self.val(guard, "p")
        if self.ins.guard_negated:
            a, b = b, a
        if self.scalar(guard):
            if new.scalar == old.scalar:
                return Val(new.scalar, {base: self.tmp(f"{a} if {p} else {b}")})
            dt = _VIEW[base]
            return Val(False, {base: self.tmp(f"widen({a} if {p} else {b},{dt})")})
        return Val(False, {base: self.tmp(f"choose({p},{a},{b},{_VIEW[base]})")})

    def spill(self, regs: list[Reg]) -> None:
        """Store registers that an operation reads straight from the register file."""
        wanted = {r.index for r in regs}
        self.flush(lambda index: index in wanted)

    def forget(self, regs: list[Reg]) -> None:
        """Registers whose value now lives in the register file only."""
        for r in regs:
            self.vals.pop(r.index, None)
            self.dirty.pop(r.index, None)

    def in_flight(self, regs: list[Reg]) -> None:
        """Registers that an asynchronous wgmma owns from here on."""
        self.forget(regs)
        for r in regs:
            self.types[r.index] = InFlight

    def flush(self, only: Callable[[int], bool]) -> None:
        """Store changed registers that satisfy ``only`` into the register file."""
        for index, r in self.dirty.items():
            if not only(index):
                continue
            base = BASE_FORM[r.width]
            v = self.vals[index]
            if base not in v.forms:
                v.forms[base] = self.tmp(self.to_base(v, r))
            x = v.forms[base]
            if self.full:
                self.line(f"R[{index}]={x}")
            else:
                self.line(f"R[{index}]=merge(m,{x},R[{index}],{_VIEW[base]})")

    def function(self, name: str) -> str:
        """The source of the function."""
        head = f"def {name}(R,w):" if self.full else f"def {name}(R,w,m):"
        return "\n ".join([head, *(self.lines or ["pass"])]) + "\n"
