"""The study's tables, claims and pictures, from its results.

    python -m demo.report                                        # docs/study.md and its pictures
    python -m demo.report --results runs/study/results.json --page runs/study/report.md

Every number is a mean over seeds. A difference is paired: both methods start from the same bases
and answer the same problems with the same seeds. Its 95 % interval is Student's, and the p-value
that of an exact permutation test, which flips the signs of the differences.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro

from data import InputError, atomic_write, parse_row
from demo.study import (
    CHOOSING_SEEDS,
    LONG,
    MAIN,
    METHODS,
    OTHERS,
    SEEDS,
    STEPS,
    WORLDS,
    along,
    curves,
    grid,
    points,
)
from demo.world import TIERS, TRAIN_MIX
from paper.plot import STYLE

TITLES = {
    "base": "base",
    "sft": "SFT",
    "oswft": "OSW-FT, K = 2",
    "static": "static weights",
    "grpo": "GRPO, G = 8",
    "oswft-k1": "OSW-FT, K = 1",
    "oswft-k4": "OSW-FT, K = 4",
    "oswft-k8": "OSW-FT, K = 8",
    "hard": "hard weights",
    "random": "random weights",
    "dft": "DFT",
}
PURPOSES = {  # of settings
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
# Student's t of 95 %, by degrees of freedom
T_95 = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), start=1))
NO_RUNS = "not run, or not reached"
TOKENS = ("trained_tokens", "sampled_tokens")
EFFECTS = ("gain", "retention", "balance", "pass@8", "TFLOPs")
SPREAD = ("expert's style", "KL")  # in answers to the retention tiers
WINDOW = 8  # optimizer steps over which weights are averaged


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
    if len(x) - 1 not in T_95:
        raise InputError(f"intervals need 2 to {max(T_95) + 1} seeds, there are {len(x)}")
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


class Results:
    """A study's scored checkpoints, and the settings that were chosen."""

    def __init__(self, rows: Sequence[dict], settings: dict):
        self.rows, self.settings, self.points = rows, settings, points(rows)
        for point in self.points:
            if "weights" in point:
                weights = 100 * mean_weights(point)[: point["steps"]]
                point["first weights"] = weights[0]
                point["change of weights"] = weights[-WINDOW:].mean() - weights[:WINDOW].mean()

    def setting(self, world: str, method: str, purpose: str = "best") -> tuple[float, int]:
        """The learning rate and the steps; zeros for a base, or if none is chosen yet."""
        return tuple(self.settings[world].get(method, {}).get(purpose, (0.0, 0)))

    def curves(self, world: str, method: str, rate: float) -> dict[int, list[dict]]:
        """The checkpoints at a learning rate, from the base on, by reported seed."""
        return curves(self.points, world, method, SEEDS).get(rate, {})

    def by_seed(self, world: str, method: str, purpose: str = "best") -> dict[int, dict]:
        """A method's scores at the settings of a purpose, by reported seed."""
        rate, steps = self.setting(world, method, purpose)
        if method == "base":
            bases = [p for p in self.points if (p["world"], p["method"]) == (world, "base")]
            return {point["seed"]: point for point in bases if point["seed"] in SEEDS}
        if purpose in BETWEEN:
            targets = self.by_seed(world, "oswft")
            found = {
                seed: along(curve, purpose, targets[seed][purpose])
                for seed, curve in self.curves(world, method, rate).items()
                if seed in targets
            }
            return {seed: point for seed, point in found.items() if point}
        return {
            seed: point
            for seed, curve in self.curves(world, method, rate).items()
            for point in curve[1:]
            if point["steps"] == steps
        }

    def shown_setting(self, name: str) -> str:
        rate, _ = self.setting(*parse(name))
        return setting_text(rate, self.by_seed(*parse(name)).values())

    def shared_seeds(self, world: str, methods: Sequence[str]) -> set[int]:
        """The seeds that all of these methods have, of those that were run at all."""
        purposes = [next(iter(self.settings[world].get(name, {})), "best") for name in methods]
        found = [set(self.by_seed(world, *pair)) for pair in zip(methods, purposes, strict=True)]
        return set.intersection(*(seeds for seeds in found if seeds)) if any(found) else set(SEEDS)

    def compare(self, a: str, b: str | None, score: str) -> Difference | None:
        """a - b over the seeds that both have, each named as "world:method@purpose"."""
        ours = self.by_seed(*parse(a))
        theirs = self.by_seed(*parse(b)) if b else {seed: {score: 0.0} for seed in ours}
        both = [seed for seed in ours if seed in theirs]
        if len(both) < 2:
            return None
        values = [ours[seed][score] - theirs[seed][score] for seed in both]
        return difference(values, digits=2 if score == "TFLOPs" else 1)


def setting_text(rate: float, found: Collection[dict]) -> str:
    """Learning rate and steps; steps are a mean where curves are compared along the way."""
    return f"{rate:g}, {np.mean([p['steps'] for p in found]):.0f}" if rate and found else ""


def mean_weights(row: dict) -> np.ndarray:
    """A run's mean weight at each step, over all trained tiers."""
    return sum(share * np.array(row["weights"][tier]) for tier, share in TRAIN_MIX.items())


def parse(name: str) -> tuple[str, str, str]:
    """(world, method, purpose) of "world:method@purpose"; "style" and "best" may be left out."""
    world, _, rest = name.rpartition(":")
    method, _, purpose = rest.partition("@")
    return world or "style", method, purpose or "best"


def title(name: str) -> str:
    world, method, purpose = parse(name)
    where = {"style": "", "own": " (own style)", "weak": " (weak base)"}[world]
    return TITLES[method] + PURPOSES[purpose] + where


# ------------------------------------------------------------------------------------------------
# Claims: what is said, a, b, the score in which a - b decides it, and its expected sign, or 0

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


def claims_table(results: Results) -> str:
    rows = []
    for text, a, b, score, expected in CLAIMS:
        cells = [text, title(a) + (f" − {title(b)}" if b else ""), score]
        if found := results.compare(a, b, score):
            cells += [found.text, f"{found.p:.3f}", found.seeds]
            rows.append([*cells, found.verdict(expected)])
        else:
            rows.append([*cells, "", "", "", NO_RUNS])
    return markdown(["", "difference", "of", "mean, 95 %", "p", "seeds", "verdict"], rows)


def differences_table(
    results: Results, questions: Sequence[tuple[str, str, str]], scores: Sequence[str]
) -> str:
    """a - b in several scores; bold where the interval does not contain zero."""
    rows = []
    for text, a, b in questions:
        settings = [setting for name in (a, b) if (setting := results.shown_setting(name))]
        cells, seeds = [text, f"{title(a)} − {title(b)}", " / ".join(settings)], 0
        for score in scores:
            found = results.compare(a, b, score)
            cells.append(found.cell if found else "")
            seeds = found.seeds if found else seeds
        rows.append([*cells, seeds or NO_RUNS])
    return markdown(["", "difference", "rate, steps", *scores, "seeds"], rows)


# ------------------------------------------------------------------------------------------------
# Tables


def markdown(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def scores_table(results: Results, world: str, methods: Sequence[str]) -> str:
    """Scores and costs of the methods at each of their settings, on the seeds that all have."""
    scores = ("gain", "retention", "pass@8", "easy", "far")
    seeds, rows = results.shared_seeds(world, methods), []
    for method in ("base", *methods):
        alike: dict[tuple, list[str]] = {}  # purposes with the same settings
        for purpose in results.settings[world].get(method, {"best": None}):
            setting = results.setting(world, method, purpose)
            alike.setdefault((setting, purpose if purpose in BETWEEN else ""), []).append(purpose)
        for ((rate, _), _), purposes in alike.items():
            own = results.by_seed(world, method, purposes[0])
            found = [point for seed, point in own.items() if seed in seeds]
            said = ",".join(PURPOSES[purpose] for purpose in purposes if purpose != "best")
            best = ", at its best and" if said and "best" in purposes else ""
            cells = [TITLES[method] + best + said]
            if not found:
                rows.append([*cells, NO_RUNS, *[""] * 9])
                continue
            mean = {key: np.mean([p[key] for p in found]) for key in (*TOKENS, "TFLOPs")}
            cells += [setting_text(rate, found)]
            cells += [spread([point[score] for point in found]) for score in scores]
            cells += [f"{mean[key] / 1e3:.0f}" for key in TOKENS]
            rows.append([*cells, f"{mean['TFLOPs']:.2f}", len(found)])
    costs = ("trained, k", "sampled, k", "TFLOPs", "seeds")
    return markdown(["method", "learning rate, steps", *scores, *costs], rows)


def sweep_table(results: Results, world: str, methods: Sequence[str]) -> str:
    """Gain / retention of every setting that was tried, means over the choosing seeds."""
    tried: dict[tuple, list[dict]] = {}
    for point in results.points:
        if point["seed"] in CHOOSING_SEEDS and point["world"] == world:
            tried.setdefault((point["method"], point["rate"], point["steps"]), []).append(point)
    rows = []
    for method, rate in [(name, rate) for name in methods for rate in grid(name)]:
        cells = []
        for steps in STEPS:
            own = tried.get((method, rate, steps), [])
            pair = (np.mean([p[score] for p in own]) for score in ("gain", "retention") if own)
            text = " / ".join(f"{mean:.0f}" for mean in pair)
            best = results.setting(world, method) == (rate, steps)
            cells.append(f"**{text}**" if best else text)
        if any(cells):
            rows.append([TITLES[method], f"{rate:g}", *cells])
    return markdown(["method", "learning rate", *(f"{steps} steps" for steps in STEPS)], rows)


def choice_table(results: Results) -> str:
    """The chosen settings' scores on the seeds that chose them, and on those that are reported."""
    rows = []
    for method in MAIN:
        setting = results.setting("style", method)
        at = [p for p in results.points if (p["world"], p["method"]) == ("style", method)]
        at = [point for point in at if (point["rate"], point["steps"]) == setting]
        cells = []
        for seeds in (CHOOSING_SEEDS, SEEDS):
            own = [point for point in at if point["seed"] in seeds]
            means = (np.mean([p[key] for p in own]) for key in EFFECTS[:3] if own)
            cells.append(" / ".join(f"{mean:.1f}" for mean in means))
        rows.append([TITLES[method], results.shown_setting(method), *cells])
    return markdown(["method", "rate, steps", "choosing seeds", "reported seeds"], rows)


def bases_table(results: Results) -> str:
    """pass@1 by tier, and in brackets the share of answers in scratch, of each base."""
    rows = []
    for world in ("style", "weak"):
        found = list(results.by_seed(world, "base").values())
        if found:
            scratch = [
                100 * np.mean([p["tiers"][tier]["scratch"] for p in found]) for tier in TIERS
            ]
            scores = [spread([point[tier] for point in found]) for tier in TIERS]
            cells = [f"{score} ({share:.0f})" for score, share in zip(scores, scratch, strict=True)]
            rows.append([WORLDS[world][0], *cells, len(found)])
    return markdown(["base", *TIERS, "seeds"], rows)


def runs_table(results: Results) -> str:
    """What made the rows: commit, versions, kind of machine; how many, and how long they took."""
    found: dict[tuple, list[dict]] = {}
    for row in results.rows:
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        origin = ((row["git_commit"] or "none")[:12], versions, row["machine"])
        found.setdefault(origin, []).append(row)
    rows = [
        [*origin, len(own), f"{sum(row['seconds'] for row in own) / 3600:.1f}"]
        for origin, own in found.items()
    ]
    return markdown(["commit", "versions", "machine", "runs", "hours of one core"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "bases": bases_table,
    "claims": claims_table,
    "rivals": lambda results: differences_table(results, RIVALS, EFFECTS),
    "questions": lambda results: differences_table(results, QUESTIONS, EFFECTS),
    "mechanism": lambda results: differences_table(results, MECHANISM, SPREAD),
    "main": lambda results: scores_table(results, "style", MAIN),
    "others": lambda results: scores_table(results, "style", OTHERS),
    "own": lambda results: scores_table(results, "own", MAIN),
    "weak": lambda results: scores_table(results, "weak", MAIN[:2]),
    "choice": choice_table,
    "runs": runs_table,
    "sweep": lambda results: sweep_table(results, "style", tuple(METHODS)),
    "sweep-own": lambda results: sweep_table(results, "own", MAIN),
    "sweep-weak": lambda results: sweep_table(results, "weak", MAIN[:2]),
}


# ------------------------------------------------------------------------------------------------
# Pictures

COLORS = {
    "base": "black",
    "sft": "#c44e52",
    "oswft": "#4c72b0",
    "static": "#55a868",
    "grpo": "#8172b3",
}
MARKERS = dict(zip(MAIN, "osD^", strict=True))


def draw_front(results: Results, path: Path) -> None:
    """Gain and retention along the longest runs of each method at its best rate, in two worlds.

    In the corner, in the method's color: the tokens trained on / sampled up to the end.
    """
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    titles = {"style": "expert in another style", "own": "expert in the model's own style"}
    for axes, (world, name) in zip(panels, titles.items(), strict=True):
        seeds, ends = results.shared_seeds(world, MAIN), {}
        for method in MAIN:
            rate, _ = results.setting(world, method)
            reported = results.settings[world].get(method, {}).values()
            last = max((steps for other, steps in reported if other == rate), default=0)
            runs: dict[int, list[dict]] = {}
            for seed, curve in results.curves(world, method, rate).items():
                for point in curve if seed in seeds else ():
                    runs.setdefault(point["steps"], []).append(point)
            if last in runs:
                draw_curve(axes, method, [runs[n] for n in sorted(runs) if n <= last])
                ends[method] = runs[last]
        for height, method in enumerate(reversed(ends)):
            spent = " / ".join(
                f"{np.mean([p[key] for p in ends[method]]) / 1e3:.0f}" for key in TOKENS
            )
            place = {"transform": axes.transAxes, "fontsize": 8, "color": COLORS[method]}
            axes.text(0.03, 0.04 + 0.06 * height, f"{spent} k tokens", **place)
        label = "gain: pass@1 on the trained tiers middle and hard (%)"
        axes.set(title=name, xlabel=label, ylim=(None, 102))
    panels[0].set_ylabel("retention: pass@1 on tiers\nnever trained on, keep and long (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5)
    plt.savefig(path)
    plt.close(figure)


def draw_curve(axes, method: str, runs: list[list[dict]]) -> None:
    """From the base through a method's checkpoints; the last one with intervals."""
    x, y = ([np.mean([p[score] for p in own]) for own in runs] for score in ("gain", "retention"))
    style = {"color": COLORS[method], "marker": MARKERS[method], "markersize": 4}
    axes.plot(x, y, label=TITLES[method], **style)
    axes.plot(x[0], y[0], "*", color="black", markersize=9, zorder=3)
    last = runs[-1]
    if len(last) > 1:
        widths = [difference([p[key] for p in last]).half_width for key in ("retention", "gain")]
        axes.errorbar(x[-1], y[-1], *widths, color=COLORS[method], alpha=0.4)


def draw_mechanism(results: Results, path: Path) -> None:
    """Weights by tier over the steps; share of scratch, and KL from the base, by tier."""
    figure, (weights, scratch, kl) = plt.subplots(1, 3, figsize=(11, 3.4))
    runs = results.by_seed("style", "oswft").values()
    for n, tier in enumerate(TRAIN_MIX if runs else ()):
        mean = np.mean([run["weights"][tier][: run["steps"]] for run in runs], axis=0)
        color = plt.get_cmap("viridis")(0.4 * n)
        weights.plot(range(1, len(mean) + 1), mean, label=tier, color=color)
    weights.set(title="OSW-FT's mean weight", xlabel="optimizer step", ylim=(0, None))
    names = ["base", "sft@demo", "oswft@demo", "static@demo", "grpo@demo"]
    shown = {name: results.by_seed(*parse(name)).values() for name in names}
    shown = {name: found for name, found in shown.items() if found}
    for axes, key, scale in ((scratch, "scratch", 100), (kl, "kl", 1)):
        for n, (name, found) in enumerate(shown.items()):
            values = [scale * np.mean([p["tiers"][tier][key] for p in found]) for tier in TIERS]
            places = np.arange(len(TIERS)) + (n - (len(shown) - 1) / 2) * 0.8 / len(shown)
            color = COLORS[parse(name)[1]]
            axes.bar(places, values, 0.8 / len(shown), color=color, label=title(name))
        axes.set_xticks(range(len(TIERS)), TIERS)
        axes.grid(axis="x", visible=False)
    scratch.set(title="answers in the expert's style (%)")
    kl.set(title="KL from the base (nats an answer)")
    weights.legend(*weights.get_legend_handles_labels())
    figure.legend(*kl.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    plt.savefig(path)
    plt.close(figure)


PICTURES = {"front": draw_front, "mechanism": draw_mechanism}


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


def read_results(path: Path) -> Results:
    if not path.exists():
        raise InputError(f"{path}: no such file; python -m demo.study writes one")
    read = parse_row(path.read_bytes(), str(path))
    if not {"rows", "settings"} <= read.keys():
        raise InputError(f"{path}: are no results of a study")
    return Results(read["rows"], read["settings"])


def report(
    results: Path = Path("docs/study/results.json"), page: Path = Path("docs/study.md")
) -> None:
    """Fill a page's tables, and draw the pictures next to results.json.

    Args:
        results: as demo.study wrote them.
        page: its text between the tables stays; a new page has only the tables.
    """
    plt.switch_backend("Agg")  # files, no window
    found = read_results(results)
    blank = "\n\n".join(f"## {name}\n\n<!-- table {name} -->\n<!-- end -->" for name in TABLES)
    text = page.read_text() if page.exists() else f"# Study\n\n{blank}\n"
    filled = fill(text, {name: table(found) for name, table in TABLES.items()})
    with atomic_write(page) as partial:
        partial.write_text(filled)
    print(page)
    with plt.rc_context(STYLE):
        for name, draw in PICTURES.items():
            draw(found, results.with_name(f"{name}.png"))
            print(results.with_name(f"{name}.png"))


if __name__ == "__main__":
    try:
        tyro.cli(report, description=__doc__, use_underscores=True)
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
