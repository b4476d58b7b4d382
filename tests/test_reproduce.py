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
PICTURES = {"figure1/plot", "figure2/1e-6/plot", "figure2/1e-5/plot"}
PRINTED = {**{f"table1/{size}/table": 4 for size in SIZES}, "table2/table": 7, "table3/table": 3}


def reproduce(*args, **env) -> subprocess.CompletedProcess:
    env = {**os.environ, **{name: str(value) for name, value in env.items()}}
    command = ["paper/reproduce.sh", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def parse(command: str) -> tuple[str, object]:
    """(what it calls, its arguments, read as what it calls reads them); it is not called."""
    launchers = r"(deepspeed --log_level error|python -m) "
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
            row.append(parse(re.sub(r"\$\((.+?)\)", r"'\1'", line.removeprefix("$ "))))
    return rows


@pytest.mark.parametrize("form", ["paper", "tiny"])
def test_every_row_is_the_papers_setting_and_every_command_is_taken(form, tmp_path):
    tiny = form == "tiny"
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
            args.check()
            assert len(args.benchmark_file) == (3 if tiny else 0)  # else the paper's seven
            assert args.num_samples is None and not args.benchmarks
        if expected is None:
            assert scripts == ["evaluate.py"] and scored[0][1].model == model
            continue
        script, settings = expected[0], dict(expected[1])
        args = commands[0][1]
        args.check(world_size=8)
        assert scripts[0] == script and args.model == model
        rate = settings.pop("learning_rate", 1e-6 if script == "train_grpo.py" else 1e-5)
        assert args.learning_rate == pytest.approx(100 * rate if tiny else rate)
        for field, value in settings.items():
            assert getattr(args, field) == value
        assert args.max_steps == (20 if tiny else None)
        if name in TABLES:
            chosen = scored[0][1].model
            if script == "train_grpo.py":
                called, selected = parse(chosen)
                assert called == "paper.select_checkpoint"
                assert selected == {"run": Path(args.output_dir), "window": 10, "margin": 0.02}
            else:
                assert chosen == f"{args.output_dir}/final"


def test_a_row_runs_end_to_end_and_is_not_run_twice(tiny, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "0.6B").symlink_to(tiny)
    first = reproduce("--tiny", "table2/grpo/K2", RUNS=tmp_path)
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    run = tmp_path / "0.6B-grpo-G2-1e-6"
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20
    results = json.loads((run / "eval" / "results.json").read_text())
    assert results["middle"]["pass@16"] >= results["middle"]["pass@1"] > 0.1
    evaluated = next(line for line in first.stdout.splitlines() if "evaluate.py" in line)
    assert re.search(rf"--model {run}/checkpoint-0000(05|10|15|20) ", evaluated)
    again = reproduce("--tiny", "table2/grpo/K2", RUNS=tmp_path)
    assert again.returncode == 0 and again.stdout.count("done before") == 2


def test_a_name_that_does_not_exist_is_refused():
    result = reproduce("table4")
    assert result.returncode == 2 and "no row is called 'table4'" in result.stderr
    assert "reproduce.sh list" in result.stderr
