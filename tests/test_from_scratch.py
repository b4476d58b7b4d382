"""demo/from_scratch.py: the same gradients as the real scripts, from three packages alone."""

import os

import train_grpo
from conftest import link_packages, output_of
from demo import from_scratch
from demo.from_scratch import NUM_ROLLOUTS, compute_loss
from gradients import dense_grpo_loss, dense_logprobs, dense_oswft_loss, make_model, make_rows
from rounding import assert_same

import pytest
import torch


@pytest.mark.parametrize("method", NUM_ROLLOUTS)
def test_from_the_same_rewards_the_gradient_is_that_of_the_real_scripts(method):
    """Whose dense reference this is (gradients.py); SFT takes OSW-FT's steps at weight one."""
    model, answers = make_model(), make_rows(torch.Generator().manual_seed(0), count=12)
    queries, rewards = answers[::3], torch.tensor([[1.0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 0, 0]])
    ours = compute_loss(method, model, queries, answers, rewards)
    if method == "grpo":
        advantages = train_grpo.grpo_advantages(rewards).flatten().tolist()
        old = [dense_logprobs(model, row).detach() for row in answers]
        args = train_grpo.Args(model="", data="")
        dense, *_ = dense_grpo_loss(model, answers, advantages, old, args)
    else:
        weights = 1 - rewards.mean(dim=1) if method == "oswft" else torch.ones(4)
        tokens = sum(len(query.completion_ids) for query in queries)
        dense = dense_oswft_loss(model, queries, weights, tokens)
    gradients = (torch.autograd.grad(loss, list(model.parameters())) for loss in (ours, dense))
    for gradient, reference in zip(*gradients, strict=True):
        assert_same(gradient, reference)


def test_three_packages_are_enough(tiny, tmp_path):
    three_packages = link_packages(tmp_path, "torch", "transformers", "math-verify")
    assert not {"vllm", "deepspeed", "tyro", "datasets"} & set(os.listdir(three_packages))
    command = ["-S", "-m", "demo.from_scratch"]  # -S: no site-packages
    command += ["--method", "oswft", "--steps", 1, "--base", tiny]
    output = output_of(*command, env={**os.environ, "PYTHONPATH": str(three_packages)})
    assert [line.split()[0] for line in output.splitlines()] == ["base", "step", "oswft"]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_the_loop_takes_a_step_of_the_other_methods(method, tiny, monkeypatch, capsys):
    monkeypatch.setattr(from_scratch, "BATCH_SIZE", 8)
    monkeypatch.setattr(from_scratch, "evaluate", lambda *_: {})
    from_scratch.main(method, 1, 0, tiny)
    first = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert first == ["base", "step", method]
