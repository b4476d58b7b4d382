"""reproduce.sh: every command of every row is one that its script takes; a row runs end to end."""

import functools
import inspect
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import tyro

import evaluate
import train_grpo
import train_oswft
import train_sft
from conftest import ROOT
from demo import tiny as demo_tiny
from paper import plot, tables
from paper.select_checkpoint import select_checkpoint

TAKES = {  # what a command calls -> what reads its arguments
    "train_sft.py": train_sft.Args,
    "train_oswft.py": train_oswft.Args,
    "train_grpo.py": train_grpo.Args,
    "evaluate.py": evaluate.Args,
    "paper.plot": plot.Args,
    "paper.tables table": tables.table,
    "paper.select_checkpoint": select_checkpoint,
    "demo.tiny make": demo_tiny.make,
}
SIZES = ("0.6B", "1.7B", "4B")
TABLES = {  # row -> the training script and what the paper says of it; None for a base model
    **{f"table1/{size}/base": None for size in SIZES},
    **{f"table1/{size}/sft": ("train_sft.py", {"learning_rate": 1e-5}) for size in SIZES},
    **{f"table1/{size}/oswft": ("train_oswft.py", {"num_rollouts": 2}) for size in SIZES},
    **{f"table1/{size}/grpo": ("train_grpo.py", {"num_rollouts": 8}) for size in SIZES},
    **{f"table2/oswft/K{k}": ("train_oswft.py", {"num_rollouts": k}) for k in (1, 2, 4, 8)},
    **{f"table2/grpo/K{k}": ("train_grpo.py", {"num_rollouts": k}) for k in (2, 4, 8)},
    **{
        f"table3/{weighting}": ("train_oswft.py", {"num_rollouts": 4, "weighting": weighting})
        for weighting in ("hard", "random", "oswft")
    },
}
LINES = {
    **{f"figure1/{size}": ("train_oswft.py", {"num_rollouts": 2}) for size in SIZES},
    **{
        f"figure2/{rate}/{size}": ("train_grpo.py", {"learning_rate": float(rate)})
        for rate in ("1e-6", "1e-5")
        for size in SIZES
    },
}
COMMON = {
    **{"num_epochs": 1, "max_length": 5120, "max_completion_length": 4096},
    **{"train_batch_size": 128, "precision": "bf16"},
}
SAMPLED = {**COMMON, "rollout_batch_size": 128, "temperature": 1.0}
DEFAULTS = {  # section 4.1
    train_sft: {**COMMON, "learning_rate": 1e-5},
    train_oswft: {**SAMPLED, "learning_rate": 1e-5, "num_rollouts": 2, "weighting": "oswft"},
    train_grpo: {
        **{**SAMPLED, "learning_rate": 1e-6, "num_rollouts": 8},
        **{"clip_low": 0.8, "clip_high": 1.28},
    },
    evaluate: {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_completion_length": 8192},
}
PICTURES = {"figure1/plot", "figure2/1e-6/plot", "figure2/1e-5/plot"}
PRINTED = {**{f"table1/{size}/table": 4 for size in SIZES}, "table2/table": 7, "table3/table": 3}


def reproduce(*args, **env) -> subprocess.CompletedProcess:
    env = {**os.environ, **{name: str(value) for name, value in env.items()}}
    command = ["paper/reproduce.sh", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def parse(command: str) -> tuple[str, object]:
    """(what it calls, its arguments, read as what it calls reads them); it is not called."""
    launchers = r"(deepspeed --log_level error( --hostfile \S+)?|python -m) "
    name = next(name for name in TAKES if re.match(f"{launchers}{re.escape(name)} ", command))
    words = shlex.split(command.split(f" {name} ", 1)[1])
    if isinstance(TAKES[name], type):
        return name, tyro.cli(TAKES[name], args=words)

    @functools.wraps(TAKES[name])
    def by_name(*args, **kwargs):
        return inspect.signature(TAKES[name]).bind(*args, **kwargs).arguments

    return name, tyro.cli(by_name, args=words, config=(tyro.conf.PositionalRequiredArgs,))


def parsed_commands(*args, **env) -> dict[str, list[tuple[str, object]]]:
    """{row: its commands, parsed} of a dry run."""
    result = reproduce("--dry_run", *args, **env)
    assert result.returncode == 0, result.stderr
    rows = {}
    for line in result.stdout.splitlines():
        if line.startswith("# ---- "):
            row = rows.setdefault(line.removeprefix("# ---- "), [])
        elif line.startswith("$ "):
            row.append(parse(line.removeprefix("$ ")))
    return rows


@pytest.mark.parametrize("script", DEFAULTS, ids=lambda script: script.__name__)
def test_the_defaults_are_the_papers_settings(script):
    required = {"model": "m"} if script is evaluate else {"model": "m", "data": "d"}
    assert vars(script.Args(**required)).items() >= DEFAULTS[script].items()


@pytest.mark.parametrize("form", ["paper", "tiny"])
def test_every_row_is_the_papers_setting_and_every_command_is_taken(form, tmp_path, monkeypatch):
    tiny = form == "tiny"
    monkeypatch.setenv("LOCAL_SIZE", "8")
    rows = parsed_commands(*["--tiny"] * tiny, "all", RUNS=tmp_path)
    listed = reproduce("list").stdout.split()
    assert set(rows) == set(listed) == {*TABLES, *LINES, *PICTURES, *PRINTED}
    evaluated = {
        str(args.output_dir)
        for commands in rows.values()
        for script, args in commands
        if script == "evaluate.py"
    }
    for name, commands in rows.items():
        size = next((size for size in SIZES if f"/{size}" in name), "0.6B")
        model = str(tmp_path / "base" / size / "model") if tiny else f"Qwen/Qwen3-{size}-Base"
        made = [args for script, args in commands if script == "demo.tiny make"]
        commands = [command for command in commands if command[0] != "demo.tiny make"]
        bases = {str(Path(model).parent)} if tiny and name in {**TABLES, **LINES} else set()
        assert {str(args["output_dir"]) for args in made} == bases
        scripts = [script for script, _ in commands]
        if name in PICTURES:
            ((_, args),) = commands
            assert len(args.runs) == 3 and args.by == (() if tiny else ("model",))
            continue
        if name in PRINTED:
            ((_, args),) = commands
            assert len(args["folders"]) == PRINTED[name]
            assert {str(folder) for folder in args["folders"]} <= evaluated
            continue
        expected = {**TABLES, **LINES}[name]
        scored = [(script, args) for script, args in commands if script == "evaluate.py"]
        assert len(scored) == (name in TABLES)
        for _, args in scored:
            assert len(args.benchmark_file) == (3 if tiny else 0)  # else the paper's seven
            assert args.num_samples is None and not args.benchmarks
        if expected is None:
            assert scripts == ["evaluate.py"] and scored[0][1].model == model
            continue
        script, settings = expected[0], dict(expected[1])
        args = commands[0][1]
        args.check()
        assert scripts[0] == script and args.model == model
        rate = settings.pop("learning_rate", 1e-6 if script == "train_grpo.py" else 1e-5)
        assert args.learning_rate == pytest.approx(100 * rate if tiny else rate)
        for field, value in settings.items():
            assert getattr(args, field) == value
        assert args.max_steps == (20 if tiny else None)
        if name in TABLES:
            chosen = scored[0][1].model
            if script == "train_grpo.py":
                called, selected = commands[1]
                assert called == "paper.select_checkpoint"
                assert selected == {"run": Path(args.output_dir), "window": 10, "margin": 0.02}
                assert chosen == f"{args.output_dir}/checkpoint-SELECTED"
            else:
                assert chosen == f"{args.output_dir}/final"


def test_a_row_runs_end_to_end_and_is_not_run_twice(tiny, tmp_path):
    runs = tmp_path / "a folder"
    (runs / "base").mkdir(parents=True)
    (runs / "base" / "0.6B").symlink_to(tiny)
    first = reproduce("--tiny", "table2/grpo/K2", RUNS=runs)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    run = runs / "0.6B-grpo-G2-1e-6"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20
    results = json.loads((run / "eval" / "results.json").read_text())
    assert results["middle"]["pass@16"] >= results["middle"]["pass@1"] > 0.1
    evaluated = next(line for line in first.stdout.splitlines() if "evaluate.py" in line)
    model = parse(evaluated.removeprefix("$ "))[1].model
    assert re.fullmatch(rf"{run}/checkpoint-0000(05|10|15|20)", model)
    again = reproduce("--tiny", "table2/grpo/K2", RUNS=runs)
    assert again.returncode == 0 and again.stdout.count("done before") == 2


def test_flags_reach_every_training_script_that_takes_them_and_the_hostfile_every_launch(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("LOCAL_SIZE", "8")
    (tmp_path / "4B-grpo-G8-1e-6" / "checkpoint-000050").mkdir(parents=True)  # it was stopped
    flags = ["--vllm_memory", "0.4", "--gradient_checkpointing", "--no_vllm_sleep"]
    flags += ["--verifier_workers", "4", "--max_tokens_per_micro_batch", "4096"]
    call = ["--hostfile", "hosts", "table1/4B", "--", *flags]
    for row, commands in parsed_commands(*call, RUNS=tmp_path).items():
        for script, args in commands:
            if script.startswith("train_"):
                args.check()
                assert args.gradient_checkpointing and args.max_tokens_per_micro_batch == 4096
                assert bool(args.resume) == (row == "table1/4B/grpo")
            if script in ("train_oswft.py", "train_grpo.py"):
                assert (args.vllm_memory, args.vllm_sleep, args.verifier_workers) == (0.4, False, 4)
    shown = reproduce("--dry_run", *call, RUNS=tmp_path).stdout
    assert shown.count("$ deepspeed") == shown.count("--hostfile hosts ") == 3 + 4
    absent = reproduce("--hostfile", tmp_path / "hosts", "table1")
    assert absent.returncode == 2 and absent.stderr == f"error: {tmp_path}/hosts: no such file\n"


def test_a_name_that_does_not_exist_is_refused():
    result = reproduce("table4")
    assert result.returncode == 2 and "no row is called 'table4'" in result.stderr
    assert "reproduce.sh list" in result.stderr
