"""How the model answers: vLLM holds the trainer's weights, whatever happened to them."""

import ast
import contextlib
from types import SimpleNamespace
from unittest.mock import Mock, call

import rollout
from bench.gpu import QWEN3
from conftest import ROOT, launch, needs_vllm, output_of
from data import InputError, TokenizedExample, Trajectory
from demo.tiny import make_tokenizer
from rollout import (
    Completion,
    Rollout,
    completion_stats,
    gpu_options,
    import_vllm,
    kv_cache_bytes,
    vllm_gap,
)

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config


@pytest.mark.parametrize(
    ("ranks", "tied", "precision", "tensor_parallel"),
    [(1, "tied", "bf16", 1), (2, "untied", "fp32", 2)],
)
def test_after_a_large_update_vllm_agrees_with_the_trainer(
    tiny, tmp_path, ranks, tied, precision, tensor_parallel
):
    output = launch(
        "tests/rollouts.py",
        *(tiny / "model", tmp_path / "model", tied, precision, tensor_parallel),
        ranks=ranks,
    )
    assert f"equal: {tied} {precision} {tensor_parallel}" in output


def bare_rollout(**attributes) -> Rollout:
    made = object.__new__(Rollout)
    vars(made).update(sleeps=False, **attributes)
    return made


def test_waking_goes_weights_then_sync_then_kv_cache_then_prefix_reset(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made, weights = bare_rollout(llm=Mock()), iter([("a", torch.ones(1))])
    made.sleeps = True
    monkeypatch.setattr(torch.cuda, "empty_cache", made.llm.empty_cache)
    made.load_weights(weights)
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
        made.load_weights(iter([]))


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


@pytest.mark.parametrize(("precision", "refused"), [("bf16", 0.2), ("fp32", 1e-3)])
def test_the_gap_that_is_refused_is_sharper_in_fp32(precision, refused):
    sampler = bare_rollout(model="m", precision=precision, temperature=1.0)
    queries, completions = [Trajectory("", [1], [])], [[Completion(0, [2], "", "stop", [-1.0])]]
    for gap in (refused / 20, refused):
        engine = SimpleNamespace(
            device="cpu", eval_logprobs=lambda *_, gap=gap: torch.tensor([[gap - 1]])
        )
        with pytest.raises(InputError) if gap == refused else contextlib.nullcontext():
            vllm_gap(engine, sampler, queries, completions, refuse=True)


def test_completion_stats_worked_out_by_hand():
    stopped = Completion(0, [1] * 3, "", "stop", [])
    cut_off = Completion(1, [1] * 9, "", "length", [])
    assert completion_stats([[stopped], [cut_off]]) == {
        "completion_length_mean": 6.0,
        "completion_length_max": 9,
        "truncated_share": 0.5,
        "rollout_tokens": 12,
    }


@needs_vllm
@pytest.mark.parametrize("real", [False, True])
def test_on_a_gpu_the_cache_of_a_tiny_model_is_capped_and_a_real_one_takes_what_is_left(
    real, tmp_path, monkeypatch
):
    """What vLLM makes of these options only a GPU can show."""
    emptied = []  # what torch keeps for later is not free
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    free = lambda left: lambda: (left * len(emptied) * 2**30, 80 * 2**30)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", free(68))
    sizes = QWEN3 if real else {"num_hidden_layers": 2, "hidden_size": 64, "head_dim": 32}
    Qwen3Config(**sizes).save_pretrained(tmp_path)
    cache = 513 * kv_cache_bytes(str(tmp_path), 4096, "bf16")
    options = gpu_options(None, True, cache)
    assert options["gpu_memory_utilization"] == pytest.approx((68 - 2) / 80)
    assert (options["kv_cache_memory_bytes"] is None) == real
    emptied.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", free(2))
    with pytest.raises(InputError, match="no memory"):
        gpu_options(None, True, cache)
    assert gpu_options(None, False, cache)["gpu_memory_utilization"] == 0.3
    assert options.keys() <= import_vllm().EngineArgs.__dataclass_fields__.keys()


class StandInLLM:
    """vLLM's options, and its steps: each ends one answer. An older release has no finalizer."""

    def __init__(self, **options):
        self.options, self.slept, self.left = options, 0, 0
        config = SimpleNamespace(use_v2_model_runner=False)
        self.llm_engine = SimpleNamespace(engine_core=object(), vllm_config=config, step=self.step)
        self.llm_engine.has_unfinished_requests = lambda: self.left > 0

    def enqueue(self, inputs, params, use_tqdm):
        self.left = len(inputs)
        return [f"{n}-0" for n in range(self.left)]

    def step(self):
        self.left -= 1
        return []

    def sleep(self, level):
        self.slept += 1


@pytest.fixture
def stand_in(monkeypatch, one_rank):
    """A Rollout without vLLM, as on a GPU where it sleeps."""
    vllm = SimpleNamespace(LLM=StandInLLM, SamplingParams=lambda **options: options)
    monkeypatch.setattr(rollout, "import_vllm", lambda: vllm)
    monkeypatch.setattr(rollout.cpu, "vllm_options", lambda *_: {})
    monkeypatch.setattr(rollout, "kv_cache_bytes", lambda *_: 0)
    monkeypatch.setattr(rollout, "stop_token_ids", lambda *_: [])

    def make(prompts: int, samples: int, world_size: int = 1, **settings) -> Rollout:
        monkeypatch.setattr(rollout.dist, "get_world_size", lambda: world_size)
        settings |= {"rollout_batch_size": prompts, "num_rollouts": samples}
        made = Rollout("m", None, 128, **settings)
        made.sleeps = True
        return made

    return make


def test_vllm_prepares_for_as_many_answers_as_a_rank_samples_at_once(stand_in):
    # whole prompts go to the ranks: of 128 with 8 answers each, 24 ranks get 5 or 6
    for prompts, samples, ranks, most in ((128, 2, 8, 32), (128, 8, 24, 48), (10_000, 1, 1, 256)):
        options = stand_in(prompts, samples, world_size=ranks).llm.options
        assert options["max_num_seqs"] == most


def test_a_stop_ends_the_answers_of_a_rank_alone_and_puts_vllm_to_sleep(stand_in):
    queries = [TokenizedExample(str(n), [1], [2], None) for n in range(5)]
    for size, left in ((1, 3), (2, 0)):  # ranks that sample together go on
        made = stand_in(5, 2, world_size=size, vllm_tensor_parallel=size)
        made.answer(queries, 0, stop=lambda llm=made.llm: llm.left <= 3)
        assert made.llm.left == left and made.llm.slept == 1


@needs_vllm
def test_the_rooms_take_plain_values_as_in_the_notebook_of_the_page(tiny, tmp_path):
    page = (ROOT / "recipes" / "README.md").read_text()
    code = page.partition("## In a notebook")[2].split("```")[1].removeprefix("python\n")
    code = code.replace("train.jsonl", str(tiny / "train.jsonl"))
    stats, answers = output_of("-c", code).splitlines()[-2:]
    assert ast.literal_eval(stats)["loss"] > 0 and len(ast.literal_eval(answers)) == 2
