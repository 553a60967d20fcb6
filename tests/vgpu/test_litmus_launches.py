"""Litmus programs over several launches: stream order, host writes, signals of earlier launches.

The invariants I3 to I6 of the forward kernel in small: nothing waits at a kernel's end, so between
PEs only signals order one launch after another.
"""

from __future__ import annotations

import numpy as np
import pytest
from litmus_flags import READ, WRITE, st
from litmus_harness import PARAMS, SCHEDULES, until
from vgpu_harness import entry

from megamoe.runtime.vgpu import Finding, Kernel, MemoryFault, World

START = """
mov.u32 %r0, %tid.x; setp.ne.u32 %p30, %r0, 0; @%p30 exit;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2];
"""
SYS = "ld.acquire.sys.global.u32"
by_schedule = pytest.mark.parametrize("how", SCHEDULES, ids=lambda how: how[0])


class Bench:
    """Two PEs with data and flags on PE 0; each step launches code on some PEs."""

    def __init__(self, how: tuple[str, str, int]) -> None:
        schedule, completion, seed = how
        self.world = World(pes=2, schedule=schedule, completion=completion, seed=seed, detect=True)
        self.data, self.flag = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
        self.args = [self.world.register(self.data, "data"), self.world.register(self.flag, "flag")]
        self.scratch = self.world.alloc(256, "scratch")

    def step(self, code: dict[int, str]) -> list[Finding]:
        """One launch on each named PE; the findings of the run."""
        for pe, body in code.items():
            kernel = Kernel.from_ptx(entry(START + body, PARAMS))
            self.world.launch(
                pe=pe, kernel=kernel, grid=1, block=32, args=[*self.args, self.scratch, pe]
            )
        return self.world.run().findings


@by_schedule
def test_stream_order_orders_launches_of_one_pe(how):
    b = Bench(how)
    assert b.step({0: WRITE}) == []
    assert b.step({0: READ + WRITE}) == []


@by_schedule
def test_launches_of_two_pes_are_not_ordered(how):
    b = Bench(how)
    assert b.step({0: WRITE}) == []
    (finding,) = b.step({1: READ})
    assert finding.kind == "race"
    assert finding.access_1.pe == 0 and finding.access_2.pe == 1
    assert "sys scope from PE 0 to PE 1" in finding.missing_edge


@by_schedule
def test_a_signal_of_an_earlier_launch_orders_a_later_one(how):
    b = Bench(how)
    assert b.step({0: WRITE + st(".release.sys")}) == []
    assert b.step({1: until(SYS) + READ}) == []


@by_schedule
def test_a_signal_covers_earlier_launches_of_its_pe(how):
    b = Bench(how)
    assert b.step({0: WRITE}) == []
    assert b.step({0: st(".release.sys"), 1: until(SYS) + READ}) == []


@by_schedule
def test_acquire_in_one_launch_serves_the_next_of_the_pe(how):
    b = Bench(how)
    assert b.step({0: WRITE + st(".release.sys"), 1: until(SYS)}) == []
    assert b.step({1: READ}) == []


@by_schedule
def test_counter_zeroed_while_a_peer_may_still_add(how):
    """I3 violated: the word is zeroed in the next launch without a handshake."""
    b = Bench(how)
    add = "mov.u32 %r5, 1; red.release.sys.global.add.u32 [%d1], %r5;\n"
    assert b.step({1: add}) == []
    findings = b.step({0: "mov.u32 %r5, 0; st.global.u32 [%d1], %r5;\n"})
    assert [f.kind for f in findings] == ["race"]


@by_schedule
def test_counter_zeroed_after_its_additions_were_acquired(how):
    """I3 kept: the zeroing PE has acquired the addition; the peer adds again after a signal."""
    b = Bench(how)
    add = "mov.u32 %r5, 1; red.release.sys.global.add.u32 [%d1], %r5;\n"
    assert b.step({1: add, 0: until(SYS)}) == []
    zero = "mov.u32 %r5, 0; st.global.u32 [%d1], %r5;\n"
    assert b.step({0: zero + st(".release.sys", 1, "%d1+16")}) == []
    assert b.step({1: until(SYS, 1, "%d1+16") + add}) == []


@by_schedule
def test_single_bank_is_overwritten_while_a_peer_reads(how):
    """I4, I5 violated: the peer has read in launch n; n + 1 overwrites without knowing."""
    b = Bench(how)
    assert b.step({0: WRITE + st(".release.sys"), 1: until(SYS) + READ}) == []
    (finding,) = b.step({0: WRITE})
    assert finding.access_1.pe == 1 and "read" in finding.access_1.what


@by_schedule
def test_single_bank_is_overwritten_after_the_peers_answer(how):
    """I5 kept: the call ends only once the peer has answered."""
    b = Bench(how)
    answer = st(".release.sys", 1, "%d1+16")
    assert (
        b.step(
            {
                0: WRITE + st(".release.sys") + until(SYS, 1, "%d1+16"),
                1: until(SYS) + READ + answer,
            }
        )
        == []
    )
    assert b.step({0: WRITE}) == []


@by_schedule
def test_host_write_between_calls(how):
    b = Bench(how)
    assert b.step({0: READ}) == []
    b.data[:4] = 9
    assert b.step({0: READ + WRITE}) == []


@by_schedule
def test_host_write_under_a_peers_read(how):
    """The host of PE 0 overwrites what PE 1 has read, and PE 0 does not know that it has."""
    b = Bench(how)
    assert b.step({1: READ}) == []
    b.data[0] = 9
    (finding,) = b.step({0: READ})
    assert finding.access_2.warp == -1 and "host of PE 0" in finding.message


@by_schedule
def test_host_write_read_by_a_peer_without_a_signal(how):
    b = Bench(how)
    assert b.step({0: READ}) == []
    b.data[0] = 9
    (finding,) = b.step({1: READ})
    assert "a kernel of PE 0 that was launched after" in finding.missing_edge


@by_schedule
def test_host_write_announced_by_its_pes_next_kernel(how):
    b = Bench(how)
    assert b.step({0: READ}) == []
    b.data[0] = 9
    assert b.step({0: st(".release.sys"), 1: until(SYS) + READ}) == []


@by_schedule
def test_host_initialises_allocated_memory(how):
    """Bytes of an allocation that the host has written, all ones included, are no poison."""
    b = Bench(how)
    b.world.bytes_at(b.scratch)[:4].view(np.uint32)[:] = 0xFFFFFFFF
    read = "ld.global.u32 %r4, [%d2{}];\n"
    assert b.step({0: read.format("")}) == []
    assert [f.kind for f in b.step({0: read.format("+4")})] == ["poison_read"]


def test_memory_after_its_release_is_a_fault():
    b = Bench(SCHEDULES[0])
    assert b.step({0: READ}) == []
    b.world.unregister(b.data)
    with pytest.raises(MemoryFault, match=r"data\[0\] after its release"):
        b.step({0: READ})


def test_errors_keep_the_findings_of_their_run():
    b = Bench(SCHEDULES[0])
    with pytest.raises(MemoryFault) as info:
        b.step({0: WRITE, 1: READ + "ld.global.u32 %r4, [%d0+4096];\n"})
    assert {f.kind for f in info.value.report.findings} == {"race"}
