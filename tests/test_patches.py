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

from conftest import ROOT, assert_equal_up_to_rounding, metrics, train

FOLDER = ROOT / "recipes" / "patches"
PATCHES = ["generate", "lora", "optimizer", "schedule", "weighting"]
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
        assert not result.returncode, f"recipes/patches/{name}.diff no longer applies: {result}"
    return root


def resume(whole: Path, run: Path, step: int, *args, **options) -> None:
    """Goes on from a step of a run, in a copy of it."""
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("final"))
    for path in run.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    train("--output_dir", run, *args, "--resume", **options)


def weights(folder: Path) -> torch.Tensor:
    """All of a model, as one vector."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def updates(run: Path, base: Path) -> list[torch.Tensor]:
    """Of each step, from the checkpoints; they are as long as the metrics say."""
    models = [weights(base), *(weights(run / f"checkpoint-{n:06d}") for n in range(1, 5))]
    found = [after - before for before, after in itertools.pairwise(models)]
    for row, update, model in zip(metrics(run), found, models[1:], strict=True):
        ratio = (update.norm() / model.norm()).item()
        assert ratio == pytest.approx(row["update_norm_ratio"], rel=1e-2), row["step"]
    return found


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
# weighting, schedule and generate, together


@pytest.fixture(scope="module")
def sampled(tiny, tmp_path_factory) -> Path:
    """Two runs of 4 steps, whole/ and resumed/ after two, where vLLM cannot be imported."""
    folder = tmp_path_factory.mktemp("sampled by generate")
    root = patched(folder / "copy", "weighting", "schedule", "generate")
    (root / "vllm.py").write_text("raise ImportError('blocked')")
    setting = (*SETTING, "--weighting", "std", "--num_rollouts", "4", "--temperature", "0.8")
    train("--output_dir", folder / "whole", *setting, tiny=tiny, root=root)
    resume(folder / "whole", folder / "resumed", 2, *setting, tiny=tiny, root=root)
    return folder


def test_weighting_the_weights_are_the_standard_deviations_of_the_rewards(sampled):
    pass_rates = set()
    for path in (sampled / "whole" / "rollouts").iterdir():
        rows = [json.loads(line) for line in path.open()]
        for answers in (rows[i : i + 4] for i in range(0, len(rows), 4)):
            pass_rate = sum(answer["correct"] for answer in answers) / 4
            assert answers[0]["weight"] == pytest.approx((pass_rate * (1 - pass_rate)) ** 0.5)
            pass_rates.add(pass_rate)
    assert {0.25, 0.5, 0.75} & pass_rates and {0, 1} & pass_rates


def test_schedule_the_steps_follow_it_and_so_do_those_of_a_resumed_run(sampled, tiny, tmp_path):
    rates = [row["learning_rate"] for row in metrics(sampled / "whole")]
    assert rates == pytest.approx([1e-3, 1e-3, 0.75e-3, 0.25e-3])
    updates(sampled / "whole", tiny / "model")
    assert metrics(sampled / "resumed") == metrics(sampled / "whole")

    script = patched(tmp_path / "copy", "schedule") / "train_oswft.py"
    schedule = runpy.run_path(str(script))["schedule"]
    factors = [schedule(step, 100) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1])
    assert factors[10] == 1 and factors[55] == pytest.approx(0.5) and 0 < factors[99] < 0.001


def test_generate_samples_what_the_trainer_would_without_vllm(sampled):
    """At a temperature, prompts of several lengths side by side, after large updates."""
    for row in metrics(sampled / "whole"):
        assert row["vllm_gap_mean"] <= row["vllm_gap_max"] < 1e-3
        assert row["update_norm_ratio"] > 0.001
    rows = [json.loads(line) for line in (sampled / "whole/rollouts/step_000001.jsonl").open()]
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        assert len(row["logprobs"]) == len(row["token_ids"])


# ------------------------------------------------------------------------------------------------
# optimizer


def test_optimizer_the_steps_are_those_of_sgd_with_momentum(tiny, tmp_path):
    root = patched(tmp_path / "copy", "optimizer", "generate")
    whole, options = tmp_path / "whole", {"tiny": tiny, "root": root, "ranks": 2}
    train("--output_dir", whole, *SETTING, "--learning_rate", "0.5", **options)
    moved, rows = updates(whole, tiny / "model"), metrics(whole)
    for row, before, update in zip(rows, [0 * moved[0], *moved], moved, strict=False):
        gradient = min(row["grad_norm"], 1.0)  # clipped
        assert (update - 0.9 * before).norm() == pytest.approx(0.5 * gradient, rel=1e-2)
    resume(whole, tmp_path / "run", 2, *SETTING, "--learning_rate", "0.5", **options)
    assert metrics(tmp_path / "run") == rows


# ------------------------------------------------------------------------------------------------
# lora


@pytest.fixture(scope="module")
def lora(tiny, tmp_path_factory) -> Path:
    """Two runs of 4 steps: whole/ on one rank (ZeRO-2), resumed/ after two on two (ZeRO-3)."""
    pytest.importorskip("peft", reason="needs peft: requirements-recipes.txt")
    folder = tmp_path_factory.mktemp("lora")
    root = patched(folder / "copy", "lora")
    setting = (*SETTING, "--learning_rate", "1e-2")
    train("--output_dir", folder / "whole", *setting, tiny=tiny, root=root)
    resume(folder / "whole", folder / "resumed", 2, *setting, tiny=tiny, root=root, ranks=2)
    return folder


def test_lora_vllm_samples_from_the_merged_weights(lora):
    for run in ("whole", "resumed"):
        for row in metrics(lora / run):
            assert row["vllm_gap_mean"] <= row["vllm_gap_max"] < 1e-3
            assert row["update_norm_ratio"] > 0.05


def test_lora_a_run_goes_on_over_other_ranks_as_the_same_run(lora):
    assert_equal_up_to_rounding(lora / "resumed", lora / "whole")


@pytest.mark.parametrize("run", ["whole", "resumed"])
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
    model, report = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not any(report.values()), report
    torch.testing.assert_close(
        dict(model.named_parameters())["model.layers.1.mlp.up_proj.weight"].detach(),
        load_file(final / "model.safetensors")["model.layers.1.mlp.up_proj.weight"],
    )
