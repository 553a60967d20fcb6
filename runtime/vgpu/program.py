"""A decoded kernel: operations, basic blocks, liveness, the compiled functions of each block."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from megamoe.runtime.vgpu import (
    alu,
    alu_bits,
    alu_carry,
    alu_convert,
    alu_float,
    ops_async,
    ops_control,
    ops_memory,
    ops_remote,
    ops_sync,
    ops_tensormap,
)
from megamoe.runtime.vgpu.codegen import NAMESPACE, Emitter
from megamoe.runtime.vgpu.isa import classify, unsupported
from megamoe.runtime.vgpu.ops import Op
from megamoe.runtime.vgpu.ptx_ast import Entry, Instruction, Module, Special, Sym

DECODERS = {
    **alu.DECODERS,
    **alu_bits.DECODERS,
    **alu_carry.DECODERS,
    **alu_float.DECODERS,
    **alu_convert.DECODERS,
    **ops_control.DECODERS,
    **ops_memory.DECODERS,
    **ops_sync.DECODERS,
    **ops_async.DECODERS,
    **ops_remote.DECODERS,
    **ops_tensormap.DECODERS,
}
SMEM_START = 1024  # the first bytes of the shared window are the system's
_CLOCKS = ("clock", "globaltimer")
_CHAIN_LIMIT = 256  # ops in one function: bounds code duplication through fall-through


class Block:
    """Straight-line operations ``[start, end)``; control enters at the start only."""

    def __init__(self, index: int, start: int, end: int) -> None:
        self.index, self.start, self.end = index, start, end
        self.use = self.define = self.live_in = self.live_out = 0
        self.successors: list[int] = []
        self.full = Versions(self, True)
        self.part = Versions(self, False)


class Versions:
    """The functions of one block for one shape of mask, by the kinds of the values it reads."""

    __slots__ = ("block", "count", "full", "funcs", "get", "last", "ops", "reads", "ready")

    def __init__(self, block: Block, full: bool) -> None:
        self.block, self.full, self.ready = block, full, False
        self.funcs: dict[tuple, Callable] = {}
        self.get: Callable = _nothing
        self.count = 0
        self.ops: list[Op] = []
        self.reads: list[int] = []
        self.last = block


def _nothing(_regs: list) -> tuple:
    return ()


class Program:
    """All that is derived from a kernel's text, shared by every launch of it."""

    def __init__(self, module: Module, entry: Entry) -> None:
        self.module, self.entry = module, entry
        self.namespace: dict[str, Any] = dict(NAMESPACE)
        self.constants: dict[int, str] = {}
        self.keep: list[Any] = []
        self.variables = {**module.variables, **entry.variables}
        self.params = {p.name: p for p in entry.params}
        self.place_shared()
        self.ops: list[Op] = []
        self.op_at: list[int] = []
        self.decode()
        self.blocks: list[Block] = []
        self.block_at: dict[int, int] = {}
        self.split()
        self.liveness()
        self.clocks: set[int] | None = None
        self.states: dict[int, list[int]] = {}

    # -- names -------------------------------------------------------------------------------
    def constant(self, value: Any, stem: str = "K") -> str:
        """Bind an object in the functions' globals."""
        name = self.constants.get(id(value))
        if name is None:
            name = f"{stem}_{len(self.constants)}"
            self.constants[id(value)] = name
            self.keep.append(value)
            self.namespace[name] = value
        return name

    def place_shared(self) -> None:
        """Lay out static shared variables; dynamic shared memory starts after them."""
        offset, self.dynamic_align = SMEM_START, 16
        self.shared: dict[str, int] = {}
        self.local: dict[str, int] = {}
        local = 0
        for var in self.variables.values():
            if var.space == "shared" and not var.extern:
                offset = -(-offset // var.align) * var.align
                self.shared[var.name] = offset
                offset += var.size
            elif var.space == "shared":
                self.dynamic_align = max(self.dynamic_align, var.align)
            elif var.space == "local":
                local = -(-local // var.align) * var.align
                self.local[var.name] = local
                local += var.size
        self.local_bytes = local
        self.smem_dynamic = -(-offset // self.dynamic_align) * self.dynamic_align
        for var in self.variables.values():
            if var.space == "shared" and var.extern:
                self.shared[var.name] = self.smem_dynamic

    def symbol(self, sym: Sym, ins: Instruction | None) -> str:
        """The expression for a variable's or parameter's address."""
        name, plus = sym.name, sym.offset
        if name in self.params:
            return f"(w.param_base+{self.params[name].offset + plus})"
        if name in self.shared:
            return f"(w.smem_base+{self.shared[name] + plus})"
        if name in self.local:
            return str(self.local[name] + plus)
        if name in self.variables:
            return f"(w.globals[{name!r}]+{plus})"
        assert ins is not None
        raise unsupported(ins, f"unknown name {name}")

    # -- decoding ----------------------------------------------------------------------------
    def decode(self) -> None:
        """Decode every instruction; guards on anything but ALU work become branches around it."""
        for ins in self.entry.instructions:
            opcode = classify(ins)
            self.op_at.append(len(self.ops))
            op = DECODERS[opcode.family](ins, opcode)
            if ins.guard is not None and not op.pure and not op.targets:
                around = ops_control.skip(ins)
                self.ops.append(around)
                op = DECODERS[opcode.family](replace(ins, guard=None), opcode)
            elif ins.guard is not None:
                op.reads |= {ins.guard.index}
                if not op.targets:
                    op.reads |= op.writes
            self.ops.append(op)
        self.op_at.append(len(self.ops))

    def split(self) -> None:
        """Cut the operations into blocks."""
        leaders = {0}
        for i, op in enumerate(self.ops):
            if op.targets:
                leaders |= {i + 1, *(self.op_at[t] for t in op.targets)}
            if op.ends:
                leaders.add(i + 1)
            if op.sync or op.alone:
                leaders.add(i)
            if op.alone:
                leaders.add(i + 1)
        cuts = [*sorted(x for x in leaders if x < len(self.ops)), len(self.ops)]
        for start, end in pairwise(cuts):
            self.block_at[start] = len(self.blocks)
            self.blocks.append(Block(len(self.blocks), start, end))
        # Running off the end of the code leaves the kernel.
        self.block_at[len(self.ops)] = len(self.blocks)
        for b in self.blocks:
            last = self.ops[b.end - 1]
            b.successors += [self.block_at[self.op_at[t]] for t in last.targets]
            if not last.ends:
                b.successors.append(b.index + 1)

    def liveness(self) -> None:
        """Which registers are read later, per block, as bit sets."""
        for b in self.blocks:
            for op in self.ops[b.start : b.end]:
                for r in op.reads | op.direct:
                    if not b.define >> r & 1:
                        b.use |= 1 << r
                if op.ins.guard is None:
                    for r in op.writes:
                        b.define |= 1 << r
        changed = True
        while changed:
            changed = False
            for b in reversed(self.blocks):
                out = 0
                for s in b.successors:
                    if s < len(self.blocks):
                        out |= self.blocks[s].live_in
                live = b.use | (out & ~b.define)
                if out != b.live_out or live != b.live_in:
                    b.live_out, b.live_in, changed = out, live, True

    def clock_registers(self) -> set[int]:
        """Registers whose values come from a clock."""
        found: set[int] = set()
        changed = True
        while changed:
            changed = False
            for op in self.ops:
                timed = any(isinstance(x, Special) and x.name.startswith(_CLOCKS)
                            for x in op.ins.operands)  # fmt: skip
                if (timed or op.reads & found) and not op.writes <= found:
                    found |= op.writes
                    changed = True
        return found

    def state(self, block: int, regs: list) -> list:
        """The live registers at a block, clocks left out, in a form that compares."""
        which = self.states.get(block)
        if which is None:
            if self.clocks is None:
                self.clocks = self.clock_registers()
            live = self.blocks[block].live_in
            which = self.states[block] = [
                i for i in range(live.bit_length()) if live >> i & 1 and i not in self.clocks
            ]
        return [x.tobytes() if type(x) is np.ndarray else x for x in map(regs.__getitem__, which)]

    # -- compiling ---------------------------------------------------------------------------
    def prepare(self, v: Versions) -> None:
        """Choose the operations of a function and the registers whose kinds select it."""
        b = v.block
        v.ops = list(self.ops[b.start : b.end])
        v.last = b
        while v.full and len(v.ops) < _CHAIN_LIMIT:
            tail, nxt = v.ops[-1], v.last.index + 1
            if tail.targets or tail.ends or tail.alone or nxt >= len(self.blocks):
                break
            first = self.ops[self.blocks[nxt].start]
            if first.alone or (first.sync and first.sync != "lanes"):
                break
            v.last = self.blocks[nxt]
            v.ops += self.ops[v.last.start : v.last.end]
        reads: set[int] = set()
        written: set[int] = set()
        for op in v.ops:
            reads |= op.reads - written
            if op.ins.guard is None:
                written |= op.writes
        v.reads = sorted(reads)
        v.count = sum(op.ins.index >= 0 for op in v.ops)
        if len(v.reads) > 1:
            v.get = operator.itemgetter(*v.reads)
        elif v.reads:
            only = v.reads[0]
            v.get = lambda regs: (regs[only],)
        v.ready = True

    def compile(self, v: Versions, key: tuple) -> Callable:
        """Generate and compile the function for one combination of value kinds."""
        e = Emitter(self, v.full, dict(zip(v.reads, key, strict=True)))
        live = v.last.live_out
        nxt = v.last.index + 1

        def flush(reg: int) -> bool:
            return bool(live >> reg & 1)

        for op in v.ops:
            e.ins = op.ins
            if not op.targets and not op.ends:
                op.emit(e)
        last = v.ops[-1]
        e.ins = last.ins
        if last.targets:
            self.emit_branch(e, last, flush, nxt)
        elif last.ends:
            e.flush(flush)
            last.emit(e)
        else:
            e.flush(flush)
            e.line(f"return {nxt}")
        name = f"block_{v.block.index}"
        source = e.function(name)
        exec(compile(source, f"<vgpu block {v.block.index}>", "exec"), self.namespace)
        fn = v.funcs[key] = self.namespace.pop(name)
        fn.source = source
        return fn

    def emit_branch(self, e: Emitter, op: Op, flush: Callable[[int], bool], nxt: int) -> None:
        """A branch at the end of a block: uniform, converged, or splitting the lanes."""
        targets = tuple(self.block_at[self.op_at[t]] for t in op.targets)
        target, guard = targets[0], op.ins.guard
        if op.index is not None:
            i = e.val(op.index, "u32")
            e.flush(flush)
            if e.scalar(op.index):
                e.line(f"return {targets}[min({i},{len(targets) - 1})]")
            else:
                e.line(f"return w.switch({i},{targets})")
            return
        if guard is None:
            e.flush(flush)
            e.line(f"return {target}")
            return
        p, uniform = e.val(guard, "p"), e.scalar(guard)
        e.flush(flush)
        yes, no = (nxt, target) if op.ins.guard_negated else (target, nxt)
        if uniform:
            e.line(f"return {yes} if {p} else {no}")
            return
        if not e.full:
            p = e.tmp(f"{p}&m")
        raw = e.tmp(f"{p}.tobytes()")
        e.line(f"if {raw}==BYTES_FALSE: return {no}")
        e.line(f"if {raw}=={'BYTES_TRUE' if e.full else 'w.cur.raw'}: return {yes}")
        e.line(f"return w.diverge({p},{yes},{no})")
