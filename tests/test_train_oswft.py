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
from train_oswft import Args, check, update

SETTING = (
    *("--rollout_batch_size", "24", "--train_batch_size", "12", "--max_steps", "8"),
    *("--save_every", "2", "--max_tokens_per_micro_batch", "300"),
)


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.endswith("_s") and k != "tokens_per_second"}
        for row in rows
    ]


@pytest.fixture(scope="module")
def whole_run(tiny, tmp_path_factory) -> Path:
    """A run of 8 steps over 2 ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train("--output_dir", folder, *SETTING, tiny=tiny, ranks=2)
    return folder


def test_a_run_leaves_what_the_readme_says(whole_run):
    names = {path.name for path in whole_run.iterdir()}
    assert names == {
        *("args.json", "metrics.jsonl", "rollouts", "final"),
        *("checkpoint-000006", "checkpoint-000008"),  # --keep_checkpoints 2
    }
    record = json.loads((whole_run / "args.json").read_text())
    assert record["args"]["world_size"] == 2 and record["versions"]["deepspeed"]

    rows = [json.loads(line) for line in (whole_run / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    for row in rows:
        assert set(row) >= {
            *("loss", "mean_weight", "pass_rate", "weight_0_share", "weight_between_share"),
            *("weight_1_share", "skipped_sequences", "completion_length_mean"),
            *("completion_length_max", "truncated_share", "grad_norm", "clipped"),
            *("update_norm_ratio", "learning_rate", "tokens_per_second"),
            *("rollout_s", "verify_s", "train_s", "sync_s"),
        }
        assert row["mean_weight"] == pytest.approx(1 - row["pass_rate"])
        shares = (row["weight_0_share"], row["weight_between_share"], row["weight_1_share"])
        assert sum(shares) == pytest.approx(1)
        assert row["skipped_sequences"] == round(12 * row["weight_0_share"])
    assert any(0 < row["weight_0_share"] < 1 for row in rows), "nothing was ever skipped"


def test_every_sampled_completion_is_kept_with_its_verdict(whole_run, tiny):
    files = sorted((whole_run / "rollouts").iterdir())
    assert [file.name for file in files] == [f"step_{n:06d}.jsonl" for n in (1, 3, 5, 7)]
    rows = metrics(whole_run)
    for file, row, next_row in zip(files, rows[::2], rows[1::2], strict=True):
        kept = [json.loads(line) for line in file.open()]
        assert len(kept) == 24 * 2
        by_query = [kept[i : i + 2] for i in range(0, 48, 2)]
        for pair in by_query:
            assert pair[0]["id"] == pair[1]["id"]
            right = sum(answer["correct"] for answer in pair)
            assert pair[0]["pass_rate"] == right / 2 and pair[0]["weight"] == 1 - right / 2
        weights = [pair[0]["weight"] for pair in by_query]
        assert row["mean_weight"] == pytest.approx(sum(weights[:12]) / 12)
        assert next_row["mean_weight"] == pytest.approx(sum(weights[12:]) / 12)


def test_the_queries_do_not_depend_on_the_number_of_ranks(whole_run, tiny, tmp_path):
    """Nor do the answers, as each query brings its seed, nor the first step's gradient."""
    setting = [*SETTING, "--max_steps", "2"]
    train("--output_dir", tmp_path / "run", *setting, tiny=tiny, ranks=1)
    one, two = metrics(tmp_path / "run"), metrics(whole_run)
    kept = [
        [json.loads(line) for line in (run / "rollouts" / "step_000001.jsonl").open()]
        for run in (tmp_path / "run", whole_run)
    ]
    for ours, theirs in zip(*kept, strict=True):
        assert (ours["id"], ours["token_ids"]) == (theirs["id"], theirs["token_ids"])
    for key, value in one[0].items():
        assert two[0][key] == pytest.approx(value, rel=1e-3), key


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 200
    path = folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()[-4000:]
        time.sleep(0.05)


def test_killed_stopped_and_resumed_equals_never_interrupted(whole_run, tiny, tmp_path):
    run = tmp_path / "run"
    arguments = (
        *("--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", run),
        *(*TINY_LENGTHS, "--learning_rate", "1e-3", *SETTING),
    )
    killed = start("train_oswft.py", *arguments, ranks=2, start_new_session=True)
    wait_for_rows(run, 3, killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    # what a kill while writing leaves: half a checkpoint, aside, and half a row
    half = run / "partial-000004"
    half.mkdir(exist_ok=True)
    (half / "model.safetensors").write_text("half")
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 5, "lo')

    stopped = start("train_oswft.py", *arguments, "--resume", ranks=2, start_new_session=True)
    wait_for_rows(run, 5, stopped)
    os.killpg(stopped.pid, signal.SIGINT)  # what Ctrl-C sends
    output, _ = stopped.communicate(timeout=60)
    assert stopped.returncode != 0
    assert "go on with --resume" in output, output[-3000:]
    assert not list(run.glob("partial-*"))
    saved = int(sorted(run.glob("checkpoint-*"))[-1].name[-6:])
    assert len(metrics(run)) == saved >= 5

    launch("train_oswft.py", *arguments, "--resume", ranks=2)
    assert metrics(run) == metrics(whole_run)
    for name in ("rollouts/step_000001.jsonl", "rollouts/step_000007.jsonl"):
        assert (run / name).read_bytes() == (whole_run / name).read_bytes()
    assert (run / "final" / "model.safetensors").read_bytes() == (
        whole_run / "final" / "model.safetensors"
    ).read_bytes()


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


def test_the_final_model_loads_in_transformers_and_vllm_and_stops_at_the_end_of_turn(whole_run):
    from data import ASK_FREE

    result = subprocess.run(
        [sys.executable, "-c", STOPS_BY_ITSELF, whole_run / "final", f"7+5-3+1\n{ASK_FREE}"],
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


def run_alone(*args, env=None) -> subprocess.CompletedProcess:
    """The script as rank 0 of 1, without the launcher's seconds."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **alone, "MASTER_PORT": "0"} if env is None else env
    command = [sys.executable, "train_oswft.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture(scope="module")
def bad_inputs(tiny, whole_run, tmp_path_factory):
    """Every case is run at once, two at a time: {name: (process, its output folder)}."""
    folder = tmp_path_factory.mktemp("bad")
    rows = (tiny / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "not_json.jsonl").write_text(rows[0] + "{half\n")
    (folder / "few.jsonl").write_text("".join(rows[:5]))
    other_run = folder / "other_run"
    shutil.copytree(whole_run, other_run)
    good = ["--model", tiny / "model", "--data", tiny / "train.jsonl", *TINY_LENGTHS, *SETTING]
    cases = {
        "not json": [*good, "--data", folder / "not_json.jsonl"],
        "few": [*good, "--data", folder / "few.jsonl", "--max_length", "60"],
        "no such model": [*good, "--model", folder / "absent"],
        "k": [*good, "--num_rollouts", "0"],
        "model length": [*good, "--max_length", "513"],
        "unknown": [*good, "--learning_rat", "1"],
        "nothing to resume": [*good, "--resume"],
        "another run": [*good, "--output_dir", other_run],
        "other arguments": [
            *(*good, "--output_dir", other_run, "--resume"),
            *("--learning_rate", "0.5", "--seed", "3", "--max_steps", "100"),
        ],
    }

    def run(name: str):
        output = other_run if "--output_dir" in cases[name] else folder / name
        return name, (run_alone(*cases[name], "--output_dir", output), output)

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(run, cases))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("not json", "not_json.jsonl:2: not JSON"),
        ("few", "examples are left"),
        ("no such model", "no tokenizer there"),
        ("k", "--num_rollouts must be at least 1, got 0"),
        ("model length", "--max_length 513 is beyond the model's limit of 512 tokens"),
        ("another run", "is not empty: choose another output_dir, or --resume"),
        ("nothing to resume", "there is no checkpoint to resume from"),
    ],
)
def test_bad_input_gets_one_line_and_nothing_is_written(bad_inputs, case, message):
    process, output = bad_inputs[case]
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
        ({"learning_rate": 0.0}, "--learning_rate, --temperature and --max_grad_norm must be"),
        ({"temperature": 0.0}, "--learning_rate, --temperature and --max_grad_norm must be"),
        ({"vllm_memory": 1.5}, "--vllm_memory is a share between 0 and 1, got 1.5"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, message):
    check(Args(model="m", data="d"), world_size=3)
    with pytest.raises(InputError, match=message):
        check(Args(model="m", data="d", **arguments), world_size=3)


def test_resuming_with_other_arguments_lists_them(bad_inputs):
    process, _ = bad_inputs["other arguments"]
    assert process.returncode == 1
    (error,) = [line for line in process.stderr.splitlines() if line.startswith("error: ")]
    assert "learning_rate 0.001 -> 0.5" in error and "seed 0 -> 3" in error
    assert "world_size 2 -> 1" in error  # optimizer state is saved per rank
    assert "max_steps" not in error  # a longer run is the same run


def test_a_mistyped_argument_is_explained(bad_inputs):
    process, output = bad_inputs["unknown"]
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

    engine, run = FullDisk(), Run(str(tmp_path / "run"), {}, resume=False)
    run.save_checkpoint(engine, None, 1, keep=1)
    engine.disk_is_full = True
    with pytest.raises(
        OSError, match=r"step 2: .* could not be written: unexpected pos 2112 vs 2004$"
    ):
        run.save_checkpoint(engine, None, 2, keep=1)
    assert [path.name for path in run.folder.iterdir()] == ["checkpoint-000001"]
    engine.disk_is_full = False
    run.save_checkpoint(engine, None, 3, keep=1)
    assert [path.name for path in run.folder.iterdir()] == ["checkpoint-000003"]


def test_metrics_go_to_wandb_too_if_it_is_installed(one_rank, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("engine.find_spec", lambda name: None)
        with pytest.raises(InputError, match="pip install wandb"):
            Run(str(tmp_path / "run"), {"wandb": True}, resume=False)
    logged = []
    wandb = SimpleNamespace(
        init=lambda **settings: logged.append(settings["config"]["seed"]),
        log=lambda row, step: logged.append((step, row["loss"])),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("engine.find_spec", lambda name: wandb)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # leave pytest's own
    run = Run(str(tmp_path / "run"), {"wandb": True, "seed": 7}, resume=False)
    run.start(engine=None, max_steps=1)
    run.log({"step": 1, "loss": 0.5})
    run.finish(1, 1)
    assert logged == [7, (1, 0.5)]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'


def test_a_run_that_diverges_stops_and_keeps_its_last_checkpoint(tiny, tmp_path):
    run = tmp_path / "run"
    process = start(
        "train_oswft.py",
        *("--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", run),
        *(*TINY_LENGTHS, *SETTING, "--learning_rate", "1e30", "--train_batch_size", "24"),
        *("--save_every", "1"),
    )
    output, _ = process.communicate(timeout=200)
    assert process.returncode != 0
    errors = re.findall(r"error: step 2: (?:loss|gradient) is (?:nan|inf), rows \['", output)
    assert len(errors) == 1, output[-3000:]
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-000001"]
    assert not (run / "final").exists()
