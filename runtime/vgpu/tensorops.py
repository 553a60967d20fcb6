"""Tensor copies (``cp.async.bulk.tensor``, tile mode) and their reducing form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megamoe.runtime.vgpu.access import Access, fault
from megamoe.runtime.vgpu.asyncops import AsyncOp, groups_of, reducer, span
from megamoe.runtime.vgpu.barriers import MBarrier
from megamoe.runtime.vgpu.errors import MemoryFault
from megamoe.runtime.vgpu.memory import Region
from megamoe.runtime.vgpu.ptx_ast import Instruction
from megamoe.runtime.vgpu.sync import active, lane_values, mbarrier_at
from megamoe.runtime.vgpu.tensormap import TensorMapDesc

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.boxplan import BoxPlan
    from megamoe.runtime.vgpu.warp import Warp


def descriptor(w: Warp, ins: Instruction, address: int, lane: int, dims: int) -> TensorMapDesc:
    """The tensor map at a generic address, in parameters or global memory."""
    region, off = span(w, ins, "generic", address, 128, lane, 64)
    if w.world.detector is not None:
        w.world.detector.tensor_map(w, ins, region, off, lane)
    try:
        desc = TensorMapDesc.from_bytes(region.data[off : off + 128].tobytes())
    except ValueError as e:
        raise MemoryFault(f"{w.place(lane)}: {ins.opcode}: {e} ({w.source(ins)})") from None
    if desc.rank != dims:
        raise MemoryFault(
            f"{w.place(lane)}: {ins.opcode}: the tensor map has rank {desc.rank} ({w.source(ins)})"
        )
    return desc


def global_part(
    w: Warp, ins: Instruction, desc: TensorMapDesc, coords: list[int], smem: int, lane: int
) -> tuple[Region, int, BoxPlan]:
    """Region, offset and plan of a box; checks that the tensor lies inside one allocation."""
    first, plan = desc.plan(coords, smem & 0xFFFFFF)
    if not plan.extent:
        return w.world.memory.regions[0], 0, plan
    a = Access(ins, "tensor", "global", 1, 1)
    region = w.world.memory.find(first)
    if region is None or first + plan.extent > region.end:
        a.count = plan.extent
        raise fault(w, a, first, lane, f"box at {coords} leaves the allocation")
    return region, first - region.base, plan


def tensor_load(
    w: Warp, ins: Instruction, dst: Any, tmap: Any, coords: list[Any], bar: Any, mask: Any
) -> None:
    """Global → shared (of this CTA, a peer, or several with a multicast mask)."""
    world = w.world
    args = [dst, tmap, bar, 0 if mask is None else mask, *coords]
    for lane, (d, m, b, ctas, *at) in zip(active(w), lane_values(w, *args), strict=True):
        desc = descriptor(w, ins, m, lane, len(at))
        region, off, plan = global_part(w, ins, desc, at, d, lane)
        nbytes = desc.box_bytes
        ranks = [d >> 24] if mask is None else [r for r in range(16) if ctas >> r & 1]
        where, done = d & 0xFFFFFF, []
        targets: list[np.ndarray] = []
        dests: list[tuple[Region, int]] = []
        for r in ranks:
            dests.append(span(w, ins, "shared", where | r << 24, nbytes, lane, 128, write=True))
            cta = w.cta.peer(r)
            assert cta is not None
            targets.append(cta.smem)
            at_bar = b if mask is None else (b & 0xFFFFFF) | r << 24
            done.append((mbarrier_at(w, ins, at_bar), nbytes))
        w.loaded[region.tally] += plan.bytes_inside
        submit_load(w, ins, lane, (region, off, plan), where, targets, dests, done)
        world.count_async(ins, nbytes * len(ranks))


def submit_load(
    w: Warp, ins: Instruction, lane: int, source: tuple[Region, int, BoxPlan], where: int,
    targets: list[np.ndarray], dests: list[tuple[Region, int]], done: list[tuple[MBarrier, int]],
) -> None:  # fmt: skip
    """Queue a load."""
    region, off, plan = source

    def reader() -> Any:
        return plan.gather_global(region.data[off : off + plan.extent])

    def writer(values: Any) -> None:
        for smem in targets:
            plan.scatter_shared(smem, where, values)

    op = AsyncOp(w, ins, "tensor_load", reader, writer, done, lane)
    op.track = (region, off, plan, dests, where)
    w.world.submit(op)


def tensor_store(
    w: Warp, ins: Instruction, src: Any, tmap: Any, coords: list[Any], reduce: str
) -> None:
    """Shared → global, plain or reducing."""
    issued: dict[tuple[int, ...], AsyncOp] = {}
    for lane, (s, m, *at) in zip(active(w), lane_values(w, src, tmap, *coords), strict=True):
        desc = descriptor(w, ins, m, lane, len(at))
        region, off, plan = global_part(w, ins, desc, at, s, lane)
        span(w, ins, "shared", s, desc.box_bytes, lane, 128)
        if plan.extent and not region.writable:
            raise fault(w, Access(ins, "tensor", "global", 1), region.base + off, lane, "read-only")
        key = (s, m, *at)
        same_as = None if reduce else issued.get(key)
        issued[key] = submit_store(w, ins, lane, (region, off, plan), s, desc, reduce, same_as)
        w.stored[region.tally] += plan.bytes_inside
        w.world.count_async(ins, plan.bytes_inside)


def submit_store(
    w: Warp, ins: Instruction, lane: int, target: tuple[Region, int, BoxPlan], src: int,
    desc: TensorMapDesc, reduce: str, same_as: AsyncOp | None,
) -> AsyncOp:  # fmt: skip
    """Queue a store."""
    region, off, plan = target
    smem, where = w.cta.smem, src & 0xFFFFFF
    apply = reducer(f"{reduce}.{desc.dtype}") if reduce else None

    def reader() -> Any:
        return plan.gather_shared(smem, where)

    def writer(values: Any) -> None:
        data = region.data[off : off + plan.extent]
        if apply is not None and plan.extent:
            old = np.ascontiguousarray(plan.gather_global(data))
            new = np.ascontiguousarray(values)
            mixed = apply(old.view(np.uint8).reshape(-1), new.view(np.uint8).reshape(-1))
            values = mixed.view(new.dtype).reshape(new.shape)
        plan.scatter_global(data, values)

    op = AsyncOp(w, ins, "tensor_store", reader, writer, [], lane)
    op.track, op.same_as = (region, off, plan, [], where), same_as
    groups_of(w, "bulk", lane).open.append(op)
    w.world.submit(op)
    return op
