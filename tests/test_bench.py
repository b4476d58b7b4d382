"""Measurements and plans: that they count what they say, beside what real runs take."""

import json
import re
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

import train_oswft
from bench import growth, measure, peers, plan
from bench.gpu import training_flops
from conftest import ROOT, launch, metrics, needs_vllm, train
from data import InputError, load_examples, load_tokenizer, tokenize_examples
from demo.tiny import make_config, make_tokenizer


def run(*args) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_what_is_compared_takes_turns_and_the_first_ones_do_not_count():
    calls = []
    cases = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert measure.take_turns(cases, repetitions=2) == {"a": [4, 5], "b": [3, 6]}
    assert "".join(calls) == "abbaab"


def test_a_ratio_compares_within_a_turn():
    assert measure.ratio([2, 20, 400], [1, 10, 100]) == 2


def test_a_goal_says_whether_it_is_reached():
    assert "**1.31** (goal ≥ 1.3: reached)" in measure.goal("speed", 1.31, "≥ 1.3")
    assert "NOT reached" in measure.goal("speed", 1.29, "≥ 1.3")
    assert "NOT reached" in measure.goal("time", 1.2, "≤ 1.1")


def test_extra_memory_is_the_peak_beyond_what_was_there_and_what_is_returned():
    mib = 2**20
    before = torch.ones(64 * mib // 4)

    def call():
        for _ in range(3):
            passing = torch.ones(100 * mib // 4)
        del passing
        return [before[: 32 * mib // 4] * 2]

    _, extra = measure.extra_memory(call)
    assert 60 * mib <= extra <= 210 * mib  # 100 or, while one takes another's place, 200 - 32


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """A folder with a config and no weights."""
    folder = tmp_path_factory.mktemp("small")
    config = make_config(
        make_tokenizer(),
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        head_dim=64,
        max_position_embeddings=1024,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)
    return str(folder)


def flags(model: str, **values) -> train_oswft.Args:
    defaults = {"max_length": 512, "max_tokens_per_micro_batch": 4096}
    return train_oswft.Args(model=model, data="", **{**defaults, **values})


def test_the_planned_memory_is_what_a_real_run_holds(small, tmp_path):
    model = tmp_path / "model"
    code = f"import transformers as t; c = t.AutoConfig.from_pretrained({small!r}); "
    code += f"t.AutoModelForCausalLM.from_config(c).save_pretrained({str(model)!r})"
    assert run("-c", code).returncode == 0
    output = launch("tests/memory.py", model, 512, 8, 0, ranks=2)
    held = json.loads(re.search("held (.*)", output)[1])
    planned = plan.memory(flags(small, zero_stage=3), gpus=2, gpu_memory=1)
    assert planned["train"]["activations"] == pytest.approx(held.pop("activations"), rel=0.15)
    for part, size in held.items():  # between two steps
        assert planned["sample"][part] == pytest.approx(size, rel=0.02), part


def test_the_flags_that_save_memory_do_so_where_they_should(small):
    def total(phase: str = "train", gpus: int = 2, **values) -> float:
        return sum(plan.memory(flags(small, **values), gpus, 1)[phase].values())

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
    options = {"max_tokens_per_micro_batch": 100_000}
    models = (small, str(tmp_path))
    tied, untied = (plan.memory(flags(m, **options), 2, 1)["train"] for m in models)
    assert tied["embedding's gradient"] == 2048 * 256 * 2
    assert untied["embedding's gradient"] == 0


def test_the_plan_s_defaults_are_those_of_training_and_an_80_gb_gpu_is_no_larger_than_it_is():
    planned, trained = (x.__dataclass_fields__ for x in (plan.Args, train_oswft.Args))
    for name in planned.keys() & trained.keys():
        assert planned[name].default == trained[name].default, name
    assert planned["gpu_memory"].default < 81_559 / 1024  # what nvidia-smi says


def test_plan_names_the_flag_that_makes_a_run_fit(small):
    def planned(model: str = small, max_length: int = 512, gpus: int = 2, **values) -> str:
        args = plan.Args(model=model, max_length=max_length, gpus=gpus, **values)
        return "".join(plan.main(args))

    share = {"zero_stage": 3, "vllm_memory": 0.5, "vllm_sleep": False}
    assert "**It fits.**" in planned(gpu_memory=80)
    assert "It does with `--vllm_sleep`" in planned(gpu_memory=9, **share)
    small_share = planned(gpu_memory=12, **{**share, "vllm_memory": 0.3})
    assert "vLLM's share does not hold the model" in small_share  # of 3.6 GiB, its own take 4
    assert "It does with `--vllm_memory 0.5`" in small_share
    assert "No flag of the training scripts makes it fit" in planned(gpu_memory=1)
    for wrong in (
        {"model": "no/such-folder/x"},
        {"max_length": 5000},
        {"gpus": 3, "vllm_tensor_parallel": 2},
    ):
        with pytest.raises((InputError, OSError)):
            planned(**wrong)


def test_plan_asks_for_gradient_checkpointing_only_where_it_is_needed(small):
    def verdict(**values) -> str:
        flags = {"zero_stage": 3, "vllm_memory": 0.5, "vllm_sleep": True, **values}
        return "".join(plan.main(plan.Args(model=small, max_length=512, gpus=2, **flags)))

    needless = "It does without `--gradient_checkpointing`, too."
    assert needless in verdict(gradient_checkpointing=True)
    assert needless not in verdict()
    large = {"gpu_memory": 12, "max_tokens_per_micro_batch": 100_000}
    assert "It does with `--max_tokens_per_micro_batch 512`" in verdict(**large)


def test_a_section_prints_its_markdown_and_nothing_else(small):
    result = run("-m", "bench.plan", "--model", small, "--max_length", 512)
    assert result.returncode == 0 and result.stdout.startswith(small), result.stderr
    result = run("-m", "bench.plan", "--model", small, "--max_length", 5000)
    assert result.returncode == 1 and not result.stdout
    assert re.search("^error: --max_length 5000", result.stderr, re.M)


def test_planned_tokens_are_those_of_a_real_run(tiny, tmp_path):
    arguments = ("--rollout_batch_size", 64, "--max_steps", 2, "--output_dir", tmp_path / "run")
    train(*arguments, tiny=tiny)
    rows = metrics(tmp_path / "run")
    sampled = sum(row["rollout_tokens"] for row in rows)
    trained = sum(row["train_tokens"] for row in rows)
    tokenizer = load_tokenizer(str(tiny / "model"))
    examples = load_examples(str(tiny / "train.jsonl"))
    examples, _ = tokenize_examples(examples, tokenizer, 128, 48)
    planned = plan.epoch_tokens(
        queries=2 * 64 + 30,  # the last, incomplete batch is not used
        batch=64,
        prompt=statistics.mean(len(example.prompt_ids) for example in examples),
        solution=statistics.mean(len(example.completion_ids) for example in examples),
        completion=sampled / (2 * 2 * 64),
        skipped=statistics.mean(row["weight_0_share"] for row in rows),
    )["OSW-FT, K=2"]
    assert planned[0] == pytest.approx(sampled)
    assert planned[1] == pytest.approx(trained, rel=0.15)


TABLES = """# Benchmarks

## step

|  | grown by | linear |
| --- | ---: | ---: |
| of another section | 9 | 9 |

## scaling

|  | s a step | grown by | linear |
| --- | ---: | ---: | ---: |
| K = 1 | 0.4 | 1.00 | 1 |
| K = 8 | 1.2 | 3.00 | 8 |
| length ×4 | 2.1 | 3.40 | 4 |

|  | s a step | beside ours |
| --- | ---: | ---: |
| no growth | 2 | 3 |

## rows

|  |  | grown by | linear |
| --- | ---: | ---: | ---: |
| to start, 1,000 rows | 0.10 | 1.00 | 1 |
| to start, 1,000,000 rows | 98.20 | 982.00 | 1000 |
"""


def test_the_picture_of_growth_has_a_curve_for_each_thing_that_grows_and_no_other(tmp_path):
    scaling = {"K": {1: 1.0, 8: 3.0}, "length": {1: 1.0, 4: 3.4}}
    assert growth.read_curves(TABLES, "scaling") == scaling
    assert growth.read_curves(TABLES, "rows") == {"to start": {1: 1.0, 1000: 982.0}}
    benchmarks, picture = tmp_path / "BENCHMARKS.md", tmp_path / "growth.svg"
    benchmarks.write_text(TABLES)
    growth.main(benchmarks, picture)
    drawn = picture.read_text()
    assert all(f">{name}<" in drawn for name in ("K", "length", "to start"))
    growth.main(benchmarks, picture)
    assert picture.read_text() == drawn  # no date, no random names


def test_the_rows_section_measures_files_of_the_sizes_asked_for():
    result = run("-m", "bench.rows", "--sizes", 5000, 10000)
    assert result.returncode == 0, result.stderr[-3000:]
    told = re.findall(r"^\| (.*?), 10,000 rows \| ([\d.]+) \| [\d.]+ \| 2 \|$", result.stdout, re.M)
    assert [what for what, _ in told] == ["CPU-seconds to start", "peak MiB", "ms to draw a batch"]
    assert all(float(value) > 0 for _, value in told)
    assert "10,000 examples, dropped: {'prompt_too_long': 0" in result.stderr


def test_the_gpu_section_refuses_a_machine_without_one_and_its_parts_run(small):
    result = run("-m", "bench.gpu")
    assert result.returncode == 1 and "error: there is no CUDA GPU here" in result.stderr
    code = f"""
from bench import gpu
from transformers import AutoConfig
config = AutoConfig.from_pretrained({small!r})
(row,) = gpu.train_on_lengths(config, [64], 128, repetitions=1)
assert row[0] == 64 and row[1] > 0 and row[2] > 0, row
assert gpu.sampled_per_second(config, prompts=4, tokens=8) > 0
assert gpu.matrix_rate(64, repetitions=2) > 0
"""
    result = run("-c", code)
    assert result.returncode == 0, result.stderr[-3000:]


def test_training_flops_count_parameters_and_causal_attention():
    config = SimpleNamespace(num_attention_heads=2, head_dim=8, num_hidden_layers=3)
    # Of a token at length S, forward: 2 N for the matrices, and for attention of each layer 2 S d
    # for the scores and the same for the values, half of which a causal mask leaves out.
    assert training_flops(config, 1000, 64) == 3 * (2 * 1000 + 3 * 2 * 64 * 16)


@needs_vllm
def test_the_peers_of_a_step_sample_answers_that_are_as_long(tiny):
    pytest.importorskip("trl", reason="needs requirements-dev.txt")
    workers = {
        "ours": measure.Worker(peers.prepare_ours, tiny, "oswft", 1),
        "SFT, generate": measure.Worker(peers.prepare_trl_oswft, tiny, 1, False),
        "SFT, vLLM": measure.Worker(peers.prepare_trl_oswft, tiny, 1, True),
        "GRPO": measure.Worker(peers.prepare_trl_grpo, tiny, 1),
    }
    measured = {name: worker() for name, worker in workers.items()}
    lengths = {name: step["tokens"] / 128 for name, step in measured.items()}
    lengths["GRPO"] /= 4  # it samples 8 answers, not 2
    assert list(lengths.values()) == pytest.approx([lengths["ours"]] * 4, rel=0.1)
    assert all(step["sample"] > 0 and step["update"] > 0 for step in measured.values())


def test_mfu_compares_the_same_step_and_counts_all_its_products(small, tmp_path):
    code = f"""
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from bench import mfu
mfu.LENGTH, mfu.timed = 32, lambda call: call()
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained({small!r}))
model.save_pretrained({str(tmp_path)!r})
ours, plain, products = (
    prepare({str(tmp_path)!r})
    for prepare in (mfu.prepare_ours, mfu.prepare_plain, mfu.prepare_products)
)
torch.testing.assert_close(torch.tensor(ours()["grad_norm"]), plain(), rtol=1e-4, atol=0)
with FlopCounterMode(display=False) as counter:
    products()
assert counter.get_total_flops() == 6 * mfu.matrix_weights(model) * mfu.ROWS * mfu.LENGTH
"""
    result = run("-c", code)
    assert result.returncode == 0, result.stderr[-3000:]
