"""Training sets: the paper's curated one, converted public ones, and a look at any of them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from data import InputError, print_anywhere


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the command with one line after Ctrl-C, or after an error that the user can fix."""
    print_anywhere()
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
