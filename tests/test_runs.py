"""Whole runs through the deepspeed launcher: what they leave, and that they resume."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import conftest
from conftest import ROOT, SCRIPTS, call_of, launch, metrics, needs_vllm, slow, start
from run import checkpoints, read_args

import pytest

pytestmark = slow

SAMPLING = SCRIPTS[1:]
# --keep_checkpoints 2, but GRPO's models are kept: which one is evaluated is chosen later
KEPT = {"train_sft.py": (6, 8), "train_oswft.py": (6, 8), "train_grpo.py": (2, 4, 6, 8)}
RANKS = {"train_sft.py": 2, "train_oswft.py": 2, "train_grpo.py": 1}  # of a whole run


@pytest.fixture(scope="module")
def whole_runs(tiny, tmp_path_factory) -> dict[str, Path]:
    """For each script a run of 8 steps that nothing interrupts."""
    folder, before = tmp_path_factory.mktemp("whole runs"), os.umask(0o027)
    for script in SCRIPTS:
        call = call_of(script, tiny, folder / script)
        launch(*call, ranks=RANKS[script], launcher="deepspeed")
    os.umask(before)
    return {script: folder / script for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_leaves_what_the_readme_says(whole_runs, script):
    run = whole_runs[script]
    names = {path.name for path in run.iterdir()}
    kept = {f"checkpoint-{step:06d}" for step in KEPT[script]}
    assert names - {"rollouts"} == {"args.json", "metrics.jsonl", "final", ".lock", *kept}
    assert ("rollouts" in names) == (script in SAMPLING)
    modes = {path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()}
    assert modes == {0o640}  # the umask's, safetensors' own 0600 too
    record = read_args(run)
    assert record["world_size"] == RANKS[script] and record["versions"]["deepspeed"]
    assert all(" " in path for path in (str(run), record["args"]["model"], record["args"]["data"]))
    runner = "V1" if script in SAMPLING else None
    assert record.get("vllm_runner") == runner

    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    documented = set(re.findall(r"`(_?[a-z_0-9]+)`", (ROOT / "docs/output.md").read_text()))
    for row in rows:
        assert row.get("vllm_gap_max", 0) < 1e-3
        for key in row:
            prefix, _, suffix = key.rpartition("_")
            assert key in documented or {f"{prefix}_mean", f"_{suffix}"} <= documented, key


def assert_equal(run: Path, whole: Path) -> None:
    """To the last byte, less the seconds."""
    assert metrics(run) == metrics(whole)
    paths = [*(whole / "rollouts").glob("*"), whole / "final" / "model.safetensors"]
    for path in paths:
        assert (run / path.relative_to(whole)).read_bytes() == path.read_bytes(), path


def test_killed_and_resumed_equals_never_interrupted(whole_runs, tiny, tmp_path):
    run = tmp_path / "run"  # OSW-FT is stopped, below
    call = (*call_of("train_sft.py", tiny, run), "--max_steps", 500)  # It cannot end first.
    killed = start(*call, ranks=2, start_new_session=True)
    conftest.wait_for_rows(run, 3, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    half = run / "partial-checkpoint-000004"
    half.mkdir(exist_ok=True)  # as a kill while writing leaves it

    output = launch("train_sft.py", "--resume", run, "--max_steps", 8, ranks=2)
    assert re.search(r"[2468] of 8 steps done\n", output), output[-3000:]
    assert not list(run.glob("partial-*"))
    assert_equal(run, whole_runs["train_sft.py"])


@needs_vllm
def test_a_run_that_is_stopped_by_ctrl_c_saves_and_continues(whole_runs, tiny, tmp_path):
    run, script = tmp_path / "run", "train_oswft.py"
    call = (*call_of(script, tiny, run), "--save_every", 100, "--max_steps", 500)
    process = start(*call, ranks=2, start_new_session=True)
    conftest.wait_for_rows(run, 2, process)
    os.killpg(process.pid, signal.SIGINT)  # while it samples, most likely
    output = conftest.ended(process)
    assert process.returncode != 0
    assert f"--resume {run}" in output and "run_script" not in output, output[-3000:]
    assert [*checkpoints(run)] == [len(metrics(run))]
    launch(script, "--resume", run, "--save_every", 2, "--max_steps", 8, ranks=2)
    assert_equal(run, whole_runs[script])


def test_a_run_that_changes_shape_is_the_same_run_up_to_rounding(whole_runs, tmp_path):
    """Ranks, ZeRO stage and memory flags: the same queries, answers and metrics.

    SFT's and OSW-FT's state is the same; tests/test_engine.py shows how one goes on.
    """
    whole = whole_runs["train_grpo.py"]
    run = shutil.copytree(whole, tmp_path / "a run")
    for done in ("checkpoint-000008", "final"):
        shutil.rmtree(run / done)
    flags = ("--gradient_checkpointing", "--max_tokens_per_micro_batch", 500)
    flags += ("--zero_stage", 3, "--cpu_offload")
    launch("train_grpo.py", "--resume", run, *flags, ranks=2)
    conftest.assert_equal_up_to_rounding(run, whole)
    assert read_args(run)["world_size"] == 2
