"""What docs/study/plan6.md counts of the models of a triple, in one process with one vLLM engine.

    python -m real.score --regime S --folder runs/sixth --base S-base/final --seed 5 --models ...

Writes <model>.scores.json beside each model's folder: the right answers to each problem, by set.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import evaluate
from arguments import one_line_errors
from data import Example, derive_seed, load_examples, load_tokenizer, write_json
from engine import init_training, load_model
from evaluate import tokenize_prompts
from rollout import Completion, Rollout
from verify import Verifier

import tyro

EQUATION = re.compile(r"[\dxX.+*/()= -]*\d[\dxX.+*/()= -]*=[\dxX.+*/()= -]*")  # the expert's style
SETS = {"S": ("real_held", "middle_held", "easy_held"), "O": ("kept_held", "easy_held")}
SAMPLES = 4  # answers to each problem
TOKENS = 96  # of an answer, at most
FIRST_TOKENS = 32  # of an answer, whose entropy is estimated
WHOLE = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}  # how training samples
GREEDY = {"temperature": 0.0}


@dataclass(kw_only=True)
class Args:
    regime: Literal["S", "O"]
    folder: Path  # of the study, with data/
    base: Path  # in the folder
    models: tuple[Path, ...]  # in the folder: the base, checkpoints
    seed: int = 0  # of sampling, the same for all models of a triple
    precision: Literal["bf16", "fp32"] = "bf16"
    vllm_memory: float = 0.2  # share of the memory for vLLM
    last_step: int = 60  # its checkpoints, and the base, are also sampled at T = 1, and greedily
    problems: int | None = None  # of each set; None: all

    @property
    def paper(self) -> dict[str, float]:
        """How the paper samples when it scores, as evaluate.py does."""
        return evaluate.Args(model=str(self.base)).sampling


class Sampler:
    """One vLLM engine, which gets the parameters of one model after another."""

    def __init__(self, args: Args):
        model = str(args.folder / args.base)
        self.tokenizer, self.seed = load_tokenizer(model), args.seed
        settings = {"precision": args.precision, "vllm_memory": args.vllm_memory}
        self.rollout = Rollout(model, self.tokenizer, 512, **settings)
        self.verifier = Verifier(2)

    def load(self, model: Path) -> None:
        self.rollout.load_parameters(iter(load_model(str(model), 512).state_dict().items()))

    def answers(
        self, rows: Sequence[Example], samples: int, sampling: dict, logprobs: int = 0
    ) -> list[Completion]:
        """`samples` answers to each row, those of a row side by side."""
        prompts = tokenize_prompts(self.tokenizer, rows)
        seeds = [derive_seed(self.seed, "score", e.id) for e in rows]
        options = {"logprobs": logprobs, **sampling}
        return self.rollout.generate(prompts, samples, TOKENS, seeds, **options)

    def count(self, rows: Sequence[Example], found: Sequence[Completion]) -> list[int]:
        """Right answers to each problem."""
        references = [rows[c.query].answer for c in found]
        counts = [0] * len(rows)
        verdicts = self.verifier.score([c.text for c in found], references)
        for c, right in zip(found, verdicts, strict=True):
            counts[c.query] += right
        return counts


def entropy(found: Sequence[Completion]) -> float:
    """The mean of -log p of the sampled tokens, the first ones of each answer: nats a token."""
    logprobs = [value for c in found for value in c.logprobs[:FIRST_TOKENS]]
    return -sum(logprobs) / len(logprobs)


def style(found: Sequence[Completion]) -> float:
    """The share of answers whose first line is an equation, as the expert's is."""
    lines = [c.text.split("\n")[0].strip() for c in found]
    return sum(bool(EQUATION.fullmatch(line)) for line in lines) / len(lines)


def main(args: Args) -> None:
    init_training()
    sets = {
        name: load_examples(str(args.folder / "data" / f"{name}.jsonl"))[: args.problems]
        for name in SETS[args.regime]
    }
    sampler = Sampler(args)
    for model in args.models:
        sampler.load(args.folder / model)
        scores = {"counts": {}, "style": {}}
        for name, rows in sets.items():
            found = sampler.answers(rows, SAMPLES, args.paper)
            scores["counts"][name] = sampler.count(rows, found)
            scores["style"][name] = style(found)
        if model == args.base or model.name == f"checkpoint-{args.last_step:06d}":
            scores |= {"whole": {}, "greedy": {}}
            for name, rows in sets.items():
                asked = len(rows) if name == "real_held" else 0
                found = sampler.answers(rows, SAMPLES, WHOLE, logprobs=asked)
                scores["whole"][name] = sampler.count(rows, found)
                if asked:
                    scores["entropy"] = entropy(found)
                scores["greedy"][name] = sampler.count(rows, sampler.answers(rows, 1, GREEDY))
        print("scored:", model, flush=True)  # how well, nobody reads before the last run
        write_json(scores, (args.folder / model).with_suffix(".scores.json"))


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.score", description=__doc__))
