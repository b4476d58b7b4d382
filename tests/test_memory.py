"""Does a run fit? What prepare/memory.py says, beside what real runs take."""

from checks import held_by_a_step
from conftest import on_ranks, slow
from cpu import REDUCE_BUCKET
from data import InputError
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


def test_the_flags_that_save_memory_do_so_where_they_should(small):
    def total(phase: str = "train", **flags) -> float:
        return sum(planned(small, **flags)[phase].values())

    vllm = {"vllm_memory": 0.3}
    assert total(vllm_sleep=True, **vllm) < total(vllm_sleep=False, **vllm)
    assert total("sample", vllm_sleep=True, **vllm) == total("sample", vllm_sleep=False, **vllm)
    assert total(gradient_checkpointing=True) < total()
    assert total(max_tokens_per_micro_batch=512) < total()
    assert total(cpu_offload=True) < total()
    sharded, whole = (planned(small, zero_stage=stage)["sample"] for stage in (3, 2))
    assert sharded["weights"] == whole["weights"] / 2
    assert "gradients" in sharded and "gradients" not in whole  # freed after a step


def test_the_gradient_of_a_tied_head_is_planned_until_the_embedding_s_is_added(small, tmp_path):
    AutoConfig.from_pretrained(small, tie_word_embeddings=False).save_pretrained(tmp_path)
    for model, size in (small, 2048 * 256 * 2), (str(tmp_path), 0):
        train = planned(model, max_tokens_per_micro_batch=100_000)["train"]
        assert train["embedding's gradient"] == size


def test_asleep_the_trainer_leaves_vllm_all_that_it_will_not_need(small):
    for stage in (1, 2, 3):
        sample = planned(small, gpus=4, zero_stage=stage, vllm_sleep=True)["sample"]
        total = sum(sample.values()) / 2**30
        assert 22 < total <= 24, (stage, total)
    # one parameter's state is gathered, and vLLM sleeps
    flags = {"vllm_memory": 0.5}
    assert planned(small, **flags)["save"]["vLLM"] == 12 * 2**30
    assert planned(small, **flags, vllm_sleep=True)["save"]["vLLM"] == memory.GRAPHS
    assert "(`--vllm_memory 0.3" in memory.main(memory.Args(model=small, max_length=512))[2]


def test_a_gpu_alone_has_one_reduce_bucket_and_stage_1_sends_all_gradients_at_once(small):
    def bucket(gpus: int, stage: int) -> float:
        """Bytes for each number in it; a pass over many tokens needs most while it runs."""
        size = memory.traced(small, "bf16")[0] if stage == 1 else memory.REDUCE_BUCKET
        flags = {"zero_stage": stage, "max_tokens_per_micro_batch": 100_000}
        return planned(small, gpus, **flags)["train"]["reduce bucket"] / size

    assert [bucket(1, stage) for stage in (1, 2, 3)] == [2, 2, 2]
    assert [bucket(2, stage) for stage in (1, 2, 3)] == [4, 6, 2]


def test_plan_names_the_flag_that_makes_a_run_fit(small):
    def verdict(**flags) -> str:
        flags = {"max_length": 512, "gpus": 2, **flags}
        return memory.main(memory.Args(model=small, **flags))[-1]

    share = {"zero_stage": 3, "vllm_memory": 0.5, "vllm_sleep": False}
    assert "**It fits.**" in verdict(gpu_memory=80)
    assert "**It fits.**" in verdict(gpu_memory=11.2, vllm_sleep=True)  # full, up to rounding
    assert "`--vllm_sleep`" in verdict(gpu_memory=9, **share)
    large = {**share, "vllm_sleep": True, "max_tokens_per_micro_batch": 100_000}
    assert "`--max_tokens_per_micro_batch 512`" in verdict(gpu_memory=12, **large)
    # of 3.6 GiB, vLLM's own take 4
    assert "`--vllm_memory 0.5`" in verdict(gpu_memory=12, **{**share, "vllm_memory": 0.3})
    assert "No flag" in verdict(gpu_memory=1)
    with pytest.raises(InputError):
        verdict(max_length=5000)
