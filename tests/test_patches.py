"""recipes/patches: each diff still applies, and does to a real run what its page says."""

import copy
import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import train_grpo
import train_oswft
from checks import SETTINGS as ENGINE_SETTINGS
from checks import Twins, compare_oswft
from conftest import ROOT, assert_equal_up_to_rounding, call_of, launch, metrics, on_ranks, slow
from data import read_rows, write_rows
from dense import ROWS, dense_grpo_loss, dense_logprobs, dense_oswft_loss, make_rows
from engine import init_training
from logprobs import LogprobModel

import pytest
import torch
from safetensors.torch import load_file

FOLDER = ROOT / "recipes" / "patches"
PATCHES = sorted(path.stem for path in FOLDER.glob("*.diff"))
SETTING = ("--rollout_batch_size", "12", "--save_every", "1", "--keep_checkpoints", "4")
RATE, MOMENTUM = 2.0, 0.9  # of SGD
FACTORS = [1, 1, 0.75, 0.25]  # of the schedule, for the 4 steps of an epoch
LENGTH = 24  # of an answer: some are cut off


def patched(root: Path, *names: str) -> Path:
    """Makes `root` a copy of the scripts and modules with these patches."""
    root.mkdir()
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, root)
    (root / "recipes").mkdir()
    for name in ("__init__.py", "generate.py"):
        shutil.copy(ROOT / "recipes" / name, root / "recipes")
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    for name in names:  # if git refuses one: mend the diff, or the line that it changes
        subprocess.run(["git", "apply", FOLDER / f"{name}.diff"], cwd=root, check=True)
    return root


def resumed(whole: Path, root: Path) -> Path:
    """A run, continued after its second step, in a copy of it, with ZeRO-3."""
    run = whole.with_name("resumed")
    shutil.copytree(whole, run, ignore=shutil.ignore_patterns("final", "*3", "*4"))
    launch("train_oswft.py", "--resume", run, "--zero_stage", "3", root=root)
    return run


def rollouts(run: Path) -> list[dict]:
    return [json.loads(row) for step in sorted(run.glob("rollouts/*")) for row in step.open()]


def weights(folder: Path) -> torch.Tensor:
    """All of a model, as one vector."""
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@slow  # So that `make check` passes while a script is edited.
@pytest.mark.parametrize("names", [[name] for name in PATCHES] + [PATCHES], ids="+".join)
def test_patches_apply_alone_and_together_and_leave_code_that_passes_lint(tmp_path, names):
    root = patched(tmp_path / "copy", *names)
    for command in ("check", "format --check"):
        subprocess.run([sys.executable, "-m", "ruff", *command.split(), "."], cwd=root, check=True)


@pytest.fixture(scope="module")
def five(tiny, tmp_path_factory) -> Path:
    """One run with five patches, as they change different parts; vLLM cannot be imported."""
    folder = tmp_path_factory.mktemp("five patches")
    root = patched(folder / "copy", "weighting", "schedule", "optimizer", "generate", "kl")
    (root / "vllm.py").write_text("raise ImportError('blocked')")
    rows = [row for _, row in read_rows(tiny / "train.jsonl")][:48]
    for row in rows[::2]:  # else all prompts are of one length
        row["question"] = "1+1-" + row["question"]
    write_rows(rows, folder / "train.jsonl")
    setting = (*SETTING, "--data", folder / "train.jsonl", "--learning_rate", RATE)
    setting += ("--weighting", "std", "--num_rollouts", "4", "--temperature", "0.8")
    setting += ("--max_completion_length", LENGTH, "--kl", "0.1")
    setting += ("--max_steps", "None")  # The schedule needs none.
    launch(*call_of("train_oswft.py", tiny, folder / "whole"), *setting, root=root)
    return resumed(folder / "whole", root)


@slow
def test_schedule_and_optimizer_move_the_weights_as_sgd_with_momentum_at_its_rates_would(
    five, tiny
):
    """From the checkpoints; after the second one the momentum must have come back."""
    models = [weights(tiny / "model")]
    models += [weights(five / f"checkpoint-{n:06d}") for n in range(1, 5)]
    steps, momentum = zip(models[:-1], models[1:], metrics(five), FACTORS, strict=True), 0
    for before, after, row, factor in steps:
        assert row["learning_rate"] == pytest.approx(RATE * factor)
        gradient = -(after - before) / (RATE * factor) - MOMENTUM * momentum
        norm = min(row["grad_norm"], 1)  # 0 where no query has a weight
        assert gradient.norm().item() == pytest.approx(norm, rel=1e-2, abs=1e-4)
        momentum = MOMENTUM * momentum + gradient


@slow
def test_weighting_and_generate_weigh_by_the_deviation_of_what_the_trainer_would_sample(five):
    """Prompts of several lengths side by side, at a temperature, while the weights change."""
    assert all(row["vllm_gap_max"] < 1e-3 for row in metrics(five))
    rows, pass_rates = rollouts(five), set()
    for answers in (rows[i : i + 4] for i in range(0, len(rows), 4)):
        pass_rate = sum(answer["correct"] for answer in answers) / 4
        assert answers[0]["weight"] == pytest.approx((pass_rate * (1 - pass_rate)) ** 0.5)
        pass_rates.add(pass_rate)
    assert {0.25, 0.5, 0.75} & pass_rates and {0, 1} & pass_rates
    assert all(len(row["logprobs"]) == len(row["token_ids"]) <= LENGTH for row in rows)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


@slow
def test_lora_trains_adapters_that_vllm_the_final_model_and_a_resumed_run_have(tiny, tmp_path):
    pytest.importorskip("peft", reason="needs requirements-dev.txt")
    root, whole = patched(tmp_path / "copy", "lora"), tmp_path / "whole"
    call = call_of("train_oswft.py", tiny, whole)
    launch(*call, *SETTING, "--max_steps", "4", "--learning_rate", "1e-2", root=root)
    run = resumed(whole, root)
    assert_equal_up_to_rounding(run, whole)
    assert all(row["vllm_gap_max"] < 1e-3 for row in metrics(run))
    before = load_file(tiny / "model" / "model.safetensors")
    after = load_file(run / "final" / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {n.removesuffix(".weight") for n in before if (after[n] - before[n]).norm() > 1e-3}
    files = (run / "checkpoint-000004" / "state").iterdir()  # of the adapters alone
    assert {path.stem.partition(".lora_")[0] for path in files} == changed


def compare_kl() -> None:
    """Where kl.diff is applied. The reference is another model than the one that is trained."""
    init_training()
    args = train_oswft.Args(**ENGINE_SETTINGS, kl=0.3)
    twins = Twins(pytest.MonkeyPatch(), args)
    generator = torch.Generator().manual_seed(0)
    reference = copy.deepcopy(twins.dense)
    for parameter in reference.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    twins.engine.reference = LogprobModel(copy.deepcopy(reference)).to(twins.engine.device)
    for weights in (torch.arange(ROWS) / ROWS, torch.zeros(ROWS)):  # the penalty alone, too
        rows = make_rows(generator)
        tokens = sum(len(row.response_ids) for row in rows)
        loss = dense_oswft_loss(twins.dense, rows, weights, tokens)
        for row in rows:
            with torch.no_grad():
                fixed = dense_logprobs(reference, row)
            ratio = (fixed - dense_logprobs(twins.dense, row)).exp()
            loss = loss + args.kl * (ratio - ratio.log() - 1).sum() / tokens
        twins.compare(loss, train_oswft.update(twins.engine, rows, weights, args))


def compare_importance() -> None:
    """Where importance.diff is applied."""
    init_training()
    cap, temperature = 1.5, 0.7
    args = train_grpo.Args(**ENGINE_SETTINGS, temperature=temperature, importance_cap=cap)
    twins = Twins(pytest.MonkeyPatch(), args)
    generator = torch.Generator().manual_seed(0)
    rows = make_rows(generator)
    advantages = torch.randn(len(rows), generator=generator)
    advantages[3] = 0  # a row that no pass takes
    with torch.no_grad():
        old = [dense_logprobs(twins.dense, row, temperature) for row in rows]
    # vLLM's differ by so much that some factors reach the cap
    vllm = [each + 0.8 * torch.randn(len(each), generator=generator) for each in old]
    sampled = [each.tolist() for each in vllm]
    factors = [(o - v).exp().clamp(max=cap) for o, v in zip(old, vllm, strict=True)]
    scores = twins.engine.eval_logprobs(rows, temperature, advantages != 0)
    groups = advantages[:, None]  # of one answer
    for old_logprobs in (None, scores):  # the first update of a batch, then a later one
        loss, *_ = dense_grpo_loss(twins.dense, rows, advantages.tolist(), old, args, factors)
        stats = train_grpo.update(twins.engine, rows, groups, old_logprobs, sampled, args)
        twins.compare(loss, stats)


def compare_compiled() -> None:
    """Traced as for inductor, whose kernels would take a minute more: hooks fire as with them."""
    init_training()
    with pytest.MonkeyPatch.context() as patch:
        traced = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")
        patch.setattr(torch.nn.Module, "compile", traced)
        for stage in (1, 2):
            compare_oswft(patch, compile=True, zero_stage=stage)


DENSE = {"kl": compare_kl, "importance": compare_importance, "compile": compare_compiled}


@slow
@pytest.mark.parametrize(("name", "ranks"), [("kl", 2), ("importance", 1), ("compile", 2)])
def test_a_patch_has_the_dense_gradient(name, ranks, tmp_path):
    on_ranks(ranks, DENSE[name], root=patched(tmp_path / "copy", name))
