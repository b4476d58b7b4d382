"""SFT, OSW-FT and GRPO in one file, to be read from top to bottom.

It imports none of our files. From the same batches and answers it takes the steps of train_*.py.

    pip install torch transformers tyro              # demo.tiny needs tyro
    python -m demo.tiny copy --output_dir runs/tiny  # train.jsonl and heldout/*.jsonl
    python -m demo.from_scratch --method oswft       # half a minute; grpo takes longer
    python -m demo.from_scratch --model FOLDER_OR_HUB_ID --data FILE --gain FILE --retention FILE

Any small causal LM with a chat template will do: on the CPU, in fp32, a batch in one pass.
Shapes: B queries in a batch, K answers to each of them, N rows, T tokens in the longest row.
"""

import argparse
import json
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

BATCH_SIZE = 128  # queries in an optimizer step; these are the demo's settings, to be edited
LEARNING_RATE = 3e-4
NUM_ROLLOUTS = {"sft": 0, "oswft": 2, "grpo": 8}  # K, answers sampled for each query
MAX_LENGTH = 160  # tokens of prompt and expert solution; longer rows are left out
MAX_COMPLETION = 128  # tokens of a sampled answer
SCORING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # for scores; training samples at T = 1
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
GAIN_FILES = ["runs/tiny/heldout/middle.jsonl", "runs/tiny/heldout/hard.jsonl"]
RETENTION_FILES = ["runs/tiny/heldout/keep.jsonl", "runs/tiny/heldout/long.jsonl"]


@dataclass
class Row:
    """A prompt with one completion: the expert's solution, or an answer of the model."""

    question: str
    reference: str  # the right answer
    prompt_ids: list[int]
    response_ids: list[int]


def load_rows(tokenizer, paths: list) -> list[Row]:
    """Read JSONL files with the fields id, question, solution, answer, source."""
    rows = []
    template = tokenizer.apply_chat_template
    for path in paths:
        if not Path(path).is_file():
            sys.exit(f"error: {path}: no such file (python -m demo.tiny copy writes the demo's)")
        for line in Path(path).read_text(encoding="utf-8").strip().split("\n"):
            fields = json.loads(line)
            user = {"role": "user", "content": fields["question"] + "\n" + INSTRUCTION}
            solution = fields["solution"].strip()
            prompt = template([user], tokenize=False, add_generation_prompt=True)
            chat = template([user, {"role": "assistant", "content": solution}], tokenize=False)
            end = chat[chat.rindex(solution) + len(solution) :].strip()  # such as <|im_end|>
            prompt_ids = tokenizer(prompt, add_special_tokens=False).input_ids
            response_ids = tokenizer(solution + end, add_special_tokens=False).input_ids
            answer = str(fields["answer"]).strip()
            if len(prompt_ids) + len(response_ids) <= MAX_LENGTH:
                rows.append(Row(fields["question"], answer, prompt_ids, response_ids))
    if not rows:
        sys.exit(f"error: {paths[0]}: no row fits into MAX_LENGTH = {MAX_LENGTH} tokens")
    return rows


# ---- Rollout and verdict: sample answers, and see which are right --------------------------------
def sample(model, tokenizer, queries: list[Row], num_samples: int, **sampling) -> list[Row]:
    """Answers, by default at temperature 1: B * K rows, those of a query side by side."""
    stop_ids = [queries[0].response_ids[-1], tokenizer.eos_token_id]  # the expert's stop, and EOS
    prompts = {"input_ids": [query.prompt_ids for query in queries]}
    inputs = tokenizer.pad(prompts, padding_side="left", return_tensors="pt")  # (B, T)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
    settings |= {"num_return_sequences": num_samples, "max_new_tokens": MAX_COMPLETION}
    output = model.generate(**inputs, **settings, repetition_penalty=1.0, eos_token_id=stop_ids)
    answers = []
    for n, ids in enumerate(output[:, inputs.input_ids.shape[1] :].tolist()):  # B * K of them
        stops = [position for position, token in enumerate(ids) if token in stop_ids]
        end = stops[0] + 1 if stops else len(ids)  # what follows is padding
        answers.append(replace(queries[n // num_samples], response_ids=ids[:end]))
    return answers


def boxed_answer(text: str) -> str | None:
    """What the last \\boxed{...} of a text holds; None if there is none."""
    # A box may hold braces, as in \frac{1}{2}, but only one level deep.
    boxes = re.findall(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    return boxes[-1].strip() if boxes else None


def verify(tokenizer, queries: list[Row], answers: list[Row]) -> torch.Tensor:
    """Rewards (B, K): 1 for a right answer, else 0."""
    ids = [answer.response_ids for answer in answers]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = [boxed_answer(t) == a.reference for t, a in zip(texts, answers, strict=True)]
    return torch.tensor(right).float().view(len(queries), -1)


# ---- Weights, advantages, losses -----------------------------------------------------------------
def oswft_weights(rewards):
    """w = 1 - p̂, where p̂ is the share of a query's answers that are right: (B, K) -> (B,)."""
    return 1 - rewards.float().mean(dim=1)


def grpo_advantages(rewards):
    """A = (r - mean) / std over the answers to a query: (B, K) -> (B, K); 0 if all are alike."""
    mean = rewards.mean(dim=1, keepdim=True)  # (B, 1)
    std = rewards.std(dim=1, keepdim=True)  # (B, 1)
    return (rewards - mean) / (std + 1e-6)


def sft_loss(logprobs, mask, num_tokens):
    """-(sum of log π) / tokens; logprobs and mask are (B, T)."""
    return -(logprobs * mask).sum() / num_tokens


def oswft_loss(logprobs, mask, weights, num_tokens):
    """-(sum of w * log π) / tokens; weights are (B,), and never part of the divisor."""
    sequence_logprobs = (logprobs * mask).sum(dim=1)  # (B,)
    return -(weights * sequence_logprobs).sum() / num_tokens


def grpo_loss(logprobs, old_logprobs, advantages, mask, num_tokens, clip_low=0.8, clip_high=1.28):
    """-(sum of min(ratio * A, clip(ratio) * A)) / tokens; advantages: (N,), the rest: (N, T)."""
    ratio = (logprobs - old_logprobs).exp()  # (N, T)
    clipped_ratio = ratio.clamp(clip_low, clip_high)
    advantages = advantages[:, None]  # (N, 1): an answer's tokens share it
    objective = torch.minimum(ratio * advantages, clipped_ratio * advantages)
    return -(objective * mask).sum() / num_tokens


def token_logprobs(model, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """log π of each token but the first, and a mask, 1 on the completions: (N, T - 1) both."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    input_ids = torch.zeros(len(rows), max(lengths), dtype=torch.long)  # (N, T)
    mask = torch.zeros(len(rows), max(lengths))  # (N, T)
    for n, row in enumerate(rows):  # padded on the right, where causal attention does not look
        input_ids[n, : lengths[n]] = torch.tensor(row.prompt_ids + row.response_ids)
        mask[n, len(row.prompt_ids) : lengths[n]] = 1
    logits = model(input_ids=input_ids[:, :-1]).logits  # (N, T - 1, vocabulary)
    targets = input_ids[:, 1:, None]  # (N, T - 1, 1): the token that comes next
    logprobs = logits.log_softmax(dim=2).gather(2, targets)[:, :, 0]
    return logprobs, mask[:, 1:]


def compute_loss(method: str, model, queries, answers, rewards, weigh=oswft_weights):
    """The loss of a batch: a scalar. `weigh` makes OSW-FT's weights: (B, K) -> (B,)."""
    rows = answers if method == "grpo" else queries  # own answers, or the expert's solutions
    logprobs, mask = token_logprobs(model, rows)
    num_tokens = mask.sum()  # completion tokens of the batch
    if method == "sft":
        return sft_loss(logprobs, mask, num_tokens)
    if method == "oswft":
        weights = weigh(rewards)  # (B,)
        return oswft_loss(logprobs, mask, weights, num_tokens)
    advantages = grpo_advantages(rewards).flatten()  # (B, K) -> (N,)
    old_logprobs = logprobs.detach()  # one step for each batch: the model has not moved
    return grpo_loss(logprobs, old_logprobs, advantages, mask, num_tokens)


# ---- Evaluation and training ---------------------------------------------------------------------
def evaluate(model, tokenizer, tests: dict[str, list[Row]]) -> dict[str, float]:
    """pass@1 of each test set in percent, of four answers to each question; the demo: 8 others."""
    scores = {}
    for name, queries in tests.items():
        answers = sample(model, tokenizer, queries, num_samples=4, **SCORING)
        scores[name] = round(100 * verify(tokenizer, queries, answers).mean().item(), 1)
    return scores


def main(args) -> None:
    torch.manual_seed(args.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)  # Auto may take another one
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    data = load_rows(tokenizer, [args.data])
    tests = {"gain": load_rows(tokenizer, args.gain)}
    tests["retention"] = load_rows(tokenizer, args.retention)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    scores = {"base": evaluate(model, tokenizer, tests)}

    random.Random(args.seed).shuffle(data)  # once: after the last row the first comes again
    for step in range(args.steps):
        positions = range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)
        queries = [data[position % len(data)] for position in positions]

        # Rollout and verify: K answers to each query, and which of them are right.
        answers = rewards = None  # SFT samples nothing
        if args.method != "sft":
            answers = sample(model, tokenizer, queries, NUM_ROLLOUTS[args.method])
            rewards = verify(tokenizer, queries, answers)  # (B, K)

        # Weigh, and take one step.
        loss = compute_loss(args.method, model, queries, answers, rewards)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        pass_rate = f"  pass rate {rewards.mean():.3f}" if answers else ""
        print(f"step {step + 1:3}  loss {loss.item():7.4f}{pass_rate}", flush=True)

    scores[args.method] = evaluate(model, tokenizer, tests)
    print("\npass@1, %    gain  retention   (of 4 answers to a problem; the demo: of 8 others)")
    for name, score in scores.items():
        print(f"{name:10}{score['gain']:7.1f}{score['retention']:11.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=NUM_ROLLOUTS, default="oswft")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo/base")
    parser.add_argument("--data", default="runs/tiny/train.jsonl")
    parser.add_argument("--gain", nargs="+", default=GAIN_FILES)
    parser.add_argument("--retention", nargs="+", default=RETENTION_FILES)
    main(parser.parse_args())
