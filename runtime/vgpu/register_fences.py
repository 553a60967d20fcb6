"""Which wgmma instructions may touch registers that no wgmma.fence has handed over.

Source: PTX ISA, "wgmma.fence": it is required before the first wgmma.mma_async and whenever
registers that one reads or accumulates into were touched by anything else, except by an earlier
wgmma.mma_async with accumulators of the same shape. A forward data-flow analysis over the kernel's
control flow finds, for each wgmma, a register write that can reach it without a fence.

A ``mov`` behind a fence in straight-line code does not count: compilers put values that were ready
before the fence into their registers there, and ptxas coalesces such copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from megamoe.runtime.vgpu.ptx_ast import Instruction

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.program import Program

_CACHE: WeakKeyDictionary[Program, dict[int, Instruction]] = WeakKeyDictionary()
State = dict[int, Instruction]


def unfenced(program: Program) -> dict[int, Instruction]:
    """Index of a wgmma → an instruction that wrote one of its registers after the last fence."""
    found = _CACHE.get(program)
    if found is None:
        found = _CACHE[program] = analyse(program)
    return found


def analyse(program: Program) -> dict[int, Instruction]:
    """The analysis."""
    ops = program.ops
    products = [op for op in ops if op.ins.opcode.startswith("wgmma.mma_async")]
    if not products:
        return {}
    watched: set[int] = set()
    for op in products:
        watched |= op.direct
    out: dict[int, Instruction] = {}
    entry: dict[int, State] = {0: {}}
    first = program.blocks[0].start
    entry[0] = dict.fromkeys(watched, ops[first].ins)
    work = [0]
    while work:
        index = work.pop()
        state = dict(entry[index])
        block = program.blocks[index]
        fenced = False
        for op in ops[block.start : block.end]:
            name = op.ins.opcode
            if name.startswith("wgmma.fence"):
                state.clear()
                fenced = True
            elif name.startswith("wgmma.mma_async"):
                for r in op.direct:
                    if r in state:
                        out.setdefault(op.ins.index, state[r])
            elif fenced and name.startswith("mov."):
                pass
            elif not name.startswith("wgmma."):
                for r in op.writes & watched:
                    state[r] = op.ins
        for nxt in block.successors:
            if nxt >= len(program.blocks):
                continue
            old = entry.get(nxt)
            if old is None:
                entry[nxt] = dict(state)
                work.append(nxt)
                continue
            new = {r: i for r, i in state.items() if r not in old}
            if new:
                old.update(new)
                work.append(nxt)
    return out
