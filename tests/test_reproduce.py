"""paper/reproduce.sh, with stand-ins that note how they are called and leave what a run leaves."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import evaluate
import train_grpo
import train_oswft
import train_sft
from conftest import ROOT
from prepare import weigh

import pytest
import tyro

STAND_IN = f"""#!{sys.executable} -ES
import os, pathlib, sys
words = sys.argv[1:]
with open("calls", "a") as calls:
    print(*words, file=calls)
value = dict(zip(words, words[1:]))
folder = value.get("--output_dir") or value.get("--model", "").replace("final", "eval")
folder = pathlib.Path(folder)
if words[0] != "-m":
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("args.json").touch()
if os.environ["FAILS"] in words or words[-1] == "--model":
    sys.exit(1)
if words[0] == "evaluate.py":
    folder.joinpath("results.json").touch()
elif words[0].startswith("train"):
    folder.joinpath("final").mkdir()
elif "prepare.weigh" in words:
    pathlib.Path(value["--output"]).touch()
elif "paper.select_checkpoint" in words:
    print(words[-1] + "/checkpoint-000070")
"""
TAKES = {
    "train_sft.py": train_sft.Args,
    "train_oswft.py": train_oswft.Args,
    "train_grpo.py": train_grpo.Args,
    "evaluate.py": evaluate.Args,
    "prepare.weigh": weigh.Args,
}
SFT, OSWFT, GRPO, EVALUATE, WEIGH = TAKES
RUNS, SIZES = "runs/paper", ("0.6B", "1.7B", "4B")
ROWS = {  # a run's folder -> its script, learning rate, number of rollouts and weighting
    **{f"{size}/sft": (SFT, 1e-5, None, None) for size in SIZES},
    **{f"{size}/oswft-K2": (OSWFT, 1e-5, 2, "oswft") for size in SIZES},
    **{f"{size}/grpo-G8-1e-6": (GRPO, 1e-6, 8, None) for size in SIZES},
    **{f"{size}/grpo-G8-1e-5": (GRPO, 1e-5, 8, None) for size in SIZES},
    **{f"0.6B/oswft-K{k}": (OSWFT, 1e-5, k, "oswft") for k in (1, 4, 8)},
    **{f"0.6B/grpo-G{g}-1e-6": (GRPO, 1e-6, g, None) for g in (2, 4)},
    **{f"0.6B/oswft-K4-{how}": (OSWFT, 1e-5, 4, how) for how in ("hard", "random")},
    "0.6B/sft-static": (SFT, 1e-5, None, None),  # ours, not the paper's
}
WEIGHTED = Path(RUNS, "0.6B", "weighted.jsonl")
SCORED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_completion_length": 8192}


@pytest.fixture
def reproduce(tmp_path) -> Callable:
    """Runs the script; returns its exit status, and the words of each command."""
    (tmp_path / "paper").mkdir()
    shutil.copy(ROOT / "paper" / "reproduce.sh", tmp_path / "paper")
    for name in ("deepspeed", "python"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)

    def run(fails: str = "-") -> tuple[int, list[list[str]]]:
        (tmp_path / "calls").write_text("")
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FAILS": fails}
        done = subprocess.run(["bash", tmp_path / "paper" / "reproduce.sh"], env=env)
        return done.returncode, [x.split() for x in (tmp_path / "calls").read_text().splitlines()]

    return run


def parsed(calls: list[list[str]], script: str) -> dict[str, object]:
    """The arguments of a script's calls, as it reads them, by the folder or file that it writes."""
    found = {}
    for words in calls:
        if script in words:
            args = tyro.cli(TAKES[script], args=words[words.index(script) + 1 :])
            found[str(getattr(args, "output_dir", None) or args.model)] = args
    return found


def test_every_run_has_the_papers_setting_and_every_command_is_taken(reproduce):
    status, calls = reproduce()
    assert status == 0
    trained = {script: parsed(calls, script) for script in (SFT, OSWFT, GRPO)}
    assert sum(map(len, trained.values())) == len(ROWS) == 20
    for name, (script, *settings) in ROWS.items():
        args = trained[script][f"{RUNS}/{name}"]
        own = ("learning_rate", "num_rollouts", "weighting")
        assert [vars(args).get(key) for key in own] == settings
        model, data = f"Qwen/Qwen3-{name.split('/')[0]}-Base", "data/train.jsonl"
        others = {"vllm_sleep": True} if script != SFT else {}
        if name.endswith("static"):
            data, others = str(WEIGHTED), {"weight_column": "weight"}
        default = vars(TAKES[script](model=model, data=data, output_dir=args.output_dir))
        changed = {key for key, value in vars(args).items() if value != default[key]}
        assert {key: vars(args)[key] for key in changed.difference(own)} == others
    given = {"model": "Qwen/Qwen3-0.6B-Base", "data": "data/train.jsonl", "output": WEIGHTED}
    assert list(parsed(calls, WEIGH).values()) == [weigh.Args(**given)]

    scored = parsed(calls, EVALUATE)
    bases = {f"{RUNS}/{size}/base/eval": f"Qwen/Qwen3-{size}-Base" for size in SIZES}
    runs = {f"{RUNS}/{name}": row[0] for name, row in ROWS.items() if row[:2] != (GRPO, 1e-5)}
    chosen = {f"{run}/eval": f"{run}/checkpoint-000070" for run in runs if runs[run] == GRPO}
    final = {f"{run}/final": f"{run}/final" for run in runs if runs[run] != GRPO}
    assert {folder: args.model for folder, args in scored.items()} == bases | chosen | final
    assert all(vars(args).items() >= SCORED.items() for args in scored.values())
    shown = [words[3:] for words in calls if words[:3] == ["-m", "look.tables", "table"]]
    assert [len(folders) for folders in shown] == [4, 4, 4, 7, 3]
    found = {folder.replace("/final", "/eval") for folder in scored}
    assert {*itertools.chain(*shown)} == found - {f"{RUNS}/0.6B/sft-static/eval"}
    drawn = {words[-1]: words[2:-4] for words in calls if words[:2] == ["-m", "look.plot"]}
    figures = {"1": "oswft-K2", "2/1e-6": "grpo-G8-1e-6", "2/1e-5": "grpo-G8-1e-5"}
    for figure, run in figures.items():
        assert drawn[f"{RUNS}/figure{figure}"] == [f"{RUNS}/{size}/{run}" for size in SIZES]


def test_a_command_that_fails_is_the_last_and_goes_on_where_it_stopped(reproduce):
    status, calls = reproduce(fails="train_oswft.py")
    assert status == 1 and [words[0] for words in calls] == [EVALUATE, SFT, OSWFT]
    status, calls = reproduce(fails="paper.select_checkpoint")
    stopped = f"{RUNS}/0.6B/oswft-K2"
    assert calls[0][-4:] == ["--output_dir", stopped, "--resume", stopped]
    assert ["--resume" in words for words in calls].count(True) == 1
    assert status == 1 and calls[-1][-1] == "--model"  # and no model
    with pytest.raises(SystemExit):
        tyro.cli(evaluate.Args, args=calls[-1][1:])
    reproduce()
    status, calls = reproduce()
    assert status == 0 and {words[1] for words in calls} == {"look.tables", "look.plot"}
