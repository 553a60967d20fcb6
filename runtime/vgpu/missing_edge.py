"""The edge that would have ordered two accesses, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamoe.runtime.vgpu.clocks import GENERIC, GLOBAL, SHARED, TENSORMAP

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.findings import Touch
    from megamoe.runtime.vgpu.warp import Warp

_FENCES = {
    GLOBAL: "fence.proxy.async (or .async.global)",
    SHARED: "fence.proxy.async (or .async.shared::cta)",
    TENSORMAP: "fence.proxy.tensormap::generic.acquire",
}


def explain(key: tuple, time: int, first: Touch, then: Touch, row: int) -> str:
    """What was missing between ``first`` (by the agent ``key`` at ``time``) and ``then``.

    ``row`` other than ``GENERIC``: causality order is there, only the proxy fence is not.
    """
    if row != GENERIC and first.what == "mbarrier.init":
        return "fence.mbarrier_init or fence.proxy.async after the initialisation"
    if row != GENERIC:
        return f"{_FENCES[row]} between them: they go through different proxies"
    kind = key[0]
    after = ""
    if first.warp is not None and then.warp is not None and first.warp is not then.warp:
        after = f", and from there {path(first.warp, then.warp)}"
    if kind == "host":
        return "the launch boundary"
    if kind == "host_pe":
        return f"a signal from a kernel of PE {key[1]} that was launched after the host's write"
    if kind == "mbarrier":
        return f"a successful wait on mbarrier smem+{key[3]:#x}, whose phase the copy completes"
    if kind == "bulk_write":
        return f"cp.async.bulk.wait_group without .read by the issuing lane{after}"
    if kind == "bulk_read":
        return f"cp.async.bulk.wait_group or .read by the issuing lane{after}"
    if kind == "copy":
        return f"cp.async.wait_group or an mbarrier by the issuing lane{after}"
    if kind == "wgmma":
        return f"wgmma.wait_group by the warpgroup, and from there {path(first.warp, then.warp)}"
    return path(first.warp, then.warp)


def path(a: Warp | None, b: Warp | None) -> str:
    """An edge between two warps."""
    if a is None or b is None:
        return "the launch boundary"
    if a is b:
        return "bar.warp.sync between the lanes (program order holds only inside a lane)"
    if a.cta is b.cta:
        return f"a barrier (bar, or mbarrier arrive and wait) from warp {a.index} to warp {b.index}"
    if a.cta.cluster is b.cta.cluster:
        return (
            f"barrier.cluster, or a release and acquire at cluster scope, from CTA {a.cta.number}"
            f" to CTA {b.cta.number}"
        )
    if a.pe == b.pe:
        return f"a release and acquire at gpu scope from CTA {a.cta.number} to CTA {b.cta.number}"
    return f"a release and acquire at sys scope from PE {a.pe} to PE {b.pe}"
