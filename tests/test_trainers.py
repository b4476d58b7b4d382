"""recipes/transformers_trainer.py and trl_sft.py: their gradients, and a run of each to its end."""

import ast
import contextlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_templates import QWEN3
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

from conftest import ROOT, link_packages, needs_vllm
from data import (
    load_examples,
    load_tokenizer,
    read_rows,
    stop_token_ids,
    tokenize_examples,
    write_rows,
)
from gradients import dense_oswft_loss, make_rows

pytest.importorskip("trl", reason="needs requirements-recipes.txt")

from recipes.transformers_trainer import OSWFTTrainer
from recipes.trl_sft import WeightedSFTTrainer
from train_oswft import oswft_loss
from trainers import Case, make_trainer

SETTING = ("--bf16", "False", "--disable_tqdm", "True")
SETTING += ("--max_sequence_length", "128", "--max_completion_length", "48")
SETTING += ("--learning_rate", "1e-3", "--logging_steps", "1", "--num_train_epochs", "8")
SETTING += ("--save_strategy", "no")


def torchrun(*args, ranks: int) -> str:
    """Run over so many ranks, on a port that is free; returns the output."""
    command = [Path(sys.executable).parent / "torchrun", "--standalone", "--nproc_per_node", ranks]
    result = subprocess.run(
        [str(word) for word in (*command, *args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    return result.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_the_dense_loss(ranks):
    assert torchrun("tests/trainers.py", ranks=ranks).count(" Case(") == 20


@needs_vllm
@pytest.mark.parametrize(("recipe", "ranks"), [("transformers_trainer", 2), ("trl_sft", 1)])
def test_the_pass_rate_rises(recipe, ranks, tiny, tmp_path):
    model, data, run = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "run"
    shutil.copytree(tiny / "model", model)
    config = model / "generation_config.json"  # as Qwen3-Base's: it does not know the end of turn
    config.write_text(json.dumps({"eos_token_id": 0}))
    rows = [row for _, row in read_rows(str(tiny / "heldout" / "hard.jsonl"))]
    write_rows(rows[:48], data)  # the same questions, again and again

    batch = ("--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 2 // ranks)
    where = ("--model", model, "--data", data, "--output_dir", run)
    printed = torchrun("-m", f"recipes.{recipe}", *where, *batch, *SETTING, ranks=ranks)
    logs = [ast.literal_eval(line) for line in printed.splitlines() if "mean_weight" in line]
    weights = [float(log["mean_weight"]) for log in logs]
    assert len(weights) == 24
    assert sum(weights[-6:]) / 6 < sum(weights[:3]) / 3 - 0.15, weights

    stops = json.loads((run / "generation_config.json").read_text())["eos_token_id"]
    assert set(stops) == set(stop_token_ids(load_tokenizer(str(run))))


PAGE = (ROOT / "recipes" / "README.md").read_text()
ROWS = make_rows(torch.Generator().manual_seed(0), count=8)


@pytest.mark.parametrize(
    ("trainer", "setting"),
    [
        (OSWFTTrainer, {"average_tokens_across_devices": False}),
        (OSWFTTrainer, {"remove_unused_columns": True}),
        (OSWFTTrainer, {"label_smoothing_factor": 0.1}),
        (WeightedSFTTrainer, {"label_smoothing_factor": 0.1}),
        (WeightedSFTTrainer, {"remove_unused_columns": True}),
        (WeightedSFTTrainer, {"packing": True}),
        (WeightedSFTTrainer, {"loss_type": "dft"}),
        (WeightedSFTTrainer, {"max_length": 64}),
    ],
)
def test_settings_that_would_lose_a_weight_are_refused(trainer, setting, tmp_path):
    with pytest.raises(ValueError, match=f"OSW-FT needs {next(iter(setting))}="):
        make_trainer(Case(trainer, 8, 1), str(tmp_path), ROWS, weigh=None, **setting)


@pytest.mark.parametrize(
    "weights",
    [[1.0] * 7, torch.ones(8, 1), torch.full((8,), torch.nan)],
    ids=["7", "(8, 1)", "nan"],
)
def test_what_is_not_one_number_for_each_row_is_refused(weights, tmp_path):
    trainer = make_trainer(Case(OSWFTTrainer, 8, 1), str(tmp_path), ROWS, lambda *_: weights)
    with pytest.raises(ValueError, match=r"weigh gave .*: not 8 numbers"):
        trainer.train()


def test_rows_without_an_answer_or_a_prompt_are_refused(tmp_path):
    trainer = make_trainer(Case(OSWFTTrainer, 8, 1), str(tmp_path), ROWS, lambda *_: [1.0] * 8)
    rows = trainer.train_dataset
    all_learnt = rows.remove_columns("labels").add_column("labels", rows["input_ids"])
    for wrong in (rows.remove_columns("answer"), all_learnt):
        trainer.train_dataset = wrong
        with pytest.raises(ValueError, match="needs a prompt in each row, and a column answer"):
            trainer.train()


def test_the_page_s_own_loop_gives_the_dense_gradient(tmp_path):
    model = make_trainer(Case(OSWFTTrainer, 8, 1), str(tmp_path), ROWS, None).model
    weights, micro_batches = torch.rand(8), []
    for part in (range(3), range(3, 8)):
        ids = [torch.tensor(ROWS[i].prompt_ids + ROWS[i].completion_ids) for i in part]
        mask = [torch.arange(len(ROWS[i])) >= len(ROWS[i].prompt_ids) for i in part]
        rows = {"input_ids": ids, "mask": mask}
        batch = {name: pad_sequence(row, batch_first=True) for name, row in rows.items()}
        micro_batches.append({**batch, "weights": weights[list(part)]})
    loop, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(loop, {"model": model, "micro_batches": micro_batches, "oswft_loss": oswft_loss})
    ours = [parameter.grad.clone() for parameter in model.parameters()]
    tokens = sum(len(row.completion_ids) for row in ROWS)
    dense = torch.autograd.grad(
        dense_oswft_loss(model, ROWS, weights, tokens), list(model.parameters())
    )
    torch.testing.assert_close(ours, list(dense), rtol=1e-4, atol=1e-6)


def test_rows_that_were_flattened_without_their_index_are_refused(tmp_path):
    trainer = make_trainer(
        Case(WeightedSFTTrainer, 8, 1, padding_free=True), str(tmp_path), ROWS, None
    )
    batch = next(iter(trainer.get_train_dataloader()))
    batch["weights"] = torch.ones(8)
    del batch["seq_idx"]
    with pytest.raises(ValueError, match="without seq_idx"):
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(50))


@pytest.mark.parametrize("trainer", [OSWFTTrainer, WeightedSFTTrainer])
def test_evaluation_is_that_of_sft(trainer, tmp_path):
    trainer = make_trainer(Case(trainer, 8, 1), str(tmp_path), ROWS, weigh=None)
    tokens = sum(len(row.completion_ids) for row in ROWS)
    dense = dense_oswft_loss(trainer.model, ROWS, torch.ones(8), tokens).item()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(dense, rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # imported before
@pytest.mark.parametrize("recipe", ["transformers_trainer", "trl_sft", "the page's script"])
def test_what_is_learnt_is_what_the_scripts_learn_and_once(
    recipe, tiny, tmp_path, one_rank, monkeypatch
):
    shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer = load_tokenizer(str(tiny / "model"))
    tokenizer.chat_template = QWEN3  # it writes an empty <think></think> into messages
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [row for _, row in read_rows(str(tiny / "heldout" / "hard.jsonl"))]
    write_rows(rows[:8], tmp_path / "train.jsonl")

    made = []
    monkeypatch.setattr(Trainer, "train", lambda trainer, **_: made.append(trainer))
    monkeypatch.setattr(Trainer, "save_model", lambda trainer: None)
    monkeypatch.setattr("verify.Verifier", lambda num_workers: contextlib.nullcontext())
    monkeypatch.setattr("recipes.trainer_run.Verifier", lambda _: contextlib.nullcontext())
    monkeypatch.setattr("recipes.trainer_run.Rollout", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    if recipe == "the page's script":
        _, script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        exec(script.replace("Qwen/Qwen3-0.6B-Base", "model"), {"__name__": "__main__"})
    else:
        call = f"{recipe} --model model --data train.jsonl --output_dir run "
        call += "--max_sequence_length 128 --max_completion_length 48"
        monkeypatch.setattr(sys, "argv", call.split())
        runpy.run_module(f"recipes.{recipe}", run_name="__main__")

    (trainer,) = made
    assert trainer.args.num_train_epochs == 1
    examples, _ = tokenize_examples(load_examples("train.jsonl"), tokenizer, 128, 48)
    for row, example in zip(trainer.train_dataset, examples, strict=True):
        learnt = [token for token in row["labels"] if token != -100]
        assert learnt == example.completion_ids.tolist(), tokenizer.decode(learnt)
        assert row["input_ids"] == [*example.prompt_ids, *example.completion_ids]


def test_the_page_s_script_runs_where_only_trl_and_math_verify_are(tiny, tmp_path):
    _, script = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    copy = re.search(r"```bash\n(mkdir.*?)pip install trl math-verify\n```", PAGE, re.DOTALL)[1]
    job, packages = tmp_path / "job", tmp_path / "packages"
    job.mkdir()
    packages.mkdir()
    (tmp_path / "oswft").symlink_to(ROOT)
    subprocess.run(copy, shell=True, cwd=job, check=True)
    shutil.copy(tiny / "heldout" / "hard.jsonl", job / "train.jsonl")
    changes = {
        "Qwen/Qwen3-0.6B-Base": str(tiny / "model"),
        "max_new_tokens=1024": "max_new_tokens=48",
        "accumulation_steps=16,": "accumulation_steps=2, max_steps=2,",
    }
    for old, new in changes.items():
        assert script.count(old) == 1
        script = script.replace(old, new)
    (job / "train.py").write_text(script)

    env = {**os.environ, "PYTHONPATH": f"{link_packages(packages, 'trl', 'math-verify')}"}
    assert not {"vllm", "deepspeed", "tyro"} & set(os.listdir(packages))
    command = [sys.executable, "-S", "train.py"]  # -S: no site-packages
    result = subprocess.run(command, cwd=job, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(re.findall(r"'mean_weight': '0\.\d+'", result.stdout)) == 2, result.stdout
    assert (job / "runs" / "trl" / "model.safetensors").exists()
