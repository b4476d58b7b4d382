"""Measurements and plans: that they count what they say, beside what real runs take."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import train_oswft
from bench import __main__ as page
from bench import cost, gpu, measure, plan, setup
from conftest import ROOT, launch, needs_shared, needs_vllm
from data import InputError
from demo.tiny import make_config, make_tokenizer
from engine import CPU_REDUCE_BUCKET

needs_trl = pytest.mark.skipif(not find_spec("trl"), reason="needs requirements-dev.txt")


def run(*args) -> str:
    """The output of Python with these arguments."""
    command = [sys.executable, *map(str, args)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_what_is_compared_takes_turns_and_the_first_ones_do_not_count():
    calls = []
    cases = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert measure.take_turns(cases, repetitions=2) == {"a": [4, 5], "b": [3, 6]}
    assert "".join(calls) == "abbaab"
    assert measure.take_turns(cases, repetitions=1) == {"a": [7], "b": [8]}
    seeds = measure.take_turns(dict.fromkeys("ab", lambda seed: seed), 2, seeded=True)
    assert seeds == {"a": [1, 2], "b": [1, 2]}


def test_a_ratio_is_that_within_a_turn_and_a_goal_needs_that_of_the_medians_too():
    found = measure.ratio([2, 20, 300], [1, 5, 100])
    assert found == ([2, 4, 3], 4) and str(found) == "3.00 (2.00–4.00)"
    assert measure.goal("a", "b", found, "≥ 3").endswith(": reached)")
    assert measure.goal("a", "b", found, "≤ 3").endswith(": NOT reached)")
    found = measure.ratio([3, 30, 10], [1, 10, 5])
    assert found == ([3, 3, 2], 2) and measure.goal("a", "b", found, "≥ 3").endswith("NOT reached)")
    assert str(measure.ratio([1], [80])) == "0.013 (0.013–0.013)"


def test_extra_memory_is_the_peak_beyond_what_was_there_and_what_is_returned():
    mib = 2**20
    before = torch.ones(16 * mib)

    def call() -> list[torch.Tensor]:
        kept = before[: 8 * mib] * 2
        before.repeat(2)  # 128 MiB
        return [kept]

    extra = measure.extra_memory(call)
    assert 120 * mib <= extra <= 150 * mib


def test_the_page_begins_with_all_goals(tmp_path):
    output = tmp_path / "BENCHMARKS.md"
    output.write_text("old\n")
    goals = "\n\n".join(
        [
            measure.goal("speed", "theirs", measure.ratio([13], [10]), "≥ 1.3"),
            measure.goal("time", "theirs", measure.ratio([6], [5]), "≤ 1.1"),
            measure.goal("size", "theirs", measure.ratio([7], [1]), "none: it is small"),
        ]
    )
    page.write_page({"sft": f"a table\n\n{goals}"}, output)
    top, section = output.read_text().split("## sft")
    assert "speed | theirs | 1.30 (1.30–1.30) | ≥ 1.3: reached" in top and "old" not in top
    assert "time | theirs | 1.20 (1.20–1.20) | ≤ 1.1: NOT reached" in top
    assert "size | theirs | 7.00 (7.00–7.00) | none: it is small" in top
    assert section == "\n\na table\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """A folder with a config and no weights."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    sizes |= {"num_hidden_layers": 6, "max_position_embeddings": 1024}
    config = make_config(make_tokenizer(), **sizes, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    return str(folder)


def flags(model: str, **values) -> train_oswft.Args:
    defaults = {"max_length": 512, "max_tokens_per_micro_batch": 4096}
    return train_oswft.Args(model=model, data="", **{**defaults, **values})


def test_the_planned_memory_is_what_a_real_run_holds(small, tmp_path, monkeypatch):
    assert DeepSpeedZeroConfig().reduce_bucket_size == plan.REDUCE_BUCKET  # a GPU's
    if not torch.cuda.is_available():
        monkeypatch.setattr(plan, "REDUCE_BUCKET", CPU_REDUCE_BUCKET)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small)).save_pretrained(tmp_path)
    output = launch("tests/memory.py", tmp_path, 512, 8, 0, ranks=2)
    held = json.loads(re.search("held (.*)", output)[1])
    planned = plan.memory(flags(small, zero_stage=3), gpus=2, gpu_memory=1)
    assert planned["train"]["activations"] == pytest.approx(held.pop("activations"), rel=0.15)
    for part, size in held.items():  # between two steps
        assert planned["sample"][part] == pytest.approx(size, rel=0.02), part


HELD = """
import gc, sys, torch
from engine import init_distributed, load_engine
import train_sft
from data import Trajectory

init_distributed()
args = train_sft.Args(model=sys.argv[1], data="", max_length=64, zero_stage=int(sys.argv[2]))
engine = load_engine(args)
train_sft.update(engine, [Trajectory("", [1], [2, 3])], args)
tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
tensors += [x.grad for x in tensors if x.is_leaf and x.grad is not None]
storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
print("held", sum(storages.values()))
"""


@pytest.mark.parametrize("stage", [1, 2])
def test_between_steps_stage_1_keeps_an_fp32_gradient_and_stage_2_none(stage, small, tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small))
    model.save_pretrained(tmp_path)
    held = int(run("-c", HELD, tmp_path, stage).split()[-1])
    assert held == pytest.approx({1: 18, 2: 14}[stage] * model.num_parameters(), rel=0.02)
    planned = plan.memory(flags(small, zero_stage=stage), gpus=1, gpu_memory=80)["sample"]
    assert held == pytest.approx(sum(planned.values()) - planned["vLLM"] - 3 * 2**30, rel=0.02)


def test_at_the_start_all_weights_are_there_in_fp32(small):
    for stage in (2, 3):
        phases = plan.memory(flags(small, zero_stage=stage), gpus=8, gpu_memory=1)
        assert phases["start"]["weights"] == 4 * plan.traced(small, "bf16")[0]


def test_the_flags_that_save_memory_do_so_where_they_should(small):
    def total(phase: str = "train", gpus: int = 2, **values) -> float:
        return sum(plan.memory(flags(small, **values), gpus, 24)[phase].values())

    vllm = {"vllm_memory": 0.3}
    assert total(vllm_sleep=True, **vllm) < total(vllm_sleep=False, **vllm)
    assert total("sample", vllm_sleep=True, **vllm) == total("sample", vllm_sleep=False, **vllm)
    assert total(gradient_checkpointing=True) < total()
    assert total(max_tokens_per_micro_batch=512) < total()
    assert total(cpu_offload=True) < total()
    assert total(gpus=8) < total(gpus=2)
    sharded, whole = (plan.memory(flags(small, zero_stage=n), 2, 1)["sample"] for n in (3, 2))
    assert sharded["weights"] == whole["weights"] / 2
    assert "gradients" in sharded and "gradients" not in whole  # freed after a step
    assert total(gpus=1, zero_stage=3) == total(gpus=1, zero_stage=2)


def test_the_gradient_of_a_tied_head_is_planned_until_the_embedding_s_is_added(small, tmp_path):
    AutoConfig.from_pretrained(small, tie_word_embeddings=False).save_pretrained(tmp_path)
    for model, size in (small, 2048 * 256 * 2), (str(tmp_path), 0):
        planned = plan.memory(flags(model, max_tokens_per_micro_batch=100_000), 2, 1)["train"]
        assert planned["embedding's gradient"] == size


def test_the_plan_s_defaults_are_those_of_training_and_an_80_gb_gpu_is_no_larger_than_it_is():
    planned, trained = (x.__dataclass_fields__ for x in (plan.Args, train_oswft.Args))
    for name in planned.keys() & trained.keys():
        assert planned[name].default == trained[name].default, name
    assert planned["gpu_memory"].default < 81_559 / 1024  # what nvidia-smi says


def test_asleep_the_trainer_leaves_vllm_all_that_it_will_not_need(small):
    for stage in (1, 2, 3):
        args = flags(small, zero_stage=stage, vllm_sleep=True)
        phases = plan.memory(args, gpus=4, gpu_memory=24)
        total = sum(phases["sample"].values()) / 2**30
        assert 22 < total <= 24, (stage, total)
    assert "(`--vllm_memory 0.3" in plan.main(plan.Args(model=small, max_length=512))[2]


def test_a_gpu_alone_has_one_reduce_bucket_and_stage_1_sends_all_gradients_at_once(small):
    def bucket(gpus: int, stage: int) -> float:
        """Bytes for each number in it; a pass over many tokens needs most while it runs."""
        args = flags(small, zero_stage=stage, max_tokens_per_micro_batch=100_000)
        size = plan.traced(small, "bf16")[0] if stage == 1 else plan.REDUCE_BUCKET
        return plan.memory(args, gpus, 80)["train"]["reduce bucket"] / size

    assert [bucket(1, stage) for stage in (1, 2, 3)] == [2, 2, 2]
    assert [bucket(2, stage) for stage in (1, 2, 3)] == [4, 4, 2]


def test_plan_names_the_flag_that_makes_a_run_fit(small):
    def planned(**values) -> str:
        values = {"max_length": 512, "gpus": 2, **values}
        return "".join(plan.main(plan.Args(model=small, **values)))

    share = {"zero_stage": 3, "vllm_memory": 0.5, "vllm_sleep": False}
    assert "**It fits.**" in planned(gpu_memory=80)
    assert "`--vllm_sleep`" in planned(gpu_memory=9, **share)
    large = {**share, "vllm_sleep": True, "max_tokens_per_micro_batch": 100_000}
    assert "`--max_tokens_per_micro_batch 512`" in planned(gpu_memory=12, **large)
    # of 3.6 GiB, vLLM's own take 4
    assert "`--vllm_memory 0.5`" in planned(gpu_memory=12, **{**share, "vllm_memory": 0.3})
    assert "No flag" in planned(gpu_memory=1)
    for wrong in {"max_length": 5000}, {"gpus": 3, "vllm_tensor_parallel": 2}:
        with pytest.raises(InputError):
            planned(**wrong)


@needs_vllm
@pytest.mark.parametrize(
    ("section", "rows", "options"),
    [
        pytest.param(
            "parts",
            9,
            ("--tokens", 1024, "--vocabulary", 16_384, "--limit", 200),
            marks=needs_shared,
        ),
        pytest.param("step", 8, ("--grpo_repetitions", 1), marks=needs_trl),
    ],
)
def test_a_section_measures_what_it_names(section, rows, options, tiny):
    model = ("--model", tiny / "model", "--data", tiny / "train.jsonl")
    output = run("-m", f"bench.{section}", "--repetitions", 1, *model, *options)
    cells = re.findall(r"^\| .*\| ([\d.]+) \(\S+\) \|$", output, re.M)
    assert len(cells) >= rows and min(map(float, cells)) > 0, output
    goals = re.findall(measure.GOAL, output, re.M)
    assert len(goals) >= 4 and all(float(value.split()[0]) > 0 for *_, value, _ in goals)


def test_the_gpu_section_refuses_a_machine_without_one_and_its_parts_run(small):
    with pytest.raises(InputError, match="no CUDA GPU"):
        gpu.main()
    code = f"""
from bench import gpu
from transformers import AutoConfig
config = AutoConfig.from_pretrained({small!r})
(row,) = gpu.train_on_lengths(config, [64], 128, repetitions=1)
assert row[0] > 0 and row[1] > 0, row
assert gpu.sampled_per_second(config, prompts=4, tokens=8) > 0
assert gpu.matrix_rate(64, repetitions=2) > 0
"""
    run("-c", code)


@pytest.mark.parametrize("name", ["0.6B", "1.7B", "4B"])
def test_the_cost_of_a_step_counts_the_parameters_of_the_paper_s_models(name):
    config = Qwen3Config(**setup.QWEN3[name])
    with FakeTensorMode():
        own = AutoModelForCausalLM.from_config(config).num_parameters()
    assert cost.num_parameters(config) == pytest.approx(own, rel=1e-3)  # norms are left out
    assert float(name[:-1]) == pytest.approx(own / 1e9, rel=0.02)


def test_gradients_are_sent_twice_and_weights_once():
    config = Qwen3Config(**setup.QWEN3["0.6B"])
    one, two = (
        cost.update_seconds(config, 2 * cost.MICRO_BATCH * gpus, 1, gpus) for gpus in (1, 2)
    )
    adam = 15 * cost.num_parameters(config) / (cost.BANDWIDTH * cost.READ_SHARE)
    sent = (two - one + adam) * cost.LINK * 2  # half of the bytes stay on each of two GPUs
    assert sent == pytest.approx((2 * 2 + 1) * 2 * cost.num_parameters(config), rel=0.01)


def test_sampling_costs_a_read_of_the_weights_for_each_token_of_the_longest_answer():
    def seconds(answers: int, limit: int = 4096) -> float:
        alive = lambda t: answers * (t < 100)  # noqa: E731
        return cost.sampling_seconds(config, alive, 1, limit, gpus=1)

    config = Qwen3Config(**setup.QWEN3["0.6B"])
    weights = 2 * cost.num_parameters(config) / (cost.BANDWIDTH * cost.READ_SHARE)
    assert seconds(1) == pytest.approx(100 * (weights + cost.DECODE_STEP), rel=0.01)
    assert seconds(1, limit=50) == pytest.approx(seconds(1) / 2, rel=0.01)
    assert seconds(64) < 1.5 * seconds(1)  # they share the read
    assert seconds(2048) > 3.9 * seconds(512)  # no more than 512 run at a time


def test_the_costs_of_the_three_methods_are_ordered_and_a_model_that_does_not_fit_is_said(
    monkeypatch,
):
    monkeypatch.setitem(setup.QWEN3["4B"], "num_hidden_layers", 72)
    text = "".join(cost.main(cost.Args(gpus=1)))
    assert text.count("too large") == 12  # sampling beside a trainer of 8B on one GPU
    rows = re.findall(r"0.6B, .*\| ([\d.]+) \|", text)
    assert len(rows) == 3 and [*map(float, rows)] == sorted(map(float, rows))


def test_training_flops_count_parameters_and_causal_attention():
    config = SimpleNamespace(num_attention_heads=2, head_dim=8, num_hidden_layers=3)
    # Of a token at length S, forward: 2 N for the matrices, and for attention of each layer 2 S d
    # for the scores and the same for the values, half of which a causal mask leaves out.
    assert gpu.training_flops(config, 1000, 64) == 3 * (2 * 1000 + 3 * 2 * 64 * 16)
