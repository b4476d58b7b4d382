"""recipes/transformers_trainer.py and trl_sft.py: their gradients, and runs to their end."""

import contextlib
import os
import re
import runpy
import shutil
import sys
import tempfile
from types import SimpleNamespace
from unittest.mock import ANY, Mock, call, create_autospec

import data
import models
from conftest import ROOT, launch, needs_vllm, on_ranks, slow
from demo.tiny import make_tokenizer
from dense import dense_oswft_loss, make_model, make_rows
from ranks import gather
from rollout import Rollout, RolloutArgs
from templates import QWEN3

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments

pytest.importorskip("trl", reason="needs requirements-dev.txt")

from recipes.oswft_mixin import GenerateWeights, Query
from recipes.trainer_run import RolloutWeights
from recipes.transformers_trainer import OSWFTTrainer
from recipes.trl_sft import WeightedSFTTrainer

from datasets import Dataset
from trl import SFTConfig

PAGE = (ROOT / "recipes" / "README.md").read_text()
SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[-1]
ROWS = make_rows(torch.Generator().manual_seed(0), count=8)
LENGTHS = ("--max_sequence_length", "128", "--max_completion_length", "48")

CALLS, LIMIT = 2, 1e-5  # to weigh, in a run; relative error of a gradient
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

each_trainer = pytest.mark.parametrize("trainer", [OSWFTTrainer, WeightedSFTTrainer])


class Comparison(TrainerCallback):
    """The dense gradient at every step, from the rows and weights that `weigh` handed out."""

    def __init__(self, rows: list, weights: torch.Tensor, size: int, steps_per_rollout: int):
        self.rows, self.weights = rows, weights
        self.size, self.steps_per_rollout = size, steps_per_rollout  # of a step on this rank
        self.calls, self.errors = [], []  # ids of a call to weigh; relative errors

    def weigh(self, model, queries, seed):
        ids = [int(query.answer) for query in queries]
        assert [self.rows[i].prompt_ids for i in ids] == [query.prompt_ids for query in queries]
        assert len(self.errors) == len(self.calls) * self.steps_per_rollout  # before step 1
        assert seed == 42 + len(self.errors)  # the Trainer's own seed
        self.calls.append(ids)
        return self.weights[ids]

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        call, part = divmod(state.global_step, self.steps_per_rollout)
        ids = self.calls[call][part * self.size : (part + 1) * self.size]
        if WORLD_SIZE > 1:
            ids = gather(ids)
        assert len(set(ids)) == self.size * WORLD_SIZE
        rows = [self.rows[i] for i in ids]
        model = getattr(model, "module", model)  # without DDP
        dense = type(model)(model.config).double()  # no copy: TRL replaces `forward`
        dense.load_state_dict(model.state_dict())
        tokens = sum(len(row.response_ids) for row in rows)
        dense_oswft_loss(dense, rows, self.weights[ids], tokens).backward()
        ours = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        theirs = torch.cat([p.grad.flatten() for p in dense.parameters()])
        self.errors.append(((ours - theirs).norm() / theirs.norm()).item())


def make_trainer(
    trainer: type, folder, weigh, batch=8, accumulation=1, steps_per_rollout=1, rows=ROWS, **options
) -> Trainer:
    """A trainer of a small model in `folder`; `options` replace or add settings."""
    tokenizer = make_tokenizer()
    model = make_model(pad_token_id=tokenizer.pad_token_id)  # as the Trainer would set it, too late
    trl = trainer is WeightedSFTTrainer
    if trl:
        options = {"max_length": None, "padding_free": False, **options}
    settings = {"output_dir": str(folder), "per_device_train_batch_size": batch, "use_cpu": True}
    settings |= {"gradient_accumulation_steps": accumulation, "report_to": "none", "bf16": False}
    settings |= {"max_steps": CALLS * steps_per_rollout, "save_strategy": "no"}
    settings |= {"remove_unused_columns": False, "gradient_checkpointing": False}
    settings["max_grad_norm"] = 0.0  # no gradient is clipped
    settings |= {"logging_steps": 1, "disable_tqdm": True, **options}
    columns = {
        "input_ids": [row.prompt_ids + row.response_ids for row in rows],
        "labels": [[-100] * len(row.prompt_ids) + row.response_ids for row in rows],
        "answer": [str(i) for i in range(len(rows))],
    }
    return trainer(
        model,
        (SFTConfig if trl else TrainingArguments)(**settings),
        weigh=weigh,
        steps_per_rollout=steps_per_rollout,
        train_dataset=Dataset.from_dict(columns),
        data_collator=None if trl else DataCollatorForSeq2Seq(tokenizer),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
        processing_class=tokenizer,
    )


def largest_error(
    trainer: type, batch: int, accumulation: int, steps_per_rollout: int = 1, **options
) -> float:
    """Of the gradients of a few steps, relative to the dense ones."""
    steps, size = CALLS * steps_per_rollout, batch * accumulation
    rows = make_rows(torch.Generator().manual_seed(0), size * WORLD_SIZE * steps)
    weights = torch.randint(3, (len(rows),), generator=torch.Generator().manual_seed(1)) / 2
    comparison = Comparison(rows, weights, size, steps_per_rollout)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"steps_per_rollout": steps_per_rollout, "rows": rows, **options}
        made = make_trainer(trainer, folder, comparison.weigh, batch, accumulation, **settings)
        made.add_callback(comparison)
        made.train()
    assert (len(comparison.errors), len(comparison.calls)) == (steps, CALLS), comparison.calls
    return max(comparison.errors)


@each_trainer
@pytest.mark.parametrize("split", [(8, 1), (4, 2, 2), (2, 4)])
def test_the_gradient_of_each_split_is_that_of_the_dense_loss(trainer, split):
    options = {"padding_free": True} if trainer is WeightedSFTTrainer and split == (2, 4) else {}
    assert largest_error(trainer, *split, **options) <= LIMIT


def largest_errors() -> list[float]:
    """With weights that serve two steps."""
    trl_s = largest_error(WeightedSFTTrainer, 3, 2, 2, padding_free=True)
    return [trl_s, largest_error(OSWFTTrainer, 3, 2, 2, gradient_checkpointing=True)]


@slow
def test_on_two_ranks_too_with_stale_weights_checkpointing_and_padding_free():
    errors = on_ranks(2, largest_errors)
    assert max(errors) <= LIMIT, errors


def test_vllms_answers_weigh_the_queries_of_each_rank(monkeypatch):
    """A second rank, with two queries; the first one has one, and answers the second of ours."""
    mine, other = [Query([1, 2], "a"), Query([3], "b")], Query([4], "c")
    rollout, model = create_autospec(Rollout, instance=True), torch.nn.Linear(1, 1)
    texts = [(0, "c"), (0, "c"), (0, "c"), (1, "a"), (1, ""), (1, "")]
    rollout.generate.return_value = [SimpleNamespace(query=n, text=text) for n, text in texts]
    verifier = SimpleNamespace(score=lambda texts, answers: [*map(str.__eq__, texts, answers)])
    gathered = [[1, 2], [other, *mine]]
    theirs = [(2, True), (2, False), (2, True)]
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    monkeypatch.setattr(
        "recipes.trainer_run.gather", lambda own: gathered.pop(0) if gathered else theirs + own
    )
    weights = RolloutWeights(rollout, verifier, 3, 5)(model, mine, 7)
    assert weights.tolist() == pytest.approx([2 / 3, 1 / 3])
    seeds = [data.derive_seed(7, n) for n in range(3)]
    asked = {"num_samples": 3, "max_tokens": 5, "seeds": seeds}
    prompts = [[4], [1, 2], [3]]
    calls = [call.load_parameters(ANY), call.generate(prompts, **asked), call.sleep()]
    assert rollout.method_calls == calls
    names = [name for name, _ in rollout.load_parameters.call_args.args[0]]
    assert names == ["weight", "bias"]


def test_answers_by_generate_weigh_queries_in_chunks_whatever_the_model_s_own_settings():
    tokenizer, graded = make_tokenizer(), []
    queries = [Query(tokenizer(text).input_ids, str(n)) for n, text in enumerate(("1", "2+3", "4"))]

    def generate(input_ids, attention_mask, **settings):
        ids = input_ids.repeat_interleave(2, dim=0)  # Of each query one answer repeats the end.
        graded.append(settings)
        return torch.cat([ids, ids[:, -1:] + torch.tensor([[0], [1]] * len(input_ids))], dim=1)

    def score(texts, references):
        graded.append((texts, references))
        return [True, False, False, False, True, True]

    model = Mock(device="cpu", **{"generate.side_effect": generate})
    weigh = GenerateWeights(tokenizer, SimpleNamespace(score=score), 2, 9, chunk_size=2)
    assert weigh(model, queries, seed=5).tolist() == [0.5, 1, 0]
    assert torch.initial_seed() == 5 and model.method_calls[0] == call.eval()
    settings = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 9}
    settings |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    texts = [text for digit in (1, 3, 4) for text in (f"{digit}", f"{digit + 1}")]
    assert graded == [settings, settings, (texts, [*"001122"])]


@slow
@needs_vllm
def test_the_pass_rate_rises_with_vllm_on_two_ranks(tiny, tmp_path):
    rows = [row for _, row in data.read_rows(str(tiny / "heldout" / "hard.jsonl"))]
    data.write_rows(rows[:48], tmp_path / "train.jsonl")  # the same questions, again and again
    options = ("--model", tiny / "model", "--data", tmp_path / "train.jsonl", *LENGTHS)
    options += ("--output_dir", tmp_path, "--learning_rate", "1e-3", "--num_train_epochs", "4")
    options += ("--gradient_accumulation_steps", "1", "--logging_steps", "1", "--bf16", "False")
    log = launch("recipes/trl_sft.py", *options, ranks=2)
    weights = [float(weight) for weight in re.findall(r"'mean_weight': '([\d.]+)'", log)]
    assert len(weights) == 12 and sum(weights[-3:]) / 3 < sum(weights[:3]) / 3 - 0.15, weights


@each_trainer
def test_settings_that_would_lose_a_weight_are_refused(trainer, tmp_path):
    wrong = {"loss_type": "dft", "max_length": 64, "label_smoothing_factor": 0.1}
    for name, needed in trainer.needs.items():
        setting = {name: wrong.get(name, not needed)}
        with pytest.raises(ValueError, match=f"OSW-FT needs {name}="):
            make_trainer(trainer, tmp_path, weigh=None, **setting)


def test_rows_that_lack_a_part_and_weights_of_another_shape_are_refused(tmp_path):
    options = {"weigh": lambda *_: torch.ones(8, 1), "padding_free": True}
    trainer = make_trainer(WeightedSFTTrainer, tmp_path, **options)
    batch, rows = next(iter(trainer.get_train_dataloader())), trainer.train_dataset
    del batch["seq_idx"]
    with pytest.raises(ValueError, match="without seq_idx"):
        trainer.compute_loss(trainer.model, {**batch, "weights": torch.ones(8)})
    with pytest.raises(ValueError, match="weigh gave"):
        trainer.train()
    ids, unlabelled = rows["input_ids"], rows.remove_columns("labels")
    unlearnt = unlabelled.add_column("labels", [[-100] * len(row) for row in ids])
    all_learnt = unlabelled.add_column("labels", ids)
    for trainer.train_dataset in (unlearnt, all_learnt, rows.remove_columns("answer")):
        with pytest.raises(ValueError, match=r"OSW-FT needs a (solution|prompt) in each row"):
            trainer.train()


def test_text_without_the_end_of_turn_is_refused(tmp_path):
    texts = Dataset.from_dict({"prompt": ["1"], "completion": ["2"], "answer": ["2"]})
    config = SFTConfig(str(tmp_path), remove_unused_columns=False, bf16=False, use_cpu=True)
    with pytest.raises(ValueError, match="eos_token"):
        WeightedSFTTrainer("absent", config, weigh=None, train_dataset=texts)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # imported before
@pytest.mark.parametrize("recipe", ["transformers_trainer", "trl_sft", "the page's script"])
def test_each_learns_what_the_scripts_learn(recipe, tiny, tmp_path, process_group, monkeypatch):
    tokenizer = models.load_tokenizer(str(tiny / "model"))
    tokenizer.chat_template = QWEN3  # it writes an empty <think></think> into messages
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer.save_pretrained(model)
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')  # not the end of turn
    shutil.copy(tiny / "heldout" / "hard.jsonl", tmp_path / "train.jsonl")
    made, sampled = [], []
    monkeypatch.setattr(Trainer, "train", lambda trainer, **_: made.append(trainer))
    monkeypatch.setattr(Trainer, "save_model", lambda trainer: None)
    for name in ("verify.Verifier", "recipes.trainer_run.Verifier"):
        monkeypatch.setattr(name, lambda *_, **__: contextlib.nullcontext())
    rollout = lambda *told: sampled.append(told[2])  # noqa: E731
    monkeypatch.setattr("recipes.trainer_run.Rollout", rollout)
    monkeypatch.chdir(tmp_path)
    if recipe == "the page's script":
        exec(SCRIPT.replace("Qwen/Qwen3-0.6B-Base", "model"), {"__name__": "__main__"})
    else:
        call = f"{recipe} --model model --data train.jsonl --output_dir run".split()
        monkeypatch.setattr(sys, "argv", [*call, *LENGTHS])
        runpy.run_module(f"recipes.{recipe}", run_name="__main__")
        stops = made[0].model.generation_config.eos_token_id
        assert set(stops) == set(models.stop_token_ids(tokenizer))
        precision = {"trl_sft": "bf16", "transformers_trainer": "fp32"}[recipe]  # of their own
        options = {"vllm_memory": 0.5, "vllm_sleep": True, "precision": precision}
        assert sampled == [RolloutArgs(max_length=128, **options)]
        assert made[0].weigh == RolloutWeights(None, None, 2, 48)
    [trainer] = made
    assert trainer.args.num_train_epochs == 1
    examples, _ = models.tokenize_examples(data.load_examples("train.jsonl"), tokenizer, 128, 48)
    for row, example in zip(trainer.train_dataset, examples, strict=True):
        learnt = [token for token in row["labels"] if token != -100]
        assert learnt == example.response_ids.tolist(), tokenizer.decode(learnt)
        assert row["input_ids"] == [*example.prompt_ids, *example.response_ids]
