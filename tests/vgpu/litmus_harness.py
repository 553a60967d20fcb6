"""Litmus tests of the race detector: small programs with the verdict of the PTX memory model.

A program has *roles*: pieces of PTX that run on different PEs, CTAs, CTAs of one cluster, warps or
lanes. Registers by convention: ``%d0`` data (64 words, host-written zeros), ``%d1`` flags (64
words), ``%d2`` memory that nobody has written (4 KB), ``%r0`` thread, ``%r1`` role, ``%r10`` and
``%r11`` two buffers of 4 KB in shared memory, ``%r12`` an initialised mbarrier (count 1), ``%r13``
another one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from vgpu_harness import entry

from megamoe.runtime.vgpu import Kernel, Report, VgpuError, World

PARAMS = ".param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u32 p3"
HEAD = """
.shared .align 1024 .b8 bufs[8192]; .shared .align 8 .b64 bars[2];
"""
SCHEDULES = [("round_robin", "eager", 0), ("random", "late", 1), ("starve", "random", 2)]
_labels = itertools.count()


@dataclass(frozen=True)
class Litmus:
    """``verdict``: ``clean``, a finding's kind, or ``fault`` (the engine refuses to go on).

    ``where``: what the roles are. Roles are run by lane 0 of a warp, or by whole warps (``full``).
    ``says`` has to be part of the finding's text. ``setup`` is run by every thread first.
    """

    name: str
    where: str
    roles: tuple[str, ...]
    verdict: str
    says: str = ""
    full: bool = False
    setup: str = ""
    lanes: bool = False
    barriers: bool = False
    regs: str = ""


def until(load: str, value: int = 1, address: str = "%d1") -> str:
    """Poll a word until it is at least ``value``."""
    n = next(_labels)
    return f"W{n}: {load} %r2, [{address}]; setp.lt.u32 %p1, %r2, {value}; @%p1 bra W{n};\n"


def wait(parity: int = 0, bar: str = "%r12", form: str = "") -> str:
    """Wait for a phase of an mbarrier."""
    n = next(_labels)
    return (
        f"B{n}: mbarrier.try_wait.parity{form}.shared::cta.b64 %p2, [{bar}], {parity};"
        f" @!%p2 bra B{n};\n"
    )


def elected(code: str) -> str:
    """Lane 0 of the warp only."""
    n = next(_labels)
    return f"@%p30 bra E{n};\n{code}\nE{n}:\n"


def kernel_text(case: Litmus) -> str:
    """The kernel of a litmus test."""
    role = {
        "pe": "ld.param.u32 %r1, [p3];", "cta": "mov.u32 %r1, %ctaid.x;",
        "cluster": "mov.u32 %r1, %cluster_ctarank;", "warp": "shr.u32 %r1, %r0, 5;",
        "lane": "mov.u32 %r1, %r0;",
    }[case.where]  # fmt: skip
    body = f"""
mov.u32 %r0, %tid.x; mov.u32 %r20, %laneid; setp.ne.u32 %p30, %r20, 0;
ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; ld.param.u64 %d2, [p2];
mov.u32 %r10, bufs; add.u32 %r11, %r10, 4096; mov.u32 %r12, bars; add.u32 %r13, %r12, 8;
{role}
"""
    if case.barriers:
        body += """
setp.ne.u32 %p31, %r0, 0; @%p31 bra INITED;
mbarrier.init.shared::cta.b64 [%r12], 1; mbarrier.init.shared::cta.b64 [%r13], 1;
fence.mbarrier_init.release.cluster; INITED: bar.sync 0;
"""
        if case.where == "cluster":
            body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    body += case.setup
    for i, code in enumerate(case.roles):
        body += f"setp.ne.u32 %p0, %r1, {i}; @%p0 bra ROLE{i};\n"
        body += code if case.full or case.where == "lane" else elected(code)
        body += f"\nROLE{i}:\n"
    if case.where == "cluster":
        body += "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    regs = ".reg .b32 %x<160>;\n" + case.regs
    return entry(body, PARAMS, regs, HEAD)


def run_litmus(case: Litmus, schedule: str, completion: str, seed: int) -> Report | VgpuError:
    """One run; its report, or the error that stopped it."""
    n = len(case.roles)
    pes = n if case.where == "pe" else 1
    grid = n if case.where in ("cta", "cluster") else 1
    world = World(pes=pes, schedule=schedule, completion=completion, seed=seed, detect=True)
    kernel = Kernel.from_ptx(kernel_text(case))
    home = pes - 1
    data, flag = np.zeros(64, np.uint32), np.zeros(64, np.uint32)
    args = [world.register(data, "data", home), world.register(flag, "flag", home)]
    args.append(world.alloc(4096, "unwritten", home))
    for pe in range(pes):
        world.launch(
            pe=pe, kernel=kernel, grid=grid, block=32 * n if case.where == "warp" else 32,
            cluster=n if case.where == "cluster" else 1, args=[*args, pe],
        )  # fmt: skip
    try:
        return world.run()
    except VgpuError as e:
        return e


def check(case: Litmus) -> None:
    """The verdict holds under every schedule."""
    for how in SCHEDULES:
        got = run_litmus(case, *how)
        if isinstance(got, VgpuError):
            findings = got.report.findings if got.report is not None else []
            ok = case.verdict == "fault" or any(f.kind == case.verdict for f in findings)
            assert ok, f"{case.name} {how}: {got}"
            continue
        text = "\n".join(str(f) for f in got.findings)
        kinds = {f.kind for f in got.findings}
        if case.verdict == "clean":
            assert not kinds, f"{case.name} {how}: {text}"
        else:
            assert case.verdict in kinds, f"{case.name} {how}: found {kinds or 'nothing'}\n{text}"
            assert case.says in text, f"{case.name} {how}: {text}"
