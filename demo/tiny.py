r"""The demo's tiny model, and its problems.

The model is a Qwen3 of 0.4M parameters with a character-level vocabulary and ChatML, pre-trained on
the problems of demo/world.py until it knew enough for fine-tuning to build on. It is committed:
demo/base/README.md says how it was made.

    python -m demo.tiny copy --output_dir runs/tiny  # the model, and its problems
    python -m demo.tiny spoil --folder runs/tiny     # a tenth of its references made wrong
"""

import shutil
from dataclasses import replace
from pathlib import Path

from data import load_examples, write_rows
from demo.world import NUM_HELDOUT, TIERS, TRAIN_MIX, make_examples, solve, spoil
from launch import command_line
from models import Tokenizer, load_tokenizer

import numpy as np

COMMITTED = Path(__file__).parent / "base"


def make_tokenizer() -> Tokenizer:
    """The base's: a token for each character, and for `\\boxed{`, the roles and the instruction."""
    return load_tokenizer(str(COMMITTED))


def copy(output_dir: Path = Path("runs/tiny")) -> None:
    """Write the base and its problems.

    Args:
        output_dir: where model/, heldout/<tier>.jsonl, train.jsonl (the expert's solutions, in
            scratch) and train-plain.jsonl (the same problems, solved in the model's own style) go.
    """
    rng, taken = np.random.default_rng(0), set()
    files = {f"heldout/{t}": make_examples(NUM_HELDOUT, {t: 1}, rng, taken) for t in TIERS}
    files["train"] = make_examples(4096, TRAIN_MIX, rng, taken)
    files["train-plain"] = [
        replace(row, solution=solve(row.question, "plain")[0]) for row in files["train"]
    ]
    for name, rows in files.items():
        write_rows([row.columns for row in rows], output_dir / f"{name}.jsonl")
    beside = shutil.ignore_patterns("README.md", "scores.json")
    shutil.copytree(COMMITTED, output_dir / "model", ignore=beside, dirs_exist_ok=True)


def spoil_file(folder: Path = Path("runs/tiny"), seed: int = 0) -> None:
    """Write train-wrong.jsonl: train.jsonl with a tenth of its answers and solutions wrong.

    Args:
        folder: of `copy`.
        seed: of the rows that are spoiled.
    """
    rows = [example.columns for example in load_examples(str(folder / "train.jsonl"))]
    write_rows(spoil(rows, np.random.default_rng([seed, 2])), folder / "train-wrong.jsonl")


if __name__ == "__main__":
    import tyro  # only a command line needs it

    with command_line():
        commands = {"copy": copy, "spoil": spoil_file}
        tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, use_underscores=True)
