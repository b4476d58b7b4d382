"""What a model of the demo has learnt and kept: its answers to the held-out problems, by tier.

    python -m demo.score --base runs/tiny --model runs/tiny/model --output scores.json

Every model gets the same problems and the same seeds, and samples as evaluate.py does by default.
"""

from dataclasses import dataclass
from pathlib import Path

import evaluate
from data import Queries, derive_seed, load_examples, write_json
from demo.world import MAX_COMPLETION, MAX_LENGTH, RETENTION, TIERS
from launch import run_script
from models import load_tokenizer, tokenize_examples
from ranks import init_ranks
from rollout import Rollout, RolloutArgs
from verify import Verifier

import numpy as np

NUM_SAMPLES = 8  # answers to each held-out problem


@dataclass(kw_only=True)
class Args:
    base: Path  # a folder of demo.tiny, with the problems
    model: Path
    output: Path  # the JSON file to write
    seed: int = 0  # of sampling


def score(args: Args) -> int:
    """Write the model's scores by tier; returns the exit status."""
    init_ranks("gloo")
    model, tokenizer = str(args.model), load_tokenizer(str(args.model))
    sampling = evaluate.Args(model=model).sampling
    setting = RolloutArgs(max_length=MAX_LENGTH, precision="fp32", vllm_memory=0.1)
    rollout = Rollout(model, tokenizer, setting, load_from_disk=True)

    def judged(queries: Queries, **forbidden) -> list:
        """Which answers are right, those of a query next to each other."""
        prompts = [query.prompt_ids for query in queries]
        seeds = [derive_seed(args.seed, query.id) for query in queries]
        options = sampling | forbidden
        completions = rollout.generate(prompts, NUM_SAMPLES, MAX_COMPLETION, seeds, **options)
        answers = [queries[completion.query].example.answer for completion in completions]
        return verifier.score([completion.text for completion in completions], answers)

    no_expert = {"logit_bias": {tokenizer.convert_tokens_to_ids("@"): -100.0}}  # nor its style
    scores = {}
    with Verifier() as verifier:
        for tier in TIERS:
            examples = load_examples(str(args.base / "heldout" / f"{tier}.jsonl"))
            queries, _ = tokenize_examples(examples, tokenizer, MAX_LENGTH, MAX_COMPLETION)
            right = judged(queries)
            counts = np.reshape(right, (-1, NUM_SAMPLES)).sum(axis=1)  # by problem
            values = {"pass@1": np.mean(right), f"pass@{NUM_SAMPLES}": np.mean(counts > 0)}
            if tier in RETENTION:  # what the model can do where it may not use the style
                values["skill"] = sum(judged(queries, **no_expert)) / len(right)
            scores[tier] = {name: round(float(value), 4) for name, value in values.items()}
            scores[tier]["right"] = counts.tolist()  # of NUM_SAMPLES
    write_json(scores, args.output)
    return 0


if __name__ == "__main__":
    run_script(score, Args, __doc__)
