"""The study's training sets: weights and solutions from the base's own answers, wrong references.

One pass of the base over the training problems, two answers to each, gives every row these columns:

    weight             1 - p̂: the static weights
    permuted           these weights, dealt out anew over all rows
    permuted_in_tiers  ... over the rows of the same tier
    tier_mean          their mean over the row's tier
    solvable           the weight, but 0 where it is 1: rows never solved are left out
    unsolved           1 where the weight is 1, otherwise 0: rows with a right answer are left out

as prepare/weigh.py makes them, and four more sets, with the same problems in the same order:

    train-self            a right answer of the base, if there is one, in place of the solution
    train-both-wrong      a tenth of the rows has a wrong key, and a solution that leads to it
    train-key-wrong       the same wrong keys, the right solutions
    train-solution-wrong  the same wrong solutions, the right keys

    python -m demo.variants --base runs/tiny    # these three alone: no model is needed
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tyro

from data import load_examples, write_rows
from demo.world import SPOILED, STATIC_SAMPLES, TRAIN_MIX, solve
from prepare.weigh import own_answers, static_weights
from run import one_line_errors


def write_training_sets(folder: Path, texts: Sequence[str], verify: Callable, seed: int) -> None:
    """Add the columns to the training sets of demo.tiny in a folder, and write the other sets.

    Args:
        texts: the base's answers to the problems, in the order of train.jsonl.
        verify: of texts and keys, says which are right.
    """
    rng = np.random.default_rng([seed, 2])
    expert, plain = (
        [example.columns for example in load_examples(str(folder / f"{name}.jsonl"))]
        for name in ("train", "train-plain")
    )
    spoiled = spoil(expert, rng)

    def check(rows: Sequence[dict]) -> np.ndarray:  # (N, STATIC_SAMPLES)
        keys = [row["answer"] for row in rows for _ in range(STATIC_SAMPLES)]
        return np.array(verify(texts, keys)).reshape(-1, STATIC_SAMPLES)

    right, right_by_spoiled_keys = check(expert), check(spoiled["train-key-wrong"])
    own = np.array(texts, dtype=object).reshape(right.shape)
    usable = right & np.array(["<|" not in text for text in texts]).reshape(right.shape)
    solutions = own_answers(own, usable, [row["solution"] for row in expert])
    own_rows = [row | {"solution": text} for row, text in zip(expert, solutions, strict=True)]
    sets = {"train": expert, "train-plain": plain, "train-self": own_rows}
    for name, rows in {**sets, **spoiled}.items():
        keys_are_wrong = name in ("train-both-wrong", "train-key-wrong")
        weights = static_weights(right_by_spoiled_keys if keys_are_wrong else right)
        write_rows(add_weights(rows, weights, rng), folder / f"{name}.jsonl")


def add_weights(rows: Sequence[dict], weights: np.ndarray, rng: np.random.Generator) -> list[dict]:
    """The rows with all columns of weights."""
    tiers = np.array([row["source"] for row in rows])
    columns = {
        "weight": weights,
        "permuted": rng.permutation(weights),
        "permuted_in_tiers": weights.copy(),
        "tier_mean": weights.copy(),
        "solvable": np.where(weights < 1, weights, 0.0),
        "unsolved": np.where(weights < 1, 0.0, 1.0),
    }
    for tier in TRAIN_MIX:
        own = tiers == tier
        columns["permuted_in_tiers"][own] = rng.permutation(weights[own])
        columns["tier_mean"][own] = weights[own].mean()
    values = {name: column.tolist() for name, column in columns.items()}
    return [row | {name: values[name][n] for name in values} for n, row in enumerate(rows)]


def spoil(rows: Sequence[dict], rng: np.random.Generator) -> dict[str, list[dict]]:
    """The three sets with wrong references: the same rows are spoiled in each."""
    both, key, solution = ([row | {"spoiled": False} for row in rows] for _ in range(3))
    for n in rng.choice(len(rows), size=round(SPOILED * len(rows)), replace=False):
        question, right = rows[n]["question"], rows[n]["answer"]
        wrong = right
        while wrong == right:  # a slip may not show in the end: times 0
            slip = int(rng.integers(len(question) // 2)), int(rng.integers(1, 10))
            text, wrong = solve(question, "scratch", slip)
        both[n] |= {"solution": text, "answer": wrong, "spoiled": True}
        key[n] |= {"answer": wrong, "spoiled": True}
        solution[n] |= {"solution": text, "spoiled": True}
    return {
        "train-both-wrong": both,
        "train-key-wrong": key,
        "train-solution-wrong": solution,
    }


def main(base: Path, seed: int = 0) -> None:
    """Write the three sets with wrong references next to a base's train.jsonl.

    Args:
        base: a folder of demo.tiny.
        seed: of the rows that are spoiled.
    """
    expert = [example.columns for example in load_examples(str(base / "train.jsonl"))]
    for name, rows in spoil(expert, np.random.default_rng([seed, 2])).items():
        write_rows(rows, base / f"{name}.jsonl")


if __name__ == "__main__":
    with one_line_errors():
        tyro.cli(main, description=__doc__, use_underscores=True)
