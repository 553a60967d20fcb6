"""Mutants of a kernel: its PTX with one synchronisation instruction weakened, skewed or removed.

If a checker stays silent about a mutant, either the checker is blind there or the instruction is
not needed. See docs/verification.md for how mutants are judged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from megamoe.runtime.vgpu.ptx_ast import Entry, Imm, Instruction, Reg
from megamoe.runtime.vgpu.ptx_parser import parse_ptx
from megamoe.runtime.vgpu.source_places import SourcePlaces

NARROWER = {"sys": "gpu", "gpu": "cta", "cluster": "cta"}
FAR = 1 << 30
"""Stands for the value a skipped wait would have waited for: above every count and epoch."""
NUDGE = 16
"""Bytes by which an expected transaction count is skewed: the smallest copy."""

_BARRIERS = ("bar.sync", "bar.cta.sync", "bar.warp.sync", "barrier.sync", "barrier.cta.sync",
             "bar.arrive", "bar.cta.arrive", "barrier.arrive", "barrier.cta.arrive",
             "barrier.cluster.arrive", "barrier.cluster.wait")  # fmt: skip
_GROUPS = ("cp.async.bulk.commit_group", "cp.async.commit_group", "cp.async.wait_all",
           "cp.async.mbarrier.arrive", "wgmma.fence", "wgmma.commit_group")  # fmt: skip
_GROUP_WAITS = ("cp.async.bulk.wait_group", "cp.async.wait_group", "wgmma.wait_group")


Edit = str | Callable[[str], str]
"""The new text of a statement, or how to make it from the old one."""


@dataclass(frozen=True)
class Mutant:
    """One change of one instruction.

    Args:
        line: PTX line of the instruction.
        opcode: the instruction that was changed.
        kind: ``drop``, ``relax`` (no acquire or release), ``acquire``, ``release`` (half of
            acq_rel), ``weak`` (not a synchronising access any more), ``scope`` (the next
            narrower one), ``skip`` (a wait that never waits), ``keep`` (wait_group leaves one
            group more), ``read`` (wait_group.read), ``more``, ``less`` (expected bytes or
            arrivals).
        place: ``file:function`` of the source, outermost kernel function first.
        source: ``file:line`` of the instruction.
        old, new: the statement before and after.
        order: which of the equal statements on the line it is.
        copy: which mutant of its `key` it is, from 1 on, in the order of the text: helpers are
            inlined and loops unrolled.
    """

    line: int
    opcode: str
    kind: str
    place: str
    source: str
    old: str
    new: str
    order: int = 0
    copy: int = 1

    @property
    def key(self) -> str:
        """Names the mutant whatever its PTX line: place, opcode, kind."""
        return f"{self.place}:{self.opcode}:{self.kind}"

    @property
    def description(self) -> str:
        """For people."""
        what = self.new.strip() or "nothing"
        return f"PTX line {self.line} ({self.source}, {self.place}): {self.old.strip()} -> {what}"

    def apply(self, ptx: str) -> str:
        """The mutated text; every line keeps its number."""
        lines = ptx.split("\n")
        at = self.line - 1
        starts = [m.start() for m in re.finditer(re.escape(self.old), lines[at])]
        start = starts[self.order]
        lines[at] = lines[at][:start] + self.new + lines[at][start + len(self.old) :]
        return "\n".join(lines)


def mutants_of(ptx: str, entry: str | None = None) -> list[Mutant]:
    """All mutants of a module's kernels, or of one, in the order of the text."""
    module = parse_ptx(ptx)
    places = SourcePlaces(ptx, module.files)
    lines = ptx.split("\n")
    chosen = [e for name, e in module.entries.items() if entry in (None, name)]
    counts: dict[str, int] = {}
    out = []
    for mutant in (m for e in chosen for m in _of_entry(e, lines, places)):
        counts[mutant.key] = counts.get(mutant.key, 0) + 1
        out.append(replace(mutant, copy=counts[mutant.key]))
    return out


def _of_entry(entry: Entry, lines: list[str], places: SourcePlaces) -> Iterator[Mutant]:
    seen: dict[tuple[int, str], int] = {}
    for ins in entry.instructions:
        changes = list(_changes(ins))
        if not changes:
            continue
        statement = _statement(lines[ins.line - 1], ins, seen)
        order = seen[ins.line, statement]
        place, source = places.of(ins.line)
        for kind, edit in changes:
            new = edit(statement) if callable(edit) else edit
            yield Mutant(ins.line, ins.opcode, kind, place, source, statement, new, order)


def _statement(line: str, ins: Instruction, seen: dict[tuple[int, str], int]) -> str:
    """The text of an instruction, guard included."""
    pattern = r"(?:@!?[%\w$]+\s+)?" + re.escape(ins.opcode) + r"(?![\w.:])[^;]*;"
    found = re.findall(pattern, line)
    if not found:
        raise ValueError(f"PTX line {ins.line}: {ins.opcode} does not stand on one line")
    taken = sum(n + 1 for (at, _), n in seen.items() if at == ins.line)
    statement = found[min(taken, len(found) - 1)]
    seen[ins.line, statement] = seen.get((ins.line, statement), -1) + 1
    return statement


def _changes(ins: Instruction) -> Iterator[tuple[str, Edit]]:
    """(kind, new text or function of the old text) for an instruction."""
    op = ins.opcode
    parts = op.split(".")
    head = parts[0]
    if head in ("fence", "membar"):
        yield "drop", ""
        if "mbarrier_init" not in parts:
            yield from _narrow(parts)
    elif head in ("ld", "st", "red", "atom") and "async" not in parts:
        yield from _access(ins, parts)
    elif op.startswith("barrier.cluster.arrive"):
        yield "drop", ""
        if "relaxed" not in parts:
            yield "relax", _swap("barrier.cluster.arrive" + (".release" * ("release" in parts)),
                                 "barrier.cluster.arrive.relaxed")  # fmt: skip
    elif op.startswith((*_BARRIERS, *_GROUPS)):
        yield "drop", ""
    elif op.startswith(_GROUP_WAITS):
        yield from _group_wait(ins)
    elif head == "mbarrier":
        yield from _mbarrier(ins, parts)


def _access(ins: Instruction, parts: list[str]) -> Iterator[tuple[str, Edit]]:
    """Strong loads, stores and atomics of global memory."""
    head = parts[0]
    shared = any(p.startswith("shared") for p in parts)
    orders = {"acquire", "release", "acq_rel", "relaxed", "volatile"} & set(parts)
    sem = orders.pop() if orders else ""
    if head in ("ld", "st") and not sem:
        return
    if sem in ("release", "acq_rel") and head != "atom":
        yield "drop", ""
    if sem == "acquire" and head == "ld" and isinstance(ins.operands[0], Reg):
        width = ins.operands[0].width
        yield "skip", lambda text: f"{_guard(text)}mov.b{width} {_first(text)}, {FAR};"
    if sem in ("acquire", "release", "acq_rel"):
        yield "relax", _swap(f".{sem}", ".relaxed")
    if sem == "acq_rel":
        yield "acquire", _swap(".acq_rel", ".acquire")
        yield "release", _swap(".acq_rel", ".release")
    if head in ("ld", "st"):
        scope = next((p for p in parts if p in ("sys", "gpu", "cluster", "cta")), "")
        yield "weak", _swap(f".{sem}" + (f".{scope}" if scope else ""), "")
    if not shared:
        yield from _narrow(parts)


def _narrow(parts: list[str]) -> Iterator[tuple[str, Edit]]:
    """The next narrower scope; atomics without one have gpu scope."""
    scope = next((p for p in parts if p in NARROWER), "")
    if scope:
        yield "scope", _swap(f".{scope}", f".{NARROWER[scope]}")
    elif parts[0] in ("atom", "red") and "cta" not in parts:
        sem = next((f".{p}" for p in parts if p in ("acquire", "release", "acq_rel")), "")
        before, after = f"{parts[0]}.", f"{parts[0]}{sem or '.relaxed'}.cta."
        yield "scope", lambda text: _swap(before, after)(text.replace(sem, "", 1))


def _group_wait(ins: Instruction) -> Iterator[tuple[str, Edit]]:
    yield "drop", ""
    keep = ins.operands[0]
    if isinstance(keep, Imm):
        more = keep.value + 1
        yield "keep", lambda text: re.sub(r"\d+\s*;$", f"{more};", text)
    if ins.opcode == "cp.async.bulk.wait_group":
        yield "read", _swap("wait_group", "wait_group.read")


def _mbarrier(ins: Instruction, parts: list[str]) -> Iterator[tuple[str, Edit]]:
    what = parts[1]
    if what == "init":
        count = ins.operands[-1]
        yield "more", lambda text: _skew(text, 1)
        if not isinstance(count, Imm) or count.value > 1:
            yield "less", lambda text: _skew(text, -1)
    elif what in ("arrive", "arrive_drop", "expect_tx"):
        yield "drop", ""
        if "release" in parts and ("cta" in parts or "cluster" in parts):
            yield "relax", _swap(".release", ".relaxed")
        if "expect_tx" in parts:
            yield "more", lambda text: _skew(text, NUDGE)
            yield "less", lambda text: _skew(text, -NUDGE)
    elif what in ("try_wait", "test_wait"):
        yield "skip", lambda text: f"{_guard(text)}setp.eq.u32 {_first(text)}, 0, 0;"


def _skew(text: str, by: int) -> str:
    """Change the last operand, a number or register, by a constant."""
    match = re.search(r"([%\w$-]+)\s*;$", text)
    assert match is not None, text
    operand = match.group(1)
    if re.fullmatch(r"-?\d+", operand):
        return f"{text[: match.start()]}{int(operand) + by};"
    changed = f"{text[: match.start()]}vgpu_skewed;"
    return f"{{ .reg .b32 vgpu_skewed; add.s32 vgpu_skewed, {operand}, {by}; {changed} }}"


def _swap(old: str, new: str) -> Callable[[str], str]:
    """Replace the first occurrence in the opcode."""
    return lambda text: text.replace(old, new, 1)


def _guard(text: str) -> str:
    match = re.match(r"@!?[%\w$]+\s+", text)
    return match.group(0) if match else ""


def _first(text: str) -> str:
    """The first operand as written."""
    body = text[len(_guard(text)) :]
    return body.split(None, 1)[1].split(",", 1)[0].strip()
