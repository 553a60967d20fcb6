"""The ``megamoe`` command. One file a command; heavy imports happen inside the commands."""

import click

from megamoe import __version__
from megamoe.cli.cache import cache_command
from megamoe.cli.compile import compile_command
from megamoe.cli.demo import demo_command
from megamoe.cli.plan import plan_command
from megamoe.cli.verify import verify_command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="megamoe")
def main() -> None:
    """The expert-parallel MoE FFN of a transformer layer as one persistent GPU kernel."""


main.add_command(demo_command)
main.add_command(compile_command)
main.add_command(cache_command)
main.add_command(plan_command)
main.add_command(verify_command)
