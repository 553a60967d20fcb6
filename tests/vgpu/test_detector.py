"""The engine tells a detector everything that orders memory, with the lanes that took part."""

from __future__ import annotations

import numpy as np
from vgpu_harness import entry, u64_params

from megamoe.runtime.vgpu import Kernel, World
from megamoe.runtime.vgpu.detector import Detector


class Recorder:
    """Writes down the name and arguments of every call."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple]] = []
        self.findings: list = []

    def __getattr__(self, name: str):
        return lambda *args: self.events.append((name, args))

    def of(self, name: str) -> list[tuple]:
        return [args for n, args in self.events if n == name]


BODY = """
.shared .align 128 .b8 buf[256];
.shared .align 8 .b64 bar;
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; setp.ne.u32 %p0, %r0, 0;
@%p0 bra A; mbarrier.init.shared.b64 [bar], 1; fence.mbarrier_init.release.cluster; A: bar.sync 0;
@%p0 bra B; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64; mov.u32 %r9, bar; mov.u32 %r8, buf;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r8], [%d0], 64, [%r9]; B:
W: mbarrier.try_wait.parity.shared.b64 %p1, [bar], 0; @!%p1 bra W;
mov.u32 %r7, buf; mad.lo.u32 %r6, %r0, 4, %r7; st.shared.u32 [%r6], %r0;
setp.ge.u32 %p2, %r0, 5; @%p2 bra C; ld.shared.u32 %r5, [%r6]; C: bar.warp.sync -1;
fence.proxy.async; @%p0 bra D;
cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r7], 64;
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
red.release.gpu.global.add.u32 [%d0+64], 1; D:
ld.acquire.sys.global.u32 %r3, [%d0+64];
"""


def test_every_kind_of_event_arrives() -> None:
    world = World(completion="late")
    recorder = world.detector = Recorder()
    x = np.zeros(32, np.uint32)
    world.register(x, name="x")
    kernel = Kernel.from_ptx(entry(BODY, u64_params(1)))
    world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[x])
    world.run()
    names = {n for n, _ in recorder.events}
    assert names >= {
        "region_added", "cluster_started", "cta_ended", "access", "async_issue", "async_read",
        "async_complete", "group_commit", "group_wait", "mbarrier_init", "mbarrier_arrive",
        "mbarrier_phase", "mbarrier_wait", "barrier_arrive", "barrier_pass", "warp_sync", "fence",
        "reconverge",
    }  # fmt: skip
    known = {n for n in vars(Detector) if not n.startswith("_")}
    assert names <= known
    accesses = {a.ins.opcode: (a, region, off, lanes) for _, a, region, off, lanes in
                recorder.of("access")}  # fmt: skip
    a, region, off, lanes = accesses["ld.shared.u32"]
    assert region.kind == "shared" and lanes.tolist() == [0, 1, 2, 3, 4]
    assert off.tolist() == [0, 4, 8, 12, 16]
    a, region, off, lanes = accesses["red.release.gpu.global.add.u32"]
    assert (a.sem, a.scope, region.name, off.tolist(), lanes.tolist()) == (
        "release", "gpu", "x", [64], [0],
    )  # fmt: skip
    a, *_ = accesses["ld.acquire.sys.global.u32"]
    assert (a.sem, a.scope) == ("acquire", "sys")
    order = [n for n, args in recorder.events if n.startswith(("async", "group_wait"))]
    assert order == ["async_issue", "async_read", "async_complete", "async_issue", "async_read",
                     "group_wait", "async_complete", "group_wait"]  # fmt: skip
