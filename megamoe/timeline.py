"""A picture of who ran when: one lane per PE and role, one thin line in it per warp.

Time is the simulation's own logical time, not seconds: the picture shows order and overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LANE = 0.8  # of the distance between two lanes
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777", "#332288")
PALE = 0.25
MAX_GAP = 1 / 200  # of the whole picture: shorter pauses of a warp are closed, or it shows dust


class Activity(NamedTuple):
    """One stretch of one warp. ``kind`` "run" is drawn full, polling and waiting pale."""

    pe: int
    cta: int
    warp: int
    role: str
    start: float
    end: float
    kind: str


def activity_of(report: Any) -> list[Activity]:
    """The stretches in a vgpu report."""
    return [
        Activity(pe, cta, warp, report.roles[pe, cta, warp], start, end, kind)
        for (pe, cta, warp), spans in report.activity.items()
        for start, end, kind in spans
    ]


def join_spans(
    spans: Iterable[tuple[float, float]], *, max_gap: float
) -> list[tuple[float, float]]:
    """Merge (start, end) that overlap or lie at most ``max_gap`` apart.

    >>> join_spans([(5, 6), (0, 2), (2.5, 3)], max_gap=0.5)
    [(0, 3), (5, 6)]
    """
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] <= max_gap:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def draw_timeline(activity: Sequence[Activity], path: Path, *, title: str) -> None:
    """Write the picture as a PNG.

    Args:
        activity: see `activity_of`; must not be empty.
        path: file to write.
        title: shown above the picture.

    Raises:
        ValueError: there is no activity to draw.
    """
    if not activity:
        raise ValueError("activity is empty: there is nothing to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    spans: dict[tuple[int, str], dict[tuple[int, int], dict[bool, list[tuple[float, float]]]]]
    spans = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for record in activity:
        warp = spans[record.pe, record.role][record.cta, record.warp]
        warp[record.kind != "run"].append((record.start, record.end))
    first = min(record.start for record in activity)
    last = max(record.end for record in activity)
    # Lanes in the order in which roles first act, PE by PE.
    began: dict[str, float] = {}
    for record in activity:
        began[record.role] = min(began.get(record.role, record.start), record.start)
    roles = sorted(began, key=lambda role: (began[role], role))
    lanes = sorted(spans, key=lambda lane: (lane[0], roles.index(lane[1])))
    colours = {role: PALETTE[i % len(PALETTE)] for i, role in enumerate(roles)}

    figure = Figure(figsize=(12, 1.2 + 0.35 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    for place, lane in enumerate(lanes):
        warps = spans[lane]
        height = LANE / len(warps)
        for line, key in enumerate(sorted(warps)):
            bottom = place - LANE / 2 + line * height
            for waiting in (True, False):
                pieces = join_spans(warps[key][waiting], max_gap=(last - first) * MAX_GAP)
                axes.broken_barh(
                    [(start, end - start) for start, end in pieces],
                    (bottom, height * 0.9),
                    color=colours[lane[1]],
                    alpha=PALE if waiting else 1.0,
                    linewidth=0,
                )
    for place in range(1, len(lanes)):
        if lanes[place][0] != lanes[place - 1][0]:
            axes.axhline(place - 0.5, color="black", linewidth=0.5)
    axes.set_yticks(range(len(lanes)), [f"PE {pe}  {role}" for pe, role in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(first, last)
    axes.set_xlabel("logical time of the simulation (order and overlap, not seconds)")
    axes.set_title(title)
    axes.legend(
        handles=[
            *(Patch(color=colours[role], label=role) for role in roles),
            Patch(color=PALETTE[-2], alpha=PALE, label="pale: waiting"),
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    figure.savefig(path, dpi=130)
