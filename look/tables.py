"""Tables of finished evaluations, in Markdown.

python -m look.tables table runs/*/eval                      # like the paper's Table 1
python -m look.tables compare runs/sft/eval runs/oswft/eval  # paired difference, p-value
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from data import InputError, read_rows
from evaluate import (
    BENCHMARKS,
    PROTOCOL,
    pass_at_k_curve,
    percent,
    right_counts,
    score_with_interval,
)
from launch import command_line
from look import labels, markdown_table
from run import read_args

import numpy as np
import tyro
from scipy import stats

SWAPS = 10_000  # of a permutation test


def table(folders: tuple[Path, ...]) -> None:
    """Print a Markdown table like the paper's Table 1: pass@1 and pass@n in %, with 95 % intervals.

    Args:
        folders: of evaluations, a row for each; n is the number of answers to a problem.
    """
    if not folders:
        raise InputError("which evaluations? python -m look.tables table runs/*/eval")
    runs = load_evaluations(folders)
    found = dict.fromkeys(name for _, counts in runs for name in counts)
    names = sorted(found, key=[*BENCHMARKS, *found].index)
    heads = []
    chosen = {}  # name -> k of pass@k
    for name in names:
        fewest = min(counts[name][1] for _, counts in runs if name in counts)
        chosen[name] = sorted({1, fewest})
        title = BENCHMARKS[name].title if name in BENCHMARKS else name
        heads.append(f"{title}, Pass" + " / ".join(f"@{n}" for n in chosen[name]))
    rows = []
    for run, counts in runs:
        cells = [run]
        for name in names:
            ks = chosen[name] if name in counts else ()
            scores = [percent(*score_with_interval(*counts[name], n)) for n in ks]
            cells.append(" / ".join(scores) or "–")
        rows.append(cells)
    print(markdown_table(["", *heads], rows))


def compare(first: Path, second: Path) -> None:
    """Print how much better the second evaluation is than the first, problem by problem.

    Args:
        first: folder of an evaluation.
        second: folder of another one, on the same problems.
    """
    (one, before), (other, after) = load_evaluations((first, second))
    pairs = {name: (before[name], after[name]) for name in before if name in after}
    if not pairs:
        raise InputError(f"{first} and {second} have no benchmark in common")
    rows = []
    for name, pair in pairs.items():
        for n in sorted({1, min(num for _, num in pair)}):
            scores = [100 * pass_at_k_curve(num, n)[counts].mean() for counts, num in pair]
            difference, bounds, p_value = paired_difference(*pair, n)
            cells = [f"{score:.1f}" for score in scores]
            cells += [percent(difference, bounds, "+"), f"{p_value:.2g}"]
            rows.append([name, n, *cells])
    print(markdown_table(["", "k", one, other, "difference, 95 % interval", "p"], rows))


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
    """(label, `right_counts` of each benchmark) of what each evaluation has reported last.

    Raises InputError if one has no report, or other problems, references or judges than another.
    """
    runs, known = [], {}
    for label, folder in zip(labels(folders), folders, strict=True):
        if not (folder / "results.json").exists():
            raise InputError(f"{folder} has no results: type its evaluate.py command again")
        results, samples = json.loads((folder / "results.json").read_text()), {}
        for _, row in read_rows(str(folder / "samples.jsonl")):
            samples.setdefault(row["benchmark"], []).append(row)
        for name, rows in samples.items():
            problems = {row["problem"]: row["answer"] for row in rows}
            judge = results[name]["graded_by"]
            for what, own in (("problems or references", problems), ("judge", judge)):
                first, where = known.setdefault((name, what), (own, folder))
                if own != first:
                    advice = "type both evaluate.py commands again, which grade all answers anew"
                    raise InputError(f"{where} and {folder}: {name} has another {what}: {advice}")
        runs.append((label, {name: right_counts(rows) for name, rows in samples.items()}))
    for name in PROTOCOL:
        values = {folder: read_args(folder)["setting"][name] for folder in folders}
        if len(set(values.values())) > 1:
            shown = ", ".join(f"{folder} {value}" for folder, value in values.items())
            print(f"note: the evaluations differ in {name}: {shown}", file=sys.stderr)
    return runs


if __name__ == "__main__":
    with command_line():
        tyro.extras.subcommand_cli_from_dict(
            {"table": table, "compare": compare},
            description=__doc__,
            use_underscores=True,
            config=(tyro.conf.PositionalRequiredArgs,),
        )
