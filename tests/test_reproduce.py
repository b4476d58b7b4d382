"""reproduce.sh: every command of every row is one that its script takes; a row runs end to end."""

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
WEIGHTED = "weighted-0.6B.jsonl"
BASES = {f"table1/{size}/base" for size in SIZES}
PICTURES = {"figure1/plot", "figure2/1e-6/plot", "figure2/1e-5/plot"}
PRINTED = {**{f"table1/{size}/table": 4 for size in SIZES}, "table2/table": 7, "table3/table": 3}

SCORED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_completion_length": 8192}


def reproduce(*args, **env) -> subprocess.CompletedProcess:
    command, env = ["paper/reproduce.sh", *args], {**os.environ, **env}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


def parsed_commands(*args, **env) -> dict[str, dict[str, object]]:
    """{row: {what is called: its arguments, as a script reads them}} of a dry run."""
    rows = {}
    for row in reproduce("--dry_run", *args, **env).stdout.split("# ---- ")[1:]:
        name, *commands = row.splitlines()
        for command in (line for line in commands if line.startswith("$ ")):
            _, called, words = re.split(f" ({'|'.join(TAKES)}) ", command)
            takes, words = TAKES[called], shlex.split(words)
            is_class = isinstance(takes, type)  # else a function, which would be called
            read = tyro.cli(takes, args=words) if is_class else words
            rows.setdefault(name, {})[called] = read
    return rows


def test_every_row_is_the_papers_setting_and_every_command_is_taken(tmp_path):
    rows = parsed_commands("all", RUNS=str(tmp_path), DATA="mine.jsonl", BENCHMARKS="copies")
    assert {*rows} == {*reproduce("list").stdout.split()} == {*ROWS, *BASES, *PICTURES, *PRINTED}
    scored = {str(row[EVALUATE].output_dir) for row in rows.values() if EVALUATE in row}
    for name, count in PRINTED.items():
        assert len({*rows[name]["look.tables table"]} & scored) == count
    for name in PICTURES:
        folder = name.removesuffix("/plot")
        words = [rows[f"{folder}/{size}"] for size in SIZES]
        words = [args.output_dir for row in words for args in row.values()]
        words += ["--figures", "mean_weight" if "figure1" in name else "reward"]
        assert rows[name]["look.plot"] == [*words, "--output_dir", f"{tmp_path}/{folder}"]
    for name in {*ROWS, *BASES}:
        size = next((size for size in SIZES if f"/{size}" in name), "0.6B")
        model, data = f"Qwen/Qwen3-{size}-Base", "mine.jsonl"
        if name in ROWS:
            script, *settings = ROWS[name]
            args, others = rows[name][script], {"vllm_sleep": True} if ROWS[name][2] else {}
            if weigh := rows[name].get("--module prepare.weigh"):
                assert (weigh.model, weigh.data, weigh.output.name) == (model, data, WEIGHTED)
                data, others = str(weigh.output), {"weight_column": "weight"}
            own = ("learning_rate", "num_rollouts", "weighting")
            assert [vars(args).get(key) for key in own] == settings
            default = vars(TAKES[script](model=model, data=data, output_dir=args.output_dir))
            changed = {key for key, value in vars(args).items() if value != default[key]}
            assert {key: vars(args)[key] for key in changed.difference(own)} == others
            model = f"{args.output_dir}/{'checkpoint-SELECTED' if script == GRPO else 'final'}"
        if name.startswith("table"):
            scoring = rows[name][EVALUATE]
            assert (scoring.model, str(scoring.data_dir)) == (model, "copies")
            assert vars(scoring).items() >= SCORED.items()
            assert name in BASES or str(scoring.output_dir) == f"{args.output_dir}/eval"
            if name in ROWS and script == GRPO:
                assert rows[name]["paper.select_checkpoint"] == [args.output_dir]


def test_on_the_tiny_model_every_script_has_its_model_data_and_lengths(tmp_path):
    rows = parsed_commands("--tiny", "table1/1.7B", RUNS=str(tmp_path))
    base = tmp_path / "base"
    common = {"model": f"{base}/model", "max_completion_length": 48, "precision": "fp32"}
    tiers = tuple(base / "heldout" / f"{tier}.jsonl" for tier in ("easy", "middle", "hard"))
    scored = common | {"benchmark_file": tiers}
    assert vars(rows["table1/1.7B/base"][EVALUATE]).items() >= scored.items()
    steps = {"data": f"{base}/train.jsonl", "max_length": 128, "max_steps": 20, "save_every": 5}
    for name, script in (("sft", SFT), ("oswft", OSWFT), ("grpo", GRPO)):
        assert vars(rows[f"table1/1.7B/{name}"][script]).items() >= (common | steps).items()


@slow
def test_a_row_runs_end_to_end(tiny, tmp_path):
    runs = tmp_path / "a folder"
    shutil.copytree(tiny, runs / "base")
    for path in (runs / "base" / "heldout").iterdir():
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))
    flags = ["--rollout_batch_size", "32", "--max_steps", "2", "--save_every", "1"]
    done = reproduce("--tiny", "table2/grpo/K2", "--", *flags, RUNS=str(runs))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = runs / "0.6B-grpo-G2-1e-6"
    model = read_args(run / "eval")["args"]["model"]
    assert re.fullmatch(rf"{run}/checkpoint-00000[12]", model)


def test_flags_reach_every_script_that_takes_them_and_a_stopped_run_is_resumed(tmp_path):
    write_args(tmp_path / "4B-grpo-G8-1e-6")
    (tmp_path / "4B-base" / "eval").mkdir(parents=True)  # not whole: no results
    done = tmp_path / "4B-sft" / "eval" / "results.json"
    done.parent.mkdir(parents=True)
    done.touch()
    flags = ["--vllm_memory", "0.4", "--gradient_checkpointing", "--no_vllm_sleep"]
    call = ["--hostfile", "hosts", "table1/4B", "table1/0.6B/static", "--", *flags]
    call += ["--verifier_workers", "4", "--rollout_batch_size", "64", "--max_length", "4000"]
    judged = {"temperature": 0.9, "reward": "r.py:f", "seed": 5}
    call += [word for name, value in judged.items() for word in (f"--{name}", str(value))]
    rows = parsed_commands(*call, RUNS=str(tmp_path))
    assert EVALUATE in rows["table1/4B/base"] and EVALUATE not in rows["table1/4B/sft"]
    sampled = {"vllm_memory": 0.4, "vllm_sleep": False, "verifier_workers": 4} | judged
    for name, script in (("sft", SFT), ("oswft", OSWFT), ("grpo", GRPO)):
        args = rows[f"table1/4B/{name}"][script]
        assert args.gradient_checkpointing and (args.seed, args.max_length) == (5, 4000)
        assert bool(args.resume) == (name == "grpo")
        if name != "sft":
            assert vars(args).items() >= (sampled | {"rollout_batch_size": 64}).items()
    static = rows["table1/0.6B/static"]
    weighed = vars(static["--module prepare.weigh"])
    assert weighed.items() >= (judged | {"max_length": 4000}).items()
    assert static[SFT].gradient_checkpointing and static[SFT].seed == 5
    shown = reproduce("--dry_run", *call, RUNS=str(tmp_path)).stdout
    assert shown.count("deepspeed --log_level error --hostfile") == 9


def test_a_name_or_a_hostfile_that_does_not_exist_is_refused():
    beginning = ("--dry_run", "table3/hard", "table1/0.6B/osw")
    for call in (("table3", "table4"), beginning, ("--hostfile", "absent", "table1")):
        result = reproduce(*call)
        assert result.returncode == 2 and result.stderr.startswith("error: ") and not result.stdout
