"""Copies that outlive their CTA: its shared memory is gone when its last thread has exited.

Source: PTX ISA, "cp.async.bulk" (the source of a copy must not change, hence not vanish, before
the read is over) and "State spaces" (shared memory lives as long as the CTA). A bulk store has to
be waited for by its issuing lane, ``.read`` suffices; a copy that completes on an mbarrier, by any
thread that waits for its phase.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamoe.runtime.vgpu.clocks import GENERIC, Clock

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.cta import Cta
    from megamoe.runtime.vgpu.findings import Findings, Touch


def check_lifetimes(findings: Findings, cta: Cta, known: Clock) -> None:
    """Report copies that may still be under way at the end of a CTA; ``known`` is what any of its
    threads knows then."""
    for w in cta.warps:
        for (kind, _), ops in w.hb_groups.items():
            if kind == "bulk" and ops.last_read is not None:
                time, touch = ops.last_read
                if known[GENERIC, ops.read_column] < time:
                    edge = "cp.async.bulk.wait_group or .read by the issuing lane"
                    _report(findings, cta, touch, edge)
    for bar in cta.mbarriers.values():
        if bar.hb is not None and bar.hb.last_copy is not None:
            time, touch = bar.hb.last_copy
            if known[GENERIC, bar.hb.column] < time:
                edge = f"a successful wait on mbarrier smem+{bar.offset:#x}, on which it completes,"
                _report(findings, cta, touch, edge)


def _report(findings: Findings, cta: Cta, touch: Touch, edge: str) -> None:
    assert touch.ins is not None
    if findings.new("lifetime", 0, touch.ins.line):
        findings.add(
            "lifetime", None, touch.place(), f"{edge} before the CTA ends",
            f"shared memory of CTA {cta.number}", cta.pe,
        )  # fmt: skip
