"""What docs/study/plan7.md counts of the models of a triple, in one process with one vLLM engine.

    python -m real.score --folder runs/sixth --base base/final --seed 5 --models ...

Writes <model>.scores.json beside each model's folder: the right answers to each problem, by set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import evaluate
from arguments import one_line_errors
from data import Example, derive_seed, load_examples, load_tokenizer, write_json
from engine import init_training, load_model
from evaluate import tokenize_prompts
from rollout import Rollout
from verify import Verifier

import tyro

GAIN = ("real_held", "middle_held")
SAMPLES = 4  # answers to each problem
TOKENS = 96  # of an answer, at most
GREEDY = {"temperature": 0.0}


@dataclass(kw_only=True)
class Args:
    folder: Path  # of the study, with data/
    base: Path  # in the folder
    models: tuple[Path, ...]  # in the folder: the base, or checkpoints
    seed: int = 0  # of sampling, the same for all models of a triple
    last_step: int = 60  # its checkpoints, and the base, also answer easy problems, and greedily
    problems: int | None = None  # of each set; None: all


class Sampler:
    """One vLLM engine, which gets the parameters of one model after another."""

    def __init__(self, args: Args):
        model = str(args.folder / args.base)
        self.tokenizer, self.seed = load_tokenizer(model), args.seed
        self.rollout = Rollout(model, self.tokenizer, 512, precision="fp32", vllm_memory=0.2)
        self.verifier = Verifier(2)

    def load(self, model: Path) -> None:
        self.rollout.load_parameters(iter(load_model(str(model), 512).state_dict().items()))

    def count(self, rows: Sequence[Example], samples: int, sampling: dict) -> list[int]:
        """Right answers of `samples` to each problem."""
        prompts = tokenize_prompts(self.tokenizer, rows)
        seeds = [derive_seed(self.seed, "score", e.id) for e in rows]
        found = self.rollout.generate(prompts, samples, TOKENS, seeds, **sampling)
        verdicts = self.verifier.score(
            [c.text for c in found], [rows[c.query].answer for c in found]
        )
        counts = [0] * len(rows)
        for c, right in zip(found, verdicts, strict=True):
            counts[c.query] += right
        return counts


def main(args: Args) -> None:
    init_training()
    sets = {
        name: load_examples(str(args.folder / "data" / f"{name}.jsonl"))[: args.problems]
        for name in (*GAIN, "easy_held")
    }
    paper = evaluate.Args(model=str(args.base)).sampling  # T = 0.6, top-p 0.95, top-k 20
    sampler = Sampler(args)
    for model in args.models:
        sampler.load(args.folder / model)
        whole = model == args.base or model.name == f"checkpoint-{args.last_step:06d}"
        names = sets if whole else GAIN
        scores = {"counts": {name: sampler.count(sets[name], SAMPLES, paper) for name in names}}
        if whole:
            scores["greedy"] = {name: sampler.count(sets[name], 1, GREEDY) for name in GAIN}
        print("scored:", model, flush=True)  # how well, nobody reads before the last run
        write_json(scores, (args.folder / model).with_suffix(".scores.json"))


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.score", description=__doc__))
