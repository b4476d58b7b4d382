"""How the model answers: vLLM holds the trainer's weights, whatever happened to them."""

import ast
import os
from types import SimpleNamespace
from unittest.mock import Mock, call

from checks import follow_the_trainer
from conftest import ROOT, needs_vllm, on_ranks, output_of, slow
from data import InputError, Query
from demo.tiny import make_tokenizer
from rollout import Rollout, RolloutArgs, gpu_options, import_vllm, kv_cache_bytes
from stand_in import StandIn

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast


@slow
@needs_vllm
@pytest.mark.parametrize(("tied", "precision"), [(True, "bf16"), (False, "fp32")])
def test_after_a_large_update_vllm_agrees_with_the_trainer(tied, precision, tiny, tmp_path):
    folder = str(tmp_path / "model")
    on_ranks(1, follow_the_trainer, str(tiny / "model"), folder, tied, precision)


def bare_rollout(**attributes) -> Rollout:
    """Without a vLLM of its own."""
    made = object.__new__(Rollout)
    args = RolloutArgs(max_length=128, max_completion_length=64)
    vars(made).update({"sleeps": False, "args": args, "stop_token_ids": [], **attributes})
    return made


def test_waking_goes_weights_then_sync_then_kv_cache_then_prefix_reset(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made, weights = bare_rollout(llm=Mock()), iter([("a", torch.ones(1))])
    made.sleeps = True
    monkeypatch.setattr(torch.cuda, "empty_cache", made.llm.empty_cache)
    made.load_parameters(weights)
    made.sleep()
    assert made.llm.method_calls == [
        call.empty_cache(),  # else torch keeps what the trainer has freed
        call.wake_up(tags=["weights"]),
        call.collective_rpc("reload_weights", kwargs={"weights_iterator": weights}),
        call.wake_up(tags=["kv_cache"]),
        call.reset_prefix_cache(),
        call.sleep(level=2),
    ]


def test_a_prefix_cache_that_stays_is_an_error():
    made = bare_rollout(llm=Mock(**{"reset_prefix_cache.return_value": False}))
    with pytest.raises(RuntimeError, match="old weights"):
        made.load_parameters(iter([]))


def test_ids_that_are_no_tokens_are_left_out_and_tokens_after_a_gap_are_read():
    gap = Tokenizer(WordLevel({"7": 0, "<|im_end|>": 1, "8": 70}))
    made = bare_rollout(tokenizer=PreTrainedTokenizerFast(tokenizer_object=gap))
    assert len(made.tokenizer) == 3
    sample = SimpleNamespace(token_ids=[0, 3, 90, 70], finish_reason="length", logprobs=None)
    assert made._completion(3, sample).text == "7 8"
    made = bare_rollout(tokenizer=make_tokenizer())
    beyond = len(made.tokenizer)
    begin, seven, end = made.tokenizer.convert_tokens_to_ids(["<|im_start|>", "7", "<|im_end|>"])
    ids, logprobs = [seven, beyond, beyond + 9, begin, seven, end], [-1, -1, -1, -2, -2, -2]
    sample = SimpleNamespace(token_ids=ids, finish_reason="stop", logprobs=None)
    sample.logprobs = SimpleNamespace(logprobs=logprobs)
    completion = made._completion(3, sample)
    assert (completion.text, completion.query) == ("7<|im_start|>7", 3)
    assert (completion.logprobs, completion.token_ids) == (logprobs, ids)


def test_a_rank_answers_its_share_of_the_prompts_within_the_length(
    tiny, process_group, monkeypatch, capsys
):
    vllm, prompts = StandIn(), [[1] * length for length in (3, 5, 12, 17)]
    monkeypatch.setattr("rollout.import_vllm", lambda: vllm)
    monkeypatch.setattr("cpu.available_memory", lambda: 2**34)
    monkeypatch.setattr("rollout.dist.get_world_size", lambda: 2)
    monkeypatch.setattr("rollout.dist.get_rank", lambda: 1)
    sizes = {"max_length": 20, "rollout_batch_size": 3, "precision": "fp32"}
    made = Rollout(str(tiny / "model"), make_tokenizer(), RolloutArgs(**sizes))
    assert vllm.options["max_num_seqs"] == 4  # two prompts, twice
    monkeypatch.setattr(vllm, "LLM", Mock(side_effect=ValueError("no memory\nis left")))
    with pytest.raises(InputError, match=r"see --vllm_memory\): no memory is left"):
        Rollout(str(tiny / "model"), make_tokenizer(), RolloutArgs(**sizes))
    completions = made.generate(prompts, 2, max_tokens=9, seeds=[5, 6, 7, 8], temperature=1.0)
    told = [(prompt, params["max_tokens"], params["seed"]) for prompt, params in vllm.requests]
    assert told == [([1] * 5, 9, 6), ([1] * 17, 3, 8)]
    assert [completion.query for completion in completions] == [1, 1, 3, 3]
    assert capsys.readouterr().err == ""  # rank 0 tells what is loaded, and has the bar


def test_each_gpu_has_a_cache_of_its_own(monkeypatch):
    import vllm  # noqa: F401  before torch says that there is a GPU

    monkeypatch.setattr(os, "environ", {"HOME": "/h", "VLLM_CACHE_ROOT": "~/c"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert import_vllm().envs.VLLM_CACHE_ROOT == "/h/c/cuda3"


def test_on_a_gpu_vllm_gets_its_share_or_what_is_left_and_no_more_cache_than_it_can_use(
    monkeypatch,
):
    memory = 60 * 2**30, 80 * 2**30  # free, and all
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for share, sleeps, cache, told in (
        (None, False, 2**40, (0.3, None)),
        (None, True, 2**30, (58 / 80, 2**30)),
        (0.5, True, 19 * 2**30, (0.5, 19 * 2**30)),
        (0.5, False, 21 * 2**30, (0.5, None)),
    ):
        options = gpu_options(share, sleeps, cache)
        assert (options["gpu_memory_utilization"], options["kv_cache_memory_bytes"]) == told


def test_the_cache_of_a_sequence_is_counted_in_whole_blocks(tiny):
    # two layers, keys and values, two heads of 32 numbers
    for length, precision, size in ((127, "bf16", 128 * 256 * 2), (128, "fp32", 256 * 256 * 4)):
        assert kv_cache_bytes(str(tiny / "model"), length, precision) == size


def test_a_stop_ends_the_answers_and_puts_vllm_to_sleep(process_group):
    queries = [Query(str(n), [1], [2], None) for n in range(5)]
    steps = [[]] * 5  # of vLLM: each ends an answer
    llm = Mock(**{"enqueue.return_value": [f"{n}-0" for n in range(5)]})
    llm.llm_engine.configure_mock(step=steps.pop, has_unfinished_requests=lambda: steps)
    made = bare_rollout(llm=llm, vllm=Mock(), sleeps=True)
    made.sample(queries, 0, stop=lambda: len(steps) <= 3)
    assert len(steps) == 3
    llm.sleep.assert_called_once_with(level=2)


@slow
@needs_vllm
def test_the_rooms_take_plain_values_as_in_the_notebook_of_the_page(tiny, tmp_path):
    page = (ROOT / "recipes" / "README.md").read_text()
    code = page.partition("## In a notebook")[2].split("```")[1].removeprefix("python\n")
    code = code.replace("train.jsonl", str(tiny / "train.jsonl"))
    stats, answers = output_of("-c", code).splitlines()[-2:]
    assert ast.literal_eval(stats)["loss"] > 0 and len(ast.literal_eval(answers)) == 2
