"""demo/from_scratch.py: its numbers are those of the real scripts."""

import argparse
import random
from dataclasses import replace

import evaluate
import train_grpo
import train_oswft
import train_sft
from data import Trajectory, load_examples
from demo import from_scratch
from demo.from_scratch import NUM_ROLLOUTS, compute_loss, load_rows, verify
from demo.world import GAIN, MAX_COMPLETION, MAX_LENGTH, RETENTION, TIERS
from engine import Engine, EngineArgs, load_engine
from models import load_tokenizer, tokenize_examples
from templates import QWEN3
from verify import is_correct

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast


def test_it_samples_at_temperature_1_scores_as_the_evaluation_and_ends_an_answer_at_its_stop(tiny):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny / "model")
    first, second = load_rows(tokenizer, [tiny / "heldout" / "easy.jsonl"])[:2]
    queries, calls = [replace(first, prompt_ids=first.prompt_ids[5:]), second], []
    stops = end, eos = first.response_ids[-1], tokenizer.eos_token_id
    tails = [[5, end, 0, 0], [5, 6, 7, 8], [end, eos, 5, 5], [5, eos, 6, end]]

    def generate(input_ids, attention_mask, num_return_sequences, **settings):
        calls.append((num_return_sequences, settings))
        ids = [row[mask == 1].tolist() for row, mask in zip(input_ids, attention_mask, strict=True)]
        assert ids == [query.prompt_ids for query in queries[: len(ids)]]
        assert attention_mask[:, -1].all()  # padded on the left
        rows = input_ids.repeat_interleave(num_return_sequences, dim=0)
        return torch.cat([rows, torch.tensor(tails)], dim=1)

    model = argparse.Namespace(generate=generate)
    ended = [[5, end], [5, 6, 7, 8], [end], [5, eos]]
    answers = [replace(queries[n // 2], response_ids=ids) for n, ids in enumerate(ended)]
    assert from_scratch.sample(model, tokenizer, queries, 2) == answers
    from_scratch.evaluate(model, tokenizer, {"gain": queries[:1]})
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    settings |= {"max_new_tokens": MAX_COMPLETION, "repetition_penalty": 1.0}
    settings["eos_token_id"] = [*stops]
    assert calls == [(2, settings), (4, settings | evaluate.Args(model="").sampling)]


@pytest.mark.parametrize("template", [None, QWEN3], ids=["the demo's", "Qwen3's"])
def test_prompts_and_solutions_are_tokenized_as_by_the_scripts(template, tiny):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny / "model")
    theirs = load_tokenizer(str(tiny / "model"))
    if template:  # it writes an empty <think></think> before an answer
        tokenizer.chat_template = theirs.chat_template = template
    assert (from_scratch.MAX_LENGTH, from_scratch.MAX_COMPLETION) == (MAX_LENGTH, MAX_COMPLETION)
    for name in ("train", "train-plain", *(f"heldout/{tier}" for tier in TIERS)):
        path = tiny / f"{name}.jsonl"
        examples = load_examples(str(path))
        reference, _ = tokenize_examples(examples, theirs, MAX_LENGTH, MAX_COMPLETION)
        for row, other in zip(load_rows(tokenizer, [path]), reference, strict=True):
            ids = other.prompt_ids.tolist(), other.response_ids.tolist()
            assert (row.prompt_ids, row.response_ids) == ids
            assert (row.question, row.reference) == (other.example.question, other.example.answer)


def test_verdicts_are_those_of_the_scripts(tiny):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny / "model")
    queries = load_rows(tokenizer, [tiny / "heldout" / "easy.jsonl"])
    answers = []
    for query in queries:
        box, wrong = (f"\\boxed{{{(int(query.reference) + d) % 10}}}" for d in (0, 1))
        texts = [f"1+1=2;{box}", wrong, wrong + box, box + wrong, box.replace("{", "{ "), box[:-1]]
        assert [is_correct(text, query.reference) for text in texts] == [True, False] * 3
        ids = [tokenizer(text).input_ids + query.response_ids[-1:] for text in texts]
        answers += [replace(query, response_ids=each) for each in ids]
    assert verify(tokenizer, queries, answers).tolist() == [[1, 0] * 3] * len(queries)


def take_real_step(method: str, engine: Engine, queries: list, answers: list, rewards) -> float:
    """That of the script, from the same answers; returns its loss."""
    rows = answers if method == "grpo" else queries
    rows = [Trajectory(row.question, row.prompt_ids, row.response_ids) for row in rows]
    args = {"model": "", "data": "", "learning_rate": from_scratch.LEARNING_RATE}
    if method == "sft":
        stats = train_sft.update(engine, rows, torch.ones(len(rows)), train_sft.Args(**args))
    elif method == "oswft":
        weights = train_oswft.oswft_weights(rewards)
        stats = train_oswft.update(engine, rows, weights, train_oswft.Args(**args))
    else:
        advantages = train_grpo.grpo_advantages(rewards)
        stats = train_grpo.update(engine, rows, advantages, None, train_grpo.Args(**args))
    return stats["loss"]


@pytest.mark.parametrize("method", NUM_ROLLOUTS)
def test_from_the_same_answers_it_takes_the_same_steps(method, tiny, one_rank, monkeypatch):
    batches, losses, models = [], [], []

    def compute_and_keep(method, model, *batch):
        loss = compute_loss(method, model, *batch)
        models.append(model)
        batches.append(batch)
        losses.append(loss.item())
        return loss

    monkeypatch.setattr(from_scratch, "compute_loss", compute_and_keep)
    monkeypatch.setattr(from_scratch, "BATCH_SIZE", 32)
    monkeypatch.setattr(from_scratch, "evaluate", lambda *_: {"gain": 0.0, "retention": 0.0})
    flags = {"model": tiny / "model", "data": tiny / "train.jsonl", "steps": 2, "seed": 1}
    for name, tiers in (("gain", GAIN), ("retention", RETENTION)):
        flags[name] = [tiny / "heldout" / f"{tier}.jsonl" for tier in tiers]
    from_scratch.main(argparse.Namespace(method=method, **flags))
    rows = load_rows(PreTrainedTokenizerFast.from_pretrained(flags["model"]), [flags["data"]])
    random.Random(1).shuffle(rows)
    assert [query for queries, *_ in batches for query in queries] == rows[:64]
    assert torch.initial_seed() == 1

    start = load_file(tiny / "model" / "model.safetensors")
    engine = load_engine(str(tiny / "model"), EngineArgs(max_length=MAX_LENGTH, precision="fp32"))
    assert losses == pytest.approx([take_real_step(method, engine, *b) for b in batches], rel=1e-2)
    ours = models[-1].state_dict()
    steps = [(weight - start[name]).flatten() for name, weight in engine.named_parameters()]
    off = [(weight - ours[name]).flatten() for name, weight in engine.named_parameters()]
    # Adam divides by a gradient's size: where that is rounding alone, it may step elsewhere.
    assert torch.cat(off).norm() < 0.01 * torch.cat(steps).norm()
