"""Floating-point arithmetic and the approximations."""

from __future__ import annotations

from megamoe.runtime.vgpu.alu import DECODERS as INTEGER
from megamoe.runtime.vgpu.alu import Decoder, simple
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import TYPES, Op, the_types
from megamoe.runtime.vgpu.ptx_ast import Instruction

FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f64"}


def is_float(op: Opcode) -> bool:
    """True if the instruction computes in a floating-point type."""
    return any(m in FLOATS for m in op.mods)


def finish(expr: str, kind: str, op: Opcode) -> str:
    """Apply .relu, .sat and .ftz to a result."""
    if op.has("relu"):
        expr = f"relu({expr})"
    if op.has("sat"):
        expr = f"sat01({expr})"
    if op.has("ftz") and kind == "f32":
        expr = f"convert.flush_f32({expr})"
    if kind.startswith("bf16"):
        # bf16 results are rounded when stored; values computed from them must see the rounding.
        expr = f"bf16_round({expr})"
    return expr


def source(kind: str, op: Opcode) -> str:
    """The template of a source operand, flushed under .ftz."""
    return "convert.flush_f32({})" if op.has("ftz") and kind == "f32" else "{}"


def directed(ins: Instruction, op: Opcode, kind: str) -> str:
    """The directed rounding that is written, if any; it exists here for f32."""
    mode = next((m for m in ("rz", "rm", "rp") if op.has(m)), "")
    if mode and kind != "f32":
        raise unsupported(ins, f"rounding .{mode} is supported in f32 only")
    return mode


def arithmetic(ins: Instruction, op: Opcode) -> Op:
    """add, sub, mul, div."""
    (kind,) = the_types(ins, op, 1)
    mode = directed(ins, op, kind)
    s = source(kind, op)
    if mode:
        expr = f"{op.family}_directed({s},{s},{mode!r})"
        return simple(ins, kind, [kind] * 2, None, finish(expr, kind, op))
    sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[op.family]
    return simple(ins, kind, [kind] * 2, None, finish(f"{s}{sign}{s}", kind, op))


def fma(ins: Instruction, op: Opcode) -> Op:
    """fma and the float forms of mad."""
    (kind,) = the_types(ins, op, 1)
    mode = directed(ins, op, kind)
    s = source(kind, op)
    if mode:
        expr = f"fma_directed({s},{s},{s},{mode!r})"
    elif kind.startswith("bf16"):
        expr = "fma_bf16({},{},{})"
    elif kind.startswith("f16"):
        expr = "fma16({},{},{})"
    else:
        expr = f"fma{kind[1:]}({s},{s},{s})"
    return simple(ins, kind, [kind] * 3, None, finish(expr, kind, op))


def min_max(ins: Instruction, op: Opcode) -> Op:
    """min and max: a NaN operand is dropped, or spreads with .NaN; -0 is below +0."""
    (kind,) = the_types(ins, op, 1)
    if op.has("abs") or op.has("xorsign"):
        raise unsupported(ins, ".xorsign and .abs are not supported")
    s = source(kind, op)
    expr = f"f{op.family}({s},{s},{op.has('NaN')})"
    return simple(ins, kind, [kind] * 2, None, finish(expr, kind, op))


def abs_neg(ins: Instruction, op: Opcode) -> Op:
    """abs and neg."""
    (kind,) = the_types(ins, op, 1)
    s = source(kind, op)
    expr = f"np.abs({s})" if op.family == "abs" else f"-{s}"
    return simple(ins, kind, [kind], None, expr)


def approximate(ins: Instruction, op: Opcode) -> Op:
    """ex2, lg2, rcp, sqrt, rsqrt, tanh, sin, cos."""
    (kind,) = the_types(ins, op, 1)
    name, ftz = op.family, op.has("ftz")
    if kind == "f64":
        if name not in ("rcp", "sqrt"):
            raise unsupported(ins, "not supported in f64")
        return simple(ins, kind, [kind], None, "1.0/{}" if name == "rcp" else "np.sqrt({})")
    if kind == "f32":
        tail = "" if name == "tanh" else f",{ftz}"
        return simple(ins, kind, [kind], None, f"convert.{name}_approx({{}}{tail})")
    if name == "ex2":
        inner = "convert.ex2_approx({}.astype(F4),False)"
    else:
        inner = "convert.tanh_approx({}.astype(F4))"
    expr = f"{inner}.astype(F2)" if kind.startswith("f16") else f"bf16_round({inner})"
    return simple(ins, kind, [kind], None, expr)


def copysign(ins: Instruction, op: Opcode) -> Op:
    """copysign d, a, b: the sign of a, the magnitude of b."""
    (kind,) = the_types(ins, op, 1)
    return simple(ins, kind, [kind] * 2, None, "np.copysign({1},{0})")


def testp(ins: Instruction, op: Opcode) -> Op:
    """Classification."""
    (kind,) = the_types(ins, op, 1)
    what = [m for m in op.mods if m not in TYPES]
    if len(what) != 1:
        raise unsupported(ins, "needs one class")
    return simple(ins, "p", [kind], None, f"testp({{}},{what[0]!r})")


def by_type(name: str, floating: Decoder) -> Decoder:
    """A decoder that chooses between the integer and the floating-point form."""
    integer = INTEGER[name]

    def decode(ins: Instruction, op: Opcode) -> Op:
        return (floating if is_float(op) else integer)(ins, op)

    return decode


def mad(ins: Instruction, op: Opcode) -> Op:
    """mad of floats is a fused multiply-add."""
    return (fma if is_float(op) else INTEGER["mad"])(ins, op)


DECODERS: dict[str, Decoder] = {
    "add": by_type("add", arithmetic),
    "sub": by_type("sub", arithmetic),
    "mul": by_type("mul", arithmetic),
    "div": by_type("div", arithmetic),
    "min": by_type("min", min_max),
    "max": by_type("max", min_max),
    "abs": by_type("abs", abs_neg),
    "neg": by_type("neg", abs_neg),
    "mad": mad,
    "fma": fma,
    "copysign": copysign,
    "testp": testp,
    **dict.fromkeys(("ex2", "lg2", "rcp", "sqrt", "rsqrt", "tanh", "sin", "cos"), approximate),
}
