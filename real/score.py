"""What docs/study/plan4.md measures of a run's checkpoints, all in one process.

    python -m real.score --folder runs/real --base W0 --commonsense ... --models W0/final ...

Writes <model>.scores.json beside each model's folder.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import tyro

import train_oswft
from data import (
    derive_seed,
    load_examples,
    load_tokenizer,
    prompt_text,
    read_rows,
    write_json,
)
from engine import init_distributed
from evaluate import pass_at_k, tokenize_prompts
from rollout import Rollout
from run import one_line_errors
from verify import Verifier

EQUATION = re.compile(r"[\dxX.+*/()= -]*\d[\dxX.+*/()= -]*=[\dxX.+*/()= -]*")  # the expert's style
SKILL = 4  # tokens of the base's own right answer


@dataclass(kw_only=True)
class Args:
    folder: Path  # of the study, with data/
    base: str  # W0 or W1
    models: list[Path]  # in the folder
    commonsense: Path  # commonsenseqa_dev.jsonl
    seed: int = 0


class Sampler:
    """One vLLM engine, which gets the weights of one checkpoint after another."""

    def __init__(self, model: Path, seed: int):
        args = train_oswft.Args(model=str(model), data="", vllm_memory=0.2)
        self.tokenizer, self.seed = load_tokenizer(str(model)), seed
        self.rollout = Rollout(args, self.tokenizer, max_length=640)
        self.verifier = Verifier(2)

    def load(self, model: torch.nn.Module) -> None:
        self.rollout.load_weights(iter(model.state_dict().items()))

    def answers(self, rows: Sequence, samples: int, begun: dict | None = None, tokens: int = 96):
        """Per row its completions as (token ids, text, right?); `begun` is what they begin with."""
        begun = begun or {}
        prompts = tokenize_prompts(self.tokenizer, rows)
        prompts = [ids + begun.get(e.id, []) for ids, e in zip(prompts, rows, strict=True)]
        seeds = [derive_seed(self.seed, "score", e.id) for e in rows]
        found = self.rollout.generate(prompts, samples, tokens, seeds, temperature=1.0)
        texts = [self.tokenizer.decode(begun.get(rows[c.query].id, [])) + c.text for c in found]
        right = self.verifier.score(texts, [rows[c.query].answer for c in found])
        groups = [[] for _ in rows]
        for c, text, verdict in zip(found, texts, right, strict=True):
            groups[c.query].append((c.token_ids, text, verdict))
        return groups


def pass_rate(groups, k: int = 1) -> float:
    return float(np.mean([pass_at_k(len(g), sum(right for *_, right in g), k) for g in groups]))


@torch.no_grad()
def log_probabilities(model, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Over the vocabulary at each token of an answer: (T, V) fp32."""
    logits = model(torch.tensor([prompt + answer]), logits_to_keep=len(answer) + 1).logits[0]
    return logits[:-1].float().log_softmax(-1)


def divergence(model, answers) -> float:
    """KL(base || model), the mean over the tokens of the base's own answers, in nats.

    An answer is its prompt, its tokens, and the base's log-probabilities at them.
    """
    total = count = 0
    for prompt, answer, p in answers:
        total += (p.exp() * (p - log_probabilities(model, prompt, answer))).sum().item()
        count += len(answer)
    return total / count


@torch.no_grad()
def commonsense(model, tokenizer, path: Path) -> float:
    """Accuracy on 400 questions: of five options the one with the highest mean log-probability."""
    rows, right = [row for _, row in read_rows(str(path))][:400], 0
    encode = partial(tokenizer, add_special_tokens=False, padding=True, return_tensors="pt")
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        asked = [prompt_text(tokenizer, row["question"]["stem"], "") for row in part]
        prompts = encode(asked, padding_side="left")
        read = model(**prompts, use_cache=True, logits_to_keep=1)
        options = [option["text"] for row in part for option in row["question"]["choices"]]
        texts = encode(options, padding_side="right")  # 5 of each question: (5 n, T)
        read.past_key_values.batch_repeat_interleave(5)
        mask = torch.cat([prompts.attention_mask.repeat_interleave(5, 0), texts.attention_mask], 1)
        rest = model(texts.input_ids, attention_mask=mask, past_key_values=read.past_key_values)
        logits = torch.cat([read.logits.repeat_interleave(5, 0), rest.logits[:, :-1]], 1)
        logprobs = logits.float().log_softmax(-1).gather(-1, texts.input_ids[..., None])[..., 0]
        scores = (logprobs * texts.attention_mask).sum(1) / texts.attention_mask.sum(1)
        for row, best in zip(part, scores.view(-1, 5).argmax(1), strict=True):
            right += row["question"]["choices"][best]["label"] == row["answerKey"]
    return right / len(rows)


def main(args: Args) -> None:
    from transformers import AutoModelForCausalLM

    init_distributed()
    load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)  # noqa: E731
    sets = ("words_held", "easy_held", "multiarith", "instructions_held")
    words, easy, unseen, asked = (
        load_examples(str(args.folder / "data" / f"{name}.jsonl")) for name in sets
    )
    base = load(args.folder / args.base / "final")
    sampler = Sampler(args.folder / args.base / "final", args.seed)
    sampler.load(base)
    begun = {}
    for example, group in zip(easy, sampler.answers(easy, 4), strict=True):
        if solved := [ids for ids, _, right in group if right]:
            begun[example.id] = solved[0][:SKILL]
    prompts = tokenize_prompts(sampler.tokenizer, asked)
    own = [group[0][0] for group in sampler.answers(asked, 1, tokens=64)]
    pairs = [pair for pair in zip(prompts, own, strict=True) if len(pair[0]) <= 256]
    own = [(*pair, log_probabilities(base, *pair)) for pair in pairs]  # 1.6 GB, once for all models

    for path in args.models:
        model = load(args.folder / path)
        sampler.load(model)
        words_answers, easy_answers = sampler.answers(words, 4), sampler.answers(easy, 2)
        shown = [text.split("\n")[0].strip() for group in easy_answers for _, text, _ in group]
        with_begun = [example for example in easy if example.id in begun]
        scores = {
            "gain": pass_rate(words_answers),
            "pass@4": pass_rate(words_answers, 4),
            "kl": divergence(model, own),
            "easy": pass_rate(easy_answers),
            "style": float(np.mean([bool(EQUATION.fullmatch(line)) for line in shown])),
            "skill": pass_rate(sampler.answers(with_begun, 2, begun)),
            "multiarith": pass_rate(sampler.answers(unseen, 2)),
            "commonsense": commonsense(model.bfloat16(), sampler.tokenizer, args.commonsense),
        }
        print(path, scores, flush=True)
        write_json(scores, (args.folder / path).with_suffix(".scores.json"))


if __name__ == "__main__":
    with one_line_errors():
        main(tyro.cli(Args, prog="python -m real.score", description=__doc__))
