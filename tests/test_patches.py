"""recipes/patches: each diff still applies, and does to a real run what its page says.

A test that fails with "no longer applies" means: mend the diff, or the line that it changes.
"""

import itertools
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from conftest import ROOT, assert_equal_up_to_rounding, launch, metrics, train
from data import load_tokenizer, read_rows, stop_token_ids, write_rows

FOLDER = ROOT / "recipes" / "patches"
PATCHES = sorted(path.stem for path in FOLDER.glob("*.diff"))
SETTING = ("--rollout_batch_size", "12", "--max_tokens_per_micro_batch", "300")
SETTING += ("--max_steps", "4", "--save_every", "1", "--keep_checkpoints", "4")


def patched(root: Path, *names: str) -> Path:
    """Makes `root` a copy of the scripts and modules with these patches."""
    root.mkdir()
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, root)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    for name in names:
        command = ["git", "apply", FOLDER / f"{name}.diff"]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert not result.returncode, f"{name}.diff no longer applies: {result.stderr}"
    return root


def resume(whole: Path, run: Path, root: Path) -> None:
    """Continues a run after its second step, in a copy of it, on two ranks with ZeRO-3."""
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("final", "*3", "*4"))
    launch("train_oswft.py", "--resume", run, "--zero_stage", "3", ranks=2, root=root)


def weights(folder: Path) -> torch.Tensor:
    """All of a model, as one vector."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("names", [[name] for name in PATCHES] + [PATCHES], ids="+".join)
def test_patches_apply_alone_and_together_and_leave_code_that_passes_lint(tmp_path, names):
    root = patched(tmp_path / "copy", *names)
    for command in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *command, "."]
        result = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


def test_the_page_says_how_many_lines_each_patch_changes():
    page = (ROOT / "recipes" / "patches.md").read_text()
    said = dict(re.findall(r"^\| \[(\w+)\]\(patches/\1\.diff\) .*\| (\d+) \|$", page, re.MULTILINE))
    changed = {
        name: len(re.findall(r"^[+-](?!-- |\+\+ )", path.read_text(), re.MULTILINE))
        for name, path in ((path.stem, path) for path in FOLDER.glob("*.diff"))
    }
    assert {name: int(number) for name, number in said.items()} == changed


# ------------------------------------------------------------------------------------------------
# Weighting, schedule, optimizer and generate in the same runs: they change different parts

RATE, FACTORS = 2.0, [1, 1, 0.75, 0.25]  # of SGD; of the schedule, for 4 steps


@pytest.fixture(scope="module")
def four(tiny, tmp_path_factory) -> Path:
    """Two runs of 4 steps where vLLM cannot be imported: whole/ on one rank (ZeRO-2), and
    resumed/, which continues it after two steps on two ranks (ZeRO-3)."""
    folder = tmp_path_factory.mktemp("four patches")
    root = patched(folder / "copy", "weighting", "schedule", "optimizer", "generate")
    (root / "vllm.py").write_text("raise ImportError('blocked')")
    rows = [row for _, row in read_rows(tiny / "train.jsonl")][:48]
    for row in rows[::2]:  # else all prompts are of one length
        row["question"] = "1+1-" + row["question"]
    write_rows(rows, folder / "train.jsonl")
    setting = (*SETTING, "--data", folder / "train.jsonl", "--learning_rate", RATE)
    setting += ("--weighting", "std", "--num_rollouts", "4", "--temperature", "0.8")
    setting += ("--max_completion_length", "24")  # cuts some answers off
    train("--output_dir", folder / "whole", *setting, tiny=tiny, root=root)
    resume(folder / "whole", folder / "resumed", root)
    return folder


each_run = pytest.mark.parametrize("run", ["whole", "resumed"])


def rollouts(run: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (run / f"rollouts/step_{step:06d}.jsonl").open()]


@each_run
def test_weighting_the_weights_are_the_standard_deviations_of_the_rewards(four, run):
    pass_rates = set()
    for step in range(1, 5):
        rows = rollouts(four / run, step)
        for answers in (rows[i : i + 4] for i in range(0, len(rows), 4)):
            pass_rate = sum(answer["correct"] for answer in answers) / 4
            assert answers[0]["weight"] == pytest.approx((pass_rate * (1 - pass_rate)) ** 0.5)
            pass_rates.add(pass_rate)
    assert {0.25, 0.5, 0.75} & pass_rates and {0, 1} & pass_rates


@each_run
def test_schedule_the_learning_rate_follows_it_also_in_a_run_that_is_resumed(four, run):
    rates = [row["learning_rate"] for row in metrics(four / run)]
    assert rates == pytest.approx([RATE * factor for factor in FACTORS])


def test_schedule_rises_for_a_tenth_of_the_run_then_falls_to_zero(tmp_path):
    script = patched(tmp_path / "copy", "schedule") / "train_oswft.py"
    schedule = runpy.run_path(str(script))["schedule"]
    factors = [schedule(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
    assert factors[10] == 1 and factors[55] == pytest.approx(0.5) and 0 < factors[99] < 0.001


@each_run
def test_optimizer_and_schedule_the_weights_move_as_sgd_with_momentum_would_move_them(
    four, tiny, run
):
    """From the checkpoints; where the run is resumed its momentum must have come back, too."""
    folders = [tiny / "model", *(four / run / f"checkpoint-{n:06d}" for n in range(1, 5))]
    models, momentum = [weights(folder) for folder in folders], 0
    for row, factor, (before, after) in zip(
        metrics(four / run), FACTORS, itertools.pairwise(models), strict=True
    ):
        gradient = -(after - before) / (RATE * factor) - 0.9 * momentum
        norm = min(row["grad_norm"], 1)  # 0 where no query has a weight
        assert gradient.norm().item() == pytest.approx(norm, rel=1e-2, abs=1e-4)
        momentum = 0.9 * momentum + gradient


@each_run
def test_generate_samples_what_the_trainer_would_without_vllm(four, tiny, run):
    """Prompts of several lengths side by side, at a temperature, while the weights change."""
    for row in metrics(four / run):
        assert row["vllm_gap_mean"] <= row["vllm_gap_max"] < 1e-3
    assert (weights(four / run / "final") - weights(tiny / "model")).abs().max() > 0.01
    rows = [row for step in range(1, 5) for row in rollouts(four / run, step)]
    ends = stop_token_ids(load_tokenizer(str(tiny / "model")))
    for row in rows:
        stops = [n for n, token in enumerate(row["token_ids"], 1) if token in ends]
        assert stops == ([len(row["token_ids"])] if row["finish_reason"] == "stop" else [])
        assert len(row["logprobs"]) == len(row["token_ids"]) <= 24
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


# ------------------------------------------------------------------------------------------------
# lora


@pytest.fixture(scope="module")
def lora(tiny, tmp_path_factory) -> Path:
    """As `four`, with vLLM."""
    pytest.importorskip("peft", reason="needs requirements-recipes.txt")
    folder = tmp_path_factory.mktemp("lora")
    root, run = patched(folder / "copy", "lora"), ("--output_dir", folder / "whole")
    train(*run, *SETTING, "--learning_rate", "1e-2", tiny=tiny, root=root)
    resume(folder / "whole", folder / "resumed", root)
    return folder


@each_run
def test_lora_vllm_samples_from_the_merged_weights(lora, run):
    for row in metrics(lora / run):
        assert row["vllm_gap_mean"] <= row["vllm_gap_max"] < 1e-3


def test_lora_a_run_resumes_on_other_ranks_as_the_same_run(lora):
    assert_equal_up_to_rounding(lora / "resumed", lora / "whole")


@each_run
def test_lora_the_final_model_is_the_base_plus_the_adapters_and_nothing_else(lora, tiny, run):
    before = load_file(tiny / "model" / "model.safetensors")
    after = load_file(lora / run / "final" / "model.safetensors")
    [state] = map(load_file, (lora / run / "checkpoint-000004" / "state").iterdir())
    assert after.keys() == before.keys()
    for name, weight in before.items():
        layer = name.removesuffix(".weight")
        a, b = (state.pop(f"{layer}.lora_{x}.default.weight.master", None) for x in "AB")
        if a is None:
            assert torch.equal(after[name], weight), name
            continue
        torch.testing.assert_close(after[name], weight + 2 * b @ a)
        assert (after[name] - weight).norm() > 0.05 * weight.norm(), f"{name} has hardly changed"
    assert {name.split(".")[-1] for name in state} == {"exp_avg", "exp_avg_sq"}  # what is left
    assert len(state) == 2 * 2 * 2 * 7  # moments, A and B, layers, matrices


def test_lora_the_final_model_is_a_plain_folder_that_transformers_loads(lora):
    final = lora / "resumed" / "final"
    assert not list(final.glob("adapter*"))
    _, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(report.values()), report


# ------------------------------------------------------------------------------------------------
# importance


def test_importance_the_gradient_is_that_of_the_dense_reference(tmp_path):
    root = patched(tmp_path / "copy", "importance")
    for name in ("gradients.py", "importance.py"):
        shutil.copy(ROOT / "tests" / name, root)
    assert "equal" in launch("importance.py", ranks=2, root=root)


def test_importance_in_a_run_the_weights_of_all_tokens_are_cut_at_the_cap(tiny, tmp_path):
    """vLLM's probabilities are the trainer's, so below 1 the cap is every token's weight."""
    root, run = patched(tmp_path / "copy", "importance"), tmp_path / "run"
    options = ("--rollout_batch_size", "12", "--max_steps", "1", "--importance_cap", "0.25")
    train("--output_dir", run, *options, tiny=tiny, script="train_grpo.py", root=root)
    answers, [row] = rollouts(run, 1), metrics(run)
    lengths = [len(answer["logprobs"]) for answer in answers]
    assert lengths == [len(answer["token_ids"]) for answer in answers] and row["grad_norm"] > 0
    total = sum(a["advantage"] * length for a, length in zip(answers, lengths, strict=True))
    assert row["loss"] == pytest.approx(-total / sum(lengths) / 4, rel=1e-3)
