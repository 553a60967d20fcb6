"""What a race detector can observe: the one interface between the engine and any checker.

``World.detector`` is None, which costs nothing, or an object with these methods. They are called
as things happen in the interpreted order, which is sequentially consistent. Memory is reported as
a :class:`Region` and byte offsets in it, with the lanes that touch them: ``lanes`` is None for all
lanes of ``w.cur`` (for a scalar offset: one address for every active lane).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.access import Access
    from megamoe.runtime.vgpu.asyncops import AsyncOp
    from megamoe.runtime.vgpu.barriers import MBarrier
    from megamoe.runtime.vgpu.cta import Cluster, Cta
    from megamoe.runtime.vgpu.findings import Finding
    from megamoe.runtime.vgpu.memory import Region
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Group, Warp
    from megamoe.runtime.vgpu.warpgroup import Wgmma


class Detector(Protocol):
    """Receiver of everything that matters to memory ordering."""

    @property
    def findings(self) -> list[Finding]:
        """What the present or last run has found."""

    def run_started(self) -> None:
        """A run begins; the host may have written memory since the last one."""

    def run_ended(self) -> None:
        """A run is over, or was stopped by an error."""

    def region_added(self, region: Region, written: bool) -> None:
        """Memory became visible; ``written``: the host owns its contents (else poison)."""

    def cluster_started(self, cluster: Cluster) -> None:
        """CTAs of a launch began: they follow whatever the host did before."""

    def cta_ended(self, cta: Cta) -> None:
        """A CTA ended."""

    def access(self, w: Warp, a: Access, region: Region, offsets: Any, lanes: Any) -> None:
        """A load, store or atomic: ``a`` has kind, size, count, order and scope."""

    def async_issue(self, op: AsyncOp) -> None:
        """An asynchronous copy was issued; ``op.track`` names its ranges."""

    def async_read(self, op: AsyncOp) -> None:
        """Its read side happened."""

    def async_complete(self, op: AsyncOp) -> None:
        """Its write side happened; its mbarriers are told next."""

    def tensor_map(self, w: Warp, ins: Instruction, region: Region, off: int, lane: int) -> None:
        """A copy is about to read its tensor map."""

    def group_commit(self, w: Warp, ins: Instruction, kind: str) -> None:
        """commit_group of ``bulk`` or ``copy`` groups by the active lanes."""

    def group_wait(self, w: Warp, ins: Instruction, kind: str, keep: int, read_only: bool) -> None:
        """wait_group: all but the last ``keep`` groups of each active lane."""

    def mbarrier_init(self, w: Warp, ins: Instruction, address: int, lane: int) -> None:
        """An mbarrier was initialised."""

    def mbarrier_arrive(
        self, w: Warp, ins: Instruction, bar: MBarrier, lane: int, count: int, expect: int
    ) -> None:
        """An arrival by a lane, before it is counted; ``expect``: bytes of its expect_tx."""

    def mbarrier_phase(self, bar: MBarrier) -> None:
        """A phase completed."""

    def mbarrier_wait(self, w: Warp, ins: Instruction, bar: MBarrier, bits: int) -> None:
        """A wait or test by lanes ``bits`` saw a completed phase."""

    def barrier_arrive(self, w: Warp, ins: Instruction, bar: Any) -> None:
        """An arrival at a named or cluster barrier."""

    def barrier_pass(self, w: Warp, ins: Instruction, bar: Any, generation: int) -> None:
        """A wait for a generation of a named or cluster barrier ended."""

    def warp_sync(self, w: Warp, ins: Instruction, bits: int) -> None:
        """bar.warp.sync of these lanes."""

    def reconverge(self, w: Warp, group: Group) -> None:
        """Groups of lanes met: no ordering follows from it."""

    def fence(self, w: Warp, ins: Instruction, address: Any) -> None:
        """Any fence, membar, proxy fence or wgmma.fence; ``address`` of a tensor map's."""

    def wgmma_issue(self, w: Warp, m: Wgmma) -> None:
        """A warp issued a wgmma."""

    def wgmma_commit(self, w: Warp) -> None:
        """A warp commits a wgmma group, before it is counted."""

    def wgmma_execute(self, w: Warp, group: Any, steps: list) -> None:
        """A warpgroup's product read its operands."""

    def wgmma_retire(self, w: Warp, ins: Instruction, group: Any) -> None:
        """A warp's wait_group covered a commit group."""
