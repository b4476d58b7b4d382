"""Training sets: the paper's curated one, converted public ones, and a look at any of them."""

import sys
from collections.abc import Callable

import tyro

from data import InputError, print_anywhere


def run_commands(prog: str, description: str, commands: dict[str, Callable]) -> None:
    """Run the subcommand that the command line names; an error is one line."""
    print_anywhere()
    try:
        tyro.extras.subcommand_cli_from_dict(
            commands, prog=prog, description=description, use_underscores=True
        )
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
