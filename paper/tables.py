"""Tables of finished evaluations, in Markdown.

python -m paper.tables table runs/*/eval                      # like the paper's Table 1
python -m paper.tables compare runs/sft/eval runs/oswft/eval  # paired difference, p-value
python -m paper.tables score runs/oswft/eval                  # results.json from the samples
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import evaluate
from arguments import one_line_errors
from data import InputError
from evaluate import (
    BENCHMARKS,
    PROTOCOL,
    complete_samples,
    pass_at_k_curve,
    percent,
    right_counts,
    score_with_interval,
)
from paper import labels
from run import read_args

import numpy as np
import tyro
from scipy import stats

SWAPS = 10_000  # of a permutation test


def score(folder: Path) -> None:
    """Compute results.json from the samples alone, and print it.

    Args:
        folder: of an evaluation.
    """
    evaluate.score_and_print(folder)


def table(folders: tuple[Path, ...], k: tuple[int, ...] = ()) -> None:
    """Print a Markdown table like the paper's Table 1: pass@k in %, with 95 % intervals.

    Args:
        folders: of evaluations, a row for each.
        k: of pass@k; default: 1 and the number of samples.
    """
    if not folders:
        raise InputError("which evaluations? python -m paper.tables table runs/*/eval")
    runs = load_evaluations(folders)
    found = dict.fromkeys(name for _, counts in runs for name in counts)
    names = sorted(found, key=[*BENCHMARKS, *found].index)
    fewest = {name: min(counts[name][1] for _, counts in runs if name in counts) for name in names}
    chosen = choose_k(k, fewest)
    names = [name for name in names if chosen[name]]
    heads = []
    for name in names:
        title = BENCHMARKS[name].title if name in BENCHMARKS else name
        heads.append(f"{title}, Pass" + " / ".join(f"@{n}" for n in chosen[name]))
    print("| | " + " | ".join(heads) + " |")
    print("|---" * (len(names) + 1) + "|")
    for run, counts in runs:
        cells = []
        for name in names:
            ks = chosen[name] if name in counts else ()
            scores = [percent(*score_with_interval(*counts[name], n)) for n in ks]
            cells.append(" / ".join(scores) or "–")
        print(f"| {run} | " + " | ".join(cells) + " |")


def compare(first: Path, second: Path, k: tuple[int, ...] = ()) -> None:
    """Print how much better the second evaluation is than the first, problem by problem.

    Args:
        first: folder of an evaluation.
        second: folder of another one, on the same problems.
        k: of pass@k; default: 1 and the number of samples.
    """
    (one, before), (other, after) = load_evaluations((first, second))
    pairs = {name: (before[name], after[name]) for name in before if name in after}
    if not pairs:
        raise InputError(f"{first} and {second} have no benchmark in common")
    chosen = choose_k(k, {name: min(num for _, num in pair) for name, pair in pairs.items()})
    print(f"| | k | {one} | {other} | difference, 95 % interval | p |")
    print("|---|---|---|---|---|---|")
    for name, pair in pairs.items():
        for n in chosen[name]:
            scores = [100 * pass_at_k_curve(num, n)[counts].mean() for counts, num in pair]
            difference, bounds, p_value = paired_difference(*pair, n)
            print(
                f"| {name} | {n} | {scores[0]:.1f} | {scores[1]:.1f} "
                f"| {percent(difference, bounds, '+')} | {p_value:.2g} |"
            )


def choose_k(k: tuple[int, ...], num_samples: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Which pass@k to show for each benchmark: `k` up to its n answers; default: 1 and n."""
    most = max(num_samples.values())
    if k and not 1 <= min(k) <= max(k) <= most:
        raise InputError(f"k of pass@k must be between 1 and the number of answers, {most}")
    return {
        name: tuple(m for m in k if m <= n) if k else tuple(dict.fromkeys((1, n)))
        for name, n in num_samples.items()
    }


def paired_difference(
    first: tuple[np.ndarray, int], second: tuple[np.ndarray, int], k: int
) -> tuple[float, tuple[float, float], float]:
    """pass@k of the second less the first: the difference, its 95 % interval, a p-value.

    Each is (counts (N,), num_samples), of the same problems in the same order. The interval is
    Student's, over the problems. The p-value is that of a two-sided sign-flip permutation test: it
    swaps the two at random in each problem. Where they disagree, trust the p-value: the interval
    assumes a normal mean, and has no width if all differences are alike.
    """
    differences = pass_at_k_curve(second[1], k)[second[0]] - pass_at_k_curve(first[1], k)[first[0]]
    estimate, size = float(differences.mean()), len(differences)
    error = differences.std(ddof=1) / size**0.5 if size > 1 else np.inf
    half = stats.t.ppf(0.975, size - 1) * error if error else 0.0
    signs = np.random.default_rng(0).choice((-1, 1), size=(SWAPS, size))  # -1 swaps the two
    swapped = np.abs((signs * differences).mean(axis=1))
    as_large = int((swapped >= abs(estimate) - 1e-12).sum())  # up to rounding
    bounds = max(-1.0, estimate - half), min(1.0, estimate + half)
    return estimate, bounds, (1 + as_large) / (SWAPS + 1)


def load_evaluations(
    folders: Sequence[Path],
) -> list[tuple[str, dict[str, tuple[np.ndarray, int]]]]:
    """(label, `right_counts` of each benchmark) of complete evaluations of the same problems."""
    runs, problems = [], {}
    for label, folder in zip(labels(folders), folders, strict=True):
        samples, asked = complete_samples(folder), read_args(folder)["benchmarks"]
        for name in samples:
            own = asked[name]["fingerprint"]
            known, where = problems.setdefault(name, (own, folder))
            if known != own:
                raise InputError(f"{folder}: {name} has other problems or prompts than in {where}")
        runs.append((label, {name: right_counts(rows) for name, rows in samples.items()}))
    for name in PROTOCOL:
        values = {folder: read_args(folder)["args"][name] for folder in folders}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{folder} {value}" for folder, value in values.items())
            print(f"note: the evaluations differ in {name}: {shown}", file=sys.stderr)
    return runs


if __name__ == "__main__":
    with one_line_errors():
        tyro.extras.subcommand_cli_from_dict(
            {"table": table, "compare": compare, "score": score},
            description=__doc__,
            use_underscores=True,
            config=(tyro.conf.PositionalRequiredArgs,),
        )
