"""``megamoe plan``: the memory a session takes, before anything is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from megamoe.cli.common import JSON_OPTION, plain_errors, write_json
from megamoe.cli.layer import SMS_OPTION, layer_config, layer_options


def size_text(nbytes: int) -> str:
    """Bytes in a unit that keeps three digits.

    >>> size_text(512), size_text(3 << 20), size_text(5 << 29)
    ('512 B', '3.00 MiB', '2.50 GiB')
    """
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{nbytes} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


@click.command("plan")
@layer_options
@click.option("--training", is_flag=True, help="Of a session that trains; and of a saved call.")
@click.option("--recompute", is_flag=True, help="With --training: dgrad computes fc1 again.")
@SMS_OPTION
@JSON_OPTION
def plan_command(
    json_path: Path | None, training: bool, recompute: bool, sms: int, **layer: Any
) -> None:
    """Show the bytes of every region of one PE's workspace."""
    from megamoe.checks import check_training_support
    from megamoe.planning import plan

    with plain_errors():
        cfg = layer_config(**layer)
        if training:
            check_training_support(cfg)
        elif recompute:
            raise ValueError("--recompute: needs --training")
        planned = plan(cfg, training=training, recompute=recompute, sms=sms)
    table = Table(title=f"workspace of one PE of {cfg.num_pes}: {size_text(planned.total_bytes)}")
    for column in ("block", "region", "shape", "bytes"):
        table.add_column(column, justify="right" if column == "bytes" else "left")
    rows: list[dict[str, Any]] = []
    for region in planned.regions:
        shape = " x ".join(map(str, region.shape))
        table.add_row(
            region.block, region.name, f"{region.dtype} {shape}", size_text(region.nbytes)
        )
        rows.append(
            {
                "block": region.block,
                "name": region.name,
                "dtype": region.dtype,
                "shape": list(region.shape),
                "bytes": region.nbytes,
            }
        )
    table.add_section()
    table.add_row("symmetric", "all", "", size_text(planned.symmetric_bytes))
    table.add_row("local", "all", "", size_text(planned.local_bytes))
    fetched = f"{planned.fetches_per_token:.2f} per token"
    table.add_row("", "rows pulled, experts drawn evenly", fetched, "")
    if training:
        table.add_row("saved", "each forward", "", size_text(planned.saved_bytes))
        table.add_row("dgrad", "from its dgrad to its wgrad", "", size_text(planned.dgrad_bytes))
    Console().print(table)
    write_json(
        json_path,
        {
            "symmetric_bytes": planned.symmetric_bytes,
            "local_bytes": planned.local_bytes,
            "smem_bytes": planned.smem_bytes,
            "saved_bytes": planned.saved_bytes,
            "dgrad_bytes": planned.dgrad_bytes,
            "fetches_per_token": planned.fetches_per_token,
            "regions": rows,
        },
    )
