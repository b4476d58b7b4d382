"""How the model answers: vLLM holds the trainer's weights, whatever happened to them."""

import ast
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock, call

from conftest import ROOT, needs_vllm, on_ranks, output_of, slow
from data import InputError, TokenizedExample, Trajectory, load_tokenizer
from demo.tiny import make_tokenizer
from engine import Engine, init_training
from ranks import gather
from rollout import (
    Completion,
    Rollout,
    check_vllm,
    completion_stats,
    kv_cache_bytes,
    pad_completions,
)
from train_oswft import Args, update

import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEMPERATURE = 0.8
TOLERANCE = {"fp32": 1e-3, "bf16": 0.15}  # nats, of one token


def follow_the_trainer(tiny: str, folder: str, tied: bool, precision: str) -> str:
    """On every rank; returns what the test on a GPU prints. There vLLM sleeps between samples."""
    init_training()
    tokenizer = load_tokenizer(tiny)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(tiny)
    config.tie_word_embeddings, config.initializer_range = tied, 0.1
    model = AutoModelForCausalLM.from_config(config)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    # so large a rate that the second model has nothing to do with the first
    args = Args(model=folder, data="", learning_rate=0.05)
    engine = Engine(model, precision=precision, max_tokens_per_micro_batch=200)
    settings = {"temperature": TEMPERATURE, "vllm_memory": 0.1, "vllm_sleep": True}
    sampler = Rollout(folder, tokenizer, 512, precision=precision, **settings)

    # Long prompts with a common beginning: several blocks that the prefix cache would keep.
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(8, 28, (300,), generator=generator).tolist()
    prompts = [shared + torch.randint(8, 28, (n,), generator=generator).tolist() for n in (3, 1, 5)]
    queries = [Trajectory("id", prompt, []) for prompt in prompts]

    def sample(*seeds: int) -> list[Completion]:
        options = {"seeds": seeds, "temperature": TEMPERATURE, "logprobs": 3}
        mine = sampler.generate(prompts, 2, max_tokens=40, **options)
        return sorted(gather(mine), key=lambda completion: completion.query)

    def largest_gap(completions: list[Completion]) -> float:
        rows = [Trajectory("id", prompts[c.query], c.token_ids) for c in completions]
        vllms = pad_completions([c.logprobs for c in completions], rows).to(engine.device)
        return float((engine.eval_logprobs(rows, TEMPERATURE) - vllms).abs().max())

    sampler.load_parameters(engine.named_parameters())
    first = sample(1, 2, 3)
    assert [completion.query for completion in first] == [0, 0, 1, 1, 2, 2], first
    assert first[0].token_ids != first[1].token_ids, "two samples of one prompt are the same"
    freed = reload(sampler, engine.named_parameters())
    again = sample(1, 2, 3)  # with an empty prefix cache, too: a full one rounds otherwise
    same = [ours.token_ids == theirs.token_ids for ours, theirs in zip(first, again, strict=True)]
    assert all(same), f"the same seeds gave other samples: {same}"
    assert sample(4, 5, 6) != first, "other seeds gave the same samples"
    for completions in (first, again):
        gap = largest_gap(completions)
        assert gap < TOLERANCE[precision], gap
    for c in first:
        stopped = c.token_ids[-1] in sampler.stop_token_ids
        assert stopped == (c.finish_reason == "stop"), c
        assert stopped or len(c.token_ids) == 40, c

    sampler.sleep()
    for _ in range(3):
        rows = [Trajectory("id", prompt[:50], prompt[50:99]) for prompt in prompts]
        update(engine, rows, torch.ones(3), args)
    assert largest_gap(first) > 3, "the update was not large: this test shows nothing"
    with pytest.raises(InputError, match="vLLM samples from another model than is trained"):
        check_vllm(engine, sampler, queries, [[c] for c in first], strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.GATHER_BYTES", 20_000)  # several buckets
        sampler.load_parameters(engine.named_parameters())
    second = sample(1, 2, 3)
    assert second != first, "the weights are the old ones"
    gap = largest_gap(second)
    assert gap < TOLERANCE[precision], gap
    shown = check_vllm(engine, sampler, queries, [[c] for c in second], strict=True)
    assert 0 <= shown["vllm_gap_mean"] <= shown["vllm_gap_max"] < TOLERANCE[precision], shown
    return f"gap {gap:.2g} nats, {engine.device.type}, {sampler.model_runner}, {freed}"


def reload(sampler: Rollout, weights: Iterator[tuple[str, torch.Tensor]]) -> str:
    """On a GPU after a sleep, with what an update leaves behind; returns what came back."""
    if not sampler.sleeps:
        sampler.load_parameters(weights)
        return "no sleep"
    cache = kv_cache_bytes(sampler.model, sampler.max_length, sampler.precision)  # of one sequence
    before = torch.cuda.mem_get_info()[0]
    sampler.sleep()
    freed = torch.cuda.mem_get_info()[0] - before
    assert freed > 0.9 * cache, f"{freed / 2**20:.0f} of {cache / 2**20:.0f} MiB came back"
    reserved = torch.cuda.memory_reserved()
    torch.empty(2**30, dtype=torch.uint8, device="cuda")  # an update's activations: freed, kept
    sampler.load_parameters(weights)
    assert torch.cuda.memory_reserved() < reserved + 2**29, "beside it vLLM would not fit"
    return f"{freed / 2**30:.1f} GiB came back"


@slow
@needs_vllm
@pytest.mark.parametrize(("tied", "precision"), [(True, "bf16"), (False, "fp32")])
def test_after_a_large_update_vllm_agrees_with_the_trainer(tied, precision, tiny, tmp_path):
    folder = str(tmp_path / "model")
    on_ranks(1, follow_the_trainer, str(tiny / "model"), folder, tied, precision)


def bare_rollout(**attributes) -> Rollout:
    """Without a vLLM of its own."""
    made = object.__new__(Rollout)
    defaults = {"sleeps": False, "replica": 0, "member": 0, "num_replicas": 1, "num_rollouts": 2}
    defaults |= {"max_length": 128, "max_completion_length": 64, "temperature": 1.0, "seed": 0}
    vars(made).update({**defaults, "stop_token_ids": [], **attributes})
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
    sample = SimpleNamespace(token_ids=[0, 3, 70, 90], finish_reason="length", logprobs=None)
    assert made._completion(3, sample).text == "7 8"
    made = bare_rollout(tokenizer=make_tokenizer())
    beyond = len(made.tokenizer)
    seven, end = made.tokenizer.convert_tokens_to_ids(["7", "<|im_end|>"])
    ids, logprobs = [seven, beyond, beyond + 9, seven, end], [-1, -1, -1, -2, -2]
    sample = SimpleNamespace(token_ids=ids, finish_reason="stop", logprobs=None)
    sample.logprobs = SimpleNamespace(logprobs=logprobs)
    completion = made._completion(3, sample)
    assert (completion.text, completion.query) == ("77", 3)
    assert (completion.logprobs, completion.token_ids) == (logprobs, ids)


def test_completion_stats_worked_out_by_hand():
    stopped = Completion(0, [1] * 3, "", "stop", [])
    cut_off = Completion(1, [1] * 9, "", "length", [])
    assert completion_stats([[stopped], [cut_off]]) == {
        "completion_length_mean": 6.0,
        "completion_length_max": 9,
        "truncated_share": 0.5,
        "rollout_tokens": 12,
    }


def test_a_stop_ends_the_answers_and_puts_vllm_to_sleep(process_group):
    queries = [TokenizedExample(str(n), [1], [2], None) for n in range(5)]
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
