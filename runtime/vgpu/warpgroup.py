"""Asynchronous wgmma: groups of instructions of four warps, executed as whole matrix products.

Issue records the descriptors and takes the accumulator registers away (reading them is then an
error). A commit group is executed once all four warps have committed it, at the moment the
completion policy says; ``wait_group`` gives the accumulators back. Instructions of one group that
go to the same accumulator one after the other become one product over the joined k: always the
same instructions, so results do not depend on schedule or policy.

After a wait, registers hold :class:`AccRow` objects: rows are cut out of the product only if the
kernel reads them, and a following wgmma recognises them and takes the whole product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu import wgmma as wg
from megamoe.runtime.vgpu.barriers import Waitable
from megamoe.runtime.vgpu.codegen import IN_FLIGHT, AccRow, InFlight
from megamoe.runtime.vgpu.errors import MemoryFault, SyncError, UnsupportedInstruction
from megamoe.runtime.vgpu.ptx_ast import Instruction

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.warp import Warp
    from megamoe.runtime.vgpu.world import Cta


class Wgmma:
    """The static side of a wgmma.mma_async."""

    def __init__(
        self, ins: Instruction, n: int, d_type: str, a_type: str, b_type: str, acc: list[int],
        a_regs: list[int] | None, neg_a: bool, neg_b: bool, trans_a: bool, trans_b: bool,
    ) -> None:  # fmt: skip
        self.ins, self.n, self.d_type, self.a_type, self.b_type = ins, n, d_type, a_type, b_type
        self.acc, self.a_regs = acc, a_regs
        self.sign = -1 if neg_a != neg_b else 1
        self.trans_a, self.trans_b = trans_a, trans_b
        self.k = 32 // wg.ELEMENT_BYTES[a_type]
        low, high = min(acc), max(acc)
        self.span = slice(low, high + 1) if acc == list(range(low, high + 1)) else None
        self.key = tuple(acc)
        self.flying = [IN_FLIGHT] * len(acc)


class Tile:
    """A matrix product of a warpgroup and, once needed, its registers."""

    __slots__ = ("d", "d_type", "regs")

    def __init__(self) -> None:
        self.d: Any = None
        self.d_type = "f32"
        self.regs: Any = None

    def set(self, d: np.ndarray, d_type: str) -> None:
        """Hold a new product."""
        self.d, self.d_type, self.regs = d, d_type, None

    def row(self, warp: int, i: int) -> np.ndarray:
        """Register i of a warp."""
        if self.regs is None:
            if self.d_type == "f16":
                self.regs = wg.d_to_regs_f16(self.d)
            else:
                self.regs = wg.d_to_regs(self.d).view(np.uint32)
        return self.regs[warp, i]


class Chain:
    """The accumulators of one register list: the product and the row objects of each warp."""

    def __init__(self, n: int) -> None:
        self.tile = Tile()
        self.rows = [[AccRow(self.tile, q, i) for i in range(n)] for q in range(4)]


class Group(Waitable):
    """One commit group of a warpgroup."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.parts: list[list | None] = [None] * 4
        self.results: dict[tuple, tuple[Wgmma, np.ndarray]] | None = None

    def describe(self) -> str:
        """Which warps have committed."""
        have = [q for q in range(4) if self.parts[q] is not None]
        return f"wgmma group {self.index}: committed by warps {have} of the warpgroup"


class Warpgroup:
    """Four consecutive warps."""

    def __init__(self, cta: Cta) -> None:
        self.cta = cta
        self.groups: dict[int, Group] = {}
        self.chains: dict[tuple, Chain] = {}
        self.flying: dict[tuple, np.ndarray] = {}
        self.hb: Any = None  # of a detector

    def group(self, index: int) -> Group:
        """A commit group by number."""
        found = self.groups.get(index)
        if found is None:
            found = self.groups[index] = Group(index)
        return found

    def chain(self, m: Wgmma) -> Chain:
        """The accumulators of an instruction."""
        found = self.chains.get(m.key)
        if found is None:
            found = self.chains[m.key] = Chain(len(m.acc))
        return found

    def execute(self, w: Warp, group: Group) -> None:
        """Compute every instruction of a group that all four warps have committed."""
        if group.results is not None:
            return
        earlier = self.groups.get(group.index - 1)
        if earlier is not None:
            self.execute(w, earlier)
        group.results = {}
        parts = group.parts
        first = parts[0]
        assert first is not None
        for q in range(1, 4):
            part = parts[q]
            assert part is not None
            if len(part) != len(first) or any(
                x[0] is not y[0] or x[1:4] != y[1:4] for x, y in zip(part, first, strict=True)
            ):
                raise SyncError(
                    f"{w.place()}: the warps of a warpgroup issued different wgmma "
                    f"instructions ({w.source(first[0][0].ins) if first else 'empty group'})"
                )
        i = 0
        while i < len(first):
            j = i + 1
            m = first[i][0]
            while (
                j < len(first)
                and first[j][0].key == m.key
                and first[j][3]
                and first[j][0].sign == m.sign
            ):
                j += 1
            self.product(w, group, i, j)
            i = j

    def product(self, w: Warp, group: Group, i: int, j: int) -> None:
        """Instructions [i, j) of a group: one accumulator, k joined."""
        parts: list[Any] = group.parts
        steps = [parts[0][x] for x in range(i, j)]
        m: Wgmma = steps[0][0]
        smem = self.cta.smem
        assert group.results is not None
        try:
            if m.a_regs is None:
                a = self.fetch(smem, [(s[1], 64, s[0].a_type, s[0].trans_a) for s in steps])
            else:
                a = np.concatenate(
                    [wg.a_from_regs(np.stack([parts[q][x][5] for q in range(4)]), m.a_type)
                     for x in range(i, j)], axis=1,
                )  # fmt: skip
            b = self.fetch(smem, [(s[2], m.n, s[0].b_type, s[0].trans_b) for s in steps])
        except IndexError:
            raise MemoryFault(
                f"{w.place()}: wgmma operand outside shared memory ({w.source(m.ins)})"
            ) from None
        except ValueError as e:
            raise UnsupportedInstruction(f"{w.place()}: {e} ({w.source(m.ins)})") from None
        d = np.matmul(a, b.T)
        if m.sign < 0:
            np.negative(d, out=d)
        if steps[0][3]:
            old = self.accumulator(group, m, [parts[q][i][4] for q in range(4)])
            if old is not None:
                d += old
        if m.d_type == "f16":
            d = d.astype(np.float16).astype(np.float32)
        elif m.d_type == "s32":
            d = d.astype(np.int64).astype(np.int32)
        group.results[m.key] = (m, d)
        self.flying[m.key] = d
        world = w.world
        world.wgmma_flops += 2 * 64 * m.n * a.shape[1]
        rows = m.n if m.a_regs is not None else 64 + m.n
        world.wgmma_operand_bytes += rows * a.shape[1] * wg.ELEMENT_BYTES[m.a_type]
        if world.detector is not None:
            world.detector.wgmma_execute(w, group, steps)

    @staticmethod
    def fetch(smem: np.ndarray, slabs: list[tuple[int, int, str, bool]]) -> np.ndarray:
        """Operand slabs joined along k."""
        parts = [wg.fetch(smem, desc, rows, kind, trans) for desc, rows, kind, trans in slabs]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def accumulator(self, group: Group, m: Wgmma, captured: list) -> np.ndarray | None:
        """The value the accumulators had at issue; None for all zeros."""
        if captured[0] is None:
            return self.flying[m.key]
        chain = self.chain(m)
        try:
            if all(captured[q] == chain.rows[q] for q in range(4)):
                return chain.tile.d
        except ValueError:
            pass  # a comparison of arrays: these are not the rows we gave out
        if all(type(x) is int and x == 0 for part in captured for x in part):
            return None
        regs = np.empty((4, len(m.acc), 32), np.uint32)
        for q in range(4):
            for i, x in enumerate(captured[q]):
                regs[q, i] = x.array() if type(x) is AccRow else x
        if m.d_type == "f16":
            return wg.regs_to_d_f16(regs)
        return wg.regs_to_d(regs.view(np.int32 if m.d_type == "s32" else np.float32))


# -- called from generated code ----------------------------------------------------------------
def wgmma_issue(w: Warp, m: Wgmma, desc_a: Any, desc_b: Any, scale_d: Any) -> None:
    """wgmma.mma_async by one warp."""
    regs = w.regs
    if type(desc_b) is not int or type(desc_a) not in (int, type(None)):
        desc_a = None if desc_a is None else _same(w, m, desc_a)
        desc_b = _same(w, m, desc_b)
    if type(scale_d) is not bool:
        scale_d = bool(scale_d[0])
    a_rows = None
    if m.a_regs is not None:
        a_rows = np.empty((4, 32), np.uint32)
        for i, r in enumerate(m.a_regs):
            x = regs[r]
            a_rows[i] = x.array() if type(x) is AccRow else x
    captured: Any = regs[m.span] if m.span is not None else [regs[r] for r in m.acc]
    kind = type(captured[0])
    if kind is InFlight:
        captured = None
    if m.span is not None:
        regs[m.span] = m.flying
    else:
        for r in m.acc:
            regs[r] = IN_FLIGHT
    w.wgmma_open.append((m, desc_a, desc_b, scale_d, captured, a_rows))
    if w.world.detector is not None:
        w.world.detector.wgmma_issue(w, m)


def _same(w: Warp, m: Wgmma, value: Any) -> int:
    if type(value) is int:
        return value
    raw = value.tobytes()  # much cheaper than comparing the lanes as numbers
    if raw != raw[: value.itemsize] * len(value):
        raise SyncError(f"{w.place()}: wgmma descriptors differ by lane ({w.source(m.ins)})")
    return int(value[0])


def wgmma_commit(w: Warp, ins: Instruction) -> None:
    """wgmma.commit_group."""
    wgroup = w.warpgroup()
    group = wgroup.group(w.wgmma_committed)
    if w.world.detector is not None:
        w.world.detector.wgmma_commit(w)
    w.wgmma_committed += 1
    group.parts[w.index & 3] = w.wgmma_open
    w.wgmma_open = []
    w.world.progress += 1
    if all(p is not None for p in group.parts):
        if w.world.wgmma_now():
            wgroup.execute(w, group)
        group.wake(w.world)


def wgmma_wait(w: Warp, ins: Instruction, keep: int) -> bool:
    """wgmma.wait_group: True when suspended until the other warps have committed."""
    wgroup = w.warpgroup()
    regs = w.regs
    while w.wgmma_retired < w.wgmma_committed - keep:
        group = wgroup.group(w.wgmma_retired)
        if any(p is None for p in group.parts):
            w.wait_on(group, ins)
            return True
        wgroup.execute(w, group)
        assert group.results is not None
        q = w.index & 3
        for m, d in group.results.values():
            if later_use(w, m):
                continue
            chain = wgroup.chain(m)
            if chain.tile.d is not d:
                chain.tile.set(d, m.d_type)
            if m.span is not None:
                regs[m.span] = chain.rows[q]
            else:
                for r, x in zip(m.acc, chain.rows[q], strict=True):
                    regs[r] = x
        w.wgmma_retired += 1
        if w.world.detector is not None:
            w.world.detector.wgmma_retire(w, ins, group)
        if all(
            x.wgmma_retired > group.index for x in w.cta.warps[w.index & ~3 : (w.index | 3) + 1]
        ):
            wgroup.groups.pop(group.index, None)
    return False


def later_use(w: Warp, m: Wgmma) -> bool:
    """True if a wgmma still in flight accumulates into the same registers."""
    wgroup, q = w.warpgroup(), w.index & 3
    for index in range(w.wgmma_retired + 1, w.wgmma_committed):
        part = wgroup.groups[index].parts[q]
        if part and any(rec[0].key == m.key for rec in part):
            return True
    return any(rec[0].key == m.key for rec in w.wgmma_open)
