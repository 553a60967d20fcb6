"""Decoding of asynchronous copies, wgmma, and the warp matrix moves."""

from __future__ import annotations

from megamoe.runtime.vgpu import asyncops, tensorops, warpgroup, warpmatrix
from megamoe.runtime.vgpu.access import Access
from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import NAMESPACE, Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, make, registers
from megamoe.runtime.vgpu.ops_memory import address
from megamoe.runtime.vgpu.ops_sync import shared_address, waiting
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction, Mem, Reg, Vec

NAMESPACE.update(
    {f.__name__: f for f in (
        asyncops.bulk_copy, asyncops.commit_group, asyncops.wait_group, asyncops.wait_all,
        asyncops.cp_async, asyncops.cp_async_arrive, tensorops.tensor_load,
        tensorops.tensor_store, warpgroup.wgmma_issue, warpgroup.wgmma_commit,
        warpgroup.wgmma_wait, warpmatrix.ldmatrix, warpmatrix.stmatrix, warpmatrix.mma,
        warpmatrix.movmatrix,
    )}
)  # fmt: skip


def spaces(op: Opcode) -> list[str]:
    """The state spaces written, in order (destination, source)."""
    return [m for m in op.mods if m == "global" or m.startswith("shared")]


def reduction(ins: Instruction, op: Opcode) -> str:
    """``op.type`` of a reducing copy, or nothing."""
    if not op.family.startswith("cp.reduce"):
        return ""
    name = next((m for m in op.mods if m in (
        "add", "min", "max", "inc", "dec", "and", "or", "xor")), None)  # fmt: skip
    kind = next((m for m in op.mods if m in (
        "f16", "bf16", "f32", "f64", "u32", "s32", "u64", "s64", "b32", "b64")), None)  # fmt: skip
    if name is None or (kind is None and "tensor" not in op.family):
        raise unsupported(ins, "needs an operation and a type")
    return f"{name}.{kind}" if kind else name


def bulk(ins: Instruction, op: Opcode) -> Op:
    """cp.async.bulk and cp.reduce.async.bulk without a tensor map."""
    where = spaces(op)
    if len(where) != 2:
        raise unsupported(ins, "needs a destination and a source space")
    to_shared = where[0].startswith("shared")
    form = ("g2s" if where[1] == "global" else "s2s") if to_shared else "s2g"
    if to_shared != op.has("mbarrier::complete_tx::bytes") or to_shared == op.has("bulk_group"):
        raise unsupported(ins, "completion mechanism does not fit the direction")
    cast = op.has("multicast::cluster")
    need = 3 + to_shared + cast + op.has("L2::cache_hint")
    count(ins, need)
    dst, src, size = ins.operands[:3]
    rest = ins.operands[3:]
    reduce = reduction(ins, op)

    def emit(e: Emitter) -> None:
        d = shared_address(e, dst) if to_shared else address(e, dst, False)[0]
        s = shared_address(e, src) if form != "g2s" else address(e, src, False)[0]
        bar = shared_address(e, rest[0]) if to_shared else "None"
        mask = e.val(rest[1], "u16") if cast else "None"
        n = e.val(size, "u32")
        e.line(f"bulk_copy(w,{e.const(ins, 'I')},{form!r},{d},{s},{n},{bar},{mask},{reduce!r})")

    return make(ins, emit, 0, pure=False)


def tensor(ins: Instruction, op: Opcode) -> Op:
    """cp.async.bulk.tensor and its reducing form, tile mode."""
    where = spaces(op)
    dims = next((int(m[0]) for m in op.mods if m in ("1d", "2d", "3d", "4d", "5d")), 0)
    if len(where) != 2 or not dims:
        raise unsupported(ins, "needs spaces and a dimension")
    load = where[0].startswith("shared")
    if load != op.has("mbarrier::complete_tx::bytes") or load == op.has("bulk_group"):
        raise unsupported(ins, "completion mechanism does not fit the direction")
    cast = op.has("multicast::cluster")
    need = 2 + load + cast + op.has("L2::cache_hint")
    count(ins, need)
    smem, gmem = ins.operands[:2] if load else ins.operands[1::-1]
    rest = ins.operands[2:]
    if not isinstance(gmem, Mem) or len(gmem.extra) != 1 or not isinstance(gmem.extra[0], Vec):
        raise unsupported(ins, "needs [map, {coordinates}]")
    coords = gmem.extra[0].items
    if len(coords) != dims:
        raise unsupported(ins, f"{len(coords)} coordinates")
    reduce = reduction(ins, op)

    def emit(e: Emitter) -> None:
        s = shared_address(e, smem)
        g = address(e, Mem(gmem.base, gmem.offset), False)[0]
        at = ",".join(e.val(c, "s32") for c in coords)
        i = e.const(ins, "I")
        if load:
            mask = e.val(rest[1], "u16") if cast else "None"
            e.line(f"tensor_load(w,{i},{s},{g},[{at}],{shared_address(e, rest[0])},{mask})")
        else:
            e.line(f"tensor_store(w,{i},{s},{g},[{at}],{reduce!r})")

    return make(ins, emit, 0, pure=False)


def prefetch(ins: Instruction, op: Opcode) -> Op:
    """Prefetches change nothing."""
    return make(ins, lambda e: None, 0, pure=False)


def groups(ins: Instruction, op: Opcode) -> Op:
    """commit_group and wait_group of bulk and plain asynchronous copies."""
    kind = "bulk" if ".bulk." in op.family else "copy"
    if op.family.endswith("commit_group"):
        count(ins, 0)
        return Op(
            ins, lambda e: e.line(f"commit_group(w,{e.const(ins, 'I')},{kind!r})"), pure=False
        )
    if op.family.endswith("wait_all"):
        return Op(ins, lambda e: e.line(f"wait_all(w,{e.const(ins, 'I')})"), pure=False)
    count(ins, 1)
    (n,) = ins.operands
    if not isinstance(n, Imm):
        raise unsupported(ins, "needs an immediate")
    tail = f"{kind!r},{n.value},{op.has('read')}"
    return Op(ins, lambda e: e.line(f"wait_group(w,{e.const(ins, 'I')},{tail})"), pure=False)


def cp_async(ins: Instruction, op: Opcode) -> Op:
    """cp.async of 4, 8 or 16 bytes."""
    count(ins, 3 + op.has("L2::cache_hint"), 4 + op.has("L2::cache_hint"))
    dst, src, size = ins.operands[:3]
    used = ins.operands[3] if len(ins.operands) - op.has("L2::cache_hint") == 4 else size
    if not isinstance(size, Imm) or size.value not in (4, 8, 16):
        raise unsupported(ins, "size")
    if isinstance(used, Reg) and used.width == 1:
        raise unsupported(ins, "the ignore-src form is not supported")

    def emit(e: Emitter) -> None:
        d, s = shared_address(e, dst), address(e, src, False)[0]
        e.line(f"cp_async(w,{e.const(ins, 'I')},{d},{s},{size.value},{e.val(used, 'u32')})")

    return make(ins, emit, 0, pure=False)


def cp_async_arrive(ins: Instruction, op: Opcode) -> Op:
    """cp.async.mbarrier.arrive."""
    count(ins, 1)

    def emit(e: Emitter) -> None:
        x = shared_address(e, ins.operands[0])
        e.line(f"cp_async_arrive(w,{e.const(ins, 'I')},{x},{op.has('noinc')})")

    return make(ins, emit, 0, pure=False)


# -- wgmma -------------------------------------------------------------------------------------
_ELEMENTS = ("bf16", "f16", "tf32", "e4m3", "e5m2", "s8", "u8")


def wgmma(ins: Instruction, op: Opcode) -> Op:
    """wgmma.mma_async."""
    shape = next(m for m in op.mods if m.startswith("m64n"))
    n, k = (int(x) for x in shape[4:].split("k"))
    kinds = list(op.mods[op.mods.index(shape) + 1 :])
    if len(kinds) != 3 or kinds[1] not in _ELEMENTS or kinds[2] not in _ELEMENTS:
        raise unsupported(ins, "types or modifiers in an unknown order")
    d_type, a_type, b_type = kinds
    if k * {"tf32": 4, "bf16": 2, "f16": 2}.get(a_type, 1) != 32:
        raise unsupported(ins, f"k{k} does not fit {a_type}")
    integer, half = a_type in ("s8", "u8"), a_type in ("bf16", "f16")
    if integer != (d_type == "s32") or (d_type == "f16" and a_type in ("bf16", "tf32")):
        raise unsupported(ins, f"accumulating {a_type} in {d_type}")
    acc, a, b = ins.operands[:3]
    rest = ins.operands[3:]
    if not isinstance(acc, Vec) or len(acc.items) != n // (4 if d_type == "f16" else 2):
        raise unsupported(ins, "wrong number of accumulator registers")
    in_regs = isinstance(a, Vec)
    flags = [x.value for x in rest[1:] if isinstance(x, Imm)]
    want = (0 if integer else 2) + ((1 if in_regs else 2) if half else 0)
    if len(flags) != want or len(rest) != want + 1:
        raise unsupported(ins, f"{len(flags)} immediate flags, needs {want}")
    trans = flags[2:] if half else []
    ta, tb = (0, trans[0]) if in_regs and half else (trans[0], trans[1]) if half else (0, 0)
    regs = list(registers(acc))
    a_list = list(registers(a)) if in_regs else None
    m = warpgroup.Wgmma(
        ins, n, d_type, a_type, b_type, [r.index for r in regs],
        [r.index for r in a_list] if a_list is not None else None,
        bool(flags) and flags[0] < 0, bool(flags) and flags[1] < 0, bool(ta), bool(tb),
    )  # fmt: skip

    def emit(e: Emitter) -> None:
        da = "None" if in_regs else e.val(a, "u64")
        db = e.val(b, "u64")
        scale = e.val(rest[0], "p")
        e.spill([*regs, *(a_list or [])])
        e.line(f"wgmma_issue(w,{e.const(m, 'M')},{da},{db},{scale})")
        e.in_flight(regs)

    sources = [b, rest[0]] + ([] if in_regs else [a])
    reads = {r.index for x in sources for r in registers(x)}
    direct = {r.index for r in regs} | {r.index for r in a_list or []}
    made = Op(ins, emit, reads, set(), pure=False, direct=direct)
    return made


def wgmma_group(ins: Instruction, op: Opcode) -> Op:
    """wgmma.fence, commit_group, wait_group."""
    if op.family == "wgmma.fence":
        return Op(ins, lambda e: e.line(f"fence(w,{e.const(ins, 'I')})"), pure=False)
    if op.family == "wgmma.commit_group":
        return Op(ins, lambda e: e.line(f"wgmma_commit(w,{e.const(ins, 'I')})"), pure=False)
    count(ins, 1)
    (n,) = ins.operands
    if not isinstance(n, Imm):
        raise unsupported(ins, "needs an immediate")

    def emit(e: Emitter) -> None:
        e.line(f"if wgmma_wait(w,{e.const(ins, 'I')},{n.value}): return -1")

    made = waiting(Op(ins, emit, pure=False))
    # Alone: it changes accumulator registers behind the back of the code around it.
    made.alone = True
    return made


# -- ldmatrix and friends ----------------------------------------------------------------------
def matrix_move(ins: Instruction, op: Opcode) -> Op:
    """ldmatrix and stmatrix."""
    load = op.family == "ldmatrix"
    count(ins, 2)
    vec, mem = ins.operands if load else ins.operands[::-1]
    n = next((int(m[1]) for m in op.mods if m in ("x1", "x2", "x4")), 0)
    regs = list(vec.items) if isinstance(vec, Vec) else [vec]
    if len(regs) != n or not isinstance(mem, Mem):
        raise unsupported(ins, "operands")
    a = Access(ins, "ld" if load else "st", "shared", 16)

    def emit(e: Emitter) -> None:
        if not e.full:
            e.line("if w.lanes_missing(0xFFFFFFFF): return -1")
        x, scalar = address(e, mem, True)
        if scalar:
            x = e.tmp(f"np.full(32,{x},U4)")
        info = e.const(a, "A")
        if load:
            got = e.tmp(f"ldmatrix(w,{info},{x},{n},{op.has('trans')})")
            for i, r in enumerate(regs):
                e.put(r, f"{got}[{i}]", "u32", False)
        else:
            values = ",".join(e.val(r, "u32") for r in regs)
            e.line(f"stmatrix(w,{info},{x},[{values}],{op.has('trans')})")

    made = make(ins, emit, int(load), pure=False)
    made.sync = "lanes"
    return made


def movmatrix(ins: Instruction, op: Opcode) -> Op:
    """movmatrix."""
    count(ins, 2)

    def emit(e: Emitter) -> None:
        if not e.full:
            e.line("if w.lanes_missing(0xFFFFFFFF): return -1")
        e.put(ins.operands[0], f"movmatrix({e.vec(ins.operands[1], 'u32')})", "u32", False)

    made = make(ins, emit, 1, pure=False)
    made.sync = "lanes"
    return made


def mma(ins: Instruction, op: Opcode) -> Op:
    """mma.sync m16n8k16 with f32 accumulation."""
    count(ins, 4)
    kinds = [m for m in op.mods if m in ("f32", "f16", "bf16")]
    if len(kinds) != 4 or kinds[0] != "f32" or kinds[3] != "f32" or kinds[1] != kinds[2]:
        raise unsupported(ins, "types")
    if [m for m in op.mods if m in ("row", "col")] != ["row", "col"]:
        raise unsupported(ins, "layouts")
    d, a, b, c = (list(x.items) if isinstance(x, Vec) else [x] for x in ins.operands)

    def emit(e: Emitter) -> None:
        if not e.full:
            e.line("if w.lanes_missing(0xFFFFFFFF): return -1")
        lists = [",".join(e.vec(x, "u32") for x in part) for part in (a, b)]
        cs = ",".join(e.vec(x, "f32") for x in c)
        got = e.tmp(f"mma([{lists[0]}],[{lists[1]}],[{cs}],{kinds[1]!r})")
        for i, r in enumerate(d):
            e.put(r, f"{got}[{i}]", "f32", False)

    made = make(ins, emit, 1, pure=False)
    made.sync = "lanes"
    return made


DECODERS: dict[str, Decoder] = {
    "cp.async.bulk": bulk, "cp.reduce.async.bulk": bulk, "cp.async.bulk.tensor": tensor,
    "cp.reduce.async.bulk.tensor": tensor, "cp.async.bulk.prefetch": prefetch,
    "cp.async.bulk.prefetch.tensor": prefetch, "cp.async.bulk.commit_group": groups,
    "cp.async.bulk.wait_group": groups, "cp.async.commit_group": groups,
    "cp.async.wait_group": groups, "cp.async.wait_all": groups, "cp.async": cp_async,
    "cp.async.mbarrier.arrive": cp_async_arrive, "wgmma.mma_async": wgmma,
    "wgmma.fence": wgmma_group, "wgmma.commit_group": wgmma_group,
    "wgmma.wait_group": wgmma_group, "ldmatrix": matrix_move, "stmatrix": matrix_move,
    "movmatrix": movmatrix, "mma": mma,
}  # fmt: skip
