"""cvt and cvta."""

from __future__ import annotations

from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, make
from megamoe.runtime.vgpu.ptx_ast import Instruction, Reg

_INTS = {f"{k}{w}" for k in "us" for w in (8, 16, 32, 64)}
_KINDS = _INTS | {
    "f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "tf32", "e4m3x2", "e5m2x2",
}  # fmt: skip
_NUMPY = {"f32": "F4", "f64": "F8", "f16": "F2"}


def cvt(ins: Instruction, op: Opcode) -> Op:
    """All conversions between numbers."""
    kinds = [m for m in op.mods if m in _KINDS]
    if len(kinds) != 2:
        raise unsupported(ins, "needs a destination and a source type")
    to, src = kinds
    if to in _INTS and src in _INTS:
        return integers(ins, op, to, src)
    if to in _INTS:
        return to_integer(ins, op, to, src)
    if src in _INTS:
        return from_integer(ins, op, to, src)
    return floats(ins, op, to, src)


def integers(ins: Instruction, op: Opcode, to: str, src: str) -> Op:
    """Truncation, extension, saturation."""
    count(ins, 2)
    dst, a = ins.operands
    tw, ts = int(to[1:]), to[0] == "s"

    def emit(e: Emitter) -> None:
        x = e.val(a, src)
        if op.has("sat"):
            least, most = (-(1 << tw - 1), (1 << tw - 1) - 1) if ts else (0, (1 << tw) - 1)
            if e.scalar(a):
                e.put(dst, f"max({least},min({most},{x}))", to, True)
            else:
                e.put(dst, f"convert.saturate_int({x},{tw},{ts})", to, False)
            return
        cast = f"I{tw // 8}" if ts else f"U{tw // 8}"
        if e.scalar(a):
            low = f"({x}&{(1 << tw) - 1})"
            expr = f"({low}^{1 << tw - 1})-{1 << tw - 1}" if ts else low
            e.put(dst, expr, to, True)
        elif src == to:
            e.put(dst, x, to, False)
        else:
            e.put(dst, f"{x}.astype({cast})", to, False)

    return make(ins, emit)


def _as_float(e: Emitter, a: object, src: str) -> str:
    """The source as a float array wide enough to be exact."""
    x = e.vec(a, src)
    return f"{x}.astype(F4)" if src == "f16" else x


def to_integer(ins: Instruction, op: Opcode, to: str, src: str) -> Op:
    """Float to integer, with rounding and clamping."""
    count(ins, 2)
    dst, a = ins.operands
    rounding = next((m for m in op.mods if m in ("rni", "rzi", "rmi", "rpi")), None)
    if rounding is None or src not in ("f16", "bf16", "f32", "f64"):
        raise unsupported(ins, "needs .rni, .rzi, .rmi or .rpi and a float source")

    def emit(e: Emitter) -> None:
        x = _as_float(e, a, src)
        if op.has("ftz"):
            x = f"convert.flush_f32({x})"
        e.put(dst, f"convert.int_from_float({x},{rounding!r},{to[1:]},{to[0] == 's'})", to, False)

    return make(ins, emit)


def from_integer(ins: Instruction, op: Opcode, to: str, src: str) -> Op:
    """Integer to float, round to nearest even (or towards zero into f32)."""
    count(ins, 2)
    dst, a = ins.operands
    if to not in ("f16", "bf16", "f32", "f64") or op.has("rm") or op.has("rp"):
        raise unsupported(ins, "this conversion is not supported")

    def emit(e: Emitter) -> None:
        x = e.vec(a, src)
        if op.has("rz"):
            if to != "f32":
                raise unsupported(ins, ".rz is supported into f32 only")
            e.put(dst, f"int_to_f32_rz({x})", "f32", False)
        elif to == "bf16":
            e.put(dst, f"bf16_round(int_to_f32_odd({x}))", "bf16", False)
        else:
            expr = f"{x}.astype({_NUMPY[to]})"
            e.put(dst, f"sat01({expr})" if op.has("sat") else expr, to, False)

    return make(ins, emit)


_INTEGRAL = {"rni": "np.rint", "rzi": "np.trunc", "rmi": "np.floor", "rpi": "np.ceil"}


def floats(ins: Instruction, op: Opcode, to: str, src: str) -> Op:
    """Between floating-point types, packed ones included."""
    mode = next((m for m in op.mods if m in ("rn", "rz", "rm", "rp", "rna")), "")
    integral = next((m for m in op.mods if m in _INTEGRAL), "")
    tail = f",{mode or 'rn'!r},{op.has('relu')},{op.has('satfinite')}"
    if to in ("bf16x2", "f16x2") and src == "f32":
        count(ins, 3)
        d, hi, lo = ins.operands
        plain = to == "bf16x2" and mode == "rn" and not op.has("relu") and not op.has("satfinite")

        def emit_pair(e: Emitter) -> None:
            args = f"({e.vec(hi, 'f32')},{e.vec(lo, 'f32')}"
            if plain:
                e.put(d, f"bf16x2_rn{args})", "u32", False)
            else:
                e.put(d, f"convert.{to}_from_f32{args}{tail})", "u32", False)

        return make(ins, emit_pair)
    if to in ("e4m3x2", "e5m2x2"):
        return to_fp8(ins, op, to, src)
    if src in ("e4m3x2", "e5m2x2"):
        count(ins, 2)
        if to != "f16x2":
            raise unsupported(ins, "8-bit floats convert to f16x2 only")

        def emit_from8(e: Emitter) -> None:
            x = e.vec(ins.operands[1], "u16")
            expr = f"convert.f16x2_from_fp8x2({x},{src[:4]!r},{op.has('relu')})"
            e.put(ins.operands[0], expr, "u32", False)

        return make(ins, emit_from8)
    count(ins, 2)
    d, a = ins.operands
    if to == "tf32":
        if src != "f32":
            raise unsupported(ins, "tf32 comes from f32 only")
        return make(
            ins,
            lambda e: e.put(d, f"convert.tf32_from_f32({e.vec(a, 'f32')}{tail})", "u32", False),
        )
    if to.endswith("x2") or src.endswith("x2"):
        raise unsupported(ins, "this conversion is not supported")
    directed = mode in ("rz", "rm", "rp")
    if directed and not (src == "f32" and to in ("f16", "bf16")):
        raise unsupported(ins, f"rounding .{mode} is supported from f32 to f16 and bf16 only")

    def emit(e: Emitter) -> None:
        x = e.vec(a, src)
        if op.has("ftz") and src == "f32":
            x = f"convert.flush_f32({x})"
        if integral:
            x = f"{_INTEGRAL[integral]}({x})"
        if src == "f32" and to in ("f16", "bf16"):
            e.put(d, f"convert.{to}_from_f32({x}{tail})", "u16", False)
            return
        if to == "bf16":
            wide = f"({x}).astype(F4)" if src == "f16" else f"f64_to_f32_odd({x})"
            x = x if src == "bf16" else f"bf16_round({wide})"
        elif (src, to) != (to, to) and src != to:
            x = f"({x}).astype({_NUMPY[to]})"
        if op.has("sat"):
            x = f"sat01({x})"
        if op.has("relu"):
            x = f"relu({x})"
        if op.has("ftz") and to == "f32":
            x = f"convert.flush_f32({x})"
        e.put(d, x, to, False)

    return make(ins, emit)


def to_fp8(ins: Instruction, op: Opcode, to: str, src: str) -> Op:
    """Two values to a pair of 8-bit floats."""
    if not op.has("satfinite"):
        raise unsupported(ins, "needs .satfinite")
    kind, relu = to[:4], op.has("relu")
    count(ins, 3 if src == "f32" else 2)

    def emit(e: Emitter) -> None:
        if src == "f32":
            args = ",".join(e.vec(x, "f32") for x in ins.operands[1:])
            expr = f"convert.fp8x2_from_f32({args},{kind!r},{relu})"
        elif src == "f16x2":
            expr = f"convert.fp8x2_from_f16x2({e.vec(ins.operands[1], 'u32')},{kind!r},{relu})"
        else:
            raise unsupported(ins, "8-bit floats come from f32 or f16x2")
        e.put(ins.operands[0], expr, "u16", False)

    return make(ins, emit)


def cvt_pack(ins: Instruction, op: Opcode) -> Op:
    """cvt.pack.sat: two saturated halves, or two bytes shifted into a third operand."""
    kinds = [m for m in op.mods if m in _INTS or m == "b32"]
    if kinds[1:2] != ["s32"]:
        raise unsupported(ins, "packs s32 only")
    width, signed = int(kinds[0][1:]), kinds[0][0] == "s"
    count(ins, 4 if width == 8 else 3)

    def emit(e: Emitter) -> None:
        a, b = (e.vec(x, "s32") for x in ins.operands[1:3])
        cut = [f"convert.saturate_int({x},{width},{signed}).view(U{width // 8}).astype(U4)"
               for x in (a, b)]  # fmt: skip
        expr = f"({cut[0]}<<{width})|{cut[1]}"
        if width == 8:
            expr += f"|({e.vec(ins.operands[3], 'u32')}<<16)"
        e.put(ins.operands[0], expr, "u32", False)

    return make(ins, emit)


def cvta(ins: Instruction, op: Opcode) -> Op:
    """Between a space's own addresses and generic ones."""
    count(ins, 2)
    dst, a = ins.operands
    space = next((m for m in op.mods if m not in ("to", "u64", "u32")), "")
    space = space.partition("::")[0]  # one window for shared::cta and shared::cluster
    if not isinstance(dst, Reg) or op.has("u32"):
        raise unsupported(ins, "only 64-bit addresses are supported")

    def emit(e: Emitter) -> None:
        x = e.val(a, "u64")
        if space in ("shared", "local"):
            sign = "-" if op.has("to") else "+"
            x = f"({x}{sign}{space.upper()}_WINDOW)"
            x = f"{x}&{0xFFFFFFFFFFFFFFFF}" if e.scalar(a) else x
        e.put(dst, x, "u64", e.scalar(a))

    return make(ins, emit)


DECODERS: dict[str, Decoder] = {"cvt": cvt, "cvt.pack": cvt_pack, "cvta": cvta}
