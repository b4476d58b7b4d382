"""What a model of the study has learnt and kept: its answers to the held-out problems, by tier.

    python -m demo.score --base runs/tiny --models 0 runs/tiny/model --output scores.json

Unlike evaluate.py, it scores several models with one vLLM engine. Every model gets the same
problems and the same seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import train_oswft
from data import (
    TokenizedExample,
    collate,
    derive_seed,
    load_examples,
    load_tokenizer,
    tokenize_examples,
    write_json,
)
from demo.variants import write_training_sets
from demo.world import MAX_COMPLETION, MAX_LENGTH, RETENTION, STATIC_SAMPLES, TIERS
from engine import init_ranks
from rollout import Completion, Rollout, trajectories
from run import run_script
from verify import Verifier

NUM_SAMPLES = 8  # answers to each held-out problem


@dataclass(kw_only=True)
class Args:
    base: Path  # a folder of demo.tiny, with the base and its problems
    models: dict[int, Path]  # step and folder of each model
    output: Path  # the JSON file to write
    seed: int = 0  # of sampling
    static_weights: bool = False  # also answer the training problems, for demo/variants.py


def score(args: Args) -> int:
    """Write the scores of each model, by its step and by tier; returns the exit status."""
    init_ranks("gloo")
    base, model = args.base, str(args.base / "model")
    tokenizer = load_tokenizer(model)
    settings = train_oswft.Args(model=model, data="", precision="fp32", vllm_memory=0.1)
    rollout = Rollout(settings, tokenizer, MAX_LENGTH)

    def read(path: Path) -> Sequence[TokenizedExample]:
        examples = load_examples(str(path))
        return tokenize_examples(examples, tokenizer, MAX_LENGTH, MAX_COMPLETION)[0]

    def sample(queries: Sequence, num_samples: int, **sampling) -> list[Completion]:
        """All completions, those of a query next to each other."""
        prompts = [query.prompt_ids for query in queries]
        seeds = [derive_seed(args.seed, query.id) for query in queries]
        return rollout.generate(prompts, num_samples, MAX_COMPLETION, seeds, **sampling)

    def check(queries: Sequence, completions: Sequence[Completion]) -> list[bool]:
        answers = [queries[completion.query].example.answer for completion in completions]
        return verifier.score([completion.text for completion in completions], answers)

    no_expert = {"logit_bias": {tokenizer.convert_tokens_to_ids("@"): -100.0}}  # nor its style
    reference = AutoModelForCausalLM.from_pretrained(base / "model")
    scores: dict = {"parameters": reference.num_parameters(), "models": {}}
    with Verifier() as verifier:
        heldout = {tier: read(base / "heldout" / f"{tier}.jsonl") for tier in TIERS}
        queries = [query for tier in TIERS for query in heldout[tier]]
        for step, folder in args.models.items():
            model = AutoModelForCausalLM.from_pretrained(folder)
            rollout.load_weights(model.named_parameters())
            completions = sample(queries, NUM_SAMPLES)
            correct = check(queries, completions)
            kl = kl_from_base(model, reference, queries, completions[::NUM_SAMPLES])
            scores["models"][step], start = {}, 0
            for tier, own in heldout.items():
                end = start + len(own)
                part = slice(start * NUM_SAMPLES, end * NUM_SAMPLES)
                summary = summarize(completions[part], correct[part], kl[start:end])
                scores["models"][step][tier], start = summary, end
                if tier in RETENTION:  # what the model can do where it may not use the style
                    right = check(own, sample(own, NUM_SAMPLES, **no_expert))
                    summary["skill"] = round(sum(right) / len(right), 4)
        if args.static_weights:
            rollout.load_weights(reference.named_parameters())
            completions = sample(read(base / "train.jsonl"), STATIC_SAMPLES)
            scores["static_tokens"] = sum(len(c.token_ids) for c in completions)
            write_training_sets(base, [c.text for c in completions], verifier.score, args.seed)
    write_json(scores, args.output)
    return 0


@torch.no_grad()
def kl_from_base(
    model: PreTrainedModel,
    base: PreTrainedModel,
    queries: Sequence[TokenizedExample],
    completions: Sequence[Completion],
) -> list[float]:
    """KL(model || base) along one completion of each query: nats, summed over its tokens."""
    rows = trajectories(queries, [completions])
    batch = collate(rows, range(len(rows)))
    ours, theirs = (m(batch.input_ids).logits.log_softmax(dim=2) for m in (model, base))
    kl = (ours.exp() * (ours - theirs)).sum(dim=2)  # (N, T), exact over the vocabulary
    return torch.where(batch.mask, kl, 0).sum(dim=1).tolist()


def summarize(
    completions: Sequence[Completion], correct: Sequence[bool], kl: Sequence[float]
) -> dict[str, float]:
    """Scores of a tier; the shares of answers in scratch and of those that were cut off; KL."""
    by_problem = [correct[n : n + NUM_SAMPLES] for n in range(0, len(correct), NUM_SAMPLES)]
    values = {
        "pass@1": sum(correct) / len(correct),
        f"pass@{NUM_SAMPLES}": sum(map(any, by_problem)) / len(by_problem),
        "scratch": sum(c.text.startswith("@") for c in completions) / len(completions),
        "truncated": sum(c.finish_reason == "length" for c in completions) / len(completions),
        "kl": sum(kl) / len(kl),
    }
    return {name: round(value, 4) for name, value in values.items()}


if __name__ == "__main__":
    run_script(score, Args, __doc__)
