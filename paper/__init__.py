"""The paper's tables and figures: commands, plots, and which checkpoint to evaluate."""

from pathlib import Path


def label(folder: Path) -> str:
    """A run's name: oswft for runs/oswft as for runs/oswft/eval."""
    absolute = folder.resolve()
    return (absolute.parent if absolute.name == "eval" else absolute).name
