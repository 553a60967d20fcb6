"""``megamoe cache``: look at the compiled images, delete them, carry them to other machines."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from megamoe.cli.common import JSON_OPTION, plain_errors, write_json
from megamoe.cli.layer import SMS_OPTION

FOLDER_OPTION = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Cache folder; without it $MEGAMOE_CACHE_DIR or the platform's cache folder.",
)


def _cache(folder: Path | None) -> Any:
    from megamoe.runtime.cache import ImageCache

    return ImageCache(folder)


@click.group("cache")
def cache_command() -> None:
    """Compiled kernels: list, clear, build, export, import."""


@cache_command.command("list")
@FOLDER_OPTION
@JSON_OPTION
def list_command(folder: Path | None, json_path: Path | None) -> None:
    """Show every image and what it was compiled for."""
    cache = _cache(folder)
    entries = cache.entries()
    table = Table(title=f"{len(entries)} images in {cache.folder}")
    for column in ("kernel", "for", "compiler", "KB"):
        table.add_column(column)
    rows = []
    for entry in entries:
        key = entry.key or {}
        name = f"{key['kind']} {key['arch']}" if key else "DAMAGED"
        compiler = str(key.get("compiler") or "?")
        table.add_row(name, entry.problem or entry.path.name, compiler, str(entry.nbytes // 1024))
        rows.append({"file": entry.path.name, "bytes": entry.nbytes, "key": entry.key})
    Console().print(table)
    write_json(json_path, {"folder": str(cache.folder), "images": rows})


@cache_command.command("clear")
@FOLDER_OPTION
def clear_command(folder: Path | None) -> None:
    """Delete all images, locks and left-over temporary files."""
    cache = _cache(folder)
    click.echo(f"deleted {cache.clear()} images from {cache.folder}")


@cache_command.command("export")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@FOLDER_OPTION
def export_command(file: Path, folder: Path | None) -> None:
    """Write all intact images into one tar FILE, for a machine without the compiler."""
    cache = _cache(folder)
    entries = [entry for entry in cache.entries() if entry.key is not None]
    if not entries:
        raise click.ClickException(f"no intact image in {cache.folder}")
    with tarfile.open(file, "w") as archive:
        for entry in entries:
            data = entry.path.read_bytes()
            member = tarfile.TarInfo(entry.path.name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    click.echo(f"wrote {len(entries)} images to {file}")


@cache_command.command("import")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@FOLDER_OPTION
def import_command(file: Path, folder: Path | None) -> None:
    """Take over the images of an exported FILE; each one's digest is checked."""
    with plain_errors():
        count = import_images(_cache(folder), file)
    click.echo(f"imported {count} images")


def import_images(cache: Any, file: Path) -> int:
    """Add every image of an exported file to ``cache``; returns how many.

    Raises:
        ValueError: not an exported file, or an image in it is damaged.
    """
    count = 0
    try:
        with tarfile.open(file) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.isfile() else None
                if content is None:
                    raise ValueError(f"{file}: {member.name} is not a file")
                cache.add(content.read(), name=f"{file}: {member.name}")
                count += 1
    except tarfile.TarError as error:
        raise ValueError(f"{file}: not an exported file: {error}") from error
    return count


def parse_shape(text: str) -> tuple[int, ...]:
    """``H/I/E/K/P[/Tmax]``.

    >>> parse_shape("2048/768/128/8/8")
    (2048, 768, 128, 8, 8, 4096)
    """
    try:
        sizes = tuple(int(part) for part in text.split("/"))
    except ValueError:
        sizes = ()
    if len(sizes) not in (5, 6):
        raise ValueError(f"shape={text!r}: must be H/I/E/K/P or H/I/E/K/P/Tmax")
    return sizes if len(sizes) == 6 else (*sizes, 4096)


@cache_command.command("build")
@click.argument("shapes", nargs=-1, required=True)
@click.option("--activation", default="silu", show_default=True)
@click.option("--arch", default="sm_90a", show_default=True)
@click.option("--workers", default=2, show_default=True, help="Compilations at once.")
@SMS_OPTION
@FOLDER_OPTION
def build_command(
    shapes: tuple[str, ...],
    activation: Any,
    arch: str,
    workers: int,
    sms: int,
    folder: Path | None,
) -> None:
    """Compile the forward kernel for SHAPES (H/I/E/K/P[/Tmax]) in parallel processes.

    A session finds them on a GPU with --sms SMs, or with that many as its num_sms.
    """
    from megamoe.config import MoEConfig
    from megamoe.cute_kernels.smem import default_config
    from megamoe.lowering import kernel_problem
    from megamoe.runtime.parallel import compile_many

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        plain_errors(),
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        jobs = []
        for text in shapes:
            hidden, inter, experts, top_k, pes, tokens = parse_shape(text)
            cfg = MoEConfig(
                hidden=hidden,
                intermediate=inter,
                num_experts=experts,
                top_k=top_k,
                num_pes=pes,
                max_tokens=tokens,
                activation=activation,
            )
            problem = kernel_problem(cfg)
            jobs.append((problem, default_config(problem, sms=sms)))
        task = progress.add_task("compiling", total=len(jobs))
        made = []

        def done(index: int, compiled: bool) -> None:
            made.append(compiled)
            progress.update(task, advance=1, description=f"compiling (last: {shapes[index]})")

        cache = _cache(folder)
        compile_many(jobs, cache=cache, arch=arch, workers=workers, on_done=done)
    click.echo(f"{sum(made)} compiled, {len(made) - sum(made)} were cached in {cache.folder}")
