"""Whole runs through the deepspeed launcher: what they leave, that they resume, what stops them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from conftest import ROOT, SHARED, TINY_LENGTHS, launch, needs_shared, start, train
from data import Example, InputError, TokenizedExample
from engine import Engine, Run
from train_grpo import grpo_advantages, select_step
from train_oswft import Args, update

SCRIPTS = ("train_sft.py", "train_oswft.py", "train_grpo.py")
SAMPLING = SCRIPTS[1:]
SETTING = {  # 8 steps of 12 examples; where answers are sampled, two steps to a batch of them
    "train_sft.py": ("--train_batch_size", "12"),
    "train_oswft.py": ("--rollout_batch_size", "24", "--train_batch_size", "12"),
    "train_grpo.py": (
        *("--rollout_batch_size", "24", "--train_batch_size", "12", "--num_rollouts", "4"),
        "--importance_correction",
    ),
}
for script in SCRIPTS:
    SETTING[script] += ("--max_steps", "8", "--save_every", "2")
    SETTING[script] += ("--max_tokens_per_micro_batch", "300")


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.endswith("_s") and k != "tokens_per_second"}
        for row in rows
    ]


def rollouts(folder: Path, step: int) -> list[dict]:
    """The answers to the batch that begins with `step`."""
    return [json.loads(line) for line in (folder / f"rollouts/step_{step:06d}.jsonl").open()]


@pytest.fixture(scope="module")
def whole_runs(tiny, tmp_path_factory) -> dict[str, Path]:
    """For each script a run of 8 steps over 2 ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    for script in SCRIPTS:
        train("--output_dir", folder / script, *SETTING[script], tiny=tiny, ranks=2, script=script)
    return {script: folder / script for script in SCRIPTS}


@pytest.fixture
def oswft_run(whole_runs) -> Path:
    return whole_runs["train_oswft.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_leaves_what_the_readme_says(whole_runs, script):
    run = whole_runs[script]
    names = {path.name for path in run.iterdir()}
    assert names - {"rollouts"} == {
        *("args.json", "metrics.jsonl", "final"),
        *("checkpoint-000006", "checkpoint-000008"),  # --keep_checkpoints 2
        *(("checkpoint-000002", "checkpoint-000004") if script == "train_grpo.py" else ()),
    }
    assert ("rollouts" in names) == (script in SAMPLING)
    with_state = {path.parent.name for path in run.glob("checkpoint-*/state")}
    assert with_state == {"checkpoint-000006", "checkpoint-000008"}
    assert all((path / "model.safetensors").exists() for path in run.glob("checkpoint-*"))
    record = json.loads((run / "args.json").read_text())
    assert record["args"]["world_size"] == 2 and record["versions"]["deepspeed"]

    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    documented = set(re.findall(r"`(_?[a-z_0-9]+)`", (ROOT / "README.md").read_text()))
    for row in rows:
        assert set(row) >= {
            *("loss", "epoch", "grad_norm", "clipped", "update_norm_ratio", "learning_rate"),
            *("train_tokens", "tokens_per_second", "train_s"),
        }
        for key in row:
            prefix, _, suffix = key.rpartition("_")
            assert key in documented or {f"{prefix}_mean", f"_{suffix}"} <= documented, key


def test_the_metrics_of_osw_ft_agree_with_each_other(oswft_run):
    rows = metrics(oswft_run)
    for row in rows:
        assert row["mean_weight"] == pytest.approx(1 - row["pass_rate"])
        shares = (row["weight_0_share"], row["weight_between_share"], row["weight_1_share"])
        assert sum(shares) == pytest.approx(1)
        assert row["skipped_sequences"] == round(12 * row["weight_0_share"])
    assert any(0 < row["weight_0_share"] < 1 for row in rows), "nothing was ever skipped"


def test_the_metrics_of_grpo_agree_with_each_other(whole_runs):
    rows = metrics(whole_runs["train_grpo.py"])
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        for row in (first, second):
            assert row["skipped_sequences"] == pytest.approx(12 * 4 * row["no_signal_share"])
            assert row["vllm_gap_mean"] <= row["vllm_gap_max"] < 1e-3
        # nothing has moved at the first update of a batch; at the second it has
        assert first["approx_kl"] < 1e-6 < second["approx_kl"]
        assert first["clipped_low_share"] == first["clipped_high_share"] == 0
    assert any(0 < row["no_signal_share"] < 1 for row in rows), "nothing was ever skipped"
    assert any(row["clipped_low_share"] > 0 for row in rows[1::2]), "nothing was ever clipped"


@pytest.mark.parametrize("script", SAMPLING)
def test_every_sampled_completion_is_kept_with_its_verdict(whole_runs, script):
    run = whole_runs[script]
    files = sorted(path.name for path in (run / "rollouts").iterdir())
    assert files == [f"step_{n:06d}.jsonl" for n in (1, 3, 5, 7)]
    rows, group = metrics(run), 2 if script == "train_oswft.py" else 4
    for step in (1, 3, 5, 7):
        kept = rollouts(run, step)
        assert len(kept) == 24 * group
        pass_rates = []
        for answers in (kept[i : i + group] for i in range(0, len(kept), group)):
            assert len({answer["id"] for answer in answers}) == 1
            verdicts = torch.tensor([[answer["correct"] for answer in answers]])
            pass_rates.append(verdicts.float().mean().item())
            assert {answer["pass_rate"] for answer in answers} == {pass_rates[-1]}
            if script == "train_oswft.py":
                assert {answer["weight"] for answer in answers} == {1 - pass_rates[-1]}
            else:
                advantages = torch.tensor([[answer["advantage"] for answer in answers]])
                torch.testing.assert_close(advantages, grpo_advantages(verdicts))
        reward = "pass_rate" if script == "train_oswft.py" else "reward"
        assert rows[step - 1][reward] == pytest.approx(sum(pass_rates[:12]) / 12)
        assert rows[step][reward] == pytest.approx(sum(pass_rates[12:]) / 12)


def test_the_queries_do_not_depend_on_the_number_of_ranks(oswft_run, tiny, tmp_path):
    """Nor do the answers, as each query brings its seed, nor the first step's gradient."""
    setting = [*SETTING["train_oswft.py"], "--max_steps", "2"]
    train("--output_dir", tmp_path / "run", *setting, tiny=tiny, ranks=1)
    one, two = metrics(tmp_path / "run"), metrics(oswft_run)
    for ours, theirs in zip(rollouts(tmp_path / "run", 1), rollouts(oswft_run, 1), strict=True):
        assert (ours["id"], ours["token_ids"]) == (theirs["id"], theirs["token_ids"])
    for key, value in one[0].items():
        assert two[0][key] == pytest.approx(value, rel=1e-3), key


def test_osw_ft_at_weight_one_takes_the_steps_of_sft(whole_runs, tiny, tmp_path):
    uniform = (*SETTING["train_oswft.py"], "--weighting", "uniform")
    train("--output_dir", tmp_path / "run", *uniform, tiny=tiny, ranks=2)
    sft = whole_runs["train_sft.py"]
    rows = list(zip(metrics(tmp_path / "run"), metrics(sft), strict=True))
    for ours, theirs in rows:
        assert ours["mean_weight"] == 1 and ours["train_tokens"] == theirs["train_tokens"]
        for key in ("loss", "grad_norm", "update_norm_ratio"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-6), key
    for name in ("checkpoint-000006", "checkpoint-000008", "final"):
        ours, theirs = (run / name / "model.safetensors" for run in (tmp_path / "run", sft))
        assert ours.read_bytes() == theirs.read_bytes()


def test_sft_starts_no_vllm(tmp_path):
    """It is not even imported: the script runs where vLLM is not installed."""
    code = "import sys, train_sft; print(sorted({'vllm', 'rollout', 'verify'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr[-2000:]


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    path = folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()[-4000:]
        time.sleep(0.05)


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_stopped_and_resumed_equals_never_interrupted(whole_runs, tiny, tmp_path, script):
    run, whole = tmp_path / "run", whole_runs[script]
    arguments = (
        *("--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", run),
        *(*TINY_LENGTHS, "--learning_rate", "1e-3", *SETTING[script]),
    )
    killed = start(script, *arguments, ranks=2, start_new_session=True)
    wait_for_rows(run, 3, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    # what a kill while writing leaves: half a checkpoint, aside, and half a row
    half = run / "partial-000004"
    half.mkdir(exist_ok=True)
    (half / "model.safetensors").write_text("half")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 5, "lo')

    if script == "train_oswft.py":  # once is enough: what Ctrl-C does lives in engine.py
        stopped = start(script, *arguments, "--resume", ranks=2, start_new_session=True)
        wait_for_rows(run, 5, stopped)
        os.killpg(stopped.pid, signal.SIGINT)  # what Ctrl-C sends
        output, _ = stopped.communicate(timeout=60)
        assert stopped.returncode != 0
        assert "go on with --resume" in output, output[-3000:]
        assert not list(run.glob("partial-*"))
        saved = int(sorted(run.glob("checkpoint-*"))[-1].name[-6:])
        assert len(metrics(run)) == saved >= 5

    launch(script, *arguments, "--resume", ranks=2)
    assert metrics(run) == metrics(whole)
    for path in (run / "rollouts").glob("*"):
        assert path.read_bytes() == (whole / "rollouts" / path.name).read_bytes()
    assert (run / "final" / "model.safetensors").read_bytes() == (
        whole / "final" / "model.safetensors"
    ).read_bytes()


def test_the_selected_checkpoint_is_named_by_the_rule(whole_runs):
    run = whole_runs["train_grpo.py"]
    rewards = [row["reward"] for row in metrics(run)]
    chosen = select_step(rewards, [2, 4, 6, 8], window=4, margin=0.0)
    arguments = ["--select_checkpoint", run, "--window", "4", "--margin", "0"]
    result = run_alone(*arguments, script="train_grpo.py")
    assert result.stdout.splitlines()[-1] == str(run / f"checkpoint-{chosen:06d}")
    nothing = run_alone("--select_checkpoint", run / "final", script="train_grpo.py")
    assert nothing.returncode == 1 and "metrics.jsonl: no such file" in nothing.stderr


STOPS_BY_ITSELF = """
import os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from transformers import AutoModelForCausalLM, AutoTokenizer
import vllm

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
ids = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
).input_ids
greedy = model.generate(ids, max_new_tokens=60, do_sample=False)[0, ids.shape[1]:].tolist()
llm = vllm.LLM(folder, enforce_eager=True, dtype="float32", kv_cache_memory_bytes=2**28)
params = llm.get_default_sampling_params()
params.temperature, params.max_tokens = 0, 60
(output,) = llm.generate({"prompt_token_ids": ids[0].tolist()}, params)
end = tokenizer.convert_tokens_to_ids("<|im_end|>")
assert greedy[-1] == end and greedy.count(end) == 1, greedy
assert list(output.outputs[0].token_ids) == greedy, (output.outputs[0].token_ids, greedy)
assert output.outputs[0].finish_reason == "stop"
print("stopped after", tokenizer.decode(greedy))
"""


def test_the_final_model_loads_in_transformers_and_vllm_and_stops_at_the_end_of_turn(oswft_run):
    from data import ASK_FREE

    result = subprocess.run(
        [sys.executable, "-c", STOPS_BY_ITSELF, oswft_run / "final", f"7+5-3+1\n{ASK_FREE}"],
        capture_output=True,
        text=True,
    )
    assert "stopped after 7+5=2;" in result.stdout, result.stdout + result.stderr[-3000:]


@needs_shared
def test_real_problems_with_the_real_vocabulary_over_two_ranks(tmp_path):
    python = sys.executable
    source, rows = SHARED / "data" / "aqua_dev.jsonl", tmp_path / "aqua.jsonl"
    subprocess.run([python, "data.py", "import-aqua", source, rows], cwd=ROOT, check=True)
    init = ["tiny.py", "init", "--tokenizer", SHARED / "qwen3_tokenizer"]
    subprocess.run([python, *init, "--output_dir", tmp_path / "model"], cwd=ROOT, check=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == 151_936
    launch(
        "train_oswft.py",
        *("--model", tmp_path / "model", "--data", rows, "--output_dir", tmp_path / "run"),
        *("--max_steps", 2, "--rollout_batch_size", 8, "--max_tokens_per_micro_batch", 2048),
        *("--max_length", 1536, "--max_completion_length", 128),
        ranks=2,
    )
    first, second = metrics(tmp_path / "run")
    assert 11 < first["loss"] < 13  # ln(151,936) = 11.9: nothing is known yet
    assert first["mean_weight"] == 1 and first["train_tokens"] > 1000
    assert first["completion_length_max"] == 128 and second["update_norm_ratio"] > 0


# ---- what bad input gets


def run_alone(*args, script: str = "train_oswft.py", env=None) -> subprocess.CompletedProcess:
    """The script as rank 0 of 1, without the launcher's seconds."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **alone, "MASTER_PORT": "0"} if env is None else env
    command = [sys.executable, script, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def bad_inputs(tiny, whole_runs, tmp_path_factory):
    """Every case is run at once, two at a time: {name: (process, its output folder)}."""
    folder = tmp_path_factory.mktemp("bad")
    rows = (tiny / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "not_json.jsonl").write_text(rows[0] + "{half\n")
    (folder / "few.jsonl").write_text("".join(rows[:5]))
    good = ["--model", tiny / "model", "--data", tiny / "train.jsonl", *TINY_LENGTHS]
    cases = {}
    for script in SCRIPTS:
        other = folder / f"other {script}"
        shutil.copytree(whole_runs[script], other)
        cases |= {
            (script, "few"): ["--data", folder / "few.jsonl", "--max_length", "60"],
            (script, "another run"): ["--output_dir", other],
            (script, "other arguments"): [
                *("--output_dir", other, "--resume", "--learning_rate", "0.5", "--seed", "3"),
                *("--max_steps", "100"),
            ],
            (script, "batch"): ["--train_batch_size", "0"],
        }
    cases |= {
        ("train_sft.py", "not json"): ["--data", folder / "not_json.jsonl"],
        ("train_sft.py", "no such model"): ["--model", folder / "absent"],
        ("train_sft.py", "model length"): ["--max_length", "513"],
        ("train_sft.py", "unknown"): ["--learning_rat", "1"],
        ("train_sft.py", "nothing to resume"): ["--resume"],
        ("train_oswft.py", "k"): ["--num_rollouts", "0"],
        ("train_grpo.py", "g"): ["--num_rollouts", "1"],
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
        *((script, "batch", "--train_batch_size must be at least 1") for script in SCRIPTS),
        ("train_sft.py", "not json", "not_json.jsonl:2: not JSON"),
        ("train_sft.py", "no such model", "no tokenizer there"),
        ("train_sft.py", "model length", "--max_length 513 is beyond the model's limit of 512"),
        ("train_sft.py", "nothing to resume", "there is no checkpoint to resume from"),
        ("train_oswft.py", "k", "--num_rollouts must be at least 1, got 0"),
        ("train_grpo.py", "g", "--num_rollouts must be at least 2"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_is_written(bad_inputs, script, case, message):
    process, output = bad_inputs[script, case]
    assert process.returncode == 1
    errors = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], process.stderr[-2000:]
    assert "Traceback" not in process.stderr
    assert case == "another run" or not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rollouts": 0}, "--num_rollouts must be at least 1, got 0"),
        ({"save_every": -1}, "--save_every must be at least 1, got -1"),
        ({"train_batch_size": 7}, "--train_batch_size 7 does not divide --rollout_batch_size 128"),
        ({"train_batch_size": 64, "max_steps": 5}, "--max_steps 5 ends within a batch of 2 steps"),
        ({"vllm_tensor_parallel": 2}, "--vllm_tensor_parallel 2 does not divide 3 ranks"),
        ({"max_completion_length": 5120}, "--max_completion_length must leave room for a prompt"),
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


@pytest.mark.parametrize("script", SCRIPTS)
def test_resuming_with_other_arguments_lists_them(bad_inputs, script):
    process, _ = bad_inputs[script, "other arguments"]
    assert process.returncode == 1
    (error,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert "learning_rate 0.001 -> 0.5" in error and "seed 0 -> 3" in error
    assert "world_size 2 -> 1" in error  # optimizer state is saved per rank
    assert "max_steps" not in error  # a longer run is the same run


def test_a_mistyped_argument_is_explained(bad_inputs):
    process, output = bad_inputs["train_sft.py", "unknown"]
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "--learning_rat" in process.stdout + process.stderr and not output.exists()


def test_without_the_launcher_it_says_how_to_start(tiny):
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    process = run_alone("--model", tiny / "model", "--data", tiny / "train.jsonl", env=env)
    assert process.returncode == 1
    assert "error: start this script with: deepspeed train_oswft.py" in process.stderr


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_loss_that_is_not_finite_names_step_and_rows_and_takes_no_step(one_rank):
    class OneRowIsDamaged(Engine):
        device = torch.device("cpu")
        engine = SimpleNamespace(
            global_steps=11,
            set_gradient_accumulation_boundary=lambda last: None,
            backward=lambda loss, scale_wrt_gas: None,
        )

        def __init__(self):
            pass

        def logprobs(self, batch):
            logprobs = torch.zeros(batch.mask.shape)
            logprobs[(batch.input_ids == 9).any(dim=1)] = float("nan")
            return logprobs

        def step(self):
            raise AssertionError("the weights were updated")

    rows = [
        TokenizedExample(Example(f"row-{token}", "q", "s", "a", "s"), [1, token], [2, 3])
        for token in (7, 8, 9)
    ]
    with pytest.raises(FloatingPointError, match=r"step 12: loss is nan, rows \['row-9'\]"):
        update(OneRowIsDamaged(), rows, torch.ones(3), Args(model="m", data="d"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before_it(one_rank, tmp_path):
    class FullDisk:
        disk_is_full = False

        def save_state(self, folder):
            (folder / "state").mkdir(parents=True)
            if self.disk_is_full:
                raise RuntimeError("unexpected pos 2112 vs 2004\nmore")

        def save_model(self, tokenizer, folder):
            pass

    args = Args(model="m", data="d", output_dir=str(tmp_path / "run"), keep_checkpoints=1)
    engine, run = FullDisk(), Run(args)
    run.save_checkpoint(engine, None, 1)
    engine.disk_is_full = True
    with pytest.raises(
        OSError, match=r"step 2: .* could not be written: unexpected pos 2112 vs 2004$"
    ):
        run.save_checkpoint(engine, None, 2)
    assert [path.name for path in run.folder.iterdir()] == ["checkpoint-000001"]
    engine.disk_is_full = False
    run.save_checkpoint(engine, None, 3)
    assert [path.name for path in run.folder.iterdir()] == ["checkpoint-000003"]


def test_metrics_go_to_wandb_too_if_it_is_installed(one_rank, tmp_path, monkeypatch):
    args = Args(model="m", data="d", output_dir=str(tmp_path / "run"), wandb=True, seed=7)
    with monkeypatch.context() as patch:
        patch.setattr("engine.find_spec", lambda name: None)
        with pytest.raises(InputError, match="pip install wandb"):
            Run(args)
    logged = []
    wandb = SimpleNamespace(
        init=lambda **settings: logged.append(settings["config"]["seed"]),
        log=lambda row, step: logged.append((step, row["loss"])),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("engine.find_spec", lambda name: wandb)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # leave pytest's own
    run = Run(args)
    run.start(engine=None, max_steps=2)
    run.lap("train_s")
    run.log({"step": 1, "loss": 0.5, "train_tokens": 10})
    assert logged == [7, (1, 0.5)]
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row["loss"] == 0.5 and row["tokens_per_second"] == 10 / row["train_s"]


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoint(tiny, tmp_path):
    run = tmp_path / "run"
    process = start(
        "train_oswft.py",
        *("--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", run),
        *(*TINY_LENGTHS, *SETTING["train_oswft.py"], "--train_batch_size", "24"),
        *("--learning_rate", "1e30", "--save_every", "1"),
    )
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    errors = re.findall(r"error: step 2: (?:loss|gradient) is (?:nan|inf), rows \['", output)
    assert len(errors) == 1, output[-3000:]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000001"]
    assert not (run / "final").exists()
