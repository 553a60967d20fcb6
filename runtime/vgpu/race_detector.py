"""The happens-before race detector of vgpu (docs/verification.md).

>>> world = World(pes=2, detect=True)
>>> report = world.run()
>>> report.findings
[]

It follows one run in the interpreted order and reports every pair of conflicting accesses that
the PTX memory model does not order, whatever order they happened to take, and uses of bytes that
nobody wrote. Correct for one execution: paths that a run does not take are not judged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.async_tracks import AsyncCopies
from megamoe.runtime.vgpu.barrier_clocks import BarrierClocks
from megamoe.runtime.vgpu.clocks import (
    GENERIC,
    GLOBAL,
    HOST,
    SHARED,
    STRIDE,
    Clock,
    WarpClock,
)
from megamoe.runtime.vgpu.findings import Finding, Touch
from megamoe.runtime.vgpu.happens_before import Core
from megamoe.runtime.vgpu.lifetimes import check_lifetimes
from megamoe.runtime.vgpu.shadow import HOST_ID, POISON_WORD, Shadow
from megamoe.runtime.vgpu.sync_words import SyncWords
from megamoe.runtime.vgpu.wgmma_tracks import WgmmaTracks

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.access import Access
    from megamoe.runtime.vgpu.asyncops import AsyncOp
    from megamoe.runtime.vgpu.barriers import MBarrier
    from megamoe.runtime.vgpu.cta import Cluster, Cta
    from megamoe.runtime.vgpu.memory import Region
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Group, Warp
    from megamoe.runtime.vgpu.warpgroup import Wgmma
    from megamoe.runtime.vgpu.world import World


COMPACT_AT = 100_000
"""So many records, and those that nothing refers to are dropped at the end of a run."""


class RaceDetector:
    """Finds races, missing proxy fences and uses of never-written bytes in the runs of a world.

    ``limit``: at most so many findings a run; further ones are only counted.
    """

    def __init__(self, world: World, limit: int = 100) -> None:
        self.world = world
        self.core = Core(limit)
        self.words = SyncWords(self.core)
        self.barriers = BarrierClocks(self.core)
        self.copies = AsyncCopies(self.core, self.barriers)
        self.products = WgmmaTracks(self.core)
        self.clusters = 0
        self.run = 0
        # What the end of a PE's last kernel, and the host since, made known to its next one.
        self.pe_clocks: list[Clock] = []
        self.pe_ends: list[Clock] = []
        for _ in range(world.pes):
            clock = self.core.agents.empty()
            clock[[GENERIC, GLOBAL, SHARED], HOST] = 1
            self.pe_clocks.append(clock)
        for region in world.memory.regions:
            if region.kind == "global":
                self.region_added(region, region.array is not region.data)

    @property
    def findings(self) -> list[Finding]:
        """Findings of the present or last run."""
        return self.core.findings.of_run()

    # -- runs and memory ---------------------------------------------------------------------
    def region_added(self, region: Region, written: bool) -> None:
        """New memory; what the host does not own starts as never written."""
        region.shadow = Shadow(region, written)
        if not written:
            words = region.data[: len(region.data) & ~3].view(np.uint32)
            region.shadow.snapshot = np.full(len(region.data), 0xFF, np.uint8)
            if (words == 0xFFFFFFFF).all():
                # Not all ones, which the host may well write: then it counts as written.
                words[:] = POISON_WORD
                region.shadow.snapshot = region.data.copy()

    def run_started(self) -> None:
        """Find what the host has written since the last run."""
        self.core.findings.start_run()
        self.copies.map_fences.clear()
        self.run += 1
        for region in self.world.memory.regions:
            sh = region.shadow
            if sh is not None and region.kind == "global" and sh.snapshot is not None:
                self.host_writes(sh)
                sh.snapshot = None
        self.pe_ends = [c.copy() for c in self.pe_clocks]

    def run_ended(self) -> None:
        """The next kernels of a PE follow its present ones."""
        self.pe_clocks = self.pe_ends
        for clock in self.pe_clocks:
            for row in (GLOBAL, SHARED):
                np.maximum(clock[row], clock[GENERIC], out=clock[row])
        self.core.scope_notes.clear()
        regions = [r for r in self.world.memory.regions if r.shadow is not None]
        for region in regions:
            region.shadow.snapshot, region.shadow.ran = region.data.copy(), True
        if len(self.core.records.touch) > COMPACT_AT:
            self.core.records.compact([region.shadow for region in regions])

    def host_writes(self, sh: Shadow) -> None:
        """Bytes that differ from the end of the last run were written by the host of the region's
        PE, after its last kernel and before its next one."""
        region, old = sh.region, sh.snapshot
        assert old is not None
        changed = np.flatnonzero(region.data != old)
        if not len(changed):
            return
        cells = np.unique(changed >> sh.grain)
        if not sh.ran:
            sh.writes[cells] = HOST_ID
            return
        core, pe = self.core, region.pe
        column = core.agents.column(("host_pe", pe))
        core.agents.times[column] += 1
        time = core.agents.times[column]
        clock = core.agents.fit(self.pe_clocks[pe]).copy()
        clock[[GENERIC, GLOBAL, SHARED], column] = time
        touch = Touch(None, None, "write", 0)
        rec = core.records.add(column, time, touch)
        for ids in (np.abs(sh.writes[cells]), sh.reads[cells]):
            bad = core.records.unordered(ids, clock, -1)
            if bad is not None:
                core.races(sh, cells, ids, bad, clock, touch, 1)
        for key, some, ids in sh.overflowing(cells):
            bad = core.records.unordered(ids, clock, -1)
            if bad is not None:
                core.races(sh, some, ids, bad, clock, touch, 1)
            sh.forget(key, some)
        sh.writes[cells], sh.reads[cells] = rec, 0
        self.pe_clocks[pe] = clock

    def cluster_started(self, cluster: Cluster) -> None:
        """Warps begin with what the PE's earlier kernels and its host made known."""
        agents = self.core.agents
        self.clusters += 1
        cluster.uid = self.clusters
        for cta in cluster.ctas:
            cta.region.shadow = Shadow(cta.region, False)
            for w in cta.warps:
                base = agents.column(("warp", w.pe, cta.number, w.index), STRIDE)
                w.hb = WarpClock(agents, base, w.alive, agents.fit(self.pe_clocks[w.pe]))
                w.hb_groups, w.hb_batch = {}, []

    def cta_ended(self, cta: Cta) -> None:
        """All that a CTA did comes before the PE's next kernels."""
        agents = self.core.agents
        end = agents.fit(self.pe_ends[cta.pe]).copy()
        for w in cta.warps:
            hb: WarpClock = w.hb
            np.maximum(end, hb.publish(hb.full), out=end)
            agents.times[hb.base] = hb.time
        check_lifetimes(self.core.findings, cta, end)
        for w in cta.warps:
            self.copies.all_done(w, end)
            self.products.all_done(w, end)
        for bar in cta.mbarriers.values():
            if bar.hb is not None:
                stamp = bar.hb.stamp(bar.phase)
                end[GENERIC, bar.hb.column] = stamp
                agents.times[bar.hb.column] = stamp
        self.pe_ends[cta.pe] = end

    # -- accesses ----------------------------------------------------------------------------
    def access(self, w: Warp, a: Access, region: Region, offsets: Any, lanes: Any) -> None:
        """A load, store or atomic."""
        if region.shadow is None:
            return
        if a.sem == "weak" and not a.atomic:
            self.core.plain(w, a, region, offsets, lanes)
        else:
            self.words.access(w, a, region, offsets, lanes)

    def async_issue(self, op: AsyncOp) -> None:
        """Both sides of a copy."""
        self.copies.issue(op)

    def async_read(self, op: AsyncOp) -> None:
        """Nothing: the read was entered at the issue."""

    def async_complete(self, op: AsyncOp) -> None:
        """A copy's bytes arrive."""
        self.copies.complete(op)

    def tensor_map(self, w: Warp, ins: Instruction, region: Region, off: int, lane: int) -> None:
        """A copy reads its tensor map."""
        self.copies.tensor_map(w, ins, region, off, lane)

    def group_commit(self, w: Warp, ins: Instruction, kind: str) -> None:
        """commit_group."""
        self.copies.commit(w, kind, _lanes(w))

    def group_wait(self, w: Warp, ins: Instruction, kind: str, keep: int, read_only: bool) -> None:
        """wait_group."""
        self.copies.wait(w, kind, keep, read_only, _lanes(w))

    # -- barriers and fences -----------------------------------------------------------------
    def mbarrier_init(self, w: Warp, ins: Instruction, address: int, lane: int) -> None:
        """An mbarrier was initialised."""
        self.barriers.init(w, ins, address, lane)

    def mbarrier_arrive(
        self, w: Warp, ins: Instruction, bar: MBarrier, lane: int, count: int, expect: int
    ) -> None:
        """An arrival, before it is counted."""
        self.barriers.arrive(w, ins, bar, lane, count, expect)

    def mbarrier_phase(self, bar: MBarrier) -> None:
        """A phase completed."""
        self.barriers.phase(bar)

    def mbarrier_wait(self, w: Warp, ins: Instruction, bar: MBarrier, bits: int) -> None:
        """A wait or test saw a completed phase."""
        self.barriers.wait(w, ins, bar, bits)

    def barrier_arrive(self, w: Warp, ins: Instruction, bar: Any) -> None:
        """An arrival at a named or cluster barrier."""
        self.barriers.barrier_arrive(w, ins, bar)

    def barrier_pass(self, w: Warp, ins: Instruction, bar: Any, generation: int) -> None:
        """A wait at a named or cluster barrier ended."""
        self.barriers.barrier_pass(w, ins, bar, generation)

    def warp_sync(self, w: Warp, ins: Instruction, bits: int) -> None:
        """bar.warp.sync."""
        w.hb.sync(bits & w.hb.full)

    def reconverge(self, w: Warp, group: Group) -> None:
        """No ordering follows from reconvergence."""

    def fence(self, w: Warp, ins: Instruction, address: Any) -> None:
        """Any fence."""
        if "tensormap" in ins.opcode:
            self.copies.map_fence(w, ins, address)
        else:
            self.words.fence(w, ins)

    # -- wgmma -------------------------------------------------------------------------------
    def wgmma_issue(self, w: Warp, m: Wgmma) -> None:
        """A warp issued a wgmma."""
        self.products.issue(w, m)

    def wgmma_commit(self, w: Warp) -> None:
        """A warp commits a group."""
        self.products.commit(w)

    def wgmma_execute(self, w: Warp, group: Any, steps: list) -> None:
        """Nothing: operand reads were entered at the commit."""

    def wgmma_retire(self, w: Warp, ins: Instruction, group: Any) -> None:
        """A warp's wait_group covered a commit group."""
        self.products.retire(w)


def _lanes(w: Warp) -> list[int]:
    bits = w.cur.bits
    return [i for i in range(32) if bits >> i & 1]
