"""demo/from_scratch.py: the same gradients as the real scripts, from three packages alone."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from conftest import SCRIPTS, call_of, launch, link_packages, output_of
from data import Trajectory, batch_indices, load_examples, load_tokenizer, tokenize_examples
from demo import from_scratch
from demo.from_scratch import NUM_ROLLOUTS, compute_loss

BATCH = 24


@pytest.mark.parametrize("script", SCRIPTS)
def test_from_the_same_rewards_the_gradient_is_that_of_the_real_script(script, tiny, tmp_path):
    method = script.removeprefix("train_").removesuffix(".py")
    call = [*call_of(script, tiny, tmp_path), "--max_steps", 1, "--save_every", 1]
    call += ["--train_batch_size", BATCH, "--max_grad_norm", 1e9]  # nothing is clipped
    call += ["--num_rollouts", NUM_ROLLOUTS[method]] if method != "sft" else []
    launch(*call)

    tokenizer = load_tokenizer(str(tiny / "model"))
    examples = load_examples(str(tiny / "train.jsonl"))
    data, _ = tokenize_examples(examples, tokenizer, max_length=128, max_completion_length=48)
    queries = [data[i] for i in batch_indices(len(data), BATCH, batch=0, seed=0)]
    answers, rewards = [], torch.zeros(BATCH, 0)
    if method != "sft":
        rows = (tmp_path / "rollouts" / "step_000001.jsonl").read_text().splitlines()
        rows = [json.loads(row) for row in rows]
        prompts = {query.id: query.prompt_ids for query in queries}
        answers = [Trajectory(row["id"], prompts[row["id"]], row["token_ids"]) for row in rows]
        rewards = torch.tensor([row["correct"] for row in rows]).float().view(BATCH, -1)
        assert rewards.shape[1] == NUM_ROLLOUTS[method]
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    compute_loss(method, model, queries, answers, rewards).backward()

    [path] = (tmp_path / "checkpoint-000001" / "state").glob("*.safetensors")
    with safe_open(path, "pt") as state:  # after one step Adam's first moment is 0.1 * gradient
        for name, parameter in model.named_parameters():
            theirs = 10 * state.get_tensor(f"{name}.exp_avg")
            assert theirs.abs().max() > 0
            difference = (parameter.grad - theirs).norm() / theirs.norm()
            assert difference < 1e-4, (name, difference)


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
