"""What the race detector reports, and how it puts it in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megamoe.runtime.vgpu.errors import VgpuError

if TYPE_CHECKING:
    from megamoe.runtime.vgpu.ptx_ast import Instruction
    from megamoe.runtime.vgpu.warp import Warp

KINDS = ("race", "poison_read", "transaction", "register_race", "lifetime")


class FindingError(VgpuError):
    """A run with ``raise_on_finding=True`` had findings; they are in ``report.findings``."""


@dataclass(frozen=True)
class AccessPlace:
    """One side of a finding. ``lanes`` is a bit mask; -1 in ``pe`` … ``warp`` means the host."""

    what: str
    pe: int
    cta: int
    warp: int
    lanes: int
    role: str
    opcode: str
    ptx_line: int
    source: str

    def __str__(self) -> str:
        if self.warp < 0:
            return f"{self.what} by the host" + (f" of PE {self.pe}" if self.pe >= 0 else "")
        count = self.lanes.bit_count()
        if count == 1:
            lanes = f" lane {self.lanes.bit_length() - 1}"
        else:
            lanes = " all lanes" if count == 32 else f" lanes {self.lanes:#x}"
        role = f" ({self.role})" if self.role else ""
        return (
            f"{self.what} by PE {self.pe} CTA {self.cta} warp {self.warp}{role}{lanes}: "
            f"{self.opcode} at {self.source}"
        )


@dataclass(frozen=True)
class Finding:
    """One defect.

    ``kind``: ``race`` (two accesses, at least one a write, that nothing orders), ``poison_read``
    (bytes that nobody ever wrote are used), ``transaction`` (an mbarrier's expected bytes do not
    fit its copies), ``register_race`` (registers of a wgmma touched without ``wgmma.fence``),
    ``lifetime`` (a CTA may end while a copy still reads or writes its shared memory).
    ``access_1`` came first in the run at hand and is None where there is no earlier access.
    """

    kind: str
    message: str
    access_1: AccessPlace | None
    access_2: AccessPlace
    missing_edge: str
    where: str
    pe: int = -1

    def __str__(self) -> str:
        return self.message


class Touch:
    """An access that the shadow memory can point to.

    ``lanes`` and ``offsets`` are arrays for per-lane addresses; for one address of all lanes in
    ``bits``, and for asynchronous work, ``offsets`` is None. ``scope`` is set for strong accesses.
    """

    __slots__ = (
        "bits", "ins", "lanes", "offsets", "reduce", "scope", "total", "warp", "what",
    )  # fmt: skip

    def __init__(
        self, warp: Warp | None, ins: Instruction | None, what: str, bits: int,
        lanes: Any = None, offsets: Any = None, total: int = 0, scope: str = "",
        reduce: bool = False,
    ) -> None:  # fmt: skip
        self.warp, self.ins, self.what, self.bits = warp, ins, what, bits
        self.lanes, self.offsets, self.total, self.scope = lanes, offsets, total, scope
        self.reduce = reduce

    def place(self, bits: int = 0, pe: int = -1) -> AccessPlace:
        """For a report; ``bits`` narrows the lanes."""
        w, ins = self.warp, self.ins
        if w is None or ins is None:
            return AccessPlace(self.what, pe, -1, -1, 0, "", "", 0, "")
        return AccessPlace(
            self.what, w.pe, w.cta.number, w.index, bits or self.bits, w.role, ins.opcode,
            ins.line, w.source(ins),
        )  # fmt: skip

    def lanes_at(self, cell: int, grain: int) -> int:
        """Bit mask of the lanes that touched a cell of the region."""
        if self.offsets is None:
            return self.bits
        first = self.offsets >> grain
        last = (self.offsets + self.total - 1) >> grain
        bits = 0
        for lane in self.lanes[(first <= cell) & (cell <= last)].tolist():
            bits |= 1 << int(lane)
        return bits


class Findings:
    """The findings of a detector, one for each pair of instructions, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.items: list[Finding] = []
        self.counts: dict[tuple, int] = {}
        self.run_start = 0

    def new(self, kind: str, line_1: int, line_2: int, extra: str = "") -> bool:
        """Count an occurrence; True if it has to be described."""
        key = (kind, line_1, line_2, extra)
        seen = self.counts.get(key, 0)
        self.counts[key] = seen + 1
        return seen == 0 and len(self.items) - self.run_start < self.limit

    def add(
        self, kind: str, first: AccessPlace | None, second: AccessPlace, missing: str,
        where: str, pe: int,
    ) -> None:  # fmt: skip
        """Describe a defect."""
        head = {
            "race": "race", "poison_read": "read of never-written bytes",
            "transaction": "transaction bytes", "register_race": "register race",
            "lifetime": "copy outlives its CTA",
        }[kind]  # fmt: skip
        lines = [f"{head} on {where}"]
        if first is not None:
            lines.append(f"  first:  {first}")
        lines.append(f"  {'then:  ' if first is not None else 'access:'} {second}")
        lines.append(f"  missing: {missing}")
        self.items.append(Finding(kind, "\n".join(lines), first, second, missing, where, pe))

    def start_run(self) -> None:
        """The next run's findings begin here."""
        self.run_start = len(self.items)
        self.counts.clear()

    def of_run(self) -> list[Finding]:
        """What the present run has found."""
        return self.items[self.run_start :]
