"""Integer, logic, shift, compare, select and move instructions."""

from __future__ import annotations

from collections.abc import Callable

from megamoe.runtime.vgpu.codegen import BASE_FORM, Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, form, make, mask_of, the_types, uint
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction, Not, Pair, Reg, Sink, Vec

Decoder = Callable[[Instruction, Opcode], Op]


def simple(ins: Instruction, dform: str, forms: list[str], scalar: str | None, vector: str) -> Op:
    """An op of ``{a} {b} {c}`` templates: Python numbers if all sources are, else arrays."""
    count(ins, 1 + len(forms))
    dst, srcs = ins.operands[0], ins.operands[1:]

    def emit(e: Emitter) -> None:
        if scalar is not None and e.scalars(*srcs):
            args = [e.val(s, f) for s, f in zip(srcs, forms, strict=True)]
            e.put(dst, scalar.format(*args), dform, True)
            return
        if e.scalars(*srcs[:2]):
            # Two numbers would be combined without wrapping before they meet an array.
            args = [e.vec(srcs[0], forms[0])]
            args += [e.val(s, f) for s, f in zip(srcs[1:], forms[1:], strict=True)]
        else:
            args = [e.val(s, f) for s, f in zip(srcs, forms, strict=True)]
        e.put(dst, vector.format(*args), dform, False)

    return make(ins, emit)


def add_sub(ins: Instruction, op: Opcode) -> Op:
    """add and sub of integers, with optional saturation."""
    sign = "+" if op.family == "add" else "-"
    (kind,) = the_types(ins, op, 1)
    if op.has("sat"):
        if kind != "s32":
            raise unsupported(ins, ".sat exists for s32 only")
        expr = f"max(-2147483648,min(2147483647,{{}}{sign}{{}}))"
        wide = f"np.clip({{}}.astype(I8){sign}{{}},-2147483648,2147483647).astype(I4)"
        return simple(ins, "s32", ["s32", "s32"], expr, wide)
    u = uint(kind)
    return simple(ins, u, [u, u], f"({{}}{sign}{{}})&{mask_of(u)}", f"{{}}{sign}{{}}")


_WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_CAST = {"u32": "U4", "s32": "I4", "u64": "U8", "s64": "I8"}


def mul(ins: Instruction, op: Opcode) -> Op:
    """mul and mad: lo, hi, wide."""
    (kind,) = the_types(ins, op, 1)
    mad = op.family == "mad"
    plus = "+{}" if mad else ""
    if op.has("lo"):
        u = uint(kind)
        forms = [u] * (3 if mad else 2)
        if op.has("sat"):
            raise unsupported(ins, ".sat is not supported")
        return simple(ins, u, forms, f"({{}}*{{}}{plus})&{mask_of(u)}", f"{{}}*{{}}{plus}")
    if op.has("wide"):
        wide = _WIDER.get(kind)
        if wide is None:
            raise unsupported(ins, "no .wide form")
        u = uint(wide)
        forms = [kind, kind] + ([u] if mad else [])
        view = f".view({_CAST[u]})"
        vector = f"np.multiply({{}},{{}},dtype={_CAST[wide]}){view}{plus}"
        return simple(ins, u, forms, f"({{}}*{{}}{plus})&{mask_of(u)}", vector)
    if not op.has("hi"):
        raise unsupported(ins, "needs .lo, .hi or .wide")
    u, bits = uint(kind), int(kind[1:])
    forms = [kind, kind] + ([u] if mad else [])
    if bits == 64:
        vector = f"mulhi({{}},{{}},{kind[0] == 's'}){plus}"
    else:
        wide = _WIDER[kind]
        vector = f"(np.multiply({{}},{{}},dtype={_CAST[wide]})>>{bits}).astype(U{bits // 8}){plus}"
    return simple(ins, u, forms, f"(({{}}*{{}}>>{bits}){plus})&{mask_of(u)}", vector)


def mul24(ins: Instruction, op: Opcode) -> Op:
    """24-bit multiplication."""
    (kind,) = the_types(ins, op, 1)
    mad = op.family == "mad24"
    cut = "({}&16777215)" if kind == "u32" else "((({}&16777215)^8388608)-8388608)"
    wide = "U8" if kind == "u32" else "I8"
    shift = 16 if op.has("hi") else 0
    vector = f"((({cut}).astype({wide})*({cut}))>>{shift}).astype(U4)" + ("+{}" if mad else "")
    return simple(ins, "u32", [kind, kind] + (["u32"] if mad else []), None, vector)


def div_rem(ins: Instruction, op: Opcode) -> Op:
    """Integer division and remainder; by zero the result is unspecified, here all ones."""
    (kind,) = the_types(ins, op, 1)
    u, div = uint(kind), op.family == "div"
    m = mask_of(u)
    if kind[0] == "u":
        scalar = f"({{0}}//{{1}} if {{1}} else {m})" if div else "({0}%{1} if {1} else {0})"
        return simple(ins, u, [u, u], scalar, "{}//{}" if div else "{}%{}")
    scalar = f"{'sdiv' if div else 'srem'}({{}},{{}})&{m}"
    return simple(ins, kind, [kind, kind], scalar, f"{'vsdiv' if div else 'vsrem'}({{}},{{}})")


def min_max(ins: Instruction, op: Opcode) -> Op:
    """Integer min and max."""
    (kind,) = the_types(ins, op, 1)
    fn = op.family
    if op.has("relu"):
        if kind != "s32":
            raise unsupported(ins, ".relu exists for s32 only")
        expr = f"max({fn}({{}},{{}}),0)"
        return simple(ins, kind, [kind] * 2, expr, f"maximum({fn}imum({{}},{{}}),0)")
    return simple(ins, kind, [kind] * 2, f"{fn}({{}},{{}})", f"{fn}imum({{}},{{}})")


def abs_neg(ins: Instruction, op: Opcode) -> Op:
    """Integer abs and neg."""
    (kind,) = the_types(ins, op, 1)
    u = uint(kind)
    if op.family == "abs":
        return simple(ins, kind, [kind], f"abs({{}})&{mask_of(u)}", "np.abs({})")
    return simple(ins, u, [u], f"-{{}}&{mask_of(u)}", "np.negative({})")


def sad(ins: Instruction, op: Opcode) -> Op:
    """Sum of absolute differences."""
    (kind,) = the_types(ins, op, 1)
    u = uint(kind)
    vector = "np.where({0}<{1},{1}-{0},{0}-{1})"
    cast = f".view(U{int(kind[1:]) // 8})" if kind[0] == "s" else ""
    return simple(
        ins, u, [kind, kind, u], f"(abs({{}}-{{}})+{{}})&{mask_of(u)}", vector + cast + "+{2}"
    )


def logic(ins: Instruction, op: Opcode) -> Op:
    """and, or, xor, not, cnot."""
    (kind,) = the_types(ins, op, 1)
    f = uint(kind)
    if op.family == "not":
        scalar = "not {}" if f == "p" else f"~{{}}&{mask_of(f)}"
        return simple(ins, f, [f], scalar, "~{}")
    if op.family == "cnot":
        return simple(ins, f, [f], "int({}==0)", f"({{}}==0).astype(U{int(kind[1:]) // 8})")
    sign = {"and": "&", "or": "|", "xor": "^"}[op.family]
    return simple(ins, f, [f, f], f"{{}}{sign}{{}}", f"{{}}{sign}{{}}")


def shift(ins: Instruction, op: Opcode) -> Op:
    """shl and shr; amounts beyond the width give 0 or the sign, in numpy as in PTX."""
    (kind,) = the_types(ins, op, 1)
    count(ins, 3)
    dst, a, b = ins.operands
    f, u, width = form(kind), uint(kind), int(kind[1:])
    left = op.family == "shl"

    def emit(e: Emitter) -> None:
        n = e.val(b, "u32")
        if e.scalars(a, b):
            x = e.val(a, f)
            if left:
                e.put(dst, f"({x}<<min({n},{width}))&{mask_of(u)}", u, True)
            else:
                e.put(dst, f"{x}>>min({n},{width})", f, True)
            return
        x = e.vec(a, f)
        if not e.scalar(b):
            # Same type on both sides, or numpy would compute in the wider or signed one.
            n = f"np.minimum({n},{width}).astype({x}.dtype)"
        elif isinstance(b, Imm):
            n = str(min(int(n), width))
        else:
            n = f"min({n},{width})"
        e.put(dst, f"{x}{'<<' if left else '>>'}{n}", f, False)

    return make(ins, emit)


_COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_FLOAT_COMPARE = {
    "eq": "{a}=={b}", "ne": "({a}<{b})|({a}>{b})", "lt": "{a}<{b}", "le": "{a}<={b}",
    "gt": "{a}>{b}", "ge": "{a}>={b}", "equ": "~(({a}<{b})|({a}>{b}))", "neu": "{a}!={b}",
    "ltu": "~({a}>={b})", "leu": "~({a}>{b})", "gtu": "~({a}<={b})", "geu": "~({a}<{b})",
    "num": "({a}=={a})&({b}=={b})", "nan": "({a}!={a})|({b}!={b})",
}  # fmt: skip


def compare(ins: Instruction, op: Opcode) -> Op:
    """setp and set, with an optional boolean combination."""
    is_set = op.family == "set"
    mods = [m for m in op.mods if m != "ftz"]
    cmp = mods[0]
    boolop = mods[1] if mods[1] in ("and", "or", "xor") else ""
    kinds = mods[2:] if boolop else mods[1:]
    if len(kinds) != (2 if is_set else 1) or cmp not in {*_COMPARE, *_FLOAT_COMPARE}:
        raise unsupported(ins, "modifiers in an unknown order")
    kind = kinds[-1]
    is_float = kind[0] == "f" or kind.startswith("bf")
    if kind.endswith("x2") or (is_float and cmp not in _FLOAT_COMPARE):
        raise unsupported(ins, f"comparison .{cmp}.{kind} is not supported")
    count(ins, 4 if boolop else 3)
    dst, a, b = ins.operands[:3]
    f = kind if cmp not in ("lo", "ls", "hi", "hs") else uint(kind)
    f = form(f)
    first, second = (dst.first, dst.second) if isinstance(dst, Pair) else (dst, Sink())

    def emit(e: Emitter) -> None:
        scalar = e.scalars(a, b) and not is_float
        if scalar:
            r = f"{e.val(a, f)}{_COMPARE[cmp]}{e.val(b, f)}"
        elif not is_float:
            x, y = e.vecs((a, b), f)
            r = f"{x}{_COMPARE[cmp]}{y}"
        else:
            x, y = e.vecs((a, b), f)
            r = _FLOAT_COMPARE[cmp].format(a=x, b=y)
        inverse = f"not ({r})" if scalar else f"~({r})"
        if not boolop:
            results = [(first, r, scalar), (second, inverse, scalar)]
        else:
            c = ins.operands[3]
            negate = isinstance(c, Not)
            c = c.operand if isinstance(c, Not) else c
            both = scalar and e.scalar(c)
            p = e.val(c, "p") if both or not e.scalar(c) else e.vec(c, "p")
            if negate:
                p = f"(not {p})" if both else f"(~{p})"
            sign = {"and": "&", "or": "|", "xor": "^"}[boolop]
            if scalar and not both:
                r, inverse = f"full_p({r})", f"full_p({inverse})"
            results = [(first, f"({r}){sign}{p}", both), (second, f"({inverse}){sign}{p}", both)]
        for reg, expr, is_scalar in results:
            if isinstance(reg, Sink):
                continue
            if not is_set:
                e.put(reg, expr, "p", is_scalar)
            elif kinds[0] == "f32":
                e.put(reg, f"widen({expr},PB).astype(F4)", "f32", False)
            elif is_scalar:
                e.put(reg, f"{0xFFFFFFFF} if {expr} else 0", "u32", True)
            else:
                e.put(reg, f"np.where({expr},U4(0xFFFFFFFF),U4(0))", "u32", False)

    return make(ins, emit)


def select(ins: Instruction, op: Opcode) -> Op:
    """selp and slct."""
    slct = op.family == "slct"
    kind = the_types(ins, op, 2 if slct else 1)
    count(ins, 4)
    dst, a, b, p = ins.operands
    u = uint(kind[0]) if kind[0][0] != "f" else f"u{kind[0][1:]}"

    def emit(e: Emitter) -> None:
        if slct:
            test = f"{e.vec(p, kind[1])}>=0"
            cond, uniform = e.tmp(test), False
        else:
            cond, uniform = e.val(p, "p"), e.scalar(p)
        if uniform and e.scalar(a) == e.scalar(b):
            e.put(dst, f"{e.val(a, u)} if {cond} else {e.val(b, u)}", u, e.scalar(a))
        elif uniform:
            e.put(dst, f"{e.vec(a, u)} if {cond} else {e.vec(b, u)}", u, False)
        else:
            dt = f"U{int(u[1:]) // 8}"
            e.put(dst, f"choose({cond},{e.val(a, u)},{e.val(b, u)},{dt})", u, False)

    return make(ins, emit)


def mov(ins: Instruction, op: Opcode) -> Op:
    """mov between registers, of addresses and special registers, and packing of vectors."""
    (kind,) = the_types(ins, op, 1)
    count(ins, 2)
    dst, src = ins.operands
    if isinstance(dst, Vec):
        return unpack(ins, dst, src)
    if isinstance(src, Vec):
        return pack(ins, dst, src)
    u = "p" if kind == "pred" else f"u{kind.lstrip('usbf').removesuffix('x2')}"
    if kind.endswith("x2"):
        u = "u32"

    def emit(e: Emitter) -> None:
        if isinstance(src, Reg) and isinstance(dst, Reg) and src.width == dst.width \
                and ins.guard is None:  # fmt: skip
            # Share every form already computed: the values are never written in place.
            v = e.reg(src)
            e.vals[dst.index] = type(v)(v.scalar, dict(v.forms))
            e.dirty[dst.index] = dst
            return
        e.put(dst, e.val(src, u), u, e.scalar(src))

    return make(ins, emit)


def pack(ins: Instruction, dst: object, src: Vec) -> Op:
    """mov.b64 d, {lo, hi} and its narrower and longer kin."""
    if not isinstance(dst, Reg) or dst.width % len(src.items):
        raise unsupported(ins, "cannot pack into this destination")
    step, u = dst.width // len(src.items), BASE_FORM[dst.width]
    small = f"u{step}"
    if step < 16:
        raise unsupported(ins, "vectors of bytes are not supported")

    def emit(e: Emitter) -> None:
        if e.scalars(*src.items):
            parts = [f"{e.val(x, small)}<<{i * step}" for i, x in enumerate(src.items)]
            e.put(dst, "|".join(f"({p})" for p in parts), u, True)
            return
        out = e.tmp(f"np.empty((32,{len(src.items)}),U{step // 8})")
        for i, x in enumerate(src.items):
            e.line(f"{out}[:,{i}]={e.val(x, small)}")
        e.put(dst, f"{out}.view(U{dst.width // 8}).ravel()", u, False)

    return make(ins, emit)


def unpack(ins: Instruction, dst: Vec, src: object) -> Op:
    """mov.b64 {lo, hi}, s."""
    width = src.width if isinstance(src, Reg) else int(ins.opcode.rpartition(".")[2][1:])
    step, u = width // len(dst.items), BASE_FORM[width]
    if step < 16:
        raise unsupported(ins, "vectors of bytes are not supported")

    def emit(e: Emitter) -> None:
        x = e.val(src, u)
        if e.scalar(src):
            for i, d in enumerate(dst.items):
                e.put(d, f"({x}>>{i * step})&{(1 << step) - 1}", f"u{step}", True)
            return
        parts = e.tmp(f"np.ascontiguousarray({x}.view(U{step // 8}).reshape(32,-1).T)")
        for i, d in enumerate(dst.items):
            e.put(d, f"{parts}[{i}]", f"u{step}", False)

    return make(ins, emit)


DECODERS: dict[str, Decoder] = {
    "add": add_sub, "sub": add_sub, "mul": mul, "mad": mul,
    "mul24": mul24, "mad24": mul24, "sad": sad, "div": div_rem, "rem": div_rem, "min": min_max,
    "max": min_max, "abs": abs_neg, "neg": abs_neg, "and": logic, "or": logic, "xor": logic,
    "not": logic, "cnot": logic, "shl": shift, "shr": shift, "setp": compare, "set": compare,
    "selp": select,
    "slct": select, "mov": mov,
}  # fmt: skip
