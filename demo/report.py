"""The study's tables and its picture, from its results.

    python -m demo.report                                        # docs/study.md and its picture
    python -m demo.report --results runs/study/results.jsonl --page runs/study/report.md

Every number is a mean over seeds. A difference is paired: both methods start from the same bases
and answer the same problems with the same seeds. Its 95 % interval is Student's, and the p-value
that of an exact permutation test, which flips the signs of the differences.
"""

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro

from data import InputError, atomic_write, read_rows
from demo.study import DEMO, MAIN, METHODS, OTHERS, SEEDS, TITLES, WORLDS
from demo.world import GAIN, RETENTION, STATIC_SAMPLES, TIERS, TRAIN_MIX
from paper.plot import STYLE

# Learning rate and steps of each method, by purpose. `best` has the highest balance (the mean of
# gain and retention) on the choosing seeds; the study's page says how the others came about.
LONG = (5e-5, 288)
SAME = {"best": (1e-4, 144), "same": (1e-4, 144)}
BASE = {"best": (0.0, 0)}
SETTINGS = {
    "style": {
        "base": BASE,
        "sft": {
            "best": (5e-5, 144),
            "same": (1e-4, 144),
            "demo": DEMO,
            "long": LONG,
            "epoch": (1e-4, 24),
            "trained_tokens": (1e-4, 144),
            "TFLOPs": LONG,
            "gain": LONG,
        },
        "oswft": {"best": (1e-4, 144), "demo": DEMO, "long": LONG, "epoch": (1e-4, 24)},
        "static": {**SAME, "demo": DEMO, "long": LONG},
        "grpo": {"best": (3e-4, 48), "tenfold": (3e-3, 48), "demo": DEMO},
        **dict.fromkeys(OTHERS, SAME),
    },
    "own": {
        "base": BASE,
        "sft": {"best": (3e-4, 72), "same": (3e-4, 72)},
        "oswft": {"best": (3e-4, 72)},
        "static": {"best": (3e-4, 72), "same": (3e-4, 72)},
        "grpo": {"best": (3e-4, 48)},
    },
    "weak": {"base": BASE, "sft": SAME, "oswft": {"best": (1e-4, 144)}},
}
PURPOSES = {
    "best": "",
    "same": " at OSW-FT's settings",
    "long": f" for {LONG[1]} steps",
    "epoch": " within one epoch",
    "TFLOPs": " with as many FLOPs",
    "trained_tokens": " with as many trained tokens",
    "gain": " at equal gain",
    "demo": " at the demo's settings",
    "tenfold": " at ten times the rate",
}
BETWEEN = ("TFLOPs", "trained_tokens", "gain")  # where a curve has reached what OSW-FT has
SCORES = {  # name -> tiers, and what is averaged over them
    "gain": (GAIN, "pass@1"),
    "retention": (RETENTION, "pass@1"),
    "pass@8": (GAIN, "pass@8"),
    "expert's style": (RETENTION, "scratch"),
    "KL": (RETENTION, "kl"),
    **{tier: ((tier,), "pass@1") for tier in TIERS},
}
TOKENS = ("trained_tokens", "sampled_tokens")
EFFECTS = ("gain", "retention", "balance", "pass@8", "TFLOPs")
SPREAD = ("expert's style", "KL")  # in answers to the retention tiers
BATCH, NUM_TRAIN, PROMPT_TOKENS = 128, 4096, 17  # queries, problems, and tokens of a prompt
WINDOW = 8  # optimizer steps over which weights are averaged
# Student's t of 95 %, by degrees of freedom
T_95 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=1))
NO_RUNS = "not run, or not reached"


# ------------------------------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds: its mean, half of its 95 % interval, p, and the seeds.

    `digits` is how many decimals it is shown with.
    """

    mean: float
    half_width: float
    p: float
    seeds: int
    digits: int = 1

    @property
    def text(self) -> str:
        return f"{self.mean:+.{self.digits}f} ± {self.half_width:.{self.digits}f}"

    @property
    def cell(self) -> str:
        """The interval and p; bold if zero is outside."""
        text = f"{self.text} ({self.p:.3f})"
        return f"**{text}**" if abs(self.mean) > self.half_width else text

    def verdict(self, expected: int) -> str:
        """Whether the claim holds; the interval, if that contains zero or nothing was claimed.

        Args:
            expected: the sign of the difference if the claim holds, or 0 if it names no direction.
        """
        low, high = self.mean - self.half_width, self.mean + self.half_width
        if not expected or low <= 0 <= high:
            return f"between {low:+.{self.digits}f} and {high:+.{self.digits}f}"
        return "holds" if self.mean * expected > 0 else "**the opposite holds**"


def difference(values: Sequence[float], digits: int = 1) -> Difference:
    """The mean of differences, one for each seed, with its interval and its p-value."""
    x = np.array(values)
    half_width = T_95[len(x) - 1] * x.std(ddof=1) / len(x) ** 0.5
    signs = np.array(list(itertools.product((1, -1), repeat=len(x))))
    means = np.abs((signs * x).mean(axis=1))
    p = float((means >= abs(x.mean()) - 1e-9).mean())
    return Difference(float(x.mean()), float(half_width), p, len(x), digits)


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    sd = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{sd}"


# ------------------------------------------------------------------------------------------------
# Results


def read_points(path: Path) -> pd.DataFrame:
    """Every scored checkpoint: its run's columns, its costs, scores in percent, KL in nats.

    A base, and GRPO, which reads no solution, is in every world that starts from it. Of two runs
    at one learning rate, one goes through the other's steps.
    """
    points = []
    for where, row in read_rows(str(path)):
        if "checkpoints" not in row:
            raise InputError(f"{where}: is no row of a study")
        base = WORLDS[row["world"]][0]
        same_base = [world for world in WORLDS if WORLDS[world][0] == base]
        for checkpoint in row.pop("checkpoints"):
            point = {**row, **checkpoint, "TFLOPs": count_flops(row, checkpoint) / 1e12}
            for name, (tiers, score) in SCORES.items():
                mean = np.mean([checkpoint["tiers"][tier][score] for tier in tiers])
                point[name] = mean * (1 if score == "kl" else 100)
            point["balance"] = (point["gain"] + point["retention"]) / 2
            point["first weights"] = point["change of weights"] = np.nan
            if weights := row.get("weights"):
                mean = sum(100 * share * np.array(weights[t]) for t, share in TRAIN_MIX.items())
                mean = mean[: checkpoint["steps"]]
                point["first weights"] = mean[0]
                point["change of weights"] = mean[-WINDOW:].mean() - mean[:WINDOW].mean()
            worlds = same_base if row["method"] in ("base", "grpo") else [row["world"]]
            points += [{**point, "world": world} for world in worlds]
    key = ["world", "method", "rate", "steps", "seed"]
    return pd.DataFrame(points).drop_duplicates(key, keep="last").sort_values(["seed", "steps"])


def count_flops(row: dict, checkpoint: dict) -> float:
    """6 for each parameter and trained token, 2 for each that is sampled, or read to sample.

    Prompts count in both: vLLM reads them anew for each answer, as they are shorter than a block.
    """
    answers = int((re.findall(r"num_rollouts (\d)", METHODS.get(row["method"], "")) or [0])[0])
    prompts = answers * BATCH * checkpoint["steps"]
    if "weight_column" in METHODS.get(row["method"], ""):
        prompts = STATIC_SAMPLES * NUM_TRAIN
    read = checkpoint["sampled_tokens"] + prompts * PROMPT_TOKENS
    return row["parameters"] * (6 * checkpoint["trained_tokens"] + 2 * read)


def parse(name: str) -> tuple[str, str, str]:
    """(world, method, purpose) of "world:method@purpose"; "style" and "best" may be left out."""
    world, _, rest = name.rpartition(":")
    method, _, purpose = rest.partition("@")
    return world or "style", method, purpose or "best"


def title(name: str) -> str:
    world, method, purpose = parse(name)
    where = {"style": "", "own": " (own style)", "weak": " (weak base)"}[world]
    return TITLES[method] + PURPOSES[purpose] + where


def curves(points: pd.DataFrame, world: str, method: str, rate: float) -> pd.DataFrame:
    """A method's checkpoints at a learning rate, from the base on, on the reported seeds."""
    found = points[(points.world == world) & points.seed.isin(SEEDS)]
    own = (found.method == method) & (found.rate == rate)
    base = (found.method == "base") & found.seed.isin(found.seed[own])
    return found[own | base]


def at(points: pd.DataFrame, name: str) -> pd.DataFrame:
    """A method's scores at the settings of a purpose: a line for each reported seed."""
    world, method, purpose = parse(name)
    rate, steps = SETTINGS[world][method][purpose]
    own = curves(points, world, method, rate)
    if purpose not in BETWEEN:
        return own[own.steps == steps].set_index("seed")
    targets = at(points, f"{world}:oswft")[purpose]
    columns = [*SCORES, *TOKENS, "balance", "TFLOPs", "steps"]
    found = {}
    for seed, curve in own.groupby("seed")[columns]:
        if seed in targets and (point := along(curve, purpose, targets[seed])) is not None:
            found[seed] = point
    return pd.DataFrame(found.values(), index=list(found), columns=columns)


def along(curve: pd.DataFrame, key: str, value: float) -> pd.Series | None:
    """A curve's scores where `key` has a value, between its checkpoints; None if it ends before."""
    for (_, before), (_, after) in itertools.pairwise(curve.iterrows()):
        if before[key] <= value <= after[key]:
            share = (value - before[key]) / ((after[key] - before[key]) or 1)
            return before + share * (after - before)
    return None


def compare(points: pd.DataFrame, a: str, b: str | None, score: str) -> Difference | None:
    """a - b over the seeds that both have, each named as "world:method@purpose"."""
    values = at(points, a)[score]
    if b:
        values = values - at(points, b)[score]  # by seed
    values = values.dropna()
    return difference(values, digits=2 if score == "TFLOPs" else 1) if len(values) > 1 else None


def shared_seeds(points: pd.DataFrame, world: str, methods: Sequence[str]) -> set[int]:
    """The seeds that all of these methods have, of those that were run at all."""
    found = [set(at(points, f"{world}:{method}").index) for method in methods]
    return set.intersection(*(seeds for seeds in found if seeds)) if any(found) else set(SEEDS)


def setting_text(points: pd.DataFrame, name: str, found: pd.DataFrame) -> str:
    """Learning rate and steps; steps are a mean where curves are compared along the way."""
    world, method, purpose = parse(name)
    rate = SETTINGS[world][method][purpose][0]
    return f"{rate:g}, {found.steps.mean():.0f}" if rate and len(found) else ""


CLAIMS = (
    ("SFT harms what it does not show", "sft", "base", "retention", -1),
    ("", "sft@same", "base", "retention", -1),
    ("", "sft@demo", "base", "retention", -1),
    ("OSW-FT does not harm it", "oswft", "base", "retention", 1),
    ("OSW-FT harms it less than SFT", "oswft", "sft@same", "retention", 1),
    ("", "oswft@demo", "sft@demo", "retention", 1),
    ("", "oswft@long", "sft@long", "retention", 1),
    ("", "oswft", "sft", "retention", 1),
    ("OSW-FT is better than SFT on the task", "oswft", "sft@same", "gain", 1),
    ("", "oswft@demo", "sft@demo", "gain", 1),
    ("", "oswft@long", "sft@long", "gain", 1),
    ("", "oswft", "sft", "gain", 1),
    ("OSW-FT has a higher pass@k than SFT", "oswft", "sft@same", "pass@8", 1),
    ("", "oswft", "sft", "pass@8", 1),
    ("OSW-FT has a higher pass@k than GRPO", "oswft", "grpo", "pass@8", 1),
    ("GRPO lowers pass@k", "grpo", "base", "pass@8", -1),
    ("Soft weights are better than hard ones", "oswft-k4@same", "hard@same", "balance", 1),
    ("Hard weights are better than random ones", "hard@same", "random@same", "balance", 1),
    ("K = 1 is worse than K = 2", "oswft-k1@same", "oswft", "balance", -1),
    ("More than K = 2 adds little", "oswft-k4@same", "oswft", "balance", 0),
    ("", "oswft-k8@same", "oswft", "balance", 0),
    ("The weights fall", "oswft", None, "change of weights", -1),
    ("They are lower for a stronger base", "oswft", "weak:oswft", "first weights", -1),
    ("At ten times the rate GRPO's reward collapses", "grpo@tenfold", "base", "gain", -1),
    ("", "grpo@tenfold", "grpo", "gain", -1),
    ("OSW-FT costs no more than SFT", "oswft", "sft@same", "TFLOPs", -1),
    ("OSW-FT costs less than GRPO", "oswft", "grpo", "TFLOPs", -1),
)
RIVALS = (  # what is compared, a, b
    ("At equal settings", "oswft", "sft@same"),
    ("", "oswft@demo", "sft@demo"),
    ("", "oswft@long", "sft@long"),
    ("Each at its best", "oswft", "sft"),
    ("", "oswft@epoch", "sft@epoch"),
    ("", "oswft", "sft@long"),
    ("At equal trained tokens", "oswft", "sft@trained_tokens"),
    ("At equal FLOPs", "oswft", "sft@TFLOPs"),
    ("At equal gain", "oswft", "sft@gain"),
)
QUESTIONS = (  # what is asked, a, b
    ("Is one pass of weights as good?", "static@same", "oswft"),
    ("", "static@long", "oswft@long"),
    ("Is it better than SFT?", "static", "sft"),
    ("", "static@long", "sft@long"),
    ("", "static", "sft@long"),
    ("GRPO or OSW-FT?", "grpo", "oswft"),
    ("GRPO or SFT?", "grpo", "sft"),
    ("What does GRPO's tenfold rate do?", "grpo@tenfold", "grpo"),
    ("Soft or hard weights (K = 4)?", "oswft-k4@same", "hard@same"),
    ("Hard or random weights?", "hard@same", "random@same"),
    ("Random weights or SFT?", "random@same", "sft@same"),
    ("K = 1, 4, 8 or 2?", "oswft-k1@same", "oswft"),
    ("", "oswft-k4@same", "oswft"),
    ("", "oswft-k8@same", "oswft"),
    ("DFT or SFT?", "dft@same", "sft@same"),
    ("", "dft", "sft"),
    ("What if the expert has the base's style?", "own:sft", "own:base"),
    ("", "own:oswft", "own:sft"),
    ("", "own:static", "own:sft"),
    ("", "own:grpo", "own:sft"),
    ("What if the base is weak?", "weak:sft", "weak:base"),
    ("", "weak:oswft", "weak:sft"),
)
MECHANISM = (  # what is said, a, b
    ("SFT spreads the expert's style", "sft@demo", "base"),
    ("OSW-FT spreads less of it", "oswft@demo", "sft@demo"),
    ("", "oswft", "sft@same"),
    ("Does GRPO spread it?", "grpo@demo", "base"),
    ("", "grpo@tenfold", "base"),
)


# ------------------------------------------------------------------------------------------------
# Tables


def markdown(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def claims_table(points: pd.DataFrame) -> str:
    rows = []
    for text, a, b, score, expected in CLAIMS:
        cells = [text, title(a) + (f" − {title(b)}" if b else ""), score]
        if found := compare(points, a, b, score):
            cells += [found.text, f"{found.p:.3f}", found.seeds]
            rows.append([*cells, found.verdict(expected)])
        else:
            rows.append([*cells, "", "", "", NO_RUNS])
    return markdown(["", "difference", "of", "mean, 95 %", "p", "seeds", "verdict"], rows)


def differences_table(
    points: pd.DataFrame, questions: Sequence[tuple[str, str, str]], scores: Sequence[str]
) -> str:
    """a - b in several scores; bold where the interval does not contain zero."""
    rows = []
    for text, a, b in questions:
        settings = [setting_text(points, name, at(points, name)) for name in (a, b)]
        found = [compare(points, a, b, score) for score in scores]
        cells = [each.cell if each else "" for each in found]
        seeds = next((each.seeds for each in found if each), NO_RUNS)
        shown = " / ".join(filter(None, settings))
        rows.append([text, f"{title(a)} − {title(b)}", shown, *cells, seeds])
    return markdown(["", "difference", "rate, steps", *scores, "seeds"], rows)


def scores_table(points: pd.DataFrame, world: str, methods: Sequence[str]) -> str:
    """Scores and costs of the methods at each of their settings, on the seeds that all have."""
    scores = ("gain", "retention", "pass@8", "easy", "far")
    seeds, rows = shared_seeds(points, world, methods), []
    for method in ("base", *methods):
        alike: dict[tuple, list[str]] = {}  # purposes with the same settings
        for purpose, setting in SETTINGS[world][method].items():
            alike.setdefault((setting, purpose if purpose in BETWEEN else ""), []).append(purpose)
        for purposes in alike.values():
            name = f"{world}:{method}@{purposes[0]}"
            found = at(points, name)
            found = found[found.index.isin(seeds)]
            said = ",".join(PURPOSES[purpose] for purpose in purposes if purpose != "best")
            best = ", at its best and" if said and "best" in purposes else ""
            cells = [TITLES[method] + best + said, NO_RUNS, *[""] * 9]
            if len(found):
                cells[1:] = [setting_text(points, name, found)]
                cells += [spread(found[score]) for score in scores]
                cells += [f"{found[key].mean() / 1e3:.0f}" for key in TOKENS]
                cells += [f"{found.TFLOPs.mean():.2f}", len(found)]
            rows.append(cells)
    costs = ("trained, k", "sampled, k", "TFLOPs", "seeds")
    return markdown(["method", "learning rate, steps", *scores, *costs], rows)


TABLES: dict[str, Callable[[pd.DataFrame], str]] = {
    "claims": claims_table,
    "rivals": lambda points: differences_table(points, RIVALS, EFFECTS),
    "questions": lambda points: differences_table(points, QUESTIONS, EFFECTS),
    "mechanism": lambda points: differences_table(points, MECHANISM, SPREAD),
    "main": lambda points: scores_table(points, "style", MAIN),
    "others": lambda points: scores_table(points, "style", OTHERS),
    "own": lambda points: scores_table(points, "own", MAIN),
    "weak": lambda points: scores_table(points, "weak", MAIN[:2]),
}


# ------------------------------------------------------------------------------------------------
# The picture

COLORS = {
    "base": "black",
    "sft": "#c44e52",
    "oswft": "#4c72b0",
    "static": "#55a868",
    "grpo": "#8172b3",
}
MARKERS = dict(zip(MAIN, "osD^", strict=True))


def draw_front(points: pd.DataFrame, path: Path) -> None:
    """Gain and retention along the longest runs of each method at its best rate, in two worlds.

    In the corner, in the method's color: the tokens trained on / sampled up to the end.
    """
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    titles = {"style": "expert in another style", "own": "expert in the model's own style"}
    for axes, (world, name) in zip(panels, titles.items(), strict=True):
        seeds, height = shared_seeds(points, world, MAIN), 0.04
        for method in reversed(MAIN):
            rate, _ = SETTINGS[world][method]["best"]
            own = curves(points, world, method, rate)
            own = own[own.seed.isin(seeds)]
            last = max(steps for other, steps in SETTINGS[world][method].values() if other == rate)
            last = min(last, own.steps.max()) if len(own) else 0
            if not last:
                continue
            draw_curve(axes, method, own[own.steps <= last])
            tokens = own[own.steps == last][list(TOKENS)].mean() / 1e3
            place = {"transform": axes.transAxes, "fontsize": 8, "color": COLORS[method]}
            axes.text(
                0.03, height, f"{tokens.iloc[0]:.0f} / {tokens.iloc[1]:.0f} k tokens", **place
            )
            height += 0.06
        label = "gain: pass@1 on the trained tiers middle and hard (%)"
        axes.set(title=name, xlabel=label, ylim=(None, 102))
    panels[0].set_ylabel("retention: pass@1 on tiers\nnever trained on, keep and long (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=5)
    plt.savefig(path)
    plt.close(figure)


def draw_curve(axes, method: str, own: pd.DataFrame) -> None:
    """From the base through a method's checkpoints; the last one with intervals."""
    means = own.groupby("steps")[["gain", "retention"]].mean()
    style = {"color": COLORS[method], "marker": MARKERS[method], "markersize": 4}
    axes.plot(means.gain, means.retention, label=TITLES[method], **style)
    axes.plot(*means.iloc[0], "*", color="black", markersize=9, zorder=3)
    last = own[own.steps == own.steps.max()]
    if len(last) > 1:
        widths = [difference(last[key]).half_width for key in ("retention", "gain")]
        axes.errorbar(*means.iloc[-1], *widths, color=COLORS[method], alpha=0.4)


# ------------------------------------------------------------------------------------------------
# The page


def fill(text: str, tables: dict[str, str]) -> str:
    """The page with each table at its mark. Raises InputError if one has no mark."""
    for name, table in tables.items():
        before, mark, rest = text.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not (mark and end):
            raise InputError(f"the page has no place for the table '{name}'")
        text = f"{before}{mark}{table}\n{end}{after}"
    return text


def report(
    results: Path = Path("docs/study/results.jsonl"), page: Path = Path("docs/study.md")
) -> None:
    """Fill a page's tables, and draw the picture next to the results.

    Args:
        results: as demo.study wrote them.
        page: its text between the tables stays; a new page has only the tables.
    """
    plt.switch_backend("Agg")  # files, no window
    points = read_points(results)
    blank = "\n\n".join(f"## {name}\n\n<!-- table {name} -->\n<!-- end -->" for name in TABLES)
    text = page.read_text() if page.exists() else f"# Study\n\n{blank}\n"
    filled = fill(text, {name: table(points) for name, table in TABLES.items()})
    with atomic_write(page) as partial:
        partial.write_text(filled)
    print(page)
    with plt.rc_context(STYLE):
        draw_front(points, results.with_name("front.png"))
    print(results.with_name("front.png"))


if __name__ == "__main__":
    try:
        tyro.cli(report, description=__doc__, use_underscores=True)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
