"""What gets refused, and how: one line that says what is wrong, and nothing written or lost."""

import json
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import train_grpo
import train_oswft
import train_sft
from conftest import SCRIPTS, SETTING, TINY_LENGTHS, run_alone, start
from data import InputError, Trajectory, write_rows
from engine import Engine
from loggers import OPEN
from run import (
    Run,
    checkpoints,
    claim_output_dir,
    hashes,
    is_out_of_memory,
    load_training_data,
    memory_advice,
    model_version,
)
from train_oswft import Args, update

ARGS = dict(zip(SCRIPTS, (train_sft.Args, train_oswft.Args, train_grpo.Args), strict=True))


@pytest.fixture(scope="module")
def bad_inputs(tiny, tmp_path_factory):
    """Every case is run at once, two at a time: {name: (process, its output folder)}."""
    folder = tmp_path_factory.mktemp("bad")
    rows = (tiny / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "not_json.jsonl").write_text(rows[0] + "{half\n")
    (folder / "few.jsonl").write_text("".join(rows[:5]))
    (folder / "own.py").write_text("def fails(completion, example):\n    return 1 / 0\n")
    good = ["--model", tiny / "model", "--data", tiny / "train.jsonl", *TINY_LENGTHS]
    cases = {}
    for script in SCRIPTS:
        other = folder / f"other {script}"
        other.mkdir()
        (other / "metrics.jsonl").write_text("")
        cases |= {
            (script, "few"): ["--data", folder / "few.jsonl", "--max_length", "60"],
            (script, "another run"): ["--output_dir", other],
        }
    cases |= {
        ("train_sft.py", "not json"): ["--data", folder / "not_json.jsonl"],
        ("train_sft.py", "no such model"): ["--model", folder / "absent"],
        ("train_sft.py", "model length"): ["--max_length", "513"],
        ("train_sft.py", "unknown"): ["--learning_rat", "1"],
        ("train_sft.py", "no weight"): ["--weight_column", "weight"],
        ("train_oswft.py", "no reward"): ["--reward", folder / "absent.py:f"],
        ("train_oswft.py", "reward fails"): ["--reward", f"{folder}/own.py:fails"],
    }

    def run(case: tuple[str, str]):
        output = folder / (f"other {case[0]}" if "--output_dir" in cases[case] else "-".join(case))
        arguments = [*good, *SETTING[case[0]], "--output_dir", output, *cases[case]]
        return case, (run_alone(*arguments, script=case[0]), output)

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(run, cases))


@pytest.mark.parametrize(
    ("script", "case", "message"),
    [
        *((script, "few", "examples are left") for script in SCRIPTS),
        *((script, "another run", "is not empty: choose another") for script in SCRIPTS),
        ("train_sft.py", "not json", "not_json.jsonl:2: not JSON"),
        ("train_sft.py", "no such model", "no tokenizer there"),
        (
            "train_sft.py",
            "no weight",
            "train.jsonl:1: field 'weight' must be a number of 0 or more",
        ),
        (
            "train_oswft.py",
            "no reward",
            "absent.py:f: expected file.py:function, and there is no file",
        ),
        ("train_oswft.py", "reward fails", "own.py:fails, row '"),
        ("train_sft.py", "model length", "--max_length 513 is beyond the model's limit of 512"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_is_written(bad_inputs, script, case, message):
    process, output = bad_inputs[script, case]
    assert process.returncode == 1
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], process.stderr[-2000:]
    assert "Traceback" not in process.stderr
    assert case in ("another run", "reward fails") or not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rollouts": 0}, "--num_rollouts must be at least 1, got 0"),
        ({"save_every": -1}, "--save_every must be at least 1, got -1"),
        ({"train_batch_size": 7}, "--train_batch_size 7 does not divide --rollout_batch_size 128"),
        (
            {"train_batch_size": 64, "max_steps": 5},
            "--max_steps 5 ends within a batch: 64 queries a step",
        ),
        (
            {"vllm_tensor_parallel": 2},
            "--vllm_tensor_parallel 2 does not divide the 3 ranks",
        ),
        ({"max_completion_length": 5120}, "--max_completion_length must leave room for a prompt"),
        (
            {"attn": "flash_attention_2", "precision": "fp32"},
            "--attn flash_attention_2 needs --prec",
        ),
        ({"attn": "kernels-community/flash-attn3"}, "/flash-attn3 needs a GPU"),
        ({"learning_rate": 0.0}, "--learning_rate must be above 0, got 0.0"),
        ({"max_grad_norm": -1.0}, "--max_grad_norm must be above 0, got -1.0"),
        ({"temperature": 0.0}, "--temperature must be above 0, got 0.0"),
        ({"vllm_memory": 1.5}, "--vllm_memory is a share between 0 and 1, got 1.5"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    Args(model="m", data="d").check(world_size=3)
    with pytest.raises(InputError, match=message):
        Args(model="m", data="d", **arguments).check(world_size=3)


def test_vllms_batch_invariant_mode_is_not_for_training(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(InputError, match="VLLM_BATCH_INVARIANT is for evaluate"):
        Args(model="m", data="d").check(world_size=1)
    train_sft.Args(model="m", data="d").check(world_size=1)  # it samples nothing


def test_a_mistyped_argument_is_explained(bad_inputs):
    process, output = bad_inputs["train_sft.py", "unknown"]
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "--learning_rat" in process.stdout + process.stderr and not output.exists()


@pytest.mark.parametrize("script", SCRIPTS)
def test_resuming_with_other_arguments_lists_them(one_rank, script, tmp_path, capsys):
    args = ARGS[script](model="m", data="d", output_dir=str(tmp_path), resume=True)
    with pytest.raises(InputError, match="there is no checkpoint to resume from"):
        claim_output_dir(args)
    state = tmp_path / "checkpoint-000002" / "state"
    state.mkdir(parents=True)
    (tmp_path / "args.json").write_text('{"args": {}}')
    with pytest.raises(InputError, match="its state is of an older version"):
        claim_output_dir(args)
    (state / "00000.safetensors").touch()
    before = {**asdict(args), "world_size": 2, "learning_rate": 0.5, "seed": 3, "max_steps": 4}
    (tmp_path / "args.json").write_text(json.dumps({"args": before}))
    with pytest.raises(InputError) as error:
        claim_output_dir(args)
    message = str(error.value)
    assert f"learning_rate 0.5 -> {args.learning_rate}" in message and "seed 3 -> 0" in message
    assert "max_steps" not in message  # a longer run is the same run
    assert "world_size" not in message  # and so is one on other machines
    (tmp_path / "args.json").write_text(json.dumps({"args": {**asdict(args), "world_size": 2}}))
    assert claim_output_dir(args) == tmp_path / "checkpoint-000002"
    assert "note: world_size 2 -> 1: the same run up to rounding" in capsys.readouterr().err


def test_resuming_with_other_data_or_another_model_is_refused(one_rank, tiny, tmp_path):
    """By what they hold: where they lie may change."""
    data, model = tmp_path / "train.jsonl", tmp_path / "model"
    shutil.copy(tiny / "train.jsonl", data)
    shutil.copytree(tiny / "model", model)
    args = train_sft.Args(model=str(model), data=str(data), output_dir=str(tmp_path), resume=True)
    args.max_length, args.max_completion_length = 128, 48
    begun = replace(args, model=str(tiny / "model"), data=str(tiny / "train.jsonl"))
    inputs = hashes(begun, load_training_data(begun, 128)[1])
    (tmp_path / "args.json").write_text(json.dumps({"args": asdict(begun), "hashes": inputs}))
    load_training_data(args, 128)

    rows = [json.loads(line) for line in data.open()]
    rows[7]["solution"] += "."
    write_rows(rows, data)
    with pytest.raises(InputError, match=rf"cannot resume: {data} is not the data that the run"):
        load_training_data(args, 128)
    shutil.copy(tiny / "train.jsonl", data)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    model_version.cache_clear()
    with pytest.raises(InputError, match=rf"cannot resume: {model} is not the model that the run"):
        load_training_data(args, 128)


@pytest.mark.parametrize(
    ("error", "said", "flags"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.)",
            "--max_tokens_per_micro_batch (now 8192), --gradient_checkpointing (now False)",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            "out of memory ([enforce fail]",
            "--cpu_offload (now False), --vllm_memory (now 0.3)",
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "out of memory (CUDA error",
            "--vllm_sleep (now False)",
        ),
        (
            MemoryError("vLLM: No available memory for the cache blocks."),
            "out of memory (vLLM: No available memory for the cache blocks.)",
            "flags that help: --vllm_memory (now 0.3), --vllm_tensor_parallel (now 1)",
        ),
    ],
)
def test_out_of_memory_names_the_flags_and_the_checkpoint(tmp_path, error, said, flags):
    args = Args(model="m", data="d", output_dir=str(tmp_path))
    assert is_out_of_memory(error) and not is_out_of_memory(RuntimeError("a bug"))
    message = memory_advice(args, error)
    assert said in message and flags in message and "\n" not in message
    assert message.endswith("there is no checkpoint to go on from")
    for step in (50, 999_950, 1_000_000):
        (tmp_path / f"checkpoint-{step:06d}" / "state").mkdir(parents=True)
    newest = f"go on from {tmp_path}/checkpoint-1000000 with --resume"
    assert memory_advice(args, error).endswith(newest)


class OneRowIsDamaged:
    """Stands in for DeepSpeed's engine: the row that reads token 9 has no finite loss."""

    def __call__(self, input_ids, targets, positions, temperature):
        logprobs = torch.zeros(input_ids.shape)
        logprobs[(input_ids == 9).any(dim=1)] = float("nan")
        return logprobs.flatten()[positions].requires_grad_()

    def set_gradient_accumulation_boundary(self, last):
        pass

    def backward(self, loss, scale_wrt_gas):
        pass

    def step(self):
        raise AssertionError("the weights were updated")


def test_a_loss_that_is_not_finite_names_step_and_rows_and_takes_no_step(one_rank):
    engine = object.__new__(Engine)
    engine.engine, engine.device, engine.num_steps = OneRowIsDamaged(), torch.device("cpu"), 11
    engine._begin_step()
    rows = [Trajectory(f"row-{token}", [1, token], [2, 3]) for token in (7, 8, 9)]
    with pytest.raises(FloatingPointError, match=r"step 12: loss is nan, rows \['row-9'\]"):
        update(engine, rows, torch.ones(3), Args(model="m", data="d"))


@pytest.fixture
def stand_in(monkeypatch):
    """For a run on a stand-in engine: there is neither a model nor data to hash."""
    monkeypatch.setattr("run.hashes", lambda args, examples: {})


class StandInEngine:
    """Writes no model; its disk may be full."""

    disk_is_full = False
    device = torch.device("cpu")

    def save_state(self, folder):
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "00000.safetensors").touch()
        if self.disk_is_full:
            raise SafetensorError("no space left on device\nmore")

    def save_model(self, tokenizer, folder):
        folder.mkdir(parents=True, exist_ok=True)


def make_run(args: Args) -> Run:
    return Run(args, StandInEngine(), None, range(256), batch_size=128)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(one_rank, stand_in, tmp_path):
    with make_run(Args(model="m", data="d", output_dir=str(tmp_path), keep_checkpoints=1)) as run:
        run.step = 1
        run.save_checkpoint()
        run.step, run.engine.disk_is_full = 2, True
        message = r"step 2: .* could not be written: no space left on device$"
        with pytest.raises(OSError, match=message):
            run.save_checkpoint()
        assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-000001"]
        run.step, run.engine.disk_is_full = 3, False
        run.save_checkpoint()
        assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-000003"]


def test_after_a_million_steps_the_newest_checkpoints_are_kept_and_resumed(
    one_rank, stand_in, tmp_path
):
    (tmp_path / "checkpoint-best").mkdir()  # a copy of the user's own
    args = Args(model="m", data="d", output_dir=str(tmp_path))
    with make_run(args) as run:
        for run.step in (999_998, 999_999, 1_000_000, 1_000_001):
            run.save_checkpoint()
    kept = [path.name for path in checkpoints(tmp_path).values()]
    assert kept == ["checkpoint-1000000", "checkpoint-1000001"]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    args.resume = True
    assert claim_output_dir(args) == tmp_path / kept[-1]


def test_a_run_is_whole_from_its_construction_and_gives_the_signals_back(
    one_rank, stand_in, tmp_path
):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run = make_run(Args(model="m", data="d", output_dir=str(tmp_path)))
    with pytest.raises(FloatingPointError), run:
        assert not run.should_stop()
        signal.raise_signal(signal.SIGINT)
        assert run.should_stop() and not run.on_rollout(0, 1)
        raise FloatingPointError
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run.metrics.closed and not list(tmp_path.glob("checkpoint-*"))


def test_a_logger_that_is_not_installed_is_refused(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr("loggers.find_spec", lambda name: None)
    assert claim_output_dir(Args(model="m", data="d", output_dir=str(tmp_path / "run"))) is None
    for name in ("wandb", "trackio", "tensorboard"):
        args = Args(model="m", data="d", output_dir=str(tmp_path / "run"), logger=name)
        with pytest.raises(InputError, match=f"pip install {name}$"):
            claim_output_dir(args)


def test_the_logger_gets_the_metrics_and_is_told_how_the_run_ends(
    one_rank, stand_in, tmp_path, monkeypatch
):
    said = []

    def open_logger(folder, run_id, config):
        said.append((run_id, config["seed"]))
        return 0, lambda values, step: said.append((step, values["loss"])), said.append

    monkeypatch.setitem(OPEN, "wandb", open_logger)
    args = Args(model="m", data="d", output_dir=str(tmp_path), logger="wandb", seed=7)
    with make_run(args) as run:
        run.lap("train_s")
        run.log({"loss": 0.5, "train_tokens": 10})
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["step"], row["epoch"], row["loss"]) == (1, 0.5, 0.5)
    assert row["tokens_per_second"] == 10 / row["train_s"]
    with pytest.raises(FloatingPointError), make_run(args):
        raise FloatingPointError
    run_id = json.loads((tmp_path / "args.json").read_text())["run_id"]
    assert said == [(run_id, 7), (1, 0.5), False, (run_id, 7), True]


def test_a_logger_that_fails_ends_no_run(one_rank, stand_in, tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise ConnectionResetError("Connection lost")

    monkeypatch.setitem(OPEN, "wandb", lambda folder, run_id, config: (0, fail, fail))
    args = Args(model="m", data="d", output_dir=str(tmp_path), logger="wandb")
    with make_run(args) as run:
        for _ in range(2):
            run.lap("train_s")
            run.log({"loss": 0.5, "train_tokens": 10})
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-000002"]
    assert capsys.readouterr().err.count("the logger failed, the run goes on: Connection lost") == 2


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoint(tiny, tmp_path):
    run = tmp_path / "run"
    process = start(
        "train_oswft.py",
        *("--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", run),
        *(*TINY_LENGTHS, *SETTING["train_oswft.py"], "--train_batch_size", "24"),
        *("--learning_rate", "1e30", "--save_every", "1"),
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode != 0
    errors = re.findall(r"error: step 2: (?:loss|gradient) is (?:nan|inf), rows \['", output)
    assert len(errors) == 1, output[-3000:]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000001"]
    assert not (run / "final").exists()
