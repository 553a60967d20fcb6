"""What the commands share: output, progress, errors without tracebacks, JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

JSON_OPTION = click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the results to this file.",
)


class Steps:
    """A progress line with a bar over a known number of named steps."""

    def __init__(self, progress: Progress, total: int):
        self._progress = progress
        self._task = progress.add_task("", total=total)
        self._begun = False

    def begin(self, text: str) -> None:
        """Count the step before, if any, as done and show this one."""
        self._progress.update(self._task, advance=1 if self._begun else 0, description=text)
        self._begun = True


@contextmanager
def steps(total: int) -> Iterator[Steps]:
    """Show progress on stderr while the block runs; gone afterwards, silent in a pipe."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Steps(progress, total)


@contextmanager
def counter() -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    """(tick, total): a bar over a count of things of which only the number matters."""
    columns = (SpinnerColumn(), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)

        def tick(text: str) -> None:
            progress.update(task, advance=1, description=text)

        def total(count: int) -> None:
            progress.update(task, total=count)

        yield tick, total


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn refused arguments and reported kernel errors into one message and exit code 1."""
    from megamoe.runtime.errors import MegaMoEError

    try:
        yield
    except (ValueError, MegaMoEError) as error:
        raise click.ClickException(str(error)) from error


def write_json(path: Path | None, values: dict[str, Any]) -> None:
    """Write ``values`` if a file was asked for, making its folder."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=2) + "\n")
