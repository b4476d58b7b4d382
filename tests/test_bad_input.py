"""What is refused, in one message, and nothing is written or lost."""

import fcntl
import json
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

import engine
import run
import train_grpo
import train_oswft
import train_sft
from conftest import SCRIPTS, SETTING, TINY_LENGTHS, run_alone, start
from data import (
    Example,
    InputError,
    TokenizedExample,
    hash_examples,
    load_examples,
    load_tokenizer,
    tokenize_examples,
    write_rows,
)
from run import (
    Run,
    checkpoints,
    claim_output_dir,
    hash_reward,
    load_training_data,
    settings,
    write_args,
)
from train_oswft import Args

ARGS = dict(zip(SCRIPTS, (train_sft.Args, train_oswft.Args, train_grpo.Args), strict=True))


@pytest.fixture(scope="module")
def bad_inputs(tiny, tmp_path_factory):
    """Every case is run at once, two at a time: {name: (process, its output folder)}."""
    folder = tmp_path_factory.mktemp("bad")
    rows = (tiny / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "not_json.jsonl").write_text(rows[0] + "{half\n")
    (folder / "few.jsonl").write_text("".join(rows[:5]))
    (folder / "own.py").write_text("def fails(completion, example):\n    return 1 / 0\n")
    write_rows([], folder / "used" / "metrics.jsonl")
    cases = {
        ("train_sft.py", "few"): ["--data", folder / "few.jsonl", "--max_length", "60"],
        ("train_sft.py", "used folder"): ["--output_dir", folder / "used"],
        ("train_sft.py", "not json"): ["--data", folder / "not_json.jsonl"],
        ("train_sft.py", "no such model"): ["--model", folder / "absent"],
        ("train_sft.py", "model length"): ["--max_length", "513"],
        ("train_sft.py", "mistyped"): ["--learning_rat", "1"],
        ("train_sft.py", "no weight"): ["--weight_column", "weight"],
        ("train_oswft.py", "no reward"): ["--reward", folder / "absent.py:f"],
        ("train_oswft.py", "reward fails"): ["--reward", f"{folder}/own.py:fails"],
    }

    def run(case: tuple[str, str]):
        script, output = case[0], folder / "-".join(case)
        good = ["--model", tiny / "model", "--data", tiny / "train.jsonl", *TINY_LENGTHS]
        good += [*SETTING[script], "--output_dir", output]
        return case, (run_alone(*good, *cases[case], script=script), output)

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(run, cases))


@pytest.mark.parametrize(
    ("script", "case", "message"),
    [
        ("train_sft.py", "few", "few.jsonl"),
        ("train_sft.py", "used folder", "used"),
        ("train_sft.py", "not json", "not_json.jsonl:2: "),
        ("train_sft.py", "no such model", "absent"),
        ("train_sft.py", "no weight", "train.jsonl:1: "),
        ("train_sft.py", "model length", "--max_length 513"),
        ("train_oswft.py", "no reward", "absent.py"),
        ("train_oswft.py", "reward fails", "own.py"),
    ],
)
def test_bad_input_is_refused_once_and_nothing_is_written(bad_inputs, script, case, message):
    process, output = bad_inputs[script, case]
    assert process.returncode == 1
    _, *errors = re.split("^error: ", process.stderr, flags=re.MULTILINE)
    assert len(errors) == 1 and message in errors[0], process.stderr[-2000:]
    assert "reward" in case or "Traceback" not in process.stderr
    assert case == "reward fails" or not any(output.glob("[!.]*"))


def test_a_mistyped_argument_is_explained(bad_inputs):
    process, output = bad_inputs["train_sft.py", "mistyped"]
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "--learning_rat" in process.stdout + process.stderr and not output.exists()


def test_a_run_works_without_git_utf_8_and_with_two_numbers_of_threads(tiny, tmp_path):
    output = tmp_path / "résumé"
    call = ["--model", tiny / "model", "--data", tiny / "train.jsonl", *TINY_LENGTHS]
    env = {"PATH": "", "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1,1"}
    done = run_alone(
        *(*call, "--output_dir", output, "--max_steps", "1", "--train_batch_size", "4"),
        script="train_sft.py",
        env={**os.environ, **env},
    )
    assert done.returncode == 0 and "r?sum?" in done.stdout, done.stderr
    assert run.read_args(output)["git_commit"] is None
    done = run_alone("--help", script="train_sft.py", env={**os.environ, **env})
    assert done.returncode == 0 and "--learning_rate" in done.stdout


def test_half_a_launchers_environment_is_named(tmp_path):
    env = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    done = run_alone("--model", "m", "--data", "d", script="train_sft.py", env=env)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in done.stderr


def test_an_output_folder_that_cannot_be_made_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    done = run_alone(*("--model", "absent", "--data", "d", "--output_dir", tmp_path / "file/run"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "file/run" in done.stderr and "absent" not in done.stderr


def test_sft_has_no_rollouts_that_its_rows_must_leave_room_for(tiny):
    args = train_sft.Args(model=str(tiny / "model"), data=str(tiny / "train.jsonl"), max_length=256)
    args.check()
    examples = load_examples(args.data)
    tokenizer = load_tokenizer(args.model)
    kept, _ = tokenize_examples(examples, tokenizer, args.max_length, args.max_completion_length)
    assert len(kept) == len(examples)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_rollouts": 0},
        {"save_every": -1},
        {"train_batch_size": 7},  # does not divide the rollout batch
        {"train_batch_size": 64, "max_steps": 5},  # ends within a batch
        {"vllm_tensor_parallel": 2},  # of 3 ranks
        {"max_completion_length": 5120},  # leaves no room for a prompt
        {"learning_rate": 0.0},
        {"max_grad_norm": -1.0},
        {"temperature": 0.0},
    ],
)
def test_arguments_that_cannot_work_are_refused(bad, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "3")
    Args(model="m", data="d").check()
    with pytest.raises(InputError, match=f"--{[*bad][-1]}"):
        Args(model="m", data="d", **bad).check()


def test_vllms_batch_invariant_mode_is_not_for_training(monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(InputError, match="VLLM_BATCH_INVARIANT"):
        Args(model="m", data="d").check()
    train_sft.Args(model="m", data="d").check()  # it samples nothing


def test_where_memory_was_too_small_the_flags_that_save_it_are_named(monkeypatch, capsys):
    def main(args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sys, "argv", ["train_oswft.py", "--model", "m", "--data", "d"])
    monkeypatch.setattr(run, "fail", sys.exit)
    with pytest.raises(SystemExit, match=r"(?s)CUDA out of memory.*--gradient_checkpointing"):
        run.run_script(main, Args, "")


def test_where_memory_was_accessed_illegally_no_flag_is_named(monkeypatch, capsys):
    def main(args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sys, "argv", ["train_oswft.py", "--model", "m", "--data", "d"])
    monkeypatch.setattr(run, "fail", sys.exit)
    with pytest.raises(SystemExit) as ended:
        run.run_script(main, Args, "")
    assert "illegal memory access" in str(ended.value) and "--cpu_offload" not in str(ended.value)


def test_a_gpu_whose_driver_is_too_old_is_named_and_no_cpu_trains(tmp_path, monkeypatch):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  570.86.15  Thu\nGCC 12\n")
    monkeypatch.setattr(engine, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(InputError, match=r"cannot use the GPU with NVIDIA UNIX x86_64  570\.86"):
        engine.refuse_unusable_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    engine.refuse_unusable_gpu()


def test_vllm_gets_more_memory_where_it_sleeps():
    shares = [Args(model="m", data="d", vllm_sleep=sleep).vllm_memory for sleep in (False, True)]
    assert shares == [0.3, 0.5]
    assert Args(model="m", data="d", vllm_memory=0.4, vllm_sleep=True).vllm_memory == 0.4


# ---- resume


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_folder_of_another_script_is_refused(script, tmp_path, monkeypatch):
    for other in (*SCRIPTS, "absent"):
        folder = tmp_path / other
        monkeypatch.setattr(sys, "argv", [script, "--resume", str(folder)])
        if other != "absent":
            begun = ARGS[other](model="m", data="d", learning_rate=0.5)
            write_args(folder, args=settings(begun))
        if other == script:
            args = run.saved_args(ARGS[script])["default"]
            assert args.learning_rate == 0.5 and args.output_dir == str(folder)
        else:
            with pytest.raises(InputError, match=other):
                run.saved_args(ARGS[script])


def test_a_run_continues_from_its_newest_checkpoint_or_else_from_its_first_step(
    one_rank, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("LOCAL_SIZE", "1")
    args = Args(model="m", data="d", train_batch_size=64)
    args.output_dir = args.resume = str(tmp_path)
    write_args(tmp_path, args={**settings(args), "seed": 3}, world_size=2)
    assert claim_output_dir(args) is None
    assert "without a checkpoint: resumed; changed: seed 3 -> 0" in capsys.readouterr().err
    (tmp_path / "checkpoint-000003").mkdir()
    with pytest.raises(InputError, match="within a batch"):
        claim_output_dir(args)
    (tmp_path / "checkpoint-000004").mkdir()
    assert claim_output_dir(args) == tmp_path / "checkpoint-000004"
    assert "resumed; changed: seed 3 -> 0, world_size 2 -> 1\n" in capsys.readouterr().err


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_belongs_to_one_process_at_a_time(resume, one_rank, tmp_path):
    args = train_sft.Args(model="m", data="d", output_dir=str(tmp_path))
    args.resume = args.output_dir if resume else None
    write_args(tmp_path, args=settings(args), world_size=1)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            claim_output_dir(args)
    args.resume = args.output_dir
    assert claim_output_dir(args) is None


def test_a_reward_file_that_has_changed_is_refused(one_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "1")
    (tmp_path / "own.py").write_text("def f(completion, example): return 1")
    args = Args(model="m", data="d", reward=f"{tmp_path}/own.py:f")
    args.output_dir = args.resume = str(tmp_path / "run")
    write_args(tmp_path / "run", args=settings(args), world_size=1, reward_hash=hash_reward(args))
    claim_output_dir(args)
    (tmp_path / "own.py").write_text("def f(completion, example): return 0")
    with pytest.raises(InputError, match="is not what it was"):
        claim_output_dir(args)
    args.reward = f"{tmp_path}/own.py:g"  # another one, and the run says so
    claim_output_dir(args)


def test_other_data_is_refused_and_the_same_data_may_lie_elsewhere(one_rank, tiny, tmp_path):
    rows = [json.loads(line) for line in (tiny / "train.jsonl").open()]
    args = train_sft.Args(model=str(tiny / "model"), data=str(tiny / "train.jsonl"))
    args.max_length, args.max_completion_length = 128, 48
    args.output_dir = args.resume = str(tmp_path / "run")
    write_args(tmp_path / "run", data_hash=hash_examples(load_training_data(args)[1]))
    args.data = str(tmp_path / "data.jsonl")
    write_rows(rows, args.data)
    load_training_data(args)
    rows[7]["solution"] += "."
    write_rows(rows, args.data)
    with pytest.raises(InputError, match="is not the data"):
        load_training_data(args)


# ---- while it runs


class StandInEngine:
    """Writes no model; its disk may be full."""

    disk_is_full = False
    device = torch.device("cpu")
    num_steps = 0

    def save_state(self, folder):
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "00000.safetensors").touch()
        if self.disk_is_full:
            raise SafetensorError("no space left on device")

    def save_model(self, tokenizer, folder):
        folder.mkdir(parents=True, exist_ok=True)


@pytest.fixture
def make_run(one_rank, tmp_path):
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in signals}

    def make_run(**values) -> Run:
        args = train_sft.Args(model="m", data="d", output_dir=str(tmp_path), **values)
        ids, example = np.zeros(2, np.int32), Example("1", "q", "s", "a", "")
        return Run(args, StandInEngine(), None, [TokenizedExample("1", ids, ids, example)] * 256)

    yield make_run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(make_run, tmp_path):
    with make_run(keep_checkpoints=1) as run:
        run.step = 1
        run.save_checkpoint()
        run.step, run.engine.disk_is_full = 2, True
        with pytest.raises(OSError, match="no space left on device"):
            run.save_checkpoint()
        assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-000001"]
        run.step, run.engine.disk_is_full = 3, False
        run.save_checkpoint()
        assert [path.name for path in tmp_path.glob("*-*")] == ["checkpoint-000003"]


def test_after_a_million_steps_the_newest_checkpoints_are_kept(make_run, tmp_path):
    (tmp_path / "checkpoint-best").mkdir()  # a copy of the user's own
    with make_run() as run:
        for run.step in (999_998, 999_999, 1_000_000, 1_000_001):
            run.save_checkpoint()
    assert [*checkpoints(tmp_path)] == [1_000_000, 1_000_001]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_asks_a_run_to_end_is_not_the_end_of_the_step(make_run, number):
    with make_run() as run:
        signal.raise_signal(number)
        assert run.should_stop()


def test_nohup_stays_in_force(make_run):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with make_run() as run:
        signal.raise_signal(signal.SIGHUP)
        assert not run.should_stop()


def test_a_run_that_fails_closes_its_files_and_saves_nothing(make_run, tmp_path):
    run = make_run()
    with pytest.raises(FloatingPointError), run:
        assert not run.should_stop()
        signal.raise_signal(signal.SIGINT)
        assert run.should_stop()
        raise FloatingPointError
    assert run.metrics.closed and not list(tmp_path.glob("checkpoint-*"))


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoint(tiny, tmp_path):
    process = start(
        "train_oswft.py",
        *("--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", tmp_path),
        *(*TINY_LENGTHS, *SETTING["train_oswft.py"], "--train_batch_size", "24"),
        *("--learning_rate", "1e30", "--save_every", "1"),
    )
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 1
    errors = re.findall(r"error: step 2: the (?:loss|gradient) is (?:nan|inf)$", output, re.M)
    assert len(errors) == 1, output[-3000:]
    assert [*checkpoints(tmp_path)] == [1] and not (tmp_path / "final").exists()
