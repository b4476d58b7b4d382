"""What is refused, in one message, and nothing is written or lost."""

import fcntl
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import evaluate
import launch
import run
import train_grpo
import train_oswft
import train_sft
from conftest import SCRIPTS, edit_json
from data import Example, InputError, Query, hash_examples, write_rows
from launch import claim_or_resume, load_training_data
from models import load_tokenizer
from run import Run, checkpoints, write_args
from train_oswft import Args
from verify import RewardError

import numpy as np
import pytest
from safetensors import SafetensorError

ARGS = dict(zip(SCRIPTS, (train_sft.Args, train_oswft.Args, train_grpo.Args), strict=True))


@pytest.fixture
def sft_args(tiny, tmp_path) -> train_sft.Args:
    """Of a run of SFT with the tiny model and its data."""
    paths = {"model": str(tiny / "model"), "data": str(tiny / "train.jsonl")}
    lengths = {"max_length": 128, "max_completion_length": 48}
    return train_sft.Args(**paths, **lengths, output_dir=str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"model": "/absent"}, "/absent"),
        ({"data": "few.jsonl"}, "few.jsonl: 5 examples do not fill one batch"),
        ({"max_length": 8}, "0 examples"),
        ({"output_dir": "used"}, "used"),
        ({"output_dir": "few.jsonl/run"}, "few.jsonl/run"),
        ({"max_length": 513}, "512 tokens, not 513: lower --max_completion_length"),
        ({"weight_column": "weight"}, "train.jsonl:1: "),
        ({"weight_column": "nothing", "data": "zeros.jsonl"}, "zeros.jsonl: every 'nothing'"),
    ],
)
def test_what_a_run_cannot_use_is_named(bad, named, sft_args, tmp_path, one_rank, monkeypatch):
    monkeypatch.setattr(train_sft, "init_training", lambda: None)
    monkeypatch.chdir(tmp_path)
    rows = Path(sft_args.data).read_text().splitlines(keepends=True)
    Path("few.jsonl").write_text("".join(rows[:5]))
    write_rows([json.loads(row) | {"nothing": 0} for row in rows], "zeros.jsonl")
    write_rows([], "used/metrics.jsonl")
    with pytest.raises((InputError, OSError), match=re.escape(named)):
        train_sft.main(replace(sft_args, **bad))
    assert not any(Path("run").glob("[!.]*")) and len([*Path("used").glob("[!.]*")]) == 1


@pytest.mark.parametrize(
    ("args_class", "bad"),
    [
        (Args, {"train_batch_size": 7}),  # does not divide the rollout batch
        (Args, {"learning_rate": 0.0}),
        (Args, {"resume": "run", "output_dir": "other"}),
        (Args, {"max_length": 128, "max_completion_length": 128}),
        (train_grpo.Args, {"num_rollouts": 1}),
        (train_grpo.Args, {"clip_low": 1.1}),
        (train_grpo.Args, {"temperature": 0.0}),
    ],
)
def test_arguments_that_cannot_work_are_refused(args_class, bad, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "1")
    args_class(model="m", data="d").check()
    with pytest.raises(InputError, match=f"--{[*bad][-1]}"):
        args_class(model="m", data="d", **bad).check()


ENDS = [(0, 0), (130, 130), (KeyboardInterrupt(), 130), (InputError("x"), 1), (RewardError(), 1)]
ENDS += [(AssertionError("a bug"), 1)]  # Without `fail` the other ranks would wait.


@pytest.mark.parametrize(("outcome", "status"), ENDS)
def test_a_script_reads_its_flags_and_ends_with_its_status(outcome, status, one_rank, monkeypatch):
    def main(args) -> int:
        assert (args.model, args.data) == ("m", "d")
        if isinstance(outcome, int):
            return outcome
        raise outcome

    monkeypatch.setattr(launch, "finish", sys.exit)
    monkeypatch.setattr(launch, "fail", lambda reason, status=1: sys.exit(status))
    words = ["train_sft.py", "--local_rank=1", "--model", "m", "--data", "d"]  # a launcher adds one
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        launch.run_script(main, train_sft.Args, "")
    assert ended.value.code == status


def test_the_folder_of_another_script_is_refused(tmp_path, monkeypatch):
    for script, args_class in ARGS.items():
        begun = args_class(model="m", data="d", learning_rate=0.5)
        write_args(tmp_path / script, args=begun.settings)
    write_rows([], tmp_path / "damaged" / "args.json")  # 0 bytes, as a power cut may leave it
    for script, args_class in ARGS.items():
        monkeypatch.setattr(sys, "argv", [script, "--resume", str(tmp_path / script)])
        args = launch.saved_args(args_class)["default"]
        assert args.learning_rate == 0.5 and args.output_dir == str(tmp_path / script)
        others = {*SCRIPTS, "absent", "damaged", f"{script}/checkpoint-000004"} - {script}
        for other in others:
            monkeypatch.setattr(sys, "argv", [script, "--resume", str(tmp_path / other)])
            named = "not JSON" if other == "damaged" else f"{other}: holds no run of this script"
            with pytest.raises(InputError, match=named):
                launch.saved_args(args_class)


def test_a_run_goes_on_from_its_newest_checkpoint_if_any(one_rank, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_SIZE", "1")
    args = Args(model="m", data="d", train_batch_size=64)
    args.output_dir = args.resume = str(tmp_path)
    write_args(tmp_path, args={**args.settings, "seed": 3}, world_size=2)
    assert claim_or_resume(args) is None
    (tmp_path / "final").mkdir()
    with pytest.raises(InputError, match="is finished, and has no checkpoint"):
        claim_or_resume(args)  # it would train anew over what is there
    (tmp_path / "checkpoint-000002").mkdir()
    (tmp_path / "checkpoint-000004").mkdir()
    for other in {"train_batch_size": 32}, {"train_batch_size": None}, {"rollout_batch_size": 64}:
        with pytest.raises(InputError, match=r"000004: keep the batch sizes"):
            claim_or_resume(replace(args, **other))
    assert claim_or_resume(args) == tmp_path / "checkpoint-000004"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_belongs_to_one_process_at_a_time(resume, one_rank, tmp_path):
    args = train_sft.Args(model="m", data="d", output_dir=str(tmp_path))
    args.resume = args.output_dir if resume else None
    write_args(tmp_path, args=args.settings, world_size=1)
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            claim_or_resume(args)
    args.resume = args.output_dir
    assert claim_or_resume(args) is None
    with (tmp_path / ".lock").open("w") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until this process ends


def test_other_data_is_refused_and_the_same_data_may_lie_elsewhere(
    one_rank, sft_args, write, monkeypatch
):
    text = Path(sft_args.data).read_text()
    _, examples = load_training_data(sft_args)
    write_args(Path(sft_args.output_dir), data_hash=hash_examples(examples))
    load_training_data(replace(sft_args, data=write(text)))
    with pytest.raises(InputError, match="gives other rows"):
        load_training_data(replace(sft_args, data=write(text.replace("2=", "3=", 1))))
    monkeypatch.setattr(launch.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(launch, "gather", lambda items: [*items, ("hostb", "another hash")])
    with pytest.raises(InputError, match="hostb reads other rows"):
        load_training_data(sft_args)


@pytest.fixture
def make_run(tiny, tiny_engine, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_engine, "num_steps", 0)
    tokenizer = load_tokenizer(str(tiny / "model"))
    handlers = {number: signal.getsignal(number) for number in run.STOP_SIGNALS}

    def make_run(args=None, **values) -> Run:
        args = args or train_sft.Args(model="m", data="d", output_dir=str(tmp_path), **values)
        ids, example = np.zeros(2, np.int32), Example("1", "q", "s", "a", "")
        rows = [Query("1", ids, ids, example)] * 256
        return Run(args, tiny_engine, tokenizer, rows)

    yield make_run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_failed_checkpoint_leaves_the_one_before_it(make_run, tiny_engine, tmp_path, monkeypatch):
    def fill_the_disk(folder: Path, save_state=tiny_engine.save_state):
        save_state(folder)
        raise SafetensorError("no space left on device")

    (tmp_path / "checkpoint-best").mkdir()  # a copy of the user's own
    with make_run(keep_checkpoints=1) as run:
        run.step = 999_999
        run.save_checkpoint()
        run.step = 1_000_000
        with monkeypatch.context() as patch, pytest.raises(InputError, match="no space left"):
            patch.setattr(tiny_engine, "save_state", fill_the_disk)
            run.save_checkpoint()
        assert [*checkpoints(tmp_path)] == [999_999]
        run.save_checkpoint()
    assert [*checkpoints(tmp_path)] == [1_000_000] and (tmp_path / "checkpoint-best").exists()


def test_a_resumed_run_drops_the_metrics_of_steps_that_it_takes_again(
    make_run, tiny_engine, tmp_path, monkeypatch
):
    rows = [json.dumps({"step": step, "train_tokens": 1}) + "\n" for step in range(1, 7)]
    half, path = rows[3][:9] + "\0", tmp_path / "metrics.jsonl"  # as a power cut may leave it
    monkeypatch.setattr(tiny_engine, "num_steps", 4)
    damaged = [rows[0], half, *rows[2:]]
    for written, kept in (damaged, [rows[0], rows[3]]), ([], []), ([*rows, half], rows[:4]):
        path.write_text("".join(written))
        with make_run(max_steps=8):
            assert path.read_text() == "".join(kept)


STOPS = ("INT", "TERM", "HUP", "USR1", "USR2", "XCPU")  # the last three are Slurm's


@pytest.mark.parametrize("number", [signal.Signals[f"SIG{name}"] for name in STOPS])
def test_a_signal_that_asks_a_run_to_end_is_not_the_end_of_the_step(make_run, number):
    for ignored in (False, True):  # as nohup sets it
        signal.signal(number, signal.SIG_IGN if ignored else signal.default_int_handler)
        with make_run() as run:
            signal.raise_signal(number)
            assert run.should_stop() == (not ignored)


def test_a_stop_that_another_rank_was_asked_for_is_seen(make_run, monkeypatch):
    with make_run() as run:
        for shared in (False, True):
            monkeypatch.setattr("run.stop_was_shared", lambda shared=shared: shared)
            run.next_look = 0.0  # a second has passed
            assert run.stop_requested() == run.should_stop() == shared


def test_missing_ids_and_a_letter_as_a_stop_are_refused(sft_args, model_copy, tmp_path, one_rank):
    args = replace(sft_args, model=str(model_copy))
    largest = max(load_training_data(args)[1][0].prompt_ids)
    tokenizer = load_tokenizer(args.model)
    stop = tokenizer.convert_tokens_to_ids("7")
    problems = evaluate.Args(model=args.model, benchmark_file=(Path(args.data),))
    problems.max_completion_length = 48

    def refused(named: str) -> None:
        with pytest.raises(InputError, match=named):
            load_training_data(args)
        with pytest.raises(InputError, match=named):
            missing = [(problem, 0) for problem in evaluate.load_problems(problems)]
            evaluate.sample(problems, tmp_path, tokenizer, missing)

    for name in ("generation_config.json", "config.json"):  # the second counts without the first
        edit_json(model_copy / name, eos_token_id=[0, stop])
        refused(f"correct eos_token_id in its config: it is {stop}, which .* reads as '7'")
        (model_copy / "generation_config.json").unlink(missing_ok=True)
    edit_json(model_copy / "config.json", eos_token_id=0, vocab_size=int(largest))
    refused(rf"train.jsonl:1: holds '.*' \(id {largest}\), but the model embeds {largest} ids")


def test_first_answers_that_are_hardly_ever_right_cut_off_or_not_graded_are_told(make_run, capsys):
    first_batches = {
        "60% of the answers were cut off": {"truncated_share": 0.6},
        "2.0% of the answers could not be graded": {"ungraded_share": 0.02},
        "the first pass rate is 2%": {"pass_rate": 0.02},
        "the first pass rate is 4%": {"reward": 0.04},
        "": {"truncated_share": 0.5, "ungraded_share": 0.01, "pass_rate": 0.05},
    }
    for said, shares in first_batches.items():
        with make_run(max_steps=2) as run:
            run.end_step({"train_tokens": 1, **shares})
            run.end_step({"train_tokens": 1, "ungraded_share": 1.0, "vllm_gap_mean": 2})
        shown = capsys.readouterr().err
        assert said in shown and "stale?" in shown and shown.count("warning: ") == 1 + bool(said)


def test_a_logger_that_fails_is_told_once_and_the_run_goes_on(make_run, capsys):
    with make_run() as run:
        run.log = SimpleNamespace(log=lambda row, step: 1 / 0)
        for step in (1, 2):
            run.end_step({"train_tokens": 1})
            assert run.step == step
    assert capsys.readouterr().err.count("--logger failed, the run continues: division") == 1


def test_a_run_that_fails_closes_its_files_and_saves_nothing(make_run, tmp_path):
    with pytest.raises(FloatingPointError), make_run() as run:
        run.step = 1
        raise FloatingPointError
    assert run.metrics.closed and not list(tmp_path.glob("checkpoint-*"))
