"""The generator of mutants: what it changes in each instruction, and how it names the place."""

from __future__ import annotations

from pathlib import Path

import pytest
from vgpu_harness import entry, u64_params

from megamoe import cute_kernels
from megamoe.runtime.vgpu import Kernel
from megamoe.runtime.vgpu.mutate import mutants_of
from megamoe.runtime.vgpu.source_places import SourcePlaces, function_at

CHANGES = {
    "fence.acq_rel.sys;": {"drop": "", "scope": "fence.acq_rel.gpu;"},
    "fence.proxy.async.global;": {"drop": ""},
    "fence.mbarrier_init.release.cluster;": {"drop": ""},
    "@%p1 bar.sync 1, 128;": {"drop": ""},
    "bar.warp.sync -1;": {"drop": ""},
    "ld.acquire.sys.global.b32 %r1, [%d1];": {
        "skip": "mov.b32 %r1, 1073741824;",
        "relax": "ld.relaxed.sys.global.b32 %r1, [%d1];",
        "weak": "ld.global.b32 %r1, [%d1];",
        "scope": "ld.acquire.gpu.global.b32 %r1, [%d1];",
    },
    "@!%p2 st.release.gpu.global.b32 [%d1], %r1;": {
        "drop": "",
        "relax": "@!%p2 st.relaxed.gpu.global.b32 [%d1], %r1;",
        "weak": "@!%p2 st.global.b32 [%d1], %r1;",
        "scope": "@!%p2 st.release.cta.global.b32 [%d1], %r1;",
    },
    "red.release.gpu.global.add.u32 [%d1], 1;": {
        "drop": "",
        "relax": "red.relaxed.gpu.global.add.u32 [%d1], 1;",
        "scope": "red.release.cta.global.add.u32 [%d1], 1;",
    },
    "atom.global.acq_rel.add.u32 %r1, [%d1], 1;": {
        "relax": "atom.global.relaxed.add.u32 %r1, [%d1], 1;",
        "acquire": "atom.global.acquire.add.u32 %r1, [%d1], 1;",
        "release": "atom.global.release.add.u32 %r1, [%d1], 1;",
        "scope": "atom.acq_rel.cta.global.add.u32 %r1, [%d1], 1;",
    },
    "atom.global.cas.b32 %r1, [%d1], 0, 1;": {
        "scope": "atom.relaxed.cta.global.cas.b32 %r1, [%d1], 0, 1;"
    },
    "mbarrier.init.shared.b64 [%r1], 8;": {
        "more": "mbarrier.init.shared.b64 [%r1], 9;",
        "less": "mbarrier.init.shared.b64 [%r1], 7;",
    },
    "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], %r2;": {
        "drop": "",
        "relax": "mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%r1], %r2;",
        "more": "{ .reg .b32 vgpu_skewed; add.s32 vgpu_skewed, %r2, 16; mbarrier.arrive.expect_tx"
        ".release.cta.shared::cta.b64 _, [%r1], vgpu_skewed; }",
        "less": "{ .reg .b32 vgpu_skewed; add.s32 vgpu_skewed, %r2, -16; mbarrier.arrive.expect_tx"
        ".release.cta.shared::cta.b64 _, [%r1], vgpu_skewed; }",
    },
    "mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;": {"skip": "setp.eq.u32 %p1, 0, 0;"},
    "cp.async.bulk.wait_group 1;": {
        "drop": "",
        "keep": "cp.async.bulk.wait_group 2;",
        "read": "cp.async.bulk.wait_group.read 1;",
    },
    "cp.async.bulk.wait_group.read 0;": {"drop": "", "keep": "cp.async.bulk.wait_group.read 1;"},
    "wgmma.wait_group.sync.aligned 0;": {"drop": "", "keep": "wgmma.wait_group.sync.aligned 1;"},
    "wgmma.fence.sync.aligned;": {"drop": ""},
    "ld.global.b32 %r1, [%d1];": {},
    "st.global.b32 [%d1], %r1;": {},
    "atom.shared.cta.add.u32 %r1, [%r2], 1;": {},
    "add.s32 %r1, %r2, %r3;": {},
}


@pytest.mark.parametrize("statement", CHANGES)
def test_every_change_of_a_statement(statement: str) -> None:
    text = entry(statement, u64_params(1))
    found = mutants_of(text)
    assert {m.kind: m.new for m in found} == CHANGES[statement]
    for mutant in found:
        mutated = mutant.apply(text)
        assert mutated == text.replace(statement, mutant.new)
        Kernel.from_ptx(mutated)


def test_the_right_one_of_several_statements_on_a_line_changes() -> None:
    line = "bar.sync 0; bar.sync 1; bar.sync 0;"
    text = entry(line, u64_params(1))
    mutated = [m.apply(text).split("\n")[text.split("\n").index(line)] for m in mutants_of(text)]
    assert mutated == [
        " bar.sync 1; bar.sync 0;",
        "bar.sync 0;  bar.sync 0;",
        "bar.sync 0; bar.sync 1; ",
    ]


def test_places_are_functions_of_the_kernel_not_wrappers(tmp_path) -> None:
    role = tmp_path / "role.py"
    role.write_text("def work():\n    pass\n    pass\n\n\ndef other():\n    pass\n")
    wrapper = tmp_path / "ptx.py"
    wrapper.write_text("def fence():\n    pass\n")
    helper = tmp_path / "sync.py"
    helper.write_text("def wait():\n    pass\n")
    files = {1: str(role), 2: str(wrapper), 3: str(helper)}
    assert [function_at(files[1], line) for line in (1, 3, 5, 7)] == ["work", "work", "", "other"]
    lines = [".loc 1 3 4", ".loc 1 1 0", "x", ".loc 2 2 8", "x", ".loc 3 2 8", "x", ".loc 2 2 8",
             "x", ".loc 1 7 4", "x"]  # fmt: skip
    places = SourcePlaces("\n".join(lines), files)
    assert [places.of(line) for line in (3, 5, 7, 9, 11)] == [
        ("role.py:work", "role.py:3"),
        ("role.py:work", "ptx.py:2"),
        ("role.py:work/wait", "sync.py:2"),
        ("role.py:work/wait", "ptx.py:2"),
        ("role.py:other", "role.py:7"),
    ]


def test_places_of_an_image_that_another_checkout_compiled() -> None:
    files = {1: "/gone/cute_kernels/sync.py", 2: "/gone/cute_kernels/load.py", 3: "/gone/x/load.py"}
    wait = source_line("sync.py", "def aborted")
    load = source_line("load.py", "def load_role")
    lines = [
        f".loc 2 {load} 4",
        f".loc 1 {wait} 0",
        "x",
        f".loc 1 {wait} 4",
        "x",
        ".loc 3 9 4",
        "x",
    ]
    places = SourcePlaces("\n".join(lines), files)
    assert [places.of(line)[0] for line in (3, 5, 7)] == [
        "load.py:load_role",
        "load.py:load_role/aborted",
        "load.py:9",
    ]


def source_line(name: str, start: str) -> int:
    """Number of the first line of a kernel file that starts so."""
    lines = (Path(cute_kernels.__file__).parent / name).read_text().split("\n")
    return next(n for n, line in enumerate(lines, 1) if line.startswith(start))
