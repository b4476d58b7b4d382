"""recipes/transformers_trainer.py and trl_sft.py: their gradients, and runs to their end."""

import contextlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from functools import partial

import data
from conftest import ROOT, launch, link_packages, needs_vllm, output_of
from gradients import dense_oswft_loss, make_rows

import pytest
import torch
from test_templates import QWEN3
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer

pytest.importorskip("trl", reason="needs requirements-dev.txt")

from recipes.transformers_trainer import OSWFTTrainer
from recipes.trl_sft import WeightedSFTTrainer
from train_oswft import oswft_loss
from trainers import Case, compare, make_trainer

from datasets import Dataset
from trl import SFTConfig

PAGE = (ROOT / "recipes" / "README.md").read_text()
LOOP, _, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
ROWS = make_rows(torch.Generator().manual_seed(0), count=8)
TOKENS = sum(len(row.completion_ids) for row in ROWS)
LENGTHS = ("--max_sequence_length", "128", "--max_completion_length", "48")

pad = partial(pad_sequence, batch_first=True)
each_trainer = pytest.mark.parametrize("trainer", [OSWFTTrainer, WeightedSFTTrainer])


def test_gradients_are_those_of_the_dense_loss_on_one_rank_and_on_two(minutes):
    compare()
    launch("tests/trainers.py", ranks=2)


@needs_vllm
def test_the_pass_rate_rises_with_vllm_on_two_ranks(tiny, tmp_path):
    rows = [row for _, row in data.read_rows(str(tiny / "heldout" / "hard.jsonl"))]
    data.write_rows(rows[:48], tmp_path / "train.jsonl")  # the same questions, again and again
    options = ("--model", tiny / "model", "--data", tmp_path / "train.jsonl", *LENGTHS)
    options += ("--output_dir", tmp_path, "--learning_rate", "1e-3", "--num_train_epochs", "8")
    options += ("--gradient_accumulation_steps", "1", "--logging_steps", "1", "--bf16", "False")
    log = launch("recipes/trl_sft.py", *options, ranks=2)
    weights = [float(weight) for weight in re.findall(r"'mean_weight': '([\d.]+)'", log)]
    assert len(weights) == 24 and sum(weights[-6:]) / 6 < sum(weights[:3]) / 3 - 0.15, weights


@each_trainer
def test_settings_that_would_lose_a_weight_are_refused(trainer, tmp_path):
    wrong = {"loss_type": "dft", "max_length": 64, "label_smoothing_factor": 0.1}
    for name, needed in trainer.needs.items():
        setting = {name: wrong.get(name, not needed)}
        with pytest.raises(ValueError, match=f"OSW-FT needs {name}="):
            make_trainer(Case(trainer, 8, 1), str(tmp_path), ROWS, weigh=None, **setting)


def test_rows_that_lack_a_part_and_weights_of_another_shape_are_refused(tmp_path):
    case = Case(WeightedSFTTrainer, 8, 1, padding_free=True)
    trainer = make_trainer(case, str(tmp_path), ROWS, lambda *_: torch.ones(8, 1))
    batch, rows = next(iter(trainer.get_train_dataloader())), trainer.train_dataset
    del batch["seq_idx"]
    with pytest.raises(ValueError, match="without seq_idx"):
        trainer.compute_loss(trainer.model, {**batch, "weights": torch.ones(8)})
    with pytest.raises(ValueError, match="weigh gave"):
        trainer.train()
    trainer.train_dataset = rows.remove_columns("labels").add_column(
        "labels", [[-100] * len(ids) for ids in rows["input_ids"]]
    )
    with pytest.raises(ValueError, match="needs a solution in each row"):
        trainer.train()
    all_learnt = rows.remove_columns("labels").add_column("labels", rows["input_ids"])
    for trainer.train_dataset in (rows.remove_columns("answer"), all_learnt):
        with pytest.raises(ValueError, match="needs a prompt in each row, and a column answer"):
            trainer.train()


def test_text_without_the_end_of_turn_is_refused(tmp_path):
    texts = Dataset.from_dict({"prompt": ["1"], "completion": ["2"], "answer": ["2"]})
    config = SFTConfig(str(tmp_path), remove_unused_columns=False, bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="eos_token"):
        WeightedSFTTrainer("absent", config, weigh=None, train_dataset=texts)


@each_trainer
def test_evaluation_is_that_of_sft(trainer, tmp_path):
    trainer = make_trainer(Case(trainer, 8, 1), str(tmp_path), ROWS, weigh=None)
    dense = dense_oswft_loss(trainer.model, ROWS, torch.ones(8), TOKENS).item()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(dense, rel=1e-4)


def test_the_page_s_own_loop_gives_the_dense_gradient(tmp_path):
    model = make_trainer(Case(OSWFTTrainer, 8, 1), str(tmp_path), ROWS, weigh=None).model
    weights, micro_batches = torch.rand(8), []
    for part in (slice(3), slice(3, 8)):
        ids = pad([torch.tensor(row.prompt_ids + row.completion_ids) for row in ROWS[part]])
        mask = pad([torch.arange(len(row)) >= len(row.prompt_ids) for row in ROWS[part]])
        micro_batches.append({"input_ids": ids, "mask": mask, "weights": weights[part]})
    exec(LOOP, {"model": model, "micro_batches": micro_batches, "oswft_loss": oswft_loss})
    ours = [parameter.grad for parameter in model.parameters()]
    dense = torch.autograd.grad(dense_oswft_loss(model, ROWS, weights, TOKENS), model.parameters())
    torch.testing.assert_close(ours, list(dense), rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # imported before
@pytest.mark.parametrize("recipe", ["transformers_trainer", "trl_sft", "the page's script"])
def test_each_learns_what_the_scripts_learn(recipe, tiny, tmp_path, one_rank, monkeypatch):
    tokenizer = data.load_tokenizer(str(tiny / "model"))
    tokenizer.chat_template = QWEN3  # it writes an empty <think></think> into messages
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')  # not the end of turn
    shutil.copy(tiny / "heldout" / "hard.jsonl", tmp_path / "train.jsonl")
    made = []
    monkeypatch.setattr(Trainer, "train", lambda trainer, **_: made.append(trainer))
    monkeypatch.setattr(Trainer, "save_model", lambda trainer: None)
    for name in ("verify.Verifier", "recipes.trainer_run.Verifier"):
        monkeypatch.setattr(name, lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr("recipes.trainer_run.Rollout", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    if recipe == "the page's script":
        exec(SCRIPT.replace("Qwen/Qwen3-0.6B-Base", "model"), {"__name__": "__main__"})
    else:
        call = f"{recipe} --model model --data train.jsonl --output_dir run".split()
        monkeypatch.setattr(sys, "argv", [*call, *LENGTHS])
        runpy.run_module(f"recipes.{recipe}", run_name="__main__")
        stops = made[0].model.generation_config.eos_token_id
        assert set(stops) == set(data.stop_token_ids(tokenizer))
    [trainer] = made
    assert trainer.args.num_train_epochs == 1
    examples, _ = data.tokenize_examples(data.load_examples("train.jsonl"), tokenizer, 128, 48)
    for row, example in zip(trainer.train_dataset, examples, strict=True):
        learnt = [token for token in row["labels"] if token != -100]
        assert learnt == example.completion_ids.tolist(), tokenizer.decode(learnt)
        assert row["input_ids"] == [*example.prompt_ids, *example.completion_ids]


def test_the_page_s_script_runs_where_only_trl_and_math_verify_are(tiny, tmp_path):
    copy = re.search(r"```bash\n(mkdir.*?)pip install trl math-verify\n```", PAGE, re.DOTALL)[1]
    job = tmp_path / "job"
    job.mkdir()
    (tmp_path / "oswft").symlink_to(ROOT)
    subprocess.run(copy, shell=True, cwd=job, check=True)
    shutil.copy(tiny / "heldout" / "hard.jsonl", job / "train.jsonl")
    script = SCRIPT.replace("Qwen/Qwen3-0.6B-Base", str(tiny / "model"))
    script = script.replace("max_new_tokens=1024", "max_new_tokens=48")
    script = script.replace("accumulation_steps=16,", "accumulation_steps=2, max_steps=2,")
    (job / "train.py").write_text(script)
    env = {**os.environ, "PYTHONPATH": str(link_packages(tmp_path, "trl", "math-verify"))}
    assert not {"vllm", "deepspeed", "tyro"} & set(os.listdir(tmp_path))
    output = output_of("-S", "train.py", cwd=job, env=env)  # -S: no site-packages
    assert output.count("'mean_weight': '0.") == 2, output
    assert (job / "runs" / "trl" / "model.safetensors").exists()
