"""The study's tables and its pictures, from its results.

    python -m demo.report                        # docs/study.md, its details and its pictures
    python -m demo.report --output_dir runs/study --second runs/study/results.jsonl

Every difference is paired over seeds: both runs start from the same base and answer the same
problems with the same sampling seeds. Intervals are Student's, 95 %, p-values two-sided.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
from sympy import betainc_regularized

from data import InputError, atomic_write, read_rows
from demo.study import (
    RATES,
    SEEDS,
    STATIC_K,
    SUPERVISED,
    THIRD_SEEDS,
    TITLES,
    WRONG,
    needs_base_answers,
)
from demo.world import GAIN, RETENTION, STATIC_SAMPLES, TIERS
from paper.plot import STYLE
from run import one_line_errors

DOCS = Path("docs")
FIRST_SEEDS = tuple(range(10, 18))  # reported by the first study
LEVELS = (75, 80)  # of gain, at which methods are compared
SCORES = {  # name -> tiers, and what is averaged over them
    "gain": (GAIN, "pass@1"),
    "retention": (RETENTION, "pass@1"),
    "pass@8": (GAIN, "pass@8"),
    "expert's style": (RETENTION, "scratch"),
    "KL": (RETENTION, "kl"),
    **{tier: ((tier,), "pass@1") for tier in TIERS},
}
BATCH, NUM_TRAIN, PROMPT_TOKENS = 128, 4096, 17  # queries, problems, and tokens of a prompt
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # by freedom


WORLD_TITLES = {"style": "", "clean": "", "self": "own answers", "own": "own style"}
WORLD_TITLES |= {"clean-self": "own answers", "clean-audited": "audited", "wrong": "wrong"}
WORLD_TITLES |= {"wrong-audited": "wrong, audited"}


class Runs(NamedTuple):
    """The runs of a method at a setting, one for each seed."""

    method: str
    rate: float = 1e-4
    world: str = "style"
    steps: int = 144

    @property
    def title(self) -> str:
        name = WORLD_TITLES.get(self.world, self.world)
        where = f" ({name})" if name else ""
        return f"{TITLES[self.method]}{where} at {self.rate:g}"


# ---- What is compared ----------------------------------------------------------------------------


def planned(method: str, rate: float) -> Runs:
    return Runs(method, rate, steps=RATES[rate])


middle, slow = partial(planned, rate=5e-5), partial(planned, rate=2.5e-5)
own_style = partial(Runs, rate=3e-4, world="own", steps=72)
both, slip = partial(Runs, world="both-wrong"), partial(Runs, world="solution-wrong")
KEPT, COST = "retention at equal gain", "TFLOPs at equal gain"
BEST = {"oswft": slow("oswft"), "sft": slow("sft")}  # on the choosing seeds
GRPO = Runs("grpo", 3e-4, steps=48)
OWN, OWN_WEIGHED = Runs("sft", world="self"), Runs("static", world="self")
# The hypotheses of docs/study/plan.md: a less b in a score, and the sign that it should have.
HYPOTHESES = {
    "H1": ("OSW-FT or SFT, same rate", middle("oswft"), middle("sft"), KEPT, 1),
    "H2": ("... each at its best rate", BEST["oswft"], BEST["sft"], KEPT, 1),
    "H3": ("Which queries weigh, or how much?", middle("static"), middle("permuted"), KEPT, 1),
    "H4": ("... within a tier", middle("static"), middle("permuted-in-tiers"), KEPT, 1),
    "H5": ("Key and solution wrong: OSW-FT or SFT?", both("oswft"), both("sft"), "gain", -1),
    "H6": ("Solution wrong, key right: OSW-FT or SFT?", slip("oswft"), slip("sft"), "gain", 1),
    "H7": ("Own right answers, or OSW-FT?", OWN, Runs("oswft"), KEPT, 1),
}
audited, wrong = partial(Runs, world="wrong-audited"), partial(Runs, world="wrong")
slowest = partial(Runs, rate=1.25e-5, world="clean", steps=1152)
slow_clean = partial(Runs, rate=2.5e-5, world="clean", steps=576)
clean, clean_audited = partial(Runs, world="clean"), partial(Runs, world="clean-audited")
# Of docs/study/plan3.md; 0: two-sided.
THIRD_HYPOTHESES = {
    "A1": ("Suspects left out: static weights", audited("static"), wrong("static"), "gain", 1),
    "A2": ("... OSW-FT", audited("oswft"), wrong("oswft"), "gain", 1),
    "A3": ("... SFT", audited("sft"), wrong("sft"), "gain", 1),
    "A4": ("... where nothing is wrong", clean_audited("static"), clean("static"), "gain", 0),
    "B1": ("OSW-FT or SFT, the lowest rate", slowest("oswft"), slowest("sft"), KEPT, 0),
    "B2": ("... SFT at half the rate", slow_clean("oswft"), slowest("sft"), COST, -1),
    "C1": ("GRPO or OSW-FT?", clean("grpo", 3e-4, steps=48), clean("oswft"), KEPT, 0),
}
Comparisons = tuple[tuple[str, Runs, Runs, tuple[str, ...]], ...]  # question, a, b, scores
CLAIMS: Comparisons = (
    ("OSW-FT or SFT, same settings?", Runs("oswft"), Runs("sft"), ("forgetting", "gain", "TFLOPs")),
    ("... same gain, same rate?", Runs("oswft"), Runs("sft"), (KEPT, COST)),
    ("... same gain, SFT at half the rate?", Runs("oswft"), middle("sft"), (KEPT, COST)),
    ("How much of the expert's style?", middle("oswft"), middle("sft"), ("expert's style", "KL")),
    ("Static weights or SFT?", Runs("static"), Runs("sft"), ("forgetting", "gain", "TFLOPs")),
    ("Online or static?", middle("oswft"), middle("static"), (KEPT, COST)),
    ("A tier's mean for all of its rows?", middle("static"), middle("tier-means"), (KEPT, "gain")),
    ("Permuted weights or SFT?", middle("permuted"), middle("sft"), (KEPT, "gain")),
    ("Own answers, or OSW-FT?", OWN, Runs("oswft"), ("forgetting", "gain")),
    ("... with static weights?", OWN_WEIGHED, Runs("oswft"), ("forgetting", "gain", "TFLOPs")),
    ("Solved rows left out, or weighed?", Runs("unsolved"), Runs("static"), (KEPT, "gain")),
    ("The expert in the base's style?", own_style("sft"), own_style("oswft"), ("gain",)),
    ("K = 1 or 2?", Runs("oswft-k1"), Runs("oswft"), ("balance",)),
    ("GRPO or OSW-FT?", GRPO, Runs("oswft"), ("gain", "retention", "pass@8", "far", "TFLOPs")),
)
MORE: Comparisons = (
    ("OSW-FT or SFT, same settings?", middle("oswft"), middle("sft"), CLAIMS[0][3]),
    ("... same gain, same rate?", middle("oswft"), middle("sft"), (KEPT, COST)),
    ("", slow("oswft"), slow("sft"), (KEPT, COST)),
    ("... same gain, SFT at half the rate?", middle("oswft"), slow("sft"), (KEPT, COST)),
    ("How much of the expert's style?", Runs("oswft"), Runs("sft"), ("expert's style", "KL")),
    ("Static weights or SFT?", middle("static"), middle("sft"), (KEPT, COST)),
    ("Which queries, or how much?", middle("static"), middle("permuted"), (KEPT, "gain")),
    ("", middle("static"), middle("permuted-in-tiers"), (KEPT, "gain")),
    ("", Runs("oswft-k4"), Runs("random"), ("gain", "retention")),
    ("K = 4, 8 or 2?", Runs("oswft-k4"), Runs("oswft"), ("balance",)),
    ("", Runs("oswft-k8"), Runs("oswft"), ("balance",)),
    ("Own answers, with weights or without?", OWN_WEIGHED, OWN, (KEPT, "gain")),
    ("... or the expert's?", OWN_WEIGHED, Runs("static"), (KEPT, "forgetting", "gain")),
    ("G = 2, 4 or 8?", GRPO._replace(method="grpo-g2"), GRPO, ("gain", "retention", "TFLOPs")),
    ("", GRPO._replace(method="grpo-g4"), GRPO, ("gain", "retention", "TFLOPs")),
    ("Divided by sequences?", Runs("oswft-sequence"), Runs("oswft"), ("gain", "retention")),
)


# ---- Statistics ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds: its mean, half of its 95 % interval, p, and the seeds.

    A ratio is one of logarithms.
    """

    mean: float
    half_width: float
    p: float
    seeds: int
    ratio: bool = False
    p_flip: float = 1.0  # exact, of all signs: it asks for no normal distribution

    @property
    def text(self) -> str:
        if self.ratio:
            low, mean, high = np.exp(self.mean + self.half_width * np.array([-1, 0, 1]))
            return f"{mean:.2f} [{low:.2f}, {high:.2f}]"
        digits = 1 if abs(self.mean) + self.half_width >= 1 else 2
        return f"{self.mean:+.{digits}f} ± {self.half_width:.{digits}f}"


def difference(values: Sequence[float], ratio: bool = False) -> Difference:
    """The mean of differences, one for each seed: Student's interval and two-sided p-value."""
    x, n = np.array(values), len(values) - 1
    error = x.std(ddof=1) / len(x) ** 0.5
    t = x.mean() / error if error else np.inf
    p = float(betainc_regularized(n / 2, 0.5, 0, n / (n + t * t)))
    signs = np.array(list(itertools.product([-1, 1], repeat=len(x))))
    p_flip = float((abs(signs @ x) >= abs(x.sum()) * (1 - 1e-9)).mean())
    return Difference(float(x.mean()), float(T_95[n] * error), p, len(x), ratio, p_flip)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the same order."""
    order, adjusted, largest = np.argsort(p_values), [0.0] * len(p_values), 0.0
    for rank, n in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[n]))
        adjusted[n] = largest
    return adjusted


# ---- Results -------------------------------------------------------------------------------------


def read_points(path: Path) -> pd.DataFrame:
    """Every scored checkpoint: its run's columns, its costs, scores in percent, KL in nats.

    Raises InputError if the file holds something else.
    """
    points = []
    for where, row in read_rows(str(path)):
        if "checkpoints" not in row:
            raise InputError(f"{where}: is no row of a study")
        for checkpoint in row.pop("checkpoints"):
            point = {**row, **checkpoint, "TFLOPs": count_flops(row, checkpoint) / 1e12}
            for name, (tiers, score) in SCORES.items():
                mean = np.mean([checkpoint["tiers"][tier][score] for tier in tiers])
                point[name] = mean * (1 if score == "kl" else 100)
            point["balance"] = (point["gain"] + point["retention"]) / 2
            points.append(point | {"end": row["steps"]})
    if not points:
        raise InputError(f"{path}: no run has ended yet")
    return pd.DataFrame(points).sort_values(["seed", "end", "steps"])


def count_flops(row: dict, checkpoint: dict) -> float:
    """6 for each parameter and trained token, 2 for each that is sampled, or read to sample.

    Prompts count in both: vLLM reads them anew for each answer, as they are shorter than a block.
    """
    answers = int((re.findall(r"num_rollouts (\d)", row["command"]) or [0])[0])
    prompts = answers * BATCH * checkpoint["steps"]
    if needs_base_answers(row["world"], row["command"]):
        prompts += (STATIC_K if row.get("seed") in THIRD_SEEDS else STATIC_SAMPLES) * NUM_TRAIN
    read = checkpoint["sampled_tokens"] + prompts * PROMPT_TOKENS
    return row["parameters"] * (6 * checkpoint["trained_tokens"] + 2 * read)


def curves(points: pd.DataFrame, runs: Runs, seeds: Sequence[int]) -> dict[int, pd.DataFrame]:
    """By seed, a run's checkpoints from the base on."""
    found = points[points.seed.isin(seeds)]
    own = found[(found.method == runs.method) & (found.rate == runs.rate)]
    own = own[(own.world == runs.world) & (own.end == runs.steps)]
    base = found[(found.method == "base") & (found.world != "weak")]
    return {
        seed: pd.concat([base[base.seed == seed], curve]) for seed, curve in own.groupby("seed")
    }


def at_level(curve: pd.DataFrame, gain: float, score: str) -> float | None:
    """A score where a curve's gain first rises to a level, on a line between two checkpoints.

    None if it never does.
    """
    x, y = curve["gain"].to_numpy(), curve[score].to_numpy()
    rises = np.flatnonzero((x[:-1] <= gain) & (gain <= x[1:]))
    if not len(rises):
        return None
    part = slice(rises[0], rises[0] + 2)
    return float(np.interp(gain, x[part], y[part]))


def measure(points: pd.DataFrame, runs: Runs, score: str, seeds: Sequence[int]) -> pd.Series:
    """A score by seed: at the runs' ends; or "... at equal gain", the mean over LEVELS.

    "forgetting" is the base's retention less the run's, at least 1. A run that does not reach a
    level counts with its last checkpoint.
    """
    values, (name, _, where) = {}, score.partition(" at ")
    for seed, curve in curves(points, runs, seeds).items():
        last = curve.iloc[-1]
        if where:
            found = [at_level(curve, level, name) for level in LEVELS]
            values[seed] = np.mean([last[name] if at is None else at for at in found])
        elif name == "forgetting":
            values[seed] = max(curve.iloc[0].retention - last.retention, 1)
        else:
            values[seed] = last[name]
    return pd.Series(values, dtype=float)


def compare(
    points: pd.DataFrame, a: Runs, b: Runs, score: str, seeds: Sequence[int] = SEEDS
) -> Difference | None:
    """a - b over the seeds that both have; of "forgetting" the ratio. None below two seeds."""
    values = [measure(points, runs, score, seeds) for runs in (a, b)]
    ratio = score == "forgetting"
    found = (np.log(values[0]) - np.log(values[1])) if ratio else values[0] - values[1]
    found = found.dropna()
    return difference(found.tolist(), ratio) if len(found) > 1 else None


# ---- Tables --------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def tested(
    points: pd.DataFrame, hypotheses: dict = HYPOTHESES, seeds: Sequence[int] = SEEDS
) -> dict[str, tuple[Difference, float, str]]:
    """Difference, Holm's p and verdict of each hypothesis that was run; another counts as p = 1."""
    found = {name: compare(points, *h[1:4], seeds) for name, h in hypotheses.items()}
    adjusted = holm([each.p if each else 1.0 for each in found.values()])
    return {
        name: (each, p, verdict(each, p, hypotheses[name][4]))
        for (name, each), p in zip(found.items(), adjusted, strict=True)
        if each
    }


def verdict(found: Difference, adjusted: float, expected: int) -> str:
    if adjusted < 0.05:
        if not expected:
            return "above 0" if found.mean > 0 else "below 0"
        return "holds" if found.mean * expected > 0 else "**the opposite holds**"
    return "open" if found.p >= 0.05 else "open after Holm"


def hypotheses_table(
    points: pd.DataFrame, hypotheses: dict = HYPOTHESES, seeds: Sequence[int] = SEEDS
) -> str:
    """A line for each hypothesis; "exact" is the p-value of the sign-flip test."""
    rows, results = [], tested(points, hypotheses, seeds)
    for name, (text, a, b, score, expected) in hypotheses.items():
        cells = ["", "", "", "", "", "not run"]
        if name in results:
            found, p, said = results[name]
            p_values = [f"{value:.2g}" for value in (found.p, p, found.p_flip)]
            said = said if found.seeds == len(seeds) else "not all seeds yet"
            cells = [found.text, found.seeds, *p_values, said]
        sign = ("below 0", "two-sided", "above 0")[expected + 1]
        rows.append([name, text, f"{a.title} − {b.title}", f"{score}: {sign}", *cells])
    header = ("", "question", "difference", "claim", "mean, 95 %", "seeds", "p", "Holm", "exact")
    return markdown((*header, "verdict"), rows)


def claims_table(comparisons: Comparisons, first: pd.DataFrame, second: pd.DataFrame) -> str:
    """Comparisons on both studies' seeds; in brackets how many seeds."""
    rows = []
    for text, a, b, scores in comparisons:
        cells = []
        for points, seeds in ((first, FIRST_SEEDS), (second, SEEDS)):
            found = {score: compare(points, a, b, score, seeds) for score in scores}
            said = [f"{score} {each.text}" for score, each in found.items() if each]
            number = {each.seeds for each in found.values() if each}
            cells.append(", ".join(said) + "".join(f" ({n})" for n in number))
        rows.append([text, f"{a.title} − {b.title}", *cells])
    seeds = [f"seeds {min(s)}–{max(s)}" for s in (FIRST_SEEDS, SEEDS)]
    return markdown(["", "difference", *seeds], rows)


def wrong_table(points: pd.DataFrame) -> str:
    """Gain / retention at the end with wrong references, and the weight that these carry."""
    methods, rows = ("sft", "oswft", "static", "solvable"), []
    for world in ("style", *WRONG):
        runs, cells = {method: Runs(method, world=world) for method in methods}, []
        if world == "key-wrong":
            runs["sft"] = Runs("sft")  # it reads no key
        for own in runs.values():
            means = [measure(points, own, score, SEEDS).mean() for score in ("gain", "retention")]
            cells.append("" if np.isnan(means[0]) else "{:.1f} / {:.1f}".format(*means))
        found, share = compare(points, runs["oswft"], runs["sft"], "gain"), ""
        online = curves(points, runs["oswft"], SEEDS).values() if world in WRONG else ()
        if online:
            shares = np.array([curve.iloc[-1].spoiled_share for curve in online])  # (seeds, steps)
            share = f"{shares[:, :12].mean():.0%} → {shares[:, -12:].mean():.0%}"
        rows.append([world.replace("style", "none"), *cells, found.text if found else "", share])
    titles = [TITLES[method] for method in methods]
    return markdown(["wrong", *titles, "OSW-FT − SFT, gain", "weight on wrong rows"], rows)


def suspects_table(points: pd.DataFrame) -> str:
    """Of the third study's passes, by tier: suspects, how many are wrong, how many wrong ones."""
    rows, bases = [], points[(points.method == "base") & points.seed.isin(THIRD_SEEDS)]
    for name in ("wrong", "clean") if len(bases) else ():
        tiers = [row[name] for row in bases.suspects]
        for tier in tiers[0]:
            count, spoiled, suspects, found = np.sum([seed[tier] for seed in tiers], axis=0)
            shares = ["", ""]
            if name == "wrong":
                shares = [f"{found / suspects:.0%}", f"{found / spoiled:.0%}"]
            rows.append(
                [name, tier, f"{count:,}", f"{spoiled:,}", f"{suspects / count:.1%}", *shares]
            )
    header = ("set", "tier", "rows", "wrong", "suspects", "of these wrong", "of the wrong found")
    return markdown(header, rows)


def arms_table(points: pd.DataFrame) -> str:
    """The third study's runs at their ends, means over seeds, and the cost at equal gain.

    A run of B may end once it has gained enough, so its end says nothing.
    """
    rows, scores = [], ("gain", "retention", "easy", "TFLOPs", KEPT, COST)
    trained = points[(points.method != "base") & points.seed.isin(THIRD_SEEDS)]
    keys = zip(trained.method, trained.rate, trained.world, trained.end, strict=True)
    for runs in sorted({Runs(*key) for key in keys}, key=lambda r: (r.world, r.rate, r.method)):
        found = [measure(points, runs, score, THIRD_SEEDS) for score in scores]
        means = [f"{each.mean():.1f}" for each in found]
        means[:4] = [""] * 4 if runs.rate < 5e-5 else means[:4]
        rows.append([runs.title, len(found[0]), *means])
    return markdown(["runs", "seeds", *scores], rows)


def unreached_table(points: pd.DataFrame, seeds: Sequence[int]) -> str:
    """How many runs count with their last checkpoint, as their gain does not reach a level."""
    counts, trained = {}, points[points.method != "base"]
    keys = zip(trained.method, trained.rate, trained.world, trained.end, strict=True)
    for runs in sorted({Runs(*key) for key in keys}):
        found = curves(points, runs, seeds).values()
        below = [sum(at_level(c, level, "gain") is None for c in found) for level in LEVELS]
        counts[runs.title] = np.add(counts.get(runs.title, 0), [*below, len(found)])
    rows = [[title, *count] for title, count in counts.items() if any(count[:-1])]
    return markdown(["runs", *(f"below {level}" for level in LEVELS), "of"], rows)


# ---- The picture ---------------------------------------------------------------------------------

COLORS = {"sft": "#c44e52", "oswft": "#4c72b0", "static": "#55a868", "grpo": "#8172b3"}
RATE_COLORS = dict(zip(RATES, ("#e08214", "#35978f", "#2d4b8e"), strict=True))
FRONTIER = (  # title, method, world on the second and on the third study's seeds, rates with steps
    *((TITLES[m], m, ("style", "clean"), {**RATES, 1.25e-5: 1152}) for m in SUPERVISED),
    (TITLES["grpo"], "grpo", ("style", "clean"), {3e-4: 48}),
    ("static weights (own answers)", "static", ("self", "clean-self"), {3e-4: 48, 1e-4: 144}),
)
LABEL_PLACES = {"sft": (4, -10, "left"), "static": (-4, -10, "right")}  # in points


def at_80(points: pd.DataFrame, runs: Runs, seeds: Sequence[int]) -> np.ndarray:
    """FLOPs and retention where a run's gain reaches 80, of each seed that does: (N, 2)."""
    values = [
        [at_level(curve, 80, score) for score in ("TFLOPs", "retention")]
        for curve in curves(points, runs, seeds).values()
    ]
    return np.array([pair for pair in values if None not in pair]).reshape(-1, 2)


def draw_frontier(points: pd.DataFrame, path: Path) -> None:
    """Retention at a gain of 80 against the FLOPs to get there: a line a method, a point a rate.

    A panel for the seeds of each study, as bases differ more than methods. At least four of them
    make a point.
    """
    both = (SEEDS, THIRD_SEEDS)
    studies = [s for s in both if points.seed[points.seed.isin(s)].nunique() >= 4] or [SEEDS]
    sizes = {"figsize": (1 + 4 * len(studies), 3.8), "sharex": True, "sharey": True}
    figure, (panels,) = plt.subplots(1, len(studies), squeeze=False, **sizes)
    for axes, seeds in zip(panels, studies, strict=True):
        panel = both.index(seeds)
        for title, method, worlds, rates in FRONTIER:
            found = {
                rate: at_80(points, Runs(method, rate, worlds[panel], steps), seeds)
                for rate, steps in sorted(rates.items(), reverse=True)
            }
            found = {rate: values for rate, values in found.items() if len(values) >= 4}
            if not found:
                continue
            x, y = np.array([values.mean(axis=0) for values in found.values()]).T  # (rates,) each
            widths = [[difference(c).half_width for c in values.T] for values in found.values()]
            x_width, y_width = np.array(widths).T
            color = "#937860" if "self" in worlds else COLORS[method]
            axes.plot(x, y, "o-", color=color, markersize=4, label=title)
            axes.errorbar(x, y, y_width, x_width, "none", ecolor=color, alpha=0.4, capsize=2)
            for place, (rate, values) in zip(zip(x, y, strict=True), found.items(), strict=True):
                note = np.format_float_scientific(rate, trim="-", exp_digits=1)
                note += f" ({len(values)})" * (len(values) < len(seeds))
                right, up, side = LABEL_PLACES.get(method, (4, 4, "left"))  # they would overlap
                options = {"xytext": (right, up), "textcoords": "offset points", "ha": side}
                axes.annotate(note, place, fontsize=7, **options)
        answers = (STATIC_SAMPLES, STATIC_K)[panel]
        axes.set(title=f"seeds {seeds[0]} to {seeds[-1]}; static weights from {answers} answers")
        axes.set(xscale="log", xlabel="TFLOPs until the gain is 80 %", ylim=(55, 102))
        ticks = (0.5, 1, 2, 4, 8)
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
    panels[0].set_ylabel("retention there (%)")
    panels[0].legend(fontsize=7, loc="lower right")
    plt.savefig(path)
    plt.close(figure)


def draw_kept(points: pd.DataFrame, path: Path) -> None:
    """Retention at equal gain, OSW-FT and static weights less SFT: a line for each rate."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, sharey=True)
    for axes, method in zip(panels, ("oswft", "static"), strict=True):
        for rate, color in RATE_COLORS.items():
            ours, theirs = (curves(points, planned(m, rate), SEEDS) for m in (method, "sft"))
            levels, means, widths = [], [], []
            for level in range(60, 91):
                kept = [
                    [at_level(own[seed], level, "retention") for own in (ours, theirs)]
                    for seed in ours.keys() & theirs.keys()
                ]
                if len(kept) > 1 and not any(None in pair for pair in kept):
                    found = difference([a - b for a, b in kept])
                    levels.append(level)
                    means.append(found.mean)
                    widths.append(found.half_width)
            low, high = np.array(means) - widths, np.array(means) + widths
            axes.plot(levels, means, color=color, label=f"{rate:g} × {RATES[rate]} steps")
            axes.fill_between(levels, low, high, color=color, alpha=0.15, linewidth=0)
        axes.axhline(0, color="black", linewidth=1)
        axes.set(title=f"{TITLES[method]} − SFT", xlabel="gain that both have reached (%)")
    panels[0].set_ylabel("retention, difference (points)")
    panels[0].legend(title="learning rate of both")
    plt.savefig(path)
    plt.close(figure)


# ---- The pages -----------------------------------------------------------------------------------


def fill(pages: dict[Path, str], tables: dict[str, str]) -> dict[Path, str]:
    """The pages with each table at its mark. Raises InputError if one has no mark."""
    for name, table in tables.items():
        mark = re.compile(f"(<!-- table {re.escape(name)} -->\n).*?(<!-- end -->)", flags=re.S)
        if not any(map(mark.search, pages.values())):
            raise InputError(f"no page has a place for the table '{name}'")
        filled = rf"\g<1>{table}\n\g<2>"
        pages = {page: mark.sub(filled, text) for page, text in pages.items()}
    return pages


def report(
    first: Path = DOCS / "study" / "first.jsonl",
    second: Path = DOCS / "study" / "second.jsonl",
    third: Path = DOCS / "study" / "third.jsonl",
    output_dir: Path = DOCS,
) -> None:
    """Fill the tables of study.md and study/details.md in a folder, and draw their pictures.

    Args:
        first: results of the first study.
        second: results of the second study, or of a part of it.
        third: results of the third, or of a part; left out if there are none.
        output_dir: the pages' text between the tables stays; new pages have only the tables.
    """
    plt.switch_backend("Agg")  # files, no window
    old, new = read_points(first), read_points(second)
    tables = {
        "hypotheses": hypotheses_table(new),
        "wrong": wrong_table(new),
        "claims": claims_table(CLAIMS, old, new),
        "more": claims_table(MORE, old, new),
    }
    everything = new
    if third.exists():
        latest = read_points(third)
        everything = pd.concat([new, latest])
        tables |= {
            "third": hypotheses_table(latest, THIRD_HYPOTHESES, THIRD_SEEDS),
            "suspects": suspects_table(latest),
            "arms": arms_table(latest),
        }
    tables["unreached"] = unreached_table(everything, (*SEEDS, *THIRD_SEEDS))
    (output_dir / "study").mkdir(parents=True, exist_ok=True)
    page = output_dir / "study.md"
    known = (page, output_dir / "study" / "details.md")
    pages = {path: path.read_text() for path in known if path.exists()}
    for name in tables:
        if not any(f"<!-- table {name} -->" in text for text in pages.values()):
            pages[page] = pages.get(page, "") + f"\n<!-- table {name} -->\n<!-- end -->\n"
    for path, text in fill(pages, tables).items():
        with atomic_write(path) as partial:
            partial.write_text(text)
        print(path)
    with plt.rc_context(STYLE):
        draw_kept(new, output_dir / "study" / "kept.png")
        draw_frontier(everything, output_dir / "study" / "frontier.png")
    print(output_dir / "study" / "frontier.png")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(report, description=__doc__, use_underscores=True)
