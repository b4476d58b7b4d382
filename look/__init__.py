"""What people look at: training sets, runs and evaluations, as text, pictures and pages."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

STYLE = {  # of pictures; not in look.plot, which sets a backend that the lesson cannot use
    "figure.figsize": (4.5, 3.0),  # inches: half a page
    "figure.dpi": 200,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a run's name may hold dollars
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
}


def labels(folders: Sequence[Path]) -> list[str]:
    """The names of runs: oswft for runs/oswft as for runs/oswft/eval.

    oswft-checkpoint-000050 for runs/oswft/eval-checkpoint-000050. Where two have the same name,
    all have their paths.
    """
    names = []
    for folder in folders:
        name, run = folder.resolve().name, folder.resolve().parent.name
        names.append(run + name.removeprefix("eval") if re.match("eval(-|$)", name) else name)
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def next_to(folders: Sequence[Path], name: str) -> Path:
    """runs/oswft-view.html of runs/oswft alone; of several runs view.html in their folder."""
    if len(folders) == 1:
        run = folders[0].resolve()
        path = run.with_name(f"{run.name}-{name}")
    else:
        path = Path(os.path.commonpath(map(os.path.abspath, folders)), name)
    return path.relative_to(Path.cwd()) if Path.cwd() in path.parents else path  # as one types it


def markdown_table(header: list[str], rows: list[list]) -> str:
    """A Markdown table; its first column is text, the others are numbers."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
