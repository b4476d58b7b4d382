"""The paper's tables and figures: commands, plots, and which checkpoint to evaluate."""

from pathlib import Path


def label(folder: Path) -> str:
    """A run's name: oswft for runs/oswft as for runs/oswft/eval.

    oswft-checkpoint-000050 for runs/oswft/eval-checkpoint-000050.
    """
    absolute = folder.resolve()
    if absolute.name == "eval" or absolute.name.startswith("eval-"):
        return printable(absolute.parent.name + absolute.name.removeprefix("eval"))
    return printable(absolute.name)


def printable(text: str) -> str:
    """Text for a page or a picture: no escape sequence, no line end, no turn of the direction."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
