"""SFT, OSW-FT and GRPO in one file, made to be stepped through: one process, one model, one loop.

No launcher, no vLLM, no DeepSpeed: a breakpoint stops at any line. What the paper is about is
imported from the real files: weights, losses, verdicts. Three packages are enough, also on a Mac:

    pip install torch transformers math-verify
    python -m demo.from_scratch --method oswft       # half a minute; grpo takes longer
    python -m pdb -m demo.from_scratch --method grpo --steps 2

The base is the demo's, from `demo/base`, and so are data and settings. The other differences
from train_*.py: fp32, all rows in one pass, and a mask over full logits.
"""

import argparse
import time
from pathlib import Path

from data import (
    Trajectory,
    batch_indices,
    collate,
    load_examples,
    load_tokenizer,
    stop_token_ids,
    tokenize_examples,
)
from demo import tiny
from demo.world import GAIN, MAX_COMPLETION, MAX_LENGTH, RETENTION
from train_grpo import grpo_advantages, grpo_loss
from train_oswft import oswft_loss, oswft_weights
from verify import is_correct

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

BATCH_SIZE = 128  # queries
LEARNING_RATE = 3e-4
NUM_ROLLOUTS = {"sft": 0, "oswft": 2, "grpo": 8}  # answers sampled to each query


@torch.no_grad()
def sample(model: PreTrainedModel, tokenizer, queries: list, num_samples: int) -> list[Trajectory]:
    """`num_samples` answers to each query, at temperature 1; those of a query are neighbours."""
    prompts = {"input_ids": [query.prompt_ids for query in queries]}
    inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")
    stops = stop_token_ids(tokenizer)
    output = model.generate(
        **inputs,
        do_sample=True,
        top_k=0,
        num_return_sequences=num_samples,
        max_new_tokens=MAX_COMPLETION,
        eos_token_id=stops,
    )  # (B * K, prompt and answer)
    answers = []
    for n, ids in enumerate(output[:, inputs.input_ids.shape[1] :].tolist()):
        query = queries[n // num_samples]
        end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
        answers.append(Trajectory(query.id, query.prompt_ids, ids[:end]))
    return answers


def verify(tokenizer, queries: list, answers: list[Trajectory]) -> torch.Tensor:
    """Which answers are right: (B, K) of 0 and 1."""
    texts = [tokenizer.decode(a.completion_ids, skip_special_tokens=True) for a in answers]
    references = {query.id: query.example.answer for query in queries}
    rewards = [is_correct(text, references[a.id]) for text, a in zip(texts, answers, strict=True)]
    return torch.tensor(rewards).float().view(len(queries), -1)


def compute_loss(
    method: str, model: PreTrainedModel, queries: list, answers: list, rewards: torch.Tensor
) -> torch.Tensor:
    """The loss of a whole batch: a scalar."""
    rows = answers if method == "grpo" else queries  # own answers, or the expert's solutions
    batch = collate(rows, range(len(rows)))
    logits = model(input_ids=batch.input_ids).logits  # (N, T, vocabulary)
    logprobs = logits.log_softmax(dim=2)
    logprobs = logprobs.gather(2, batch.targets[:, :, None])[:, :, 0]  # (N, T)
    normalizer = batch.mask.sum().item()  # tokens that are learnt from
    if method == "grpo":
        advantages = grpo_advantages(rewards).flatten()  # (B, G) -> (N,)
        # The model has not moved since it sampled: old log-probabilities are today's.
        return grpo_loss(logprobs, logprobs.detach(), advantages, batch.mask, normalizer)
    weights = oswft_weights(rewards) if method == "oswft" else torch.ones(len(queries))  # (B,)
    return oswft_loss(logprobs, batch.mask, weights, normalizer)


def evaluate(model: PreTrainedModel, tokenizer, base: Path) -> dict[str, float]:
    """Gain and retention: pass@1 in percent of the tiers behind each."""
    scores = {}
    for name, tiers in {"gain": GAIN, "retention": RETENTION}.items():
        files = [base / "heldout" / f"{tier}.jsonl" for tier in tiers]
        examples = [example for file in files for example in load_examples(str(file))]
        queries, _ = tokenize_examples(examples, tokenizer, MAX_LENGTH, MAX_COMPLETION)
        rewards = verify(tokenizer, queries, sample(model, tokenizer, queries, num_samples=4))
        scores[name] = round(100 * rewards.mean().item(), 1)
    return scores


def main(method: str, steps: int, seed: int, base: Path) -> None:
    if not (base / "model").exists():
        tiny.copy(base)
    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    tokenizer = load_tokenizer(str(base / "model"))
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    examples = load_examples(str(base / "train.jsonl"))
    data, _ = tokenize_examples(examples, tokenizer, MAX_LENGTH, MAX_COMPLETION)
    print("base       ", evaluate(model, tokenizer, base))

    for step in range(steps):
        started = time.perf_counter()
        queries = [data[i] for i in batch_indices(len(data), BATCH_SIZE, step, seed)]

        # ---- rollout and verify: K answers to each query, and which are right
        answers, rewards = [], torch.zeros(len(queries), 0)
        if NUM_ROLLOUTS[method]:
            answers = sample(model, tokenizer, queries, NUM_ROLLOUTS[method])
            rewards = verify(tokenizer, queries, answers)  # (B, K)

        # ---- update
        loss = compute_loss(method, model, queries, answers, rewards)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        pass_rate = f"  pass rate {rewards.mean():.3f}" if answers else ""
        seconds = time.perf_counter() - started
        print(f"step {step + 1:3}  loss {loss.item():7.4f}{pass_rate}  {seconds:4.1f} s")
    print(f"{method:11}", evaluate(model, tokenizer, base))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=NUM_ROLLOUTS, default="oswft")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of 128 queries")
    parser.add_argument("--seed", type=int, default=0, help="of the data's order and of sampling")
    parser.add_argument(
        "--base", type=Path, default=Path("runs/tiny"), help="of demo.tiny; copied if it is absent"
    )
    main(**vars(parser.parse_args()))
