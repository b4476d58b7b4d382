"""On one GPU, what other tests show on a CPU, and what only a GPU has: vLLM's sleep mode.

make test-gpu    # 8 minutes at most
"""

import json
import os
import signal

import checks
from bench.gpu import QWEN3
from conftest import GPU, call_of, launch, metrics, on_ranks, rollouts, slow, start, wait_for_rows
from prepare import memory

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

pytestmark = [slow, pytest.mark.skipif(not GPU, reason="there is no NVIDIA GPU here")]


@pytest.fixture(autouse=True)
def show_the_gpu(monkeypatch):
    """To what a test starts; conftest.py hides it from the others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPU)


def test_the_gradient_equals_a_dense_reference_on_the_cpu():
    on_ranks(1, checks.compare_gradients, *checks.CASES)


def test_a_state_goes_on_with_each_zero_stage_and_with_offload(model_copy, tmp_path):
    on_ranks(1, checks.go_on, tmp_path, on_ranks(1, checks.save_states, tmp_path))


def test_the_planned_memory_is_what_a_step_of_a_06b_model_takes(tmp_path):
    tokens, length = 8192, 4096
    Qwen3ForCausalLM(Qwen3Config(**QWEN3)).to(torch.bfloat16).save_pretrained(tmp_path)
    held = on_ranks(1, checks.held_by_a_step, str(tmp_path), length, tokens // length)
    flags = {"max_length": length, "max_tokens_per_micro_batch": tokens, "vllm_sleep": True}
    flags |= {"model": str(tmp_path), "data": "-", "max_completion_length": 1024}
    phases = memory.memory(memory.Args(gpus=1, gpu_memory=80, **flags))
    sample, planned = phases["sample"], phases["train"]
    between = sum(sample.values()) - sample["vLLM"] - sample["reserve"]
    assert held["between steps"] == pytest.approx(between, rel=0.1)
    reserve = planned.pop("reserve")  # of what torch does not count
    assert sum(planned.values()) == pytest.approx(held["allocated"], rel=0.1)
    assert held["of the GPU"] < 1.1 * (sum(planned.values()) + reserve)


@pytest.mark.parametrize(("tied", "precision"), [(True, "bf16"), (False, "fp32")])
def test_vllm_sleeps_wakes_and_agrees_after_a_large_update(tied, precision, tiny, tmp_path):
    folders = str(tiny / "model"), str(tmp_path / "model")
    said = on_ranks(1, checks.follow_the_trainer, *folders, tied, precision)
    assert "GiB came back" in said and "cuda" in said


@pytest.mark.parametrize(
    ("script", "precision", "tolerance"),
    [("train_oswft.py", "bf16", 0.05), ("train_grpo.py", "fp32", 1e-3)],
)
def test_a_killed_run_goes_on_alike_and_is_evaluated(script, precision, tolerance, tiny, tmp_path):
    run = tmp_path / "run"
    call = [*call_of(script, tiny, run), "--save_every", 4, "--precision", precision]
    call += ["--vllm_sleep", "--max_steps", 500]  # however fast it is, it does not end first
    killed = start(*call, start_new_session=True)
    wait_for_rows(run, 6, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    before, answered = metrics(run)[4:6], rollouts(run, 5)

    launch(script, "--resume", run, "--max_steps", 8)  # from step 4
    rows = metrics(run)
    assert len(rows) == 8
    assert [a["token_ids"] for a in rollouts(run, 5)] == [a["token_ids"] for a in answered]
    for ours, theirs in zip(rows[4:6], before, strict=True):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e-5)

    command = ["evaluate.py", "--model", run / "final", "--num_samples", 4]
    command += ["--benchmark_file", tiny / "heldout" / "easy.jsonl"]
    launch(*command, "--max_completion_length", 48, "--precision", precision)
    scores = json.loads((run / "eval" / "results.json").read_text())
    assert scores["easy"]["pass@1"] > 0.3
