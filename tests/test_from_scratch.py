"""demo/from_scratch.py: it stands alone, and its numbers are those of the real scripts."""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

import dense
import evaluate
import train_grpo
import train_oswft
import train_sft
from data import Trajectory, load_examples
from demo import from_scratch
from demo.from_scratch import NUM_ROLLOUTS, compute_loss, load_rows, verify
from demo.world import GAIN, MAX_COMPLETION, MAX_LENGTH, RETENTION, TIERS
from dense import assert_same, dense_grpo_loss, dense_logprobs, dense_oswft_loss, make_rows
from engine import Engine, load_engine
from models import load_tokenizer, tokenize_examples
from templates import QWEN3
from verify import is_correct

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast


def test_it_scores_answers_that_are_sampled_as_by_the_evaluation():
    assert evaluate.Args(model="").sampling == from_scratch.SCORING


def test_the_loss_of_grpo_is_clipped_as_that_of_the_script():
    """A run itself never clips, because its model has not moved since it answered."""
    generator = torch.Generator().manual_seed(0)
    logprobs = -4 * torch.rand(12, 9, generator=generator)
    old_logprobs = logprobs + 0.4 * torch.randn(12, 9, generator=generator)
    mask = torch.rand(12, 9, generator=generator) > 0.3
    rewards = torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]])
    advantages = train_grpo.grpo_advantages(rewards).flatten()
    ratio = (logprobs - old_logprobs).exp()[mask & (advantages != 0)[:, None]]
    assert (ratio < 0.8).any() and (ratio > 1.28).any()
    arguments = logprobs, old_logprobs, advantages, mask, torch.tensor(31)
    for bounds in {}, {"clip_low": 0.9, "clip_high": 1.1}:
        ours = from_scratch.grpo_loss(*arguments, **bounds)
        assert_same(ours, train_grpo.grpo_loss(*arguments, **bounds))


@pytest.mark.parametrize("template", [None, QWEN3], ids=["the demo's", "Qwen3's"])
def test_prompts_and_solutions_are_tokenized_as_by_the_scripts(template, tiny):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny / "model")
    theirs = load_tokenizer(str(tiny / "model"))
    if template:  # it writes an empty <think></think> before an answer
        tokenizer.chat_template = theirs.chat_template = template
    assert (from_scratch.MAX_LENGTH, from_scratch.MAX_COMPLETION) == (MAX_LENGTH, MAX_COMPLETION)
    tiers = [f"heldout/{tier}" for tier in TIERS]
    for name in tiers if template else ("train", "train-plain", *tiers):
        path = tiny / f"{name}.jsonl"
        examples = load_examples(str(path))
        reference, _ = tokenize_examples(examples, theirs, MAX_LENGTH, MAX_COMPLETION)
        for row, other in zip(load_rows(tokenizer, [path]), reference, strict=True):
            assert row.prompt_ids == other.prompt_ids.tolist()
            assert row.response_ids == other.response_ids.tolist()
            assert (row.question, row.reference) == (other.example.question, other.example.answer)


def test_verdicts_are_those_of_the_scripts(tiny):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny / "model")
    queries = load_rows(tokenizer, [tiny / "heldout" / f"{tier}.jsonl" for tier in TIERS])
    answers, verdicts = [], []
    for n, query in enumerate(queries):
        solution = tokenizer.decode(query.response_ids, skip_special_tokens=True)
        box = f"\\boxed{{{query.reference}}}"
        assert solution.endswith(box)
        wrong = f"\\boxed{{{(int(query.reference) + 1 + n % 9) % 10}}}"
        texts = [solution, solution.replace(box, wrong), wrong + box, box + wrong]
        texts += [solution.replace("boxed{", "boxed{ "), solution[:-1] + "}" * (n % 2)]
        for text in texts:
            ids = tokenizer(text).input_ids + query.response_ids[-1:] * (n % 2)
            answers.append(replace(query, response_ids=ids))
        verdicts += [is_correct(text, query.reference) for text in texts[:-1]] + [bool(n % 2)]
    rewards = verify(tokenizer, queries, answers)
    assert rewards.shape == (len(queries), 6)
    assert rewards.flatten().bool().tolist() == verdicts
    assert rewards[:, [0, 2, 4]].all() and not rewards[:, [1, 3]].any()


@pytest.mark.parametrize("method", NUM_ROLLOUTS)
def test_from_the_same_rewards_the_gradient_is_that_of_the_real_scripts(method):
    """Whose dense reference this is, too; SFT takes OSW-FT's steps at weight one."""
    model, answers = dense.make_model(), make_rows(torch.Generator().manual_seed(0), count=12)
    queries, rewards = answers[::3], torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]])
    ours = compute_loss(method, model, queries, answers, rewards)
    if method == "grpo":
        advantages = train_grpo.grpo_advantages(rewards).flatten().tolist()
        old = [dense_logprobs(model, row).detach() for row in answers]
        args = train_grpo.Args(model="", data="")
        theirs, *_ = dense_grpo_loss(model, answers, advantages, old, args)
    else:
        weights = 1 - rewards.mean(dim=1) if method == "oswft" else torch.ones(4)
        tokens = sum(len(query.response_ids) for query in queries)
        theirs = dense_oswft_loss(model, queries, weights, tokens)
    gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, theirs))
    for gradient, reference in zip(*gradients, strict=True):
        assert_same(gradient, reference)


def test_it_imports_torch_and_transformers_alone():
    text = Path(from_scratch.__file__).read_text()
    names = {*re.findall(r"^ *(?:import|from) (\S+?)[. \n]", text, re.MULTILINE)}
    assert names - sys.stdlib_module_names == {"torch", "transformers"}
    assert len(text.splitlines()) <= 220


def take_real_step(method: str, engine: Engine, queries: list, answers: list, rewards) -> None:
    """That of the script, from the same answers."""
    rows = answers if method == "grpo" else queries
    rows = [Trajectory(row.question, row.prompt_ids, row.response_ids) for row in rows]
    args = {"model": "", "data": "", "learning_rate": from_scratch.LEARNING_RATE}
    if method == "sft":
        train_sft.update(engine, rows, torch.ones(len(rows)), train_sft.Args(**args))
    elif method == "oswft":
        weights = train_oswft.oswft_weights(rewards)
        assert {0.0, 0.5, 1.0} == set(weights.tolist())
        train_oswft.update(engine, rows, weights, train_oswft.Args(**args))
    else:
        advantages = train_grpo.grpo_advantages(rewards)
        assert (advantages == 0).all(dim=1).any() and (advantages != 0).any()
        train_grpo.update(engine, rows, advantages, None, train_grpo.Args(**args))


@pytest.mark.parametrize("method", NUM_ROLLOUTS)
def test_from_the_same_answers_it_takes_the_same_steps(method, tiny, one_rank, monkeypatch, capsys):
    batches, models = [], []

    def compute_and_keep(method, model, *batch):
        models.append(model)
        batches.append(batch)
        return compute_loss(method, model, *batch)

    monkeypatch.setattr(from_scratch, "compute_loss", compute_and_keep)
    monkeypatch.setattr(from_scratch, "BATCH_SIZE", 32)
    monkeypatch.setattr(from_scratch, "evaluate", lambda *_: {"gain": 0.0, "retention": 0.0})
    flags = {"model": tiny / "model", "data": tiny / "train.jsonl", "steps": 2, "seed": 0}
    for name, tiers in (("gain", GAIN), ("retention", RETENTION)):
        flags[name] = [tiny / "heldout" / f"{tier}.jsonl" for tier in tiers]
    from_scratch.main(argparse.Namespace(method=method, **flags))
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert printed == ["step", "step", "pass@1,", "base", method]
    assert len({query.question for queries, *_ in batches for query in queries}) == 64  # none twice

    start = load_file(tiny / "model" / "model.safetensors")
    engine = load_engine(str(tiny / "model"), MAX_LENGTH, precision="fp32")
    for batch in batches:
        take_real_step(method, engine, *batch)
    ours, steps, off = models[-1].state_dict(), [], []
    for name, weight in engine.named_parameters():
        steps.append((weight - start[name]).flatten())
        off.append((weight - ours[name]).flatten())
    # Adam divides by a gradient's size: where that is rounding alone, it may step elsewhere.
    assert torch.cat(off).norm() < 0.01 * torch.cat(steps).norm()
