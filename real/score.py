"""What docs/study/plan5.md counts of the models of a triple, in one process with one vLLM engine.

    python -m real.score --regime S --folder runs/fifth --base S-base/final --seed 0 --models ...

Writes <model>.scores.json beside each model's folder: the right answers to each problem, by set.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from arguments import one_line_errors
from data import Example, derive_seed, load_examples, load_tokenizer, write_json
from engine import init_distributed, load_model
from evaluate import tokenize_prompts
from rollout import Rollout
from verify import Verifier

import tyro

EQUATION = re.compile(r"[\dxX.+*/()= -]*\d[\dxX.+*/()= -]*=[\dxX.+*/()= -]*")  # the expert's style
SKILL = 4  # tokens of the base's own right answer
SETS = {
    "S": ("real_held", "middle_held", "easy_held"),
    "O": ("kept_held", "easy_held", "real_held"),
}
SAMPLES = 4  # answers to each problem
TOKENS = 96  # of an answer, at most


@dataclass(kw_only=True)
class Args:
    regime: Literal["S", "O"]
    folder: Path  # of the study, with data/
    base: Path  # in the folder
    models: tuple[Path, ...]  # in the folder: the base, checkpoints
    seed: int = 0  # of sampling, the same for all models of a triple
    precision: Literal["bf16", "fp32"] = "bf16"


class Sampler:
    """One vLLM engine, which gets the weights of one model after another."""

    def __init__(self, model: Path, seed: int, precision: str):
        self.tokenizer, self.seed = load_tokenizer(str(model)), seed
        settings = {"precision": precision, "vllm_memory": 0.2}
        self.rollout = Rollout(str(model), self.tokenizer, 512, **settings)
        self.verifier = Verifier(2)

    def load(self, model: Path) -> None:
        self.rollout.load_weights(iter(load_model(str(model), 512).state_dict().items()))

    def answers(
        self,
        rows: Sequence[Example],
        samples: int,
        temperature: float = 1.0,
        begun: dict | None = None,
    ) -> list[list[tuple[list[int], str, bool]]]:
        """Of each row its answers: token ids, text, right? By id, they begin with `begun`."""
        begun = begun or {}
        prompts = tokenize_prompts(self.tokenizer, rows)
        prompts = [ids + begun.get(e.id, []) for ids, e in zip(prompts, rows, strict=True)]
        seeds = [derive_seed(self.seed, "score", e.id) for e in rows]
        found = self.rollout.generate(prompts, samples, TOKENS, seeds, temperature=temperature)
        texts = [self.tokenizer.decode(begun.get(rows[c.query].id, [])) + c.text for c in found]
        right = self.verifier.score(texts, [rows[c.query].answer for c in found])
        groups = [[] for _ in rows]
        for c, text, verdict in zip(found, texts, right, strict=True):
            groups[c.query].append((c.token_ids, text, verdict))
        return groups


def count(groups: list) -> list[int]:
    """Right answers to each problem."""
    return [sum(right for *_, right in group) for group in groups]


def main(args: Args) -> None:
    init_distributed()
    sets = {
        name: load_examples(str(args.folder / "data" / f"{name}.jsonl"))
        for name in SETS[args.regime]
    }
    first = sets[SETS[args.regime][0]]  # what is gained, or kept
    sampler = Sampler(args.folder / args.base, args.seed, args.precision)
    begun = {}
    if args.regime == "O":
        sampler.load(args.folder / args.base)
        for example, group in zip(first, sampler.answers(first, SAMPLES), strict=True):
            if solved := [ids for ids, _, right in group if right]:
                begun[example.id] = solved[0][:SKILL]

    for model in args.models:
        sampler.load(args.folder / model)
        answers = {name: sampler.answers(rows, SAMPLES) for name, rows in sets.items()}
        scores = {"counts": {name: count(groups) for name, groups in answers.items()}}
        if args.regime == "O":
            lines = [
                text.split("\n")[0].strip()
                for group in answers["kept_held"]
                for _, text, _ in group
            ]
            scores["style"] = sum(bool(EQUATION.fullmatch(line)) for line in lines) / len(lines)
            with_begun = [example for example in first if example.id in begun]
            scores["counts"]["skill"] = count(sampler.answers(with_begun, SAMPLES, begun=begun))
        if model == args.base or model.name == "checkpoint-000060":
            greedy = {name: count(sampler.answers(rows, 1, 0.0)) for name, rows in sets.items()}
            scores["greedy"] = greedy
        print("scored:", model, flush=True)  # how well, nobody reads before the last run
        write_json(scores, (args.folder / model).with_suffix(".scores.json"))


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.score", description=__doc__))
