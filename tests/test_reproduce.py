"""reproduce.sh: every command of every row is one that its script takes; a row runs end to end."""

import functools
import os
import re
import shlex
import shutil
import subprocess

import evaluate
import train_grpo
import train_oswft
import train_sft
from conftest import ROOT, slow
from look import plot, tables
from paper.select_checkpoint import select_checkpoint
from prepare import weigh
from run import read_args, write_args

import tyro

TAKES = {  # what a command calls -> what reads its arguments
    "train_sft.py": train_sft.Args,
    "train_oswft.py": train_oswft.Args,
    "train_grpo.py": train_grpo.Args,
    "evaluate.py": evaluate.Args,
    "look.plot": plot.plot,
    "look.tables table": tables.table,
    "paper.select_checkpoint": select_checkpoint,
    "--module prepare.weigh": weigh.Args,
}
SFT, OSWFT, GRPO, EVALUATE, *_ = TAKES
SIZES = ("0.6B", "1.7B", "4B")
ROWS = {  # row -> its training script, learning rate, number of rollouts and weighting
    **{f"table1/{size}/sft": (SFT, 1e-5, None, None) for size in SIZES},
    "table1/0.6B/static": (SFT, 1e-5, None, None),  # ours, not the paper's
    **{f"table1/{size}/oswft": (OSWFT, 1e-5, 2, "oswft") for size in SIZES},
    **{f"table1/{size}/grpo": (GRPO, 1e-6, 8, None) for size in SIZES},
    **{f"table2/oswft/K{k}": (OSWFT, 1e-5, k, "oswft") for k in (1, 2, 4, 8)},
    **{f"table2/grpo/K{k}": (GRPO, 1e-6, k, None) for k in (2, 4, 8)},
    **{f"table3/{how}": (OSWFT, 1e-5, 4, how) for how in ("hard", "random", "oswft")},
    **{f"figure1/{size}": (OSWFT, 1e-5, 2, "oswft") for size in SIZES},
    **{f"figure2/1e-6/{size}": (GRPO, 1e-6, 8, None) for size in SIZES},
    **{f"figure2/1e-5/{size}": (GRPO, 1e-5, 8, None) for size in SIZES},
}
BASES = {f"table1/{size}/base" for size in SIZES}
PICTURES = {"figure1/plot", "figure2/1e-6/plot", "figure2/1e-5/plot"}
PRINTED = {**{f"table1/{size}/table": 4 for size in SIZES}, "table2/table": 7, "table3/table": 3}

SAMPLED = {"max_length": 5120, "max_completion_length": 4096, "temperature": 1.0, "num_epochs": 1}
DEFAULTS = {  # section 4.1
    train_sft: {"max_length": 5120, "learning_rate": 1e-5, "train_batch_size": 128},
    train_oswft: {**SAMPLED, "learning_rate": 1e-5, "num_rollouts": 2, "weighting": "oswft"},
    train_grpo: {**SAMPLED, "learning_rate": 1e-6, "num_rollouts": 8, "clip_high": 1.28},
    evaluate: {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_completion_length": 8192},
}


def reproduce(*args, **env) -> subprocess.CompletedProcess:
    command, env = ["paper/reproduce.sh", *args], {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def parsed_commands(*args, **env) -> dict[str, dict[str, object]]:
    """{row: {what is called: its arguments, as it reads them}} of a dry run."""
    rows = {}
    for row in reproduce("--dry_run", *args, **env).stdout.split("# ---- ")[1:]:
        name, *commands = row.splitlines()
        for command in commands:
            _, called, words = re.split(f" ({'|'.join(TAKES)}) ", command)
            takes, words, config = TAKES[called], shlex.split(words), ()
            if not isinstance(takes, type):  # a function: it is not called
                takes = functools.wraps(takes)(lambda *_, words=words, **__: words)
                config = (tyro.conf.PositionalRequiredArgs,)
            rows.setdefault(name, {})[called] = tyro.cli(takes, args=words, config=config)
    return rows


def test_the_defaults_are_the_papers_settings():
    for script, settings in DEFAULTS.items():
        data = {} if script is evaluate else {"data": "d"}
        assert vars(script.Args(model="m", **data)).items() >= settings.items()


def test_every_row_is_the_papers_setting_and_every_command_is_taken(tmp_path):
    rows = parsed_commands("all", RUNS=str(tmp_path))
    assert {*rows} == {*reproduce("list").stdout.split()} == {*ROWS, *BASES, *PICTURES, *PRINTED}
    scored = {str(row[EVALUATE].output_dir) for row in rows.values() if EVALUATE in row}
    for name, count in PRINTED.items():
        assert len({*rows[name]["look.tables table"]} & scored) == count
    static = rows["table1/0.6B/static"]
    assert static[SFT].weight_column == "weight"
    assert static[SFT].data == str(static["--module prepare.weigh"].output)
    for name in {*ROWS, *BASES}:
        size = next((size for size in SIZES if f"/{size}" in name), "0.6B")
        model = f"Qwen/Qwen3-{size}-Base"
        if name in ROWS:
            script, *settings = ROWS[name]
            args = rows[name][script]
            own = [vars(args).get(key) for key in ("learning_rate", "num_rollouts", "weighting")]
            assert args.model == model and own == settings
            model = f"{args.output_dir}/{'checkpoint-SELECTED' if script == GRPO else 'final'}"
        if name.startswith("table"):
            assert rows[name][EVALUATE].model == model


@slow
def test_a_row_runs_end_to_end_and_is_not_run_twice(tiny, tmp_path):
    runs = tmp_path / "a folder"
    shutil.copytree(tiny, runs / "base")
    for path in (runs / "base" / "heldout").iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    flags = ["--rollout_batch_size", "32", "--max_steps", "2", "--save_every", "1"]
    call = ["--tiny", "table2/grpo/K2", "--", *flags]
    first = reproduce(*call, RUNS=str(runs))
    assert first.returncode == 0, first.stdout[-2000:] + first.stderr[-2000:]
    run = runs / "0.6B-grpo-G2-1e-6"
    model = read_args(run / "eval")["args"]["model"]
    assert re.fullmatch(rf"{run}/checkpoint-00000[12]", model)
    again = reproduce(*call, RUNS=str(runs))
    assert again.returncode == 0 and again.stdout.count("done before") == 2


def test_flags_reach_every_script_that_takes_them_and_a_stopped_run_is_resumed(tmp_path):
    write_args(tmp_path / "4B-grpo-G8-1e-6")
    flags = ["--vllm_memory", "0.4", "--gradient_checkpointing", "--no_vllm_sleep"]
    call = ["--hostfile", "hosts", "table1/4B", "--", *flags, "--verifier_workers", "4"]
    call += ["--rollout_batch_size", "64", "--temperature", "0.9", "--reward", "r.py:f"]
    rows = parsed_commands(*call, RUNS=str(tmp_path))
    for method in ("sft", "oswft", "grpo"):
        args = rows[f"table1/4B/{method}"][f"train_{method}.py"]
        assert args.gradient_checkpointing and bool(args.resume) == (method == "grpo")
        if method != "sft":
            assert (args.vllm_memory, args.vllm_sleep, args.verifier_workers) == (0.4, False, 4)
            assert (args.rollout_batch_size, args.temperature, args.reward) == (64, 0.9, "r.py:f")
    assert reproduce("--dry_run", *call).stdout.count("deepspeed --log_level error --hostfile") == 7


def test_a_name_or_a_hostfile_that_does_not_exist_is_refused():
    for result in (reproduce("table3", "table4"), reproduce("--hostfile", "absent", "table1")):
        assert result.returncode == 2 and result.stderr.startswith("error: ") and not result.stdout
