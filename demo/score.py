"""What a model of the study has learnt and kept: its answers to the held-out problems, by tier.

Unlike evaluate.py, one process scores all checkpoints of a run, with one vLLM engine. Every model
gets the same problems and the same seeds.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from data import (
    TokenizedExample,
    collate,
    derive_seed,
    load_examples,
    load_tokenizer,
    tokenize_examples,
    write_json,
    write_rows,
)
from demo.world import TIERS
from engine import init_ranks
from rollout import Completion, Rollout, trajectories
from train_oswft import Args
from verify import Verifier

MAX_LENGTH, MAX_COMPLETION_LENGTH = 160, 128  # tokens
NUM_SAMPLES = 8  # answers to each held-out problem
OFFLINE_SAMPLES = 2  # answers to each training problem, for the static weights


class Answers:
    """Answers of models that have the shape of the base in a folder. Use as a context manager."""

    def __init__(self, base: Path, seed: int):
        init_ranks("gloo")
        self.model, self.seed = str(base / "model"), seed
        self.tokenizer = load_tokenizer(self.model)
        args = Args(model=self.model, data="", precision="fp32", vllm_memory=0.1)
        self.rollout, self.verifier = Rollout(args, self.tokenizer, MAX_LENGTH), Verifier()

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_) -> None:
        self.verifier.__exit__()

    def queries(self, path: Path) -> Sequence[TokenizedExample]:
        examples = load_examples(str(path))
        return tokenize_examples(examples, self.tokenizer, MAX_LENGTH, MAX_COMPLETION_LENGTH)[0]

    def sample(
        self, model: PreTrainedModel, queries: Sequence[TokenizedExample], num_samples: int
    ) -> tuple[list[Completion], list[bool]]:
        """All completions, those of a query next to each other, and which of them are right."""
        self.rollout.load_weights(model.named_parameters())
        completions = self.rollout.generate(
            [query.prompt_ids for query in queries],
            num_samples=num_samples,
            max_tokens=MAX_COMPLETION_LENGTH,
            seeds=[derive_seed(self.seed, query.id) for query in queries],
        )
        answers = [queries[completion.query].example.answer for completion in completions]
        return completions, self.verifier.score([c.text for c in completions], answers)


def score(base: Path, models: dict[int, Path], seed: int, path: Path) -> None:
    """Write the scores of each model, by step and tier, to `path`."""
    reference = AutoModelForCausalLM.from_pretrained(base / "model")
    scores: dict = {"parameters": reference.num_parameters()}
    with Answers(base, seed) as answers:
        heldout = {tier: answers.queries(base / "heldout" / f"{tier}.jsonl") for tier in TIERS}
        queries = [query for tier in TIERS for query in heldout[tier]]
        for step, folder in models.items():
            model = AutoModelForCausalLM.from_pretrained(folder)
            completions, correct = answers.sample(model, queries, NUM_SAMPLES)
            kl = kl_from_base(model, reference, queries, completions[::NUM_SAMPLES])
            scores[step], start = {}, 0
            for tier, own in heldout.items():
                end = start + len(own)
                part = slice(start * NUM_SAMPLES, end * NUM_SAMPLES)
                scores[step][tier] = summarize(completions[part], correct[part], kl[start:end])
                start = end
    write_json(scores, path)


def offline_weights(base: Path, files: Sequence[str], seed: int, path: Path) -> None:
    """One pass of the base: its 1 - p̂ becomes column `weight` of its training files.

    The files hold the same problems in the same order. `path` gets the number of sampled tokens.
    """
    with Answers(base, seed) as answers:
        queries = answers.queries(base / files[0])
        model = AutoModelForCausalLM.from_pretrained(base / "model")
        completions, correct = answers.sample(model, queries, OFFLINE_SAMPLES)
    for file in files:
        add_weights(base / file, correct)
    write_json({"sampled_tokens": sum(len(c.token_ids) for c in completions)}, path)


def add_weights(path: Path, correct: Sequence[bool]) -> None:
    """Give each row of a training file 1 less the share of its answers that were right."""
    rights = [correct[n : n + OFFLINE_SAMPLES] for n in range(0, len(correct), OFFLINE_SAMPLES)]
    rows = [
        {**example.columns, "weight": 1 - sum(right) / OFFLINE_SAMPLES}
        for example, right in zip(load_examples(str(path)), rights, strict=True)
    ]
    write_rows(rows, path)


@torch.no_grad()
def kl_from_base(
    model: PreTrainedModel,
    base: PreTrainedModel,
    queries: Sequence[TokenizedExample],
    completions: Sequence[Completion],
) -> list[float]:
    """KL(model || base) along one completion of each query: nats, summed over its tokens."""
    rows = trajectories(queries, completions)
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
