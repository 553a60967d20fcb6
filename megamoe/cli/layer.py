"""The options that describe a layer, shared by the commands that take a shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import click

from megamoe.config import ACTIVATIONS, Combine, MoEConfig, W13Layout, WeightAt
from megamoe.cute_kernels.kernel_config import DEFAULT_SMS

SIZES = (
    ("--hidden", "H, the hidden size."),
    ("--intermediate", "I, of one expert."),
    ("--experts", "E, over all PEs."),
    ("--top-k", "K, experts per token."),
    ("--pes", "P, PEs of the expert-parallel group."),
)
CHOICES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("activation", ACTIVATIONS, "silu"),
    ("w13_layout", get_args(W13Layout), "gate_up"),
    ("weight_at", get_args(WeightAt), "act"),
    ("combine", get_args(Combine), "auto"),
)
FLAGS = (
    ("w13_transposed", "w13 is [E, H, 2I]."),
    ("w2_transposed", "w2 is [E, I, H]."),
    ("fc1_bias", "fc1 has a bias."),
    ("fc2_bias", "fc2 has a bias."),
)


SMS_OPTION = click.option(
    "--sms",
    type=click.IntRange(min=1),
    default=DEFAULT_SMS,
    show_default=True,
    help="SMs of the GPU, or num_sms of the session, for which the kernel config is chosen.",
)


def layer_options(command: Callable[..., Any], *, required: bool = True) -> Callable[..., Any]:
    """Add the options; the command gets them as keyword arguments for `layer_config`.

    Args:
        required: False leaves it to the command to ask for sizes (`require_sizes`).
    """

    def option(name: str) -> str:
        return "--" + name.replace("_", "-")

    options = [click.option(name, type=int, required=required, help=text) for name, text in SIZES]
    options += [
        click.option("--max-tokens", type=int, default=4096, show_default=True, help="Per call."),
        click.option("--capacity", type=int, help="Pool rows of a PE; without it the worst case."),
        click.option("--ring-rows", type=int, help="Rows of a ring pool; without it no ring."),
        click.option("--limit", type=float, help="Of a clamped activation."),
    ]
    options += [
        click.option(option(name), type=click.Choice(list(values)), default=default,
                     show_default=True)
        for name, values, default in CHOICES
    ]  # fmt: skip
    options += [click.option(option(name), is_flag=True, help=text) for name, text in FLAGS]
    for add in reversed(options):
        command = add(command)
    return command


def require_sizes(**options: Any) -> None:
    """Refuse missing sizes as click does.

    Raises:
        click.MissingParameter: names the option.
    """
    for name, _ in SIZES:
        if options[name.removeprefix("--").replace("-", "_")] is None:
            raise click.MissingParameter(param_hint=f"'{name}'", param_type="option")


def layer_config(*, experts: int, pes: int, limit: float | None, **options: Any) -> MoEConfig:
    """The config of the options.

    Raises:
        ValueError: a value that `MoEConfig` refuses.
    """
    return MoEConfig(num_experts=experts, num_pes=pes, activation_limit=limit, **options)
