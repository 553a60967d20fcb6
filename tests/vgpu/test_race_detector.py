"""The detector's interface: reports, limits, and what it costs nothing to leave out."""

from __future__ import annotations

import numpy as np
import pytest
from vgpu_harness import entry, u64_params

from megamoe.runtime.vgpu import FindingError, Kernel, RaceDetector, World

RACY = """
.loc 1 42 3
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [p0]; shr.u32 %r1, %r0, 5;
mad.wide.u32 %d1, %r1, 4, %d0;
st.global.u32 [%d0+8], %r0;
ld.global.u32 %r2, [%d0+8];
"""


def start(body: str, detect: bool = True, **launch) -> tuple[World, np.ndarray]:
    world = World(detect=detect)
    x = np.zeros((4, 4), np.uint32)
    world.register(x, name="x")
    text = entry(body, u64_params(1)) + '.file 1 "kernels/racy.py"\n'
    options = {"grid": 1, "block": 64, "args": [x]} | launch
    world.launch(pe=0, kernel=Kernel.from_ptx(text), **options)
    return world, x


def test_a_finding_names_both_accesses_and_the_missing_edge():
    world, _ = start(RACY, roles={0: "load", 1: "math"})
    finding = world.run().findings[0]
    assert finding.kind == "race"
    assert finding.where == "x[0, 2]"
    first, second = finding.access_1, finding.access_2
    assert {first.warp, second.warp} == {0, 1} and {first.role, second.role} == {"load", "math"}
    assert first.opcode == "st.global.u32" and "racy.py:42" in first.source
    assert (first.pe, first.cta, first.ptx_line > 0) == (0, 0, True)
    assert "barrier" in finding.missing_edge
    for text in ("x[0, 2]", "(math)", "racy.py:42", f"PTX line {second.ptx_line}", "missing:"):
        assert text in str(finding)


def test_one_finding_for_a_pair_of_instructions():
    loop = RACY.replace("st.global", "mov.u32 %r9, 0;\nL: st.global") + (
        "add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 50; @%p1 bra L;\n"
    )
    world, _ = start(loop)
    findings = world.run().findings
    pairs = [(f.access_1.ptx_line, f.access_2.ptx_line) for f in findings]
    assert len(set(pairs)) == len(pairs) <= 3
    counted = sum(world.detector.core.findings.counts.values())
    assert counted > len(findings)


def test_limit():
    world = World()
    world.detector = RaceDetector(world, limit=1)
    x = np.zeros(64, np.uint32)
    stores = "".join(f"st.global.u32 [%d0+{4 * i}], %r0;\n" for i in range(8))
    kernel = Kernel.from_ptx(entry("ld.param.u64 %d0, [p0];" + stores, u64_params(1)))
    world.register(x, name="x")
    world.launch(pe=0, kernel=kernel, grid=2, block=32, args=[x])
    assert len(world.run().findings) == 1


def test_raise_on_finding():
    world, _ = start(RACY)
    with pytest.raises(FindingError, match=r"race on x\[0, 2\]") as info:
        world.run(raise_on_finding=True)
    assert info.value.report.findings
    world, _ = start("mov.u32 %r0, 1;")
    assert world.run(raise_on_finding=True).findings == []


def test_findings_belong_to_their_run():
    world, x = start(RACY)
    assert world.run().findings
    kernel = Kernel.from_ptx(entry("mov.u32 %r0, 1;", u64_params(1)))
    world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[x])
    assert world.run().findings == []


def test_off_by_default():
    world, _ = start(RACY, detect=False)
    assert world.detector is None
    report = world.run()
    assert report.findings == []
    assert all(region.shadow is None for region in world.memory.regions)


def test_results_are_those_of_a_plain_run():
    out = []
    for detect in (False, True):
        world, x = start(RACY + "st.global.u32 [%d1], %r0;\n", detect=detect)
        report = world.run()
        out.append((x.copy(), report.warp_instructions, report.bytes_by_pair))
    np.testing.assert_array_equal(out[0][0], out[1][0])
    assert out[0][1:] == out[1][1:]


def test_attached_to_a_world_with_memory():
    """A detector that comes later takes bytes other than 0xFF for written."""
    world = World()
    address = world.alloc(64, "late")
    world.bytes_at(address)[:4] = 0
    world.detector = RaceDetector(world)
    body = "ld.param.u64 %d0, [p0]; ld.global.u32 %r1, [%d0];\n"
    for offset, kinds in ((0, []), (8, ["poison_read"])):
        kernel = Kernel.from_ptx(entry(body, u64_params(1)))
        world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[address + offset])
        assert [f.kind for f in world.run().findings] == kinds


def test_records_are_dropped_between_runs(monkeypatch):
    """Verdicts do not change when records that nothing refers to are forgotten."""
    monkeypatch.setattr("megamoe.runtime.vgpu.race_detector.COMPACT_AT", 0)
    world = World(pes=2, detect=True)
    x = np.zeros(8, np.uint32)
    world.register(x, name="x")
    copy = """ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 4; @%p0 exit;
    mad.wide.u32 %d1, %r0, 4, %d0; ld.global.u32 %r1, [%d1]; st.global.u32 [%d1+16], %r1;"""
    kernel = Kernel.from_ptx(entry(copy, u64_params(1)))
    for _ in range(5):
        world.launch(pe=0, kernel=kernel, grid=1, block=32, args=[x])
        assert world.run().findings == []
        assert len(world.detector.core.records.touch) < 10
    world.launch(pe=1, kernel=kernel, grid=1, block=32, args=[x])
    findings = world.run().findings
    assert [(f.access_1.pe, f.access_1.opcode) for f in findings] == [(0, "st.global.u32")]
    assert findings[0].where == "x[4]"
