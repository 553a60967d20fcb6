"""A page about one defect: its text, and the two accesses on the timeline of the warps around them.

Time is the simulation's own (warp instructions of the whole world); the page needs no other file.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from megamoe.runtime.vgpu.findings import AccessPlace
from megamoe.runtime.vgpu.world import World
from megamoe.verify.runs import Outcome, Run, execute

WIDTH, LABEL, ROW = 1000, 210, 18
COLOURS = {"run": "#4477aa", "poll": "#cccccc"}
WAITING = "#e8e8e8"
MARKS = ("#ee6677", "#aa3377")
_HOOKS = {
    "access": lambda args: (args[0], args[1].ins),
    "async_issue": lambda args: (args[0].warp, args[0].ins),
    "async_complete": lambda args: (args[0].warp, args[0].ins),
    "wgmma_issue": lambda args: (args[0], args[1].ins),
}


class Tap:
    """Stands before a detector and remembers when each warp last executed each instruction."""

    def __init__(self, world: World) -> None:
        self.world, self.inner = world, world.detector
        self.seen: dict[tuple[int, int, int, int], int] = {}

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.inner, name)
        where = _HOOKS.get(name)
        if where is None:
            return inner

        def hooked(*args: Any) -> Any:
            w, ins = where(args)
            self.seen[w.pe, w.cta.number, w.index, ins.line] = self.world.ticks
            return inner(*args)

        return hooked

    def time(self, place: AccessPlace | None) -> int | None:
        """When an access happened; None for the host's."""
        if place is None or place.warp < 0:
            return None
        return self.seen.get((place.pe, place.cta, place.warp, place.ptx_line))


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A defect's outcome with the times of its accesses."""

    outcome: Outcome
    times: tuple[int | None, int | None]


def trace(run: Run, **options: Any) -> Picture:
    """Repeat a run up to its first defect, and note when its accesses happened."""
    taps: list[Tap] = []

    def watch(world: World) -> None:
        taps.append(Tap(world))
        world.detector = taps[0]

    outcome = execute(run, first_only=True, watch=watch, **options)
    finding = next((d.finding for d in outcome.defects if d.finding), None)
    if finding is None:
        return Picture(outcome=outcome, times=(None, None))
    tap = taps[0]
    return Picture(outcome=outcome, times=(tap.time(finding.access_1), tap.time(finding.access_2)))


def page(picture: Picture) -> str:
    """The HTML page."""
    outcome = picture.outcome
    defects = outcome.defects
    title = html.escape(f"{defects[0].kind if defects else 'no defect'}: {outcome.run}")
    texts = "".join(f"<pre>{html.escape(d.text)}</pre>" for d in defects)
    drawing = timeline(picture) if outcome.report is not None else ""
    return (
        f"<!doctype html><meta charset='utf-8'><title>{title}</title>"
        "<style>body{font:14px sans-serif;margin:2em}pre{background:#f4f4f4;padding:1em;"
        "white-space:pre-wrap}text{font:11px sans-serif}</style>"
        f"<h1>{title}</h1>{texts}{drawing}"
        "<p>Logical time of a functional simulation: order and overlap, not seconds. Blue: runs; "
        "grey: polls or waits.</p>"
    )


def timeline(picture: Picture) -> str:
    """SVG: one row for each warp of the CTAs involved, a mark for each access."""
    report, finding = picture.outcome.report, None
    for defect in picture.outcome.defects:
        finding = finding or defect.finding
    places = [finding.access_1, finding.access_2] if finding is not None else []
    ctas = {(p.pe, p.cta) for p in places if p is not None and p.warp >= 0}
    warps = sorted(key for key in report.activity if not ctas or key[:2] in ctas)[:64]
    end = max([1, report.ticks, *(s[1] for key in warps for s in report.activity[key])])
    scale = WIDTH / end
    parts = []
    for row, key in enumerate(warps):
        label = f"PE {key[0]} CTA {key[1]} warp {key[2]} {report.roles[key]}"
        top = row * ROW
        parts.append(f"<text x='0' y='{top + 12}'>{html.escape(label)}</text>")
        for start, stop, kind in report.activity[key]:
            colour = COLOURS.get(kind, WAITING)
            parts.append(
                f"<rect x='{LABEL + start * scale:.1f}' y='{top + 2}' fill='{colour}' "
                f"width='{max((stop - start) * scale, 0.3):.1f}' height='{ROW - 5}'/>"
            )
    for number, (place, time) in enumerate(zip(places, picture.times, strict=False)):
        if place is None or time is None:
            continue
        x = LABEL + time * scale
        y = warps.index((place.pe, place.cta, place.warp)) * ROW + ROW / 2
        name = html.escape(f"{number + 1}: {place.what}, {place.source}")
        parts.append(
            f"<line x1='{x:.1f}' x2='{x:.1f}' y1='0' y2='{len(warps) * ROW}' "
            f"stroke='{MARKS[number]}' stroke-dasharray='3'/>"
            f"<circle cx='{x:.1f}' cy='{y}' r='5' fill='{MARKS[number]}'/>"
            f"<text x='{LABEL}' y='{len(warps) * ROW + 14 * (number + 1)}' "
            f"fill='{MARKS[number]}'>{name}</text>"
        )
    height = len(warps) * ROW + 40
    return f"<svg width='{LABEL + WIDTH}' height='{height}'>{''.join(parts)}</svg>"
