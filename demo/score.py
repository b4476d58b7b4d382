"""What a model of the study has learnt and kept: its answers to the held-out problems, by tier.

    python -m demo.score --base runs/tiny --models 0 runs/tiny/model --output scores.json

Unlike evaluate.py, it scores several models with one vLLM engine. Every model gets the same
problems and the same seeds.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, PreTrainedModel

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
from demo.world import MAX_COMPLETION, MAX_LENGTH, STATIC_SAMPLES, TIERS
from engine import init_ranks
from rollout import Completion, Rollout, trajectories
from run import one_line_errors
from train_oswft import Args
from verify import Verifier

NUM_SAMPLES = 8  # answers to each held-out problem


def score(
    base: Path, models: dict[int, Path], output: Path, seed: int = 0, static_weights: bool = False
) -> None:
    """Write the scores of each model, by its step and by tier.

    Args:
        base: a folder of demo.tiny, with the base and its problems.
        models: step and folder of each model.
        output: the JSON file to write.
        seed: of sampling.
        static_weights: also answer each training problem twice, and write the training sets of
            demo/variants.py.
    """
    init_ranks("gloo")
    tokenizer = load_tokenizer(str(base / "model"))
    args = Args(model=str(base / "model"), data="", precision="fp32", vllm_memory=0.1)
    rollout = Rollout(args, tokenizer, MAX_LENGTH)

    def read(path: Path) -> Sequence[TokenizedExample]:
        examples = load_examples(str(path))
        return tokenize_examples(examples, tokenizer, MAX_LENGTH, MAX_COMPLETION)[0]

    def sample(model: PreTrainedModel, queries: Sequence, num_samples: int) -> list[Completion]:
        """All completions, those of a query next to each other."""
        rollout.load_weights(model.named_parameters())
        prompts = [query.prompt_ids for query in queries]
        seeds = [derive_seed(seed, query.id) for query in queries]
        return rollout.generate(prompts, num_samples, MAX_COMPLETION, seeds)

    reference = AutoModelForCausalLM.from_pretrained(base / "model")
    scores: dict = {"parameters": reference.num_parameters(), "models": {}}
    with Verifier() as verifier:
        heldout = {tier: read(base / "heldout" / f"{tier}.jsonl") for tier in TIERS}
        queries = [query for tier in TIERS for query in heldout[tier]]
        for step, folder in models.items():
            model = AutoModelForCausalLM.from_pretrained(folder)
            completions = sample(model, queries, NUM_SAMPLES)
            answers = [queries[completion.query].example.answer for completion in completions]
            correct = verifier.score([c.text for c in completions], answers)
            kl = kl_from_base(model, reference, queries, completions[::NUM_SAMPLES])
            scores["models"][step], start = {}, 0
            for tier, own in heldout.items():
                end = start + len(own)
                part = slice(start * NUM_SAMPLES, end * NUM_SAMPLES)
                summary = summarize(completions[part], correct[part], kl[start:end])
                scores["models"][step][tier], start = summary, end
        if static_weights:
            completions = sample(reference, read(base / "train.jsonl"), STATIC_SAMPLES)
            scores["static_tokens"] = sum(len(c.token_ids) for c in completions)
            write_training_sets(base, [c.text for c in completions], verifier.score, seed)
    write_json(scores, output)


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
    with one_line_errors():
        tyro.cli(score, description=__doc__, use_underscores=True)
