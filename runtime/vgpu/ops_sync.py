"""Decoding of barriers, mbarriers, fences and register reallocation."""

from __future__ import annotations

from megamoe.runtime.vgpu import sync
from megamoe.runtime.vgpu.alu import Decoder
from megamoe.runtime.vgpu.codegen import NAMESPACE, Emitter
from megamoe.runtime.vgpu.isa import Opcode, unsupported
from megamoe.runtime.vgpu.ops import Op, count, make
from megamoe.runtime.vgpu.ops_memory import address
from megamoe.runtime.vgpu.ptx_ast import Imm, Instruction, Mem, Not, Sink

NAMESPACE.update(
    {f.__name__: f for f in (
        sync.mbar_init, sync.mbar_inval, sync.mbar_arrive, sync.mbar_tx, sync.mbar_drop,
        sync.mbar_test, sync.bar_sync, sync.cluster_arrive, sync.cluster_wait,
        sync.set_max_registers, sync.fence, sync.uniform,
    )}
)  # fmt: skip


def waiting(op: Op) -> Op:
    """Mark an op that may suspend its group: it starts a block and is executed again."""
    op.sync = "wait"
    return op


def shared_address(e: Emitter, mem: object) -> str:
    """The address of an mbarrier as a shared-window number or array."""
    x, scalar = address(e, mem, True)
    if isinstance(mem, Mem) and not scalar:
        return x
    return f"({x})&{0xFFFFFFFF}" if not x.isdigit() else x


def mbar_init(ins: Instruction, op: Opcode) -> Op:
    """mbarrier.init and inval."""
    inval = op.family.endswith("inval")
    count(ins, 1 if inval else 2)

    def emit(e: Emitter) -> None:
        x, i = shared_address(e, ins.operands[0]), e.const(ins, "I")
        if inval:
            e.line(f"mbar_inval(w,{i},{x})")
        else:
            e.line(f"mbar_init(w,{i},{x},{e.val(ins.operands[1], 'u32')})")

    return make(ins, emit, 0, pure=False)


def mbar_arrive(ins: Instruction, op: Opcode) -> Op:
    """mbarrier.arrive, arrive_drop, with counts and expected bytes."""
    has_dest = not isinstance(ins.operands[0], Mem)
    dest = ins.operands[0] if has_dest else Sink()
    mem, *rest = ins.operands[1:] if has_dest else ins.operands
    if not isinstance(mem, Mem) or len(rest) > 1 or (op.has("expect_tx") and not rest):
        raise unsupported(ins, "operands")

    def emit(e: Emitter) -> None:
        x, i = shared_address(e, mem), e.const(ins, "I")
        arg = e.val(rest[0], "u32") if rest else "1"
        n, tx = ("1", arg) if op.has("expect_tx") else (arg, "0")
        if op.family.endswith("drop"):
            call = f"mbar_drop(w,{i},{x},{n},{tx})"
        else:
            call = f"mbar_arrive(w,{i},{x},{n},{tx},{op.has('noComplete')})"
        if isinstance(dest, Sink):
            e.line(call)
        else:
            e.put(dest, call, "u64", True)

    return make(ins, emit, int(has_dest), pure=False)


def mbar_tx(ins: Instruction, op: Opcode) -> Op:
    """mbarrier.expect_tx and complete_tx."""
    count(ins, 2)
    sign = 1 if op.family.endswith("expect_tx") else -1

    def emit(e: Emitter) -> None:
        x, n = shared_address(e, ins.operands[0]), e.val(ins.operands[1], "u32")
        e.line(f"mbar_tx(w,{e.const(ins, 'I')},{x},{n},{sign})")

    return make(ins, emit, 0, pure=False)


def mbar_wait(ins: Instruction, op: Opcode) -> Op:
    """mbarrier.test_wait and try_wait."""
    count(ins, 3, 4)
    dest, mem, token = ins.operands[:3]
    parity = op.has("parity")
    wait = op.family.endswith("try_wait")

    def emit(e: Emitter) -> None:
        x = shared_address(e, mem)
        t = e.val(token, "u32" if parity else "u64")
        scalar = e.scalars(mem.base, token)
        got = e.tmp(f"mbar_test(w,{e.const(ins, 'I')},{x},{t},{parity},{wait})")
        if wait:
            e.line(f"if {got} is None: return -1")
        e.put(dest, got, "p", scalar)

    made = make(ins, emit, 1, pure=False)
    return waiting(made) if wait else made


def pending_count(ins: Instruction, op: Opcode) -> Op:
    """mbarrier.pending_count: the arrivals that were pending before the arrive of the token."""
    count(ins, 2)
    d, token = ins.operands

    def emit(e: Emitter) -> None:
        x, scalar = e.val(token, "u64"), e.scalar(token)
        expr = f"{x}&{0xFFFFF}"
        e.put(d, expr if scalar else f"({expr}).astype(U4)", "u32", scalar)

    return make(ins, emit)


def named_barrier(ins: Instruction, op: Opcode) -> Op:
    """bar and barrier: sync, arrive, red."""
    words = op.family.split(".")
    kind = words[-1]
    aligned = words[0] == "bar" or op.has("aligned")
    operands = list(ins.operands)
    dest: object = Sink()
    pred: object = None
    what = next((m for m in op.mods if m in ("popc", "and", "or")), "")
    if kind == "red":
        dest, pred = operands.pop(0), operands.pop()
    if len(operands) not in (1, 2) or (kind == "arrive" and len(operands) != 2):
        raise unsupported(ins, "operands")

    def emit(e: Emitter) -> None:
        number = e.val(operands[0], "u32")
        threads = e.val(operands[1], "u32") if len(operands) == 2 else "None"
        extra = ""
        if pred is not None:
            negate = isinstance(pred, Not)
            p = pred.operand if isinstance(pred, Not) else pred
            value = e.val(p, "p")
            if negate:
                value = f"(not {value})" if e.scalar(p) else f"(~{value})"
            extra = f",{value},{what!r}"
        call = f"bar_sync(w,{e.const(ins, 'I')},{number},{threads},{aligned},{kind != 'arrive'}"
        got = e.tmp(f"{call}{extra})")
        e.line(f"if {got} is None: return -1")
        if pred is not None:
            e.put(dest, got, "u32" if what == "popc" else "p", True)

    return waiting(make(ins, emit, int(kind == "red"), pure=False))


def cluster(ins: Instruction, op: Opcode) -> Op:
    """barrier.cluster.arrive and wait."""
    name = "cluster_arrive" if op.family.endswith("arrive") else "cluster_wait"
    aligned = op.has("aligned")

    def emit(e: Emitter) -> None:
        e.line(f"if {name}(w,{e.const(ins, 'I')},{aligned}): return -1")

    return waiting(Op(ins, emit, pure=False))


def fence(ins: Instruction, op: Opcode) -> Op:
    """Every fence and membar; one for a tensor map names its address."""

    def emit(e: Emitter) -> None:
        where = ""
        if ins.operands and isinstance(ins.operands[0], Mem):
            where = f",{address(e, ins.operands[0], False)[0]}"
        e.line(f"fence(w,{e.const(ins, 'I')}{where})")

    return make(ins, emit, 0, pure=False)


def setmaxnreg(ins: Instruction, op: Opcode) -> Op:
    """setmaxnreg."""
    count(ins, 1)
    (n,) = ins.operands
    if not isinstance(n, Imm) or op.has("inc") == op.has("dec"):
        raise unsupported(ins, "needs .inc or .dec and an immediate")

    def emit(e: Emitter) -> None:
        call = f"set_max_registers(w,{e.const(ins, 'I')},{n.value},{op.has('inc')})"
        e.line(f"if {call}: return -1")

    return waiting(Op(ins, emit, pure=False))


DECODERS: dict[str, Decoder] = {
    "mbarrier.init": mbar_init, "mbarrier.inval": mbar_init, "mbarrier.arrive": mbar_arrive,
    "mbarrier.arrive_drop": mbar_arrive, "mbarrier.expect_tx": mbar_tx,
    "mbarrier.complete_tx": mbar_tx, "mbarrier.test_wait": mbar_wait,
    "mbarrier.try_wait": mbar_wait, "mbarrier.pending_count": pending_count,
    "barrier.cluster.arrive": cluster, "barrier.cluster.wait": cluster,
    "setmaxnreg": setmaxnreg, "membar": fence, "fence": fence, "fence.proxy": fence,
    "fence.proxy.tensormap::generic": fence, "fence.mbarrier_init": fence,
    "griddepcontrol": fence,
    **{f"{root}.{k}": named_barrier for root in ("bar", "bar.cta", "barrier", "barrier.cta")
       for k in ("sync", "arrive", "red")},
}  # fmt: skip
