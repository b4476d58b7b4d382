"""The paper's tables and figures: commands, plots, and which checkpoint to evaluate."""

import re
from pathlib import Path


def label(folder: Path) -> str:
    """A run's name: oswft for runs/oswft as for runs/oswft/eval.

    oswft-checkpoint-000050 for runs/oswft/eval-checkpoint-000050.
    """
    name, run = folder.resolve().name, folder.resolve().parent.name
    return run + name.removeprefix("eval") if re.match("eval(-|$)", name) else name
