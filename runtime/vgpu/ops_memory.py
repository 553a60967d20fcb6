"""Decoding of loads, stores, atomics, and address arithmetic on the cluster's shared memory."""

from __future__ import annotations

from megamoe.runtime.vgpu import access, atomics
from megamoe.runtime.vgpu.access import Access
from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import NAMESPACE, Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.memory import LOCAL_WINDOW, SHARED_WINDOW, WINDOW_SIZE
from megamoe.runtime.vgpu.ops import Op, make, uint
from megamoe.runtime.vgpu.ptx_ast import Instruction, Mem, Reg, Sym, Vec

NAMESPACE.update(
    {f.__name__: f for f in (
        access.load, access.load_many, access.load_lanes, access.store, access.store_lanes,
        access.local_load, access.local_store, atomics.atomic,
    )}
)  # fmt: skip
NAMESPACE.update(SHARED_WINDOW=SHARED_WINDOW, LOCAL_WINDOW=LOCAL_WINDOW, WINDOW_SIZE=WINDOW_SIZE)
_SEMS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
_SCOPES = ("cta", "cluster", "gpu", "sys")
_KINDS = {f"{k}{w}" for k in "bus" for w in (8, 16, 32, 64)} | {
    "f16", "bf16", "f16x2", "bf16x2", "f32", "f64",
}  # fmt: skip


def space_of(op: Opcode) -> str:
    """``global``, ``shared``, ``local``, ``param`` or ``generic``."""
    for m in op.mods:
        if m.startswith("shared"):
            return "shared"
        if m in ("global", "const", "local"):
            return "global" if m == "const" else m
        if m.startswith("param"):
            return "param"
    return "generic"


def the_type(ins: Instruction, op: Opcode) -> str:
    """The single type modifier."""
    kinds = [m for m in op.mods if m in _KINDS]
    if len(kinds) != 1:
        raise unsupported(ins, "needs one type")
    return kinds[0]


def size_of(kind: str) -> int:
    """Bytes of a type."""
    return 4 if kind.endswith("x2") else int(kind.lstrip("busf")) // 8


def sem_of(op: Opcode, default: str = "weak") -> tuple[str, str]:
    """Memory order and scope as written; a strong access without a scope has the ISA's default."""
    sem = next((m for m in op.mods if m in _SEMS), default)
    scope = next((m for m in op.mods if m in _SCOPES), "")
    if sem in ("volatile", "mmio"):
        scope = "sys"
    return sem, scope or ("gpu" if sem != "weak" else "")


def address(e: Emitter, mem: object, shared: bool) -> tuple[str, bool]:
    """The expression for an address and whether it is one number for all lanes."""
    assert isinstance(mem, Mem)
    form = "u32" if shared else "u64"
    base, off = mem.base, mem.offset
    if isinstance(base, Reg):
        form = f"u{base.width}"
    x = e.val(base, form)
    scalar = e.scalar(base)
    if off:
        if scalar:
            x = str(int(x) + off) if x.isdigit() else f"({x}+{off})&{0xFFFFFFFFFFFFFFFF}"
        else:
            x = f"{x}+{off}" if off > 0 else f"{x}-{-off}"
    if not scalar and (form == "u64") == shared:
        x = f"({x}).astype({'U4' if shared else 'U8'})"
    return x, scalar


def cells(operand: object) -> list:
    """The registers of a scalar or vector operand."""
    return list(operand.items) if isinstance(operand, Vec) else [operand]


def load(ins: Instruction, op: Opcode) -> Op:
    """ld and ldu."""
    kind = the_type(ins, op)
    if len(ins.operands) not in (2, 3) or not isinstance(ins.operands[1], Mem):
        raise unsupported(ins, "needs a destination and an address")
    dst, mem = ins.operands[:2]
    regs = cells(dst)
    declared = next((int(m[1]) for m in op.mods if m in ("v2", "v4", "v8")), 1)
    if declared != len(regs):
        raise unsupported(ins, f"{len(regs)} destinations")
    space, size, form = space_of(op), size_of(kind), kind if kind[0] == "s" else None
    sem, scope = sem_of(op)
    poll = sem in ("relaxed", "acquire", "volatile", "mmio")
    a = Access(ins, "ld", space, size, len(regs), sem, scope, poll)
    form = kind if kind[0] == "s" else f"u{8 * size}"
    direct = isinstance(mem.base, Sym)

    def emit(e: Emitter) -> None:
        x, scalar = address(e, mem, space == "shared")
        info = e.const(a, "A")
        if scalar and space == "generic" and e.program.local_bytes:
            # It may point into local memory, which differs by lane.
            x, scalar = f"np.full(32,{x},U8)", False
        if space == "local":
            got = e.tmp(f"local_load(w,{info},{x},{e.mask})")
            scalar = False
        elif scalar and len(regs) == 1:
            if space == "param" and direct and size in (1, 2, 4, 8):
                got = e.tmp(f"w.params[{size}][({x}-w.param_base)>>{access.SHIFT[size]}]")
            else:
                got = e.tmp(f"load(w,{info},{x})")
        elif scalar:
            got = e.tmp(f"load_many(w,{info},{x})")
        else:
            got = e.tmp(f"load_lanes(w,{info},{x},{e.mask})")
        for i, r in enumerate(regs):
            one = got if len(regs) == 1 else f"{got}[{i}]"
            if form[0] == "s":
                half = 1 << 8 * size - 1
                one = f"({one}^{half})-{half}" if scalar else f"{one}.view(I{size})"
            e.put(r, one, form, scalar)

    return make(ins, emit, 1, pure=False)


def store(ins: Instruction, op: Opcode) -> Op:
    """st."""
    kind = the_type(ins, op)
    if len(ins.operands) not in (2, 3) or not isinstance(ins.operands[0], Mem):
        raise unsupported(ins, "needs an address and a source")
    mem, src = ins.operands[:2]
    regs = cells(src)
    space, size = space_of(op), size_of(kind)
    declared = next((int(m[1]) for m in op.mods if m in ("v2", "v4", "v8")), 1)
    if space == "param" or declared != len(regs):
        raise unsupported(ins, "cannot store to parameters, or wrong vector length")
    sem, scope = sem_of(op)
    a = Access(ins, "st", space, size, len(regs), sem, scope)
    form = f"u{8 * size}"

    def emit(e: Emitter) -> None:
        x, scalar = address(e, mem, space == "shared")
        values = ",".join(e.val(r, form) for r in regs)
        if scalar and space == "generic" and e.program.local_bytes:
            x, scalar = f"np.full(32,{x},U8)", False
        name = "local_store" if space == "local" else "store" if scalar else "store_lanes"
        e.line(f"{name}(w,{e.const(a, 'A')},{x},[{values}],{e.mask})")

    return make(ins, emit, 0, pure=False)


def atomic(ins: Instruction, op: Opcode) -> Op:
    """atom and red."""
    red = op.family == "red"
    name = next((m for m in op.mods if m in (
        "add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")), None)  # fmt: skip
    kind = the_type(ins, op)
    operands = ins.operands if red else ins.operands[1:]
    vector = next((int(m[1]) for m in op.mods if m in ("v2", "v4", "v8")), 1)
    if name is None or not isinstance(operands[0], Mem):
        raise unsupported(ins, "needs an operation and an address")
    if vector > 1 and not red:
        raise unsupported(ins, "vector atomics with a result are not supported")
    space, size = space_of(op), size_of(kind)
    sem, scope = sem_of(op, "relaxed")
    infos = [Access(ins, op.family, space, size, 1, sem, scope) for _ in range(vector)]
    try:
        fn = atomics.operation(name, kind)
    except KeyError:
        raise unsupported(ins, f".{name} is not defined on .{kind}") from None
    mem = operands[0]
    nargs = 2 if name == "cas" else 1
    args = [cells(x) for x in operands[1 : 1 + nargs]]
    form = f"u{8 * size}"

    def emit(e: Emitter) -> None:
        for i in range(vector):
            x, _ = address(e, Mem(mem.base, mem.offset + i * size), space == "shared")
            values = ",".join(e.val(c[i], form) for c in args)
            call = f"atomic(w,{e.const(infos[i], 'A')},{e.const(fn, 'FN')},{x},[{values}],{e.mask})"
            if red:
                e.line(call)
            else:
                e.put(ins.operands[0], call, form, False)

    made = make(ins, emit, 0 if red else 1, pure=False)
    return made


def prefetch(ins: Instruction, op: Opcode) -> Op:
    """Hints: nothing to do."""
    return make(ins, lambda e: None, 0, pure=False)


def policy(ins: Instruction, op: Opcode) -> Op:
    """createpolicy gives an opaque value that only cache hints read."""
    return make(ins, lambda e: e.put(ins.operands[0], "0", "u64", True))


def isspacep(ins: Instruction, op: Opcode) -> Op:
    """Does a generic address belong to a space?"""
    d, a = ins.operands
    space = op.mods[-1]

    def emit(e: Emitter) -> None:
        x, scalar = e.val(a, "u64"), e.scalar(a)
        in_shared = f"(({x}>=SHARED_WINDOW)&({x}<SHARED_WINDOW+WINDOW_SIZE))"
        in_local = f"(({x}>=LOCAL_WINDOW)&({x}<LOCAL_WINDOW+WINDOW_SIZE))"
        if space == "shared::cluster":
            test = in_shared
        elif space.startswith("shared"):
            own = f"((({x}-SHARED_WINDOW)>>24)==(w.smem_base>>24))"
            test = f"({in_shared}&{own})"
        elif space == "local":
            test = in_local
        elif space == "global":
            test = f"(({x}>={0x7000_0000_0000}))"
        else:
            test = f"(({x}>={0x6000_0000_0000})&({x}<{0x7000_0000_0000}))"
        e.put(d, test, "p", scalar)

    return make(ins, emit)


def mapa(ins: Instruction, op: Opcode) -> Op:
    """mapa: the same offset in another CTA's shared memory."""
    d, a, rank = ins.operands
    u = uint(op.mods[-1])
    generic = not op.has("shared::cluster")

    def emit(e: Emitter) -> None:
        x, r = e.val(a, u), e.val(rank, "u32")
        scalar = e.scalars(a, rank)
        if not e.scalar(rank) and u == "u64":
            r = f"{r}.astype(U8)"
        keep = f"({x}&{0xFFFFFF})|({r}<<24)"
        if generic:
            keep = f"({keep})+SHARED_WINDOW"
        if not scalar and e.scalar(a):
            keep = f"({keep}).astype({'U8' if u == 'u64' else 'U4'})"
        e.put(d, keep, u, scalar)

    return make(ins, emit)


def getctarank(ins: Instruction, op: Opcode) -> Op:
    """The rank of the CTA whose shared memory an address is in."""
    d, a = ins.operands
    u = uint(op.mods[-1])

    def emit(e: Emitter) -> None:
        x, scalar = e.val(a, u), e.scalar(a)
        expr = f"({x}>>24)&255"
        e.put(d, expr if scalar or u == "u32" else f"({expr}).astype(U4)", "u32", scalar)

    return make(ins, emit)


DECODERS: dict[str, Decoder] = {
    "ld": load, "ldu": load, "st": store, "atom": atomic, "red": atomic, "prefetch": prefetch,
    "prefetchu": prefetch, "discard": prefetch, "applypriority": prefetch, "isspacep": isspacep,
    "mapa": mapa, "getctarank": getctarank, "createpolicy.fractional": policy,
}  # fmt: skip
