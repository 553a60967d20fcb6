"""``megamoe verify``: races, deadlocks and wrong results of the kernels, on vgpu."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from megamoe.cli.common import JSON_OPTION, counter, plain_errors, write_json

if TYPE_CHECKING:
    from megamoe.verify.matrix import MatrixResult
    from megamoe.verify.mutation import MutationResult

POLICIES = {
    "schedule": ("round_robin", "random", "starve"),
    "completion": ("eager", "late", "random"),
}
SHOWN = 5


def default_processes() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _matrix_table(result: dict[str, Any]) -> Table:
    table = Table(title="kernels under the race detector", show_header=False)
    for key in ("cases", "runs", "races", "poison_reads", "deadlocks", "wrong_results",
                "other_errors", "warp_instructions"):  # fmt: skip
        bad = result[key] and key not in ("cases", "runs", "warp_instructions")
        table.add_row(
            key.replace("_", " "), f"[bold red]{result[key]}[/]" if bad else f"{result[key]:,}"
        )
    return table


def _write_pages(result: MatrixResult, folder: Path) -> list[Path]:
    """One page for each run with a defect."""
    from megamoe.verify.picture import page, trace

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, outcome in enumerate(result.failed):
        path = folder / f"finding_{number}_{outcome.run.case.name}.html"
        path.write_text(page(trace(outcome.run)))
        paths.append(path)
    return paths


def _verify(
    names: tuple[str, ...], pes: int | None, seeds: int, policies: dict[str, str | None],
    processes: int,
) -> MatrixResult:  # fmt: skip
    from megamoe.verify.cases import CASES_BY_NAME, VERIFY_CASES
    from megamoe.verify.matrix import run_matrix
    from megamoe.verify.runs import plan_runs

    unknown = [name for name in names if name not in CASES_BY_NAME]
    if unknown:
        raise ValueError(f"--case {unknown[0]}: there are {', '.join(CASES_BY_NAME)}")
    cases = [CASES_BY_NAME[name] for name in names] or list(VERIFY_CASES)
    if pes is not None:
        cases = [case.with_pes(pes) for case in cases]
    runs = plan_runs(cases, seeds=seeds, **policies)
    with counter() as (tick, total):
        total(len(runs))
        return run_matrix(runs, processes=processes, tick=tick)


def _mutate(processes: int, every: bool) -> MutationResult:
    from megamoe.runtime.vgpu.errors import VgpuError
    from megamoe.verify.mutation import run_mutation

    with counter() as (tick, total):
        try:
            return run_mutation(every=every, processes=processes, tick=tick, total=total)
        except VgpuError as error:
            raise click.ClickException(str(error)) from error


def _print_mutation(result: MutationResult, say: Callable[..., None]) -> None:
    table = Table(title="mutants of the forward kernels", show_header=False)
    table.add_row("mutants", str(len(result.verdicts)))
    for kernel, count in result.as_json()["kernels"].items():
        table.add_row(f"  {kernel}", str(count))
    for state in ("killed", "equivalent", "survivor"):
        table.add_row(state, str(len(result.of(state))))
    say(table)
    for verdict in result.of("survivor"):
        say(f"[bold red]survivor[/] after {verdict.runs} runs: {verdict.name}")
        say(f"  {verdict.mutant.description}", markup=False)
    for key in result.unused:
        say(f"[yellow]no mutant needs this entry of the equivalent list:[/] {key}")


@click.command("verify")
@click.option("--case", "names", multiple=True, help="A case by name; may be repeated.")
@click.option("--all", "everything", is_flag=True, help="All cases (the default).")
@click.option("--pes", type=click.IntRange(1, 8), help="Run the cases on this many PEs.")
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="A case.")
@click.option(
    "--schedule",
    type=click.Choice(POLICIES["schedule"]),
    help="Who runs next; without it the runs take turns.",
)
@click.option(
    "--completion",
    type=click.Choice(POLICIES["completion"]),
    help="When asynchronous operations take effect; without it the runs take turns.",
)
@click.option("--mutate", is_flag=True, help="Also judge mutants of the kernels (minutes).")
@click.option(
    "--every-mutant",
    is_flag=True,
    help="With --mutate: also those of code that an earlier kernel has in the same place.",
)
@click.option("--processes", type=click.IntRange(min=1), help="Default: all cores.")
@click.option(
    "--out",
    "out_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write a page for each run with a finding into this folder.",
)
@JSON_OPTION
def verify_command(
    names: tuple[str, ...],
    everything: bool,
    pes: int | None,
    seeds: int,
    schedule: str | None,
    completion: str | None,
    mutate: bool,
    every_mutant: bool,
    processes: int | None,
    out_dir: Path | None,
    json_path: Path | None,
) -> None:
    """Run forwards, saving forwards and dgrads under the race detector on vgpu; exit with 1 on any
    finding.

    With --mutate, also weaken or remove each synchronisation instruction of the forward kernels
    (direct and pre-reduced combine, ring pool) in turn; every such mutant must be reported or be
    listed as equivalent.
    """
    if every_mutant and not mutate:
        raise click.UsageError("--every-mutant needs --mutate")
    say = Console().print
    if everything and names:
        raise click.UsageError("--all and --case exclude each other")
    workers = processes or default_processes()
    with plain_errors():
        policies = {"schedule": schedule, "completion": completion}
        result = _verify(names, pes, seeds, policies, workers)
    values = result.as_json()
    say(_matrix_table(values))
    for finding in values["findings"][:SHOWN]:
        say(f"{finding['run']}: {finding['text']}", markup=False)
    if len(values["findings"]) > SHOWN:
        say(f"... and {len(values['findings']) - SHOWN} more; --json lists all")
    if out_dir is not None:
        for path in _write_pages(result, out_dir):
            say(f"wrote {path}")
    survivors = 0
    if mutate:
        mutation = _mutate(workers, every_mutant)
        values["mutation"] = mutation.as_json()
        survivors = len(mutation.of("survivor"))
        _print_mutation(mutation, say)
    write_json(json_path, values)
    if values["findings"] or survivors:
        raise click.exceptions.Exit(1)
