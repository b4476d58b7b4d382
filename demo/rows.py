"""The studies of the small world, read from their rows: a table and a picture.

    python -m demo.rows    # fills docs/study/details.md, draws docs/study/differences.png

A difference is paired over seeds: both runs start from the same base and answer the same problems
with the same sampling seeds. Its interval is Student's, 95 %.
"""

import itertools
import re
from pathlib import Path

from data import read_rows
from demo.world import GAIN, RETENTION
from paper.plot import STYLE

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats

FOLDER = Path(__file__).parent.parent / "docs" / "study"
RATES = ("1e-4", "5e-5", "2.5e-5", "1.25e-5")
DRAWN = (  # two runs, and a color
    ("self/sft 1e-4", "sft 1e-4", "#937860"),
    *(("grpo 3e-4", other, "#8172b3") for other in ("sft 1e-4", "sft 2.5e-5", "oswft 1e-4")),
    *((f"oswft {rate}", f"sft {rate}", "#2d4b8e") for rate in RATES),
    *((f"oswft {r}", f"sft {half}", "#6baed6") for r, half in itertools.pairwise(RATES)),
    *((f"static {rate}", f"sft {rate}", "#55a868") for rate in RATES),
    *(("static 5e-5", other, "#55a868") for other in ("sft 2.5e-5", "oswft 5e-5")),
)


def read_scores() -> pd.DataFrame:
    """By seed and run: gain and retention at its end; at equal gain `kept` (retention), TFLOPs."""
    paths = [FOLDER / f"{name}.jsonl" for name in ("first", "second", "third")]
    rows = [row for path in paths for _, row in read_rows(str(path)) if row["seed"] >= 10]
    start = {r["seed"]: r for r in rows if (r["world"], r["method"]) == ("style", "base")}
    found = []
    for row in rows:
        points = start[row["seed"]]["checkpoints"] + row["checkpoints"]
        gain, retention = (
            np.array([50 * sum(p["tiers"][tier]["pass@1"] for tier in pair) for p in points])
            for pair in (GAIN, RETENTION)
        )
        flops = np.array([0, *(count_flops(row, point) / 1e12 for point in row["checkpoints"])])
        run = {"seed": row["seed"], "gain": gain[-1], "retention": retention[-1]}
        for name, score in (("kept", retention), ("TFLOPs", flops)):
            run[name] = np.mean([at_level(gain, score, level) for level in (75, 80)])
        world = re.sub("style|clean-?", "", row["world"])
        rate = np.format_float_scientific(row["rate"], trim="-", exp_digits=1)
        run["run"] = f"{world and world + '/'}{row['method']} {rate}"
        if round(row["rate"] * row["steps"], 6) == 0.0144:
            found.append(run)
    return pd.DataFrame(found).pivot(index="seed", columns="run")


def count_flops(row: dict, point: dict) -> float:
    """6 for each parameter and trained token, 2 for each that is sampled, or read to sample."""
    rollouts = re.search(r"num_rollouts (\d)", row["command"])
    prompts = int(rollouts[1]) * 128 * point["steps"] if rollouts else 0
    if "weight_column" in row["command"] or row["world"].endswith(("self", "audited")):
        prompts += (8 if row["seed"] >= 26 else 2) * 4096  # the base's answers to all problems
    read = point["sampled_tokens"] + prompts * 17  # tokens of a prompt
    return row["parameters"] * (6 * point["trained_tokens"] + 2 * read)


def at_level(gain: np.ndarray, score: np.ndarray, level: float) -> float:
    """A score where the gain first rises to a level, between two checkpoints; else the last one."""
    rises = np.flatnonzero((gain[:-1] <= level) & (level <= gain[1:]))
    part = slice(rises[0], rises[0] + 2) if len(rises) else slice(-1, None)
    return float(np.interp(level, gain[part], score[part]))


def difference(scores: pd.DataFrame, score: str, a: str, b: str) -> tuple[pd.Series, float]:
    """a less b by seed, on the seeds that have both, and half of the mean's 95 % interval."""
    found = (scores[score][a] - scores[score][b]).dropna()
    return found, stats.ttest_1samp(found, 0).confidence_interval().high - found.mean()


def title(a: str, b: str) -> str:
    names = {"oswft": "OSW-FT", "sft": "SFT", "grpo": "GRPO", "self": "own answers"}
    return re.sub("|".join(names), lambda found: names[found[0]], f"{a} − {b}")


def table(scores: pd.DataFrame) -> str:
    lines = ["|difference|seeds|kept|TFLOPs|gain|retention|", "|---" * 6 + "|"]
    for a, b, _ in DRAWN:
        cells = [title(a, b), str(len(difference(scores, "kept", a, b)[0]))]
        for score in ("kept", "TFLOPs", "gain", "retention"):
            found, width = difference(scores, score, a, b)
            slow = re.search("2.5e-5|1.25e-5", a + b)  # some of these runs were ended early
            text = f"{found.mean():+.1f} ± {width:.1f}".replace("-", "−")
            cells.append("" if slow and score in ("gain", "retention") else text)
        means = scores["TFLOPs"][[a, b]].dropna().mean()
        cells[3] += f" (×{means[a] / means[b]:.2f})"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    scores, page = read_scores(), FOLDER / "details.md"
    before, start, rest = page.read_text().partition("<!-- table differences -->\n")
    page.write_text(before + start + table(scores) + rest[rest.index("\n<!-- end -->") :])
    plt.rcParams.update(STYLE)
    _, axes = plt.subplots(figsize=(7, 5))
    for n, (a, b, color) in enumerate(DRAWN):  # seeds as small dots, the mean with its interval
        found, width = difference(scores, "kept", a, b)
        axes.plot(found, [0.25 - n] * len(found), ".", color=color, alpha=0.4, markersize=5)
        axes.errorbar(found.mean(), -n, xerr=width, fmt="o", color=color, capsize=3, markersize=5)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(-np.arange(len(DRAWN)), [title(a, b) for a, b, _ in DRAWN])
    axes.set(xlabel="retention at equal gain, difference in points", xlim=(-13, 46))
    plt.savefig(FOLDER / "differences.png")


if __name__ == "__main__":
    main()
