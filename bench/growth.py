"""How the costs in BENCHMARKS.md grow, as a picture: python -m bench.growth

It draws the tables that have the columns "grown by" and "linear", and measures nothing.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import NullLocator

from data import atomic_write
from paper.plot import STYLE
from run import parse_args

PANELS = {"scaling": "a step of OSW-FT", "rows": "rows of the training file"}  # by section
MARKERS = "osDv^<>"
SVG = {"svg.fonttype": "none", "svg.hashsalt": ""}  # letters as text; equal numbers, equal file


def read_curves(markdown: str, section: str) -> dict[str, dict[int, float]]:
    """By what a section's tables name, up to its number: how much it grows by which factor."""
    text = markdown.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    curves: dict[str, dict[int, float]] = {}
    for table in text.split("\n\n"):
        for row in table.strip().splitlines()[2:] if "grown by | linear |" in table else ():
            label, *_, growth, factor = [cell.strip() for cell in row.strip("|").split("|")]
            name = re.split(r"[ ,=×]*\d", label)[0]
            curves.setdefault(name, {1: 1.0})[int(factor)] = float(growth)
    return curves


def main(benchmarks: Path = Path("BENCHMARKS.md"), output: Path = Path("docs/growth.svg")) -> None:
    """Draw what `benchmarks` says."""
    plt.switch_backend("Agg")  # files, no window
    markdown = benchmarks.read_text(encoding="utf-8")
    with plt.rc_context({**STYLE, **SVG}), atomic_write(output) as partial:
        figure, panels = plt.subplots(1, len(PANELS), figsize=(7.5, 3.4))
        for axes, (section, title) in zip(panels, PANELS.items(), strict=True):
            curves = read_curves(markdown, section)
            largest = max(factor for curve in curves.values() for factor in curve)
            axes.plot([1, largest], [1, largest], "k--", linewidth=1, label="linear")
            for marker, (name, curve) in zip(MARKERS, curves.items(), strict=False):
                factors = sorted(curve)
                axes.plot(factors, [curve[n] for n in factors], marker=marker, ms=4, label=name)
            axes.set(title=title, xlabel="larger by", ylabel="costs more by")
            for axis, scale in ((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale)):
                scale("log", base=2 if largest < 100 else 10)
                axis.set_major_formatter("{x:,g}×")
                axis.set_minor_locator(NullLocator())
            axes.legend(loc="upper left")
        figure.savefig(partial, format=output.suffix.removeprefix("."), metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    parse_args(main, __doc__)
