"""The study's tables, claims and pictures, from its results.

    python -m demo.report                                        # docs/study.md and its pictures
    python -m demo.report --results runs/study/results.json --page runs/study/report.md

Every number is a mean over seeds. A difference is paired: both methods start from the same bases
and answer the same problems with the same seeds. Its 95 % interval is Student's, and the p-value
that of an exact permutation test, which flips the signs of the differences.
"""

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files, no window
import matplotlib.pyplot as plt
import numpy as np
import tyro

from data import InputError, atomic_write, parse_row
from demo.study import (
    CHOOSING_SEEDS,
    MAIN,
    METHODS,
    NUM_SAMPLES,
    OTHERS,
    SEEDS,
    STEPS,
    WORLDS,
    axis,
    balance,
    grid,
    points,
)
from demo.world import GAIN, RETENTION, TIERS, TRAIN_MIX
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
    "hard": "hard",
    "random": "random",
    "dft": "DFT",
}
PURPOSES = {
    "best": "its own best settings",
    "same": "OSW-FT's settings",
    "trained_tokens": "as many trained tokens",
    "flops": "as many FLOPs",
    "tenfold": "ten times the rate",
}
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365}  # Student's t


def gain(point: dict) -> float:
    return axis(point, GAIN)


def retention(point: dict) -> float:
    return axis(point, RETENTION)


def pass_at_8(point: dict) -> float:
    return axis(point, GAIN, f"pass@{NUM_SAMPLES}")


# ------------------------------------------------------------------------------------------------
# Statistics


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds: mean, half the 95 % interval, permutation p, seeds."""

    mean: float
    half: float
    p: float
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ± {self.half:.1f}"

    def verdict(self, expected: int) -> str:
        """Whether the whole interval lies on the expected side of zero."""
        if abs(self.mean) <= self.half:
            low, high = self.mean - self.half, self.mean + self.half
            return f"not decided: between {low:+.1f} and {high:+.1f}"
        return "holds" if self.mean * expected > 0 else "the opposite holds"


def difference(values: Sequence[float]) -> Difference:
    """The mean of paired differences with its interval and p-value.

    >>> difference([1.0, 2.0, 3.0, 2.0])
    Difference(mean=2.0, half=1.2989..., p=0.125, seeds=4)
    """
    x = np.array(values)
    half = T_95[len(x) - 1] * x.std(ddof=1) / len(x) ** 0.5
    signs = np.array(list(itertools.product((1, -1), repeat=len(x))))
    means = np.abs((signs * x).mean(axis=1))
    p = float((means >= abs(x.mean()) - 1e-9).mean())
    return Difference(float(x.mean()), float(half), p, len(x))


# ------------------------------------------------------------------------------------------------
# Lookups


class Results:
    """The rows of a study: each is a run, with a list of scored checkpoints."""

    def __init__(self, rows: Sequence[dict], settings: dict):
        self.rows = rows
        self.settings = {
            (world, method): {name: tuple(pair) for name, pair in purposes.items()}
            for world, methods in settings.items()
            for method, purposes in methods.items()
        }
        self.by_key = {
            (row["world"], row["method"], row["rate"], point["steps"], row["seed"]): point
            for row in rows
            for point in row["checkpoints"]
        }

    def setting(self, world: str, method: str, purpose: str = "best") -> tuple[float, int]:
        """The learning rate and the steps; zeros if none is chosen yet."""
        return self.settings.get((world, method), {}).get(purpose, (0.0, 0))

    def seeds(self, world: str, method: str, purpose: str = "best") -> dict[int, dict]:
        """The checkpoints of a method at the settings of a purpose, by reported seed."""
        if method == "base":
            kind = WORLDS[world][0]
            found = {key: point for key, point in self.by_key.items() if key[1] == "base"}
            own = {k: p for k, p in found.items() if WORLDS[k[0]][0] == kind}
            return {key[4]: point for key, point in own.items() if key[4] in SEEDS}
        setting = self.setting(world, method, purpose)
        keys = {seed: (world, method, *setting, seed) for seed in SEEDS}
        return {seed: self.by_key[key] for seed, key in keys.items() if key in self.by_key}

    def compare(
        self, world: str, a: tuple[str, str], b: tuple[str, str], score: Callable
    ) -> Difference | None:
        """a - b, each a method and a purpose, over the seeds that have both."""
        ours, theirs = self.seeds(world, *a), self.seeds(world, *b)
        both = [seed for seed in ours if seed in theirs]
        if len(both) < 2:
            return None
        return difference([score(ours[seed]) - score(theirs[seed]) for seed in both])

    def weights(self, world: str) -> list[dict[str, np.ndarray]]:
        """OSW-FT's mean weight at each step, by tier, of each reported seed at its best rate."""
        rate, steps = self.setting(world, "oswft")
        own = [row for row in self.rows if row["seed"] in SEEDS and row["world"] == world]
        found = []
        for row in own:
            if (row["method"], row["rate"]) == ("oswft", rate):
                run = {tier: np.array(means)[:steps] for tier, means in row["weights"].items()}
                run["all"] = sum(share * run[tier] for tier, share in TRAIN_MIX.items())
                found.append(run)
        return found


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ------------------------------------------------------------------------------------------------
# Tables


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over seeds."""
    sd = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{sd}"


def table_of(results: Results, world: str, methods: Sequence[str]) -> str:
    """Scores and costs of the methods at each of their settings, on the reported seeds."""
    rows = []
    for method in ("base", *methods):
        purposes = results.settings.get((world, method), {"best": (0.0, 0)})
        for setting in dict.fromkeys(purposes.values()):
            own = [PURPOSES[name] for name, other in purposes.items() if other == setting]
            purpose = next(name for name, other in purposes.items() if other == setting)
            found = list(results.seeds(world, method, purpose).values())
            if not found:
                rows.append([TITLES[method], "; ".join(own), "not run yet", *[""] * 9])
                continue
            shown = [spread([score(p) for p in found]) for score in (gain, retention, pass_at_8)]
            tiers = [spread([axis(p, [tier]) for p in found]) for tier in ("easy", "far")]
            tokens = [np.mean([p[key] for p in found]) / 1e3 for key in TOKENS]
            rate, steps = setting
            rows.append(
                [
                    TITLES[method],
                    "" if method == "base" else "; ".join(own),
                    f"{rate:g}, {steps}" if steps else "",
                    *shown,
                    *tiers,
                    *(f"{n:.0f}" for n in tokens),
                    f"{np.mean([p['flops'] for p in found]) / 1e12:.2f}",
                    len(found),
                ]
            )
    header = ["method", "settings", "rate, steps", "gain", "retention", "pass@8", "easy", "far"]
    return markdown([*header, "trained k", "sampled k", "10¹² FLOPs", "seeds"], rows)


TOKENS = ("trained_tokens", "sampled_tokens")


def sweep_table(results: Results, world: str, methods: Sequence[str]) -> str:
    """Gain / retention of every setting that was tried, means over the choosing seeds."""
    rows = []
    tried = points(results.rows, world, CHOOSING_SEEDS)
    for method in methods:
        best = results.setting(world, method)
        for rate in grid(method):
            cells = []
            for steps in STEPS:
                own = [
                    point
                    for point in tried
                    if (point["method"], point["rate"], point["steps"]) == (method, rate, steps)
                ]
                pair = (np.mean([score(p) for p in own]) for score in (gain, retention) if own)
                text = " / ".join(f"{mean:.0f}" for mean in pair)
                cells.append(f"**{text}**" if (rate, steps) == best else text)
            if any(cells):
                rows.append([TITLES[method], f"{rate:g}", *cells])
    return markdown(["method", "rate", *(f"{steps} steps" for steps in STEPS)], rows)


def base_table(results: Results) -> str:
    """pass@1 by tier, and the share of answers in scratch, of each base."""
    rows = []
    for world in ("style", "weak"):
        found = list(results.seeds(world, "base").values())
        if found:
            cells = [
                f"{spread([axis(p, [tier]) for p in found])} "
                f"({np.mean([axis(p, [tier], 'scratch') for p in found]):.0f})"
                for tier in TIERS
            ]
            rows.append([WORLDS[world][0], *cells, len(found)])
    return markdown(["base", *TIERS, "seeds"], rows)


# ------------------------------------------------------------------------------------------------
# Claims


@dataclass(frozen=True)
class Claim:
    """A statement, and the difference a - b that decides it."""

    text: str  # "" if it is the one above
    a: tuple[str, str]  # method and purpose
    b: tuple[str, str]
    score: Callable[[dict], float]
    expected: int = 0  # the sign of a - b if it holds; 0: the interval is the finding
    world: str = "style"


BASE, SFT, OSWFT, GRPO = (("base", "best"), ("sft", "best"), ("oswft", "best"), ("grpo", "best"))
SFT_SAME, SFT_FLOPS = ("sft", "same"), ("sft", "flops")
SFT_TOKENS, STATIC = ("sft", "trained_tokens"), ("static", "same")
HARD, RANDOM, TENFOLD = ("hard", "same"), ("random", "same"), ("grpo", "tenfold")
PAPER_CLAIMS = (
    Claim("SFT harms what it does not show", SFT_SAME, BASE, retention, -1),
    Claim("", SFT, BASE, retention, -1),
    Claim("OSW-FT preserves it", OSWFT, SFT_SAME, retention, 1),
    Claim("", OSWFT, SFT, retention, 1),
    Claim("", OSWFT, SFT_FLOPS, retention, 1),
    Claim("", OSWFT, BASE, retention),
    Claim("OSW-FT is better than SFT on the task", OSWFT, SFT_SAME, gain, 1),
    Claim("", OSWFT, SFT, gain, 1),
    Claim("", OSWFT, SFT_FLOPS, gain, 1),
    Claim("", OSWFT, SFT_TOKENS, gain, 1),
    Claim("OSW-FT keeps pass@k better than GRPO", OSWFT, GRPO, pass_at_8, 1),
    Claim("", GRPO, BASE, pass_at_8, -1),
    Claim("Soft weights are better than hard ones", OSWFT, HARD, balance, 1),
    Claim("Hard weights are better than random ones", HARD, RANDOM, balance, 1),
    Claim("K = 2 is enough", ("oswft-k1", "same"), OSWFT, balance),
    Claim("", ("oswft-k4", "same"), OSWFT, balance),
    Claim("", ("oswft-k8", "same"), OSWFT, balance),
    Claim("GRPO collapses at ten times the rate", TENFOLD, GRPO, gain, -1),
    Claim("", TENFOLD, GRPO, retention, -1),
)
OUR_QUESTIONS = (
    Claim("GRPO or OSW-FT?", OSWFT, GRPO, gain),
    Claim("", OSWFT, GRPO, retention),
    Claim("Is one offline pass as good?", STATIC, OSWFT, gain),
    Claim("", STATIC, OSWFT, retention),
    Claim("Does DFT do the same?", ("dft", "best"), SFT, gain),
    Claim("", ("dft", "best"), SFT, retention),
    Claim("What if the expert has the base's own style?", SFT_SAME, BASE, retention, 0, "own"),
    Claim("", OSWFT, SFT_SAME, gain, 0, "own"),
    Claim("", OSWFT, SFT_SAME, retention, 0, "own"),
    Claim("What if the base is weak?", OSWFT, SFT_SAME, gain, 0, "weak"),
    Claim("", OSWFT, SFT_SAME, retention, 0, "weak"),
)
AT = {
    "best": "",
    "same": " at OSW-FT's settings",
    "flops": " with as many FLOPs",
    "trained_tokens": " with as many trained tokens",
    "tenfold": " at ten times the rate",
}


def claims_table(results: Results, claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        found = results.compare(claim.world, claim.a, claim.b, claim.score)
        names = [TITLES[method] + AT[purpose] for method, purpose in (claim.a, claim.b)]
        cells = [claim.text, " − ".join(names), SCORES[claim.score]]
        if found is None:
            rows.append([*cells, "", "", "", "not run yet"])
        else:
            verdict = found.verdict(claim.expected) if claim.expected else "see the interval"
            rows.append([*cells, found, f"{found.p:.3f}", found.seeds, verdict])
    return markdown(["", "difference", "in", "points, 95 %", "p", "seeds", "verdict"], rows)


def weights_table(results: Results) -> str:
    """Mean weights at the begin and the end of OSW-FT's runs, of both bases."""
    rows = []
    for world in ("style", "weak"):
        runs = results.weights(world)
        if not runs:
            continue
        for tier in (*TRAIN_MIX, "all"):
            first, last = ([100 * run[tier][part].mean() for run in runs] for part in ENDS)
            fall = difference([b - a for a, b in zip(first, last, strict=True)])
            rows.append([WORLDS[world][0], tier, spread(first), spread(last), fall, fall.seeds])
    return markdown(["base", "tier", "first 8 steps", "last 8 steps", "difference", "seeds"], rows)


def cost_table(results: Results) -> str:
    """FLOPs of each method in one step, and of its best settings, beside those of SFT."""
    rows = []
    sft = results.seeds("style", "sft")
    for method in METHODS:
        found = results.seeds("style", method)
        if not (sft and found):
            continue
        (_, steps), (_, sft_steps) = (results.setting("style", m) for m in (method, "sft"))
        ours, theirs = (np.mean([p["flops"] for p in x.values()]) for x in (found, sft))
        ratios = ours / steps / (theirs / sft_steps), ours / theirs
        rows.append([TITLES[method], *(f"{ratio:.2f}" for ratio in ratios)])
    return markdown(["method", "FLOPs of a step ÷ SFT's", "of its best settings ÷ SFT's"], rows)


ENDS = (slice(None, 8), slice(-8, None))
SCORES = {gain: "gain", retention: "retention", pass_at_8: "pass@8", balance: "their mean"}
TABLES: dict[str, Callable[[Results], str]] = {
    "bases": base_table,
    "claims": lambda results: claims_table(results, PAPER_CLAIMS),
    "questions": lambda results: claims_table(results, OUR_QUESTIONS),
    "main": lambda results: table_of(results, "style", MAIN),
    "others": lambda results: table_of(results, "style", OTHERS),
    "own": lambda results: table_of(results, "own", MAIN),
    "weak": lambda results: table_of(results, "weak", MAIN),
    "weights": weights_table,
    "cost": cost_table,
    "sweep": lambda results: sweep_table(results, "style", tuple(METHODS)),
    "sweep-own": lambda results: sweep_table(results, "own", MAIN),
    "sweep-weak": lambda results: sweep_table(results, "weak", MAIN),
}


# ------------------------------------------------------------------------------------------------
# Pictures

COLORS = dict(
    zip((*MAIN, "base"), ("#c44e52", "#4c72b0", "#55a868", "#8172b3", "black"), strict=True)
)
MARKERS = dict(zip(MAIN, "osD^", strict=True))


def draw_front(results: Results, path: Path) -> None:
    """Gain and retention along the runs of each method at its best rate; two worlds."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.9), sharey=True)
    titles = {"style": "expert in another style", "own": "expert in the model's own style"}
    for axes, (world, title) in zip(panels, titles.items(), strict=True):
        base = list(results.seeds(world, "base").values())
        for method in MAIN:
            setting = results.setting(world, method)
            if not base:
                continue
            curve = [(np.mean(list(map(gain, base))), np.mean(list(map(retention, base))))]
            for steps in STEPS:
                own = [
                    point
                    for seed in SEEDS
                    if (point := results.by_key.get((world, method, setting[0], steps, seed)))
                    and steps <= setting[1]
                ]
                if own:
                    curve.append(tuple(np.mean(list(map(f, own))) for f in (gain, retention)))
                    last = own
            if len(curve) == 1:
                continue
            x, y = zip(*curve, strict=True)
            style = {"color": COLORS[method], "marker": MARKERS[method], "markersize": 4}
            axes.plot(x, y, label=TITLES[method], **style)
            trained, sampled = (np.mean([p[key] for p in last]) / 1e3 for key in TOKENS)
            axes.annotate(
                f"{trained:.0f}k / {sampled:.0f}k",
                (x[-1], y[-1]),
                textcoords="offset points",
                xytext=(5, -9),
                fontsize=7,
                color=COLORS[method],
            )
            half = (
                [
                    T_95[len(last) - 1] * np.std(list(map(f, last)), ddof=1) / len(last) ** 0.5
                    for f in (gain, retention)
                ]
                if len(last) > 1
                else (0, 0)
            )
            axes.errorbar(x[-1], y[-1], half[1], half[0], color=COLORS[method], alpha=0.4)
        if base:
            axes.plot(*curve[0], "*", color="black", markersize=10, label="base", zorder=3)
        axes.set(title=title, xlabel="gain: pass@1 on the trained tiers, middle and hard (%)")
    panels[0].set_ylabel("retention: pass@1 on tiers\nnever trained on, keep and long (%)")
    panels[0].legend(loc="lower left")
    plt.savefig(path)
    plt.close(figure)


def draw_mechanism(results: Results, path: Path) -> None:
    """Weights by tier over the steps; share of scratch, and KL from the base, by tier."""
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.2))
    runs = results.weights("style")
    for n, tier in enumerate(TRAIN_MIX):
        if runs:
            mean = np.mean([run[tier] for run in runs], axis=0)
            color = plt.get_cmap("viridis")(0.4 * n)
            panels[0].plot(range(1, len(mean) + 1), mean, label=tier, color=color)
    panels[0].set(
        title="OSW-FT's weights", xlabel="optimizer step", ylabel="mean weight", ylim=(0, None)
    )
    panels[0].legend()
    for axes, key, title, scale in (
        (panels[1], "scratch", "answers in the expert's style (%)", 100),
        (panels[2], "kl", "KL from the base (nats an answer)", 1),
    ):
        shown = [
            name
            for name in ("base", *MAIN)
            if results.seeds("style", name, PURPOSE.get(name, "best"))
        ]
        for n, method in enumerate(shown):
            found = results.seeds("style", method, PURPOSE.get(method, "best")).values()
            values = [scale * np.mean([p["tiers"][tier][key] for p in found]) for tier in TIERS]
            places = np.arange(len(TIERS)) + (n - (len(shown) - 1) / 2) * 0.8 / len(shown)
            label = TITLES[method] + AT[PURPOSE.get(method, "best")]
            axes.bar(places, values, 0.8 / len(shown), color=COLORS[method], label=label)
        axes.set_xticks(range(len(TIERS)), TIERS)
        axes.set(title=title)
        axes.grid(axis="x", visible=False)
    panels[1].legend(fontsize=6)
    plt.savefig(path)
    plt.close(figure)


PURPOSE = {"sft": "same", "static": "same"}
PICTURES = {"front": draw_front, "mechanism": draw_mechanism}


# ------------------------------------------------------------------------------------------------
# The page


def fill(text: str, tables: dict[str, str]) -> str:
    """The page with each table between its marks. Raises InputError for a mark without a table."""
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
    return Results(read["rows"], read["settings"])


def report(
    results: Path = Path("docs/study/results.json"), page: Path = Path("docs/study.md")
) -> None:
    """Fill the page's tables, and draw the pictures beside results.json.

    Args:
        results: as demo.study wrote them.
        page: a page without the marks of the tables gets them, one after the other.
    """
    found = read_results(results)
    tables = {name: table(found) for name, table in TABLES.items()}
    blank = "\n\n".join(f"## {name}\n\n<!-- table {name} -->\n<!-- end -->" for name in TABLES)
    text = page.read_text() if page.exists() else f"# Study\n\n{blank}\n"
    with atomic_write(page) as partial:
        partial.write_text(fill(text, tables))
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
