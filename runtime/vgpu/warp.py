"""A warp: register file, groups of diverged lanes, and the step loop.

A *group* is a set of lanes at one position. Groups always stand at the start of a block. The
runnable group at the lowest position runs first and groups that meet are merged, which reconverges
compiled code; a group that has to wait is suspended alone, so the others go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.access import Access
from megamoe.runtime.vgpu.errors import VgpuError
from megamoe.runtime.vgpu.lanes import LANES, mask_array
from megamoe.runtime.vgpu.memory import Region
from megamoe.runtime.vgpu.ptx_ast import Instruction
from megamoe.runtime.vgpu.warpgroup import Warpgroup

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.program import Program, Versions
    from megamoe.runtime.vgpu.world import Cta

FULL = 0xFFFFFFFF


class Group:
    """Lanes of a warp at one position.

    ``waiting`` says what a suspended group waits for; ``token`` is set between an arrival at a
    barrier and its completion (such a group must not be merged); ``polled`` marks a group whose
    turn ended in a fruitless poll, so that others go first.
    """

    __slots__ = (
        "bits", "dead", "ins", "mask", "pc", "polled", "raw", "timed", "timed_out", "token",
        "waiting", "warp",
    )  # fmt: skip

    def __init__(self, warp: Warp, bits: int, pc: int) -> None:
        self.warp, self.pc = warp, pc
        self.set_bits(bits)
        self.token: Any = None
        self.waiting: Any = None
        self.ins: Instruction | None = None
        self.timed = self.timed_out = self.dead = self.polled = False

    def set_bits(self, bits: int) -> None:
        """Change the lanes."""
        self.bits = bits
        self.mask = mask_array(bits)
        self.raw = self.mask.tobytes()


class Warp:
    """One warp of a CTA."""

    def __init__(self, cta: Cta, index: int, lanes: int, program: Program) -> None:
        self.cta, self.world, self.pe, self.index = cta, cta.world, cta.pe, index
        self.program = program
        self.regs: list[Any] = [
            False if r.width == 1 else 0 for r in program.entry.registers
        ]  # fmt: skip
        self.alive = lanes
        self.groups = [Group(self, lanes, 0)]
        self.cur = self.groups[0]
        self.stop = self.spinning = self.queued = False
        self.icount = 0
        self.role = ""
        self.last_polls: dict[int, Any] = {}
        self.last_states: dict[tuple[int, int], list] = {}
        self.params, self.param_base = cta.launch.params, cta.launch.param_base
        self.smem_base, self.globals = cta.smem_base, cta.launch.globals
        pes = self.world.pes
        self.loaded, self.stored = [0] * (pes + 1), [0] * (pes + 1)
        self.special = self.specials()
        self.local = np.zeros((32, program.local_bytes), np.uint8)
        self.bulk_groups: dict[int, Any] = {}
        self.copy_groups: dict[int, Any] = {}
        self.wgmma_open: list[Any] = []
        self.wgmma_committed = self.wgmma_retired = 0
        self.cluster_generation = -1
        self.idle_since: int | None = None
        self.intervals: list[tuple[int, int, str]] = []
        self.run_start: int | None = None
        # Of a detector.
        self.hb: Any = None
        self.hb_groups: dict[tuple[str, int], Any] = {}
        self.hb_batch: list[Any] = []

    def specials(self) -> dict[str, Any]:
        """Special registers: arrays where they differ by lane."""
        c, launch = self.cta, self.cta.launch
        bx, by, bz = launch.block
        linear = np.arange(32, dtype=np.uint32) + np.uint32(32 * self.index)
        one = np.uint64(1) << LANES.astype(np.uint64)
        eq = one.astype(np.uint32)
        lt = (one - np.uint64(1)).astype(np.uint32)
        out: dict[str, Any] = {
            "tid.x": linear % np.uint32(bx), "tid.y": linear // np.uint32(bx) % np.uint32(by),
            "tid.z": linear // np.uint32(bx * by), "laneid": LANES,
            "lanemask_eq": eq, "lanemask_lt": lt, "lanemask_le": lt | eq,
            "lanemask_gt": ~(lt | eq), "lanemask_ge": ~lt,
            "warpid": self.index, "nwarpid": -(-bx * by * bz // 32), "gridid": 1,
            "smid": c.sm, "nsmid": self.world.sms, "is_explicit_cluster": True,
            "dynamic_smem_size": launch.smem, "cluster_ctarank": c.rank,
            "total_smem_size": launch.smem + self.program.smem_dynamic,
            "aggr_smem_size": launch.smem + self.program.smem_dynamic,
            "cluster_nctarank": launch.cluster[0] * launch.cluster[1] * launch.cluster[2],
        }  # fmt: skip
        for i, axis in enumerate("xyz"):
            out[f"ntid.{axis}"] = launch.block[i]
            out[f"nctaid.{axis}"] = launch.grid[i]
            out[f"ctaid.{axis}"] = c.index[i]
            out[f"cluster_nctaid.{axis}"] = launch.cluster[i]
            out[f"cluster_ctaid.{axis}"] = c.index[i] % launch.cluster[i]
            out[f"clusterid.{axis}"] = c.index[i] // launch.cluster[i]
            out[f"nclusterid.{axis}"] = launch.grid[i] // launch.cluster[i]
        return out

    # -- the step loop -----------------------------------------------------------------------
    def runnable(self) -> bool:
        """True if some group can go on."""
        return any(g.waiting is None for g in self.groups)

    def run(self, budget: int) -> None:
        """Run up to ``budget`` blocks, or until all lanes wait, poll in vain, or have left."""
        blocks, regs = self.program.blocks, self.regs
        self.stop = self.spinning = False
        g: Group | None = self.cur
        if len(self.groups) != 1 or self.cur.dead or self.cur.waiting is not None:
            g = self.pick()
        while g is not None and budget > 0:
            budget -= 1
            block = blocks[g.pc] if g.pc < len(blocks) else None
            if block is None:
                self.leave(g)
                g = self.pick()
                continue
            if g.bits == FULL:
                v: Versions = block.full
                if not v.ready:
                    self.program.prepare(v)
                key = tuple(map(type, v.get(regs)))
                fn = v.funcs.get(key) or self.program.compile(v, key)
                nxt = fn(regs, self)
            else:
                v = block.part
                if not v.ready:
                    self.program.prepare(v)
                key = tuple(map(type, v.get(regs)))
                fn = v.funcs.get(key) or self.program.compile(v, key)
                nxt = fn(regs, self, g.mask)
            if nxt >= 0:
                self.icount += v.count
                g.pc = nxt
                if len(self.groups) > 1:
                    g = self.meet(g)
            elif nxt == -1:
                g = self.pick()
            elif nxt == -2:
                self.icount += v.count
                self.leave(g)
                g = self.pick()
            else:
                self.icount += v.count
                for x in tuple(self.groups):
                    if not x.dead:
                        self.meet(x)
                g = self.pick()
            if self.stop:
                break

    def pick(self) -> Group | None:
        """The runnable group at the lowest position; those that polled in vain come last."""
        best = None
        for g in self.groups:
            if g.waiting is None and (best is None or (g.polled, g.pc) < (best.polled, best.pc)):
                best = g
        if best is not None:
            if best.polled:
                for g in self.groups:
                    g.polled = False
            self.cur = best
        return best

    def meet(self, g: Group) -> Group | None:
        """Merge groups at the position of ``g``, then choose who runs."""
        for other in self.groups:
            if (
                other is not g and other.pc == g.pc and other.token is None and g.token is None
                and (other.waiting is None or other.waiting is LANES_WAIT)
            ):  # fmt: skip
                other.dead = True
                self.groups.remove(other)
                g.set_bits(g.bits | other.bits)
                g.waiting = None
                g.polled = g.polled and other.polled
                if self.world.detector is not None:
                    self.world.detector.reconverge(self, g)
                break
        return self.pick()

    def diverge(self, p: np.ndarray, yes: int, no: int) -> int:
        """Split the current group by a predicate (already limited to its lanes)."""
        g = self.cur
        taken = int.from_bytes(np.packbits(p, bitorder="little").tobytes(), "little") & g.bits
        other = Group(self, g.bits & ~taken, no)
        g.set_bits(taken)
        g.pc = yes
        self.groups.append(other)
        return -3

    def switch(self, index: np.ndarray, targets: tuple[int, ...]) -> int:
        """Split the current group by a branch index."""
        g, bits = self.cur, self.cur.bits
        lanes: dict[int, int] = {}
        for lane in np.flatnonzero(g.mask).tolist():
            to = targets[min(int(index[lane]), len(targets) - 1)]
            lanes[to] = lanes.get(to, 0) | 1 << lane
        (first, mine), *others = lanes.items()
        if mine == bits:
            return first
        g.set_bits(mine)
        g.pc = first
        self.groups += [Group(self, part, to) for to, part in others]
        return -3

    def leave(self, g: Group) -> None:
        """A group's lanes have exited."""
        self.groups.remove(g)
        g.dead = True
        self.alive &= ~g.bits
        for other in self.groups:
            if other.waiting is LANES_WAIT:
                other.waiting = None
        self.world.lanes_left(self, g)

    # -- waiting -----------------------------------------------------------------------------
    def wait_on(self, what: Any, ins: Instruction, timed: bool = False) -> None:
        """Suspend the current group until ``what`` wakes it."""
        g = self.cur
        g.waiting, g.ins, g.timed = what, ins, timed
        what.waiters.append(g)
        if timed:
            self.world.timed[g] = None

    def lanes_missing(self, members: int) -> bool:
        """Suspend the current group if live lanes of the mask are elsewhere."""
        g = self.cur
        if (members & self.alive) & ~g.bits:
            g.waiting = LANES_WAIT
            return True
        return False

    def warp_synced(self, ins: Instruction) -> None:
        """A converged bar.warp.sync: only a detector cares."""
        if self.world.detector is not None:
            self.world.detector.warp_sync(self, ins, FULL)

    def warp_sync(self, members: int, ins: Instruction) -> bool:
        """bar.warp.sync of a part of the lanes; True when suspended."""
        g = self.cur
        if g.token == "warp_sync":
            g.token = None
            return False
        here = [x for x in self.groups if x.waiting is LANES_WAIT and x.token == members]
        bits = g.bits
        for x in here:
            bits |= x.bits
        if (members & self.alive) & ~bits:
            g.waiting, g.token, g.ins = LANES_WAIT, members, ins
            return True
        g.token = None
        for x in here:
            x.waiting, x.token = None, "warp_sync"
        if self.world.detector is not None:
            self.world.detector.warp_sync(self, ins, bits)
        return False

    def poll(self, a: Access, address: Any, value: Any) -> None:
        """A load that others may be about to change: in vain if it saw the same as last time."""
        seen = (address, value)
        if self.last_polls.get(a.ins.index) == seen:
            self.spin(a.ins)
        else:
            self.last_polls[a.ins.index] = seen

    def spin(self, ins: Instruction) -> None:
        """End the turn: this group polls in vain.

        The warp counts as spinning if nothing but clocks has changed in its live registers since
        the last fruitless poll here; work that looks at the same flag in every step is no spin.
        """
        g = self.cur
        g.polled = True
        self.stop = True
        state = self.program.state(g.pc, self.regs)
        if self.last_states.get((ins.index, g.bits)) != state:
            self.last_states[ins.index, g.bits] = state
            return
        self.spinning = all(x.polled or x.waiting is not None for x in self.groups)

    # -- helpers of generated code -----------------------------------------------------------
    def timer(self, name: str) -> int:
        """Clock registers; reading one ends no turn."""
        if name == "clock64":
            return self.icount
        if name == "clock":
            return self.icount & 0xFFFFFFFF
        if name == "clock_hi":
            return self.icount >> 32
        now = self.world.now
        if name.endswith("_lo"):
            return now & 0xFFFFFFFF
        return now >> 32 if name.endswith("_hi") else now

    def warpgroup(self) -> Warpgroup:
        """The warpgroup this warp belongs to."""
        return self.cta.warpgroup(self)

    def local_region(self, lane: int) -> Region:
        """One lane's local memory."""
        return Region(0, self.local[lane], "local", self.pe, "local")

    def accumulator_in_flight(self, name: str, ins: Instruction) -> None:
        """An instruction touches a register that an unfinished wgmma owns."""
        raise VgpuError(
            f"{self.place()}: {ins.opcode} uses {name}, an accumulator of a wgmma in flight:"
            f" wgmma.wait_group is missing ({self.source(ins)})"
        )

    def trap(self, ins: Instruction) -> None:
        """The kernel executed trap."""
        raise VgpuError(f"{self.place()}: {ins.opcode} ({self.source(ins)})")

    def place(self, lane: int | None = None) -> str:
        """Where this warp is, in words."""
        c = self.cta
        role = f" ({self.role})" if self.role else ""
        text = f"PE {self.pe} CTA {c.index} warp {self.index}{role}"
        return text if lane is None else f"{text} lane {lane}"

    def source(self, ins: Instruction | None) -> str:
        """PTX line and source line of an instruction."""
        if ins is None:
            return "not started"
        text = f"PTX line {ins.line}"
        if ins.loc is not None and ins.loc[1]:
            name = self.program.module.files.get(ins.loc[0], "?")
            text += f", {name.rpartition('/')[2]}:{ins.loc[1]}"
        return text


class _LanesWait:
    """What a group waits for when other lanes of its warp have to come."""

    waiters: list[Any] = []  # noqa: RUF012

    def describe(self) -> str:
        """In words."""
        return "other lanes of the warp"


LANES_WAIT = _LanesWait()
