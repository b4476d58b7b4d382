"""Does a run fit? What prepare/memory.py says, beside what real runs take."""

from types import SimpleNamespace

from checks import held_by_a_step
from conftest import on_ranks, slow
from cpu import REDUCE_BUCKET
from prepare import memory

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    """A folder with a config and no weights."""
    folder = tmp_path_factory.mktemp("small")
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
    sizes |= {"num_hidden_layers": 6, "max_position_embeddings": 1024}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    Qwen3Config(**sizes, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    return str(folder)


def planned(model: str, gpus: int = 2, gpu_memory: float = 24, **flags) -> dict:
    """Bytes by phase and part."""
    flags = {"max_length": 512, "max_tokens_per_micro_batch": 4096, **flags}
    return memory.memory(memory.Args(model=model, gpus=gpus, gpu_memory=gpu_memory, **flags))


@slow
def test_the_planned_memory_is_what_a_real_run_holds(small, tmp_path, monkeypatch):
    assert DeepSpeedZeroConfig().reduce_bucket_size == memory.REDUCE_BUCKET  # a GPU's
    if not torch.cuda.is_available():
        monkeypatch.setattr(memory, "REDUCE_BUCKET", REDUCE_BUCKET)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small)).save_pretrained(tmp_path)
    held = on_ranks(2, held_by_a_step, str(tmp_path), 512, 4)
    phases = planned(small, zero_stage=3, max_tokens_per_micro_batch=2048)
    assert phases["train"]["activations"] == pytest.approx(held.pop("activations"), rel=0.15)
    for part, size in held.items():  # between two steps
        assert phases["sample"][part] == pytest.approx(size, rel=0.02), part


def test_a_plan_is_what_one_works_out_by_hand(monkeypatch):
    sizes = {"num_hidden_layers": 10, "hidden_size": 4096, "vocab_size": 200_000}
    monkeypatch.setattr(memory, "load_config", lambda *_: config)
    monkeypatch.setattr(memory, "traced", lambda *_: (2 * 10**9, 100, per_layer))
    matrix, gib = 4096 * 200_000 * 2, 2**30
    reserve, share = {"reserve": 3 * gib}, {"vLLM": 0.3 * 79 * gib}

    # A pass that needs most at its end
    config, per_layer = SimpleNamespace(**sizes, tie_word_embeddings=True), 1000
    plan = planned("", 4, 79, zero_stage=2)
    held = {"weights": 4e9, "optimizer": 6e9, **share, **reserve}
    ending = {"gradients": 2e9, "embedding's gradient": 2 * matrix, "reduce bucket": 2e9 + 2e9}
    assert plan["train"] == pytest.approx(held | ending)
    assert plan["sample"] == pytest.approx(held)
    assert plan["load"] == pytest.approx({"weights": 8e9, **reserve})

    # In its middle; one row is longer than a pass may be
    per_layer = 10**7
    flags = {"gradient_checkpointing": True, "vllm_sleep": True, "max_tokens_per_micro_batch": 99}
    plan = planned("", 4, 79, zero_stage=3, **flags)
    held = {"weights": 1e9, "optimizer": 6e9, "gradients": 2e9, "reduce bucket": 1e9, **reserve}
    middle = {"gathered weights": 2e9, "activations": 512 * (100 + 81_920 + 10**7), "vLLM": gib}
    middle |= {"a layer's backward": 512e7, "embedding's gradient": matrix}
    assert plan["train"] == pytest.approx(held | middle)
    assert plan["sample"] == pytest.approx(held | {"vLLM": 76 * gib - 10e9})
    saved = {"gathered weights": 2 * (gib + matrix), "vLLM": gib}
    assert plan["save"] == pytest.approx(held | saved)

    # At its beginning, on one GPU that has the optimizer's state in the host's memory
    config, per_layer = SimpleNamespace(**sizes), 10**5
    alone = {"zero_stage": 1, "vllm_memory": 0.5}
    held = {"weights": 4e9, "optimizer": 0, "gradients": 8e9, "vLLM": 0.5 * 79 * gib, **reserve}
    held |= {"log-probabilities": 2**26 * 2 * 6 + matrix + 4096 * 4096 * 6}
    held |= {"activations": 4096 * (100 + 10**6)}
    assert planned("", 1, 79, cpu_offload=True, **alone)["train"] == pytest.approx(held)
    per_layer = 1000
    for gpus, copies in ((1, 1), (2, 2)):  # all gradients at once; another GPU is sent a copy
        bucket = planned("", gpus, 79, **alone)["train"]["reduce bucket"]
        assert bucket == copies * 4e9 + 2e9
    monkeypatch.setattr(memory, "kv_cache_bytes", lambda *_: gib)  # of a sequence
    told = memory.main(memory.Args(model="m", gpus=4, cpu_offload=True))[2]
    assert "0.30`) holds 16 sequences" in told and "takes 11.2 GiB of its host's" in told


def test_what_a_layer_keeps_is_counted_for_each(small):
    _, per_token, per_layer = memory.traced(small, "fp32")
    config = AutoConfig.from_pretrained(small, num_hidden_layers=5)
    kept = memory.kept_for_backward(config, torch.float32)
    assert kept == pytest.approx(per_token + 5 * per_layer, rel=0.01)


def test_plan_names_the_flag_that_makes_a_run_fit(small):
    def verdict(**flags) -> str:
        flags = {"max_length": 512, "gpus": 2, **flags}
        return memory.main(memory.Args(model=small, **flags))[-1]

    share = {"zero_stage": 3, "vllm_memory": 0.5, "vllm_sleep": False}
    assert "**It fits.**" in verdict(gpu_memory=11.2, vllm_sleep=True)  # full, up to rounding
    assert "`--vllm_sleep`" in verdict(gpu_memory=9, **share)
    large = {**share, "vllm_sleep": True, "max_tokens_per_micro_batch": 100_000}
    assert "`--max_tokens_per_micro_batch 512`" in verdict(gpu_memory=12, **large)
    assert "No flag" in verdict(gpu_memory=1)
