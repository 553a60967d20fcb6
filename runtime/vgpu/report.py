"""What a run did: counters, activity over time, and the text of a deadlock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megamoe.runtime.vgpu.findings import Finding

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.world import World


@dataclass
class Report:
    """Counters of one ``World.run``.

    ``bytes_by_pair[(src, dst)]`` counts bytes that moved from memory of PE ``src`` to PE ``dst``:
    loads and bulk loads count towards the reader, stores towards the owner of the memory.
    ``bytes_by_role[role][space]`` are bytes of global memory that a role's instructions and copies
    asked for, what HBM and links would move without any cache: ``own_read``, ``own_written``,
    ``peers_read`` and ``peers_written``. ``wgmma_operand_bytes`` is what WGMMA read of shared
    memory: A (unless in registers) and B of each instruction.
    ``activity[(pe, cta, warp)]`` is a list of (start, end, kind) in ticks (warp instructions of
    the whole world); kind is ``run`` or what the warp waited for.
    """

    warp_instructions: int = 0
    instructions_by_role: dict[str, int] = field(default_factory=dict)
    bytes_by_pair: dict[tuple[int, int], int] = field(default_factory=dict)
    bytes_by_role: dict[str, dict[str, int]] = field(default_factory=dict)
    wgmma_flops: int = 0
    wgmma_operand_bytes: int = 0
    tensor_load_bytes: int = 0
    async_ops: dict[str, int] = field(default_factory=dict)
    async_bytes: dict[str, int] = field(default_factory=dict)
    launches: dict[int, int] = field(default_factory=dict)
    activity: dict[tuple[int, int, int], list[tuple[int, int, str]]] = field(default_factory=dict)
    roles: dict[tuple[int, int, int], str] = field(default_factory=dict)
    ticks: int = 0
    seconds: float = 0.0
    text: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def read_by_role(self) -> dict[str, int]:
        """Bytes that roles read from global memory, own and peers'."""
        return self._by_role("read")

    @property
    def written_by_role(self) -> dict[str, int]:
        """Bytes that roles wrote to global memory, own and peers'."""
        return self._by_role("written")

    def _by_role(self, way: str) -> dict[str, int]:
        sums = {
            role: sum(n for space, n in spaces.items() if space.endswith(way))
            for role, spaces in self.bytes_by_role.items()
        }
        return {role: n for role, n in sums.items() if n}

    @property
    def bytes_between_pes(self) -> int:
        """Bytes that crossed from one PE to another."""
        return sum(n for (src, dst), n in self.bytes_by_pair.items() if src != dst)


def collect(world: World, seconds: float) -> Report:
    """Build the report of the run that just ended (or stopped)."""
    r = Report(
        seconds=seconds,
        wgmma_flops=world.wgmma_flops,
        wgmma_operand_bytes=world.wgmma_operand_bytes,
    )
    for w in world.all_warps:
        key = (w.pe, w.cta.number, w.index)
        r.warp_instructions += w.icount
        role = w.role or f"warp{w.index}"
        r.instructions_by_role[role] = r.instructions_by_role.get(role, 0) + w.icount
        r.roles[key] = role
        r.activity[key] = w.intervals
        for other in range(world.pes):
            _add(r.bytes_by_pair, (other, w.pe), w.loaded[other])
            _add(r.bytes_by_pair, (w.pe, other), w.stored[other])
        spaces = r.bytes_by_role.setdefault(role, {})
        for way, tally in (("read", w.loaded), ("written", w.stored)):
            _add(spaces, f"own_{way}", tally[w.pe])
            _add(spaces, f"peers_{way}", sum(tally[:-1]) - tally[w.pe])
    for name, (ops, nbytes) in world.async_counts.items():
        r.async_ops[name], r.async_bytes[name] = ops, nbytes
        if name.startswith("cp.async.bulk.tensor") and "mbarrier::complete_tx" in name:
            r.tensor_load_bytes += nbytes
    for launch in world.launches:
        r.launches[launch.pe] = r.launches.get(launch.pe, 0) + 1
    r.ticks = world.ticks
    if world.detector is not None:
        r.findings = list(world.detector.findings)
    return r


def _add(table: dict[Any, int], key: Any, nbytes: int) -> None:
    if nbytes:
        table[key] = table.get(key, 0) + nbytes


def deadlock_text(world: World, why: str) -> str:
    """Every warp, where it stands and what it waits for; then the barriers involved."""
    lines = [f"deadlock: {why}"]
    seen: dict[int, Any] = {}
    shown = 0
    for cta in world.live_ctas:
        for w in cta.warps:
            for g in w.groups:
                shown += 1
                if shown > 400:
                    continue
                lines.append("  " + describe_group(world, w, g))
                if g.waiting is not None and hasattr(g.waiting, "waiters"):
                    seen.setdefault(id(g.waiting), (cta, g.waiting))
    if shown > 400:
        lines.append(f"  ... and {shown - 400} more groups")
    for cta, what in list(seen.values())[:100]:
        lines.append(f"  PE {cta.pe} CTA {cta.index} {what.describe()}")
    for cta in world.live_ctas[:32]:
        for bar in cta.mbarriers.values():
            if id(bar) not in seen and (bar.pending != bar.expected or bar.tx):
                lines.append(f"  PE {cta.pe} CTA {cta.index} {bar.describe()}")
    waiting = len(world.queued_ctas)
    if waiting:
        lines.append(f"  {waiting} CTAs have not started: no SM has room for them")
    return "\n".join(lines)


def describe_group(world: World, w: Any, g: Any) -> str:
    """One line about a group of lanes."""
    lanes = "all lanes" if g.bits == 0xFFFFFFFF else f"lanes {g.bits:#010x}"
    blocks, ops = w.program.blocks, w.program.ops
    ins = g.ins if g.waiting is not None and g.ins is not None else None
    if ins is None and g.pc < len(blocks):
        ins = ops[blocks[g.pc].start].ins
    if g.waiting is not None:
        state = f"waits for {g.waiting.describe()}"
    elif g.polled:
        state = "polls in vain"
    else:
        state = "can run"
    name = ins.opcode if ins is not None else "?"
    return f"{w.place()} {lanes}: {name} at {w.source(ins)}: {state}"
