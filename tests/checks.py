"""What is checked on a CPU and on a GPU alike: `on_ranks` calls it on every rank."""

import copy
import ctypes
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import dense
import logprobs
import train_grpo
import train_oswft
import train_sft
from data import InputError, MicroBatch, Trajectory
from dense import ROWS, VOCABULARY, assert_same, dense_grpo_loss, dense_logprobs, lay_out, make_rows
from engine import STATE_KEYS, Engine, EngineArgs, init_training, load_engine
from models import load_tokenizer
from ranks import gather
from rollout import (
    Completion,
    Rollout,
    RolloutArgs,
    kv_cache_bytes,
    trajectories,
)

import psutil
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
)
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SETTINGS = {  # of every case, unless it says otherwise
    **{"model": "", "data": "", "learning_rate": 1e-2, "max_grad_norm": 0.05, "weight_decay": 0.3},
    **{"precision": "fp32", "max_tokens_per_micro_batch": 60},
}


class Twins:
    """An engine, and the same model without one, which takes the same steps."""

    def __init__(self, patch: pytest.MonkeyPatch, args, tied=True, vocabulary: int = VOCABULARY):
        # so few logits at a time that a pass has several chunks
        patch.setattr(logprobs, "MAX_LOGITS", dict.fromkeys(("cpu", "cuda"), 7 * vocabulary))
        patch.setattr("engine.GATHER_BYTES", 4096)  # several buckets
        sizes = {"vocab_size": vocabulary, "intermediate_size": vocabulary}
        model = dense.make_model(tie_word_embeddings=tied, **sizes)
        self.args, self.dense, self.gradients = args, copy.deepcopy(model), {}
        if args.precision == "bf16":
            for parameter in self.dense.parameters():
                parameter.data = parameter.data.bfloat16().float()
        model.get_input_embeddings().padding_idx = 5  # as for a pad token, which rows have here
        parameters = self.dense.parameters()
        options = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        self.adam = torch.optim.AdamW(parameters, **options)
        patch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # set for the engine before this one
        self.engine = Engine(model, args)
        for name, buffer in self.engine.model.named_buffers():  # rotary frequencies, in bf16 too
            assert buffer.dtype == torch.float32, name
        deepspeed = self.engine.engine
        assert deepspeed.zero_optimization_stage() == args.zero_stage
        # In the other stages it may free a gradient that is still being sent.
        assert deepspeed.zero_overlap_comm() == (args.zero_stage == 3)
        assert deepspeed.bfloat16_enabled() == (args.precision == "bf16")
        assert bool(deepspeed.zero_cpu_offload()) == args.cpu_offload
        assert self.engine.model.is_gradient_checkpointing == args.gradient_checkpointing
        self.step, self.engine.step = self.engine.step, self.keep_gradients_and_step
        self.lazily, self.engine.micro_batches = self.engine.micro_batches, self.micro_batches
        self.live: torch.Tensor | None = None  # which rows may be computed

    def micro_batches(self, *rows, **keep) -> list[MicroBatch]:
        """All at once, which changes nothing."""
        batches = [*self.lazily(*rows, **keep)]
        for batch in batches:
            computed = batch.indices[batch.mask.any(dim=1)].cpu()
            assert self.live is None or self.live[computed].all(), "a row of weight 0 costs a pass"
            size = batch.input_ids.numel() + len(batch.indices)
            assert len(batch.indices) == 1 or size <= self.args.max_tokens_per_micro_batch
        return batches

    def keep_gradients_and_step(self, learning_rate: float) -> dict[str, float]:
        for name, parameter in self.engine.model.named_parameters():
            self.gradients[name] = safe_get_full_grad(parameter).cpu().clone()
        return self.step(learning_rate)

    def compare(self, loss: torch.Tensor, stats: dict[str, float]) -> None:
        """The step of the dense twin with the one that the engine has just taken."""
        bf16 = self.args.precision == "bf16"
        bounds = {"largest": 0.06, "norm": 0.06} if bf16 else {}  # of rounding in each layer
        self.adam.zero_grad()
        (loss + 0 * sum(p.sum() for p in self.dense.parameters())).backward()
        norm = torch.cat([p.grad.double().flatten() for p in self.dense.parameters()]).norm()
        assert_same(torch.tensor(stats["loss"]), loss.detach(), **bounds)
        assert_same(torch.tensor(stats["grad_norm"]), norm, **bounds)
        assert stats["clipped"] == (stats["grad_norm"] > self.args.max_grad_norm)
        assert stats["learning_rate"] == self.args.learning_rate
        for name, parameter in self.dense.named_parameters():
            assert_same(self.gradients[name].float(), parameter.grad, **bounds)
            # Adam divides by a gradient's size and enlarges rounding: both take the same gradient
            parameter.grad.copy_(self.gradients[name])
        if bf16:
            return  # two roundings do not take the same path from here on

        torch.nn.utils.clip_grad_norm_(self.dense.parameters(), self.args.max_grad_norm)
        self.adam.step()
        names = dict(self.dense.named_parameters())
        for name, weight in self.engine.named_parameters():
            parameter = names.pop(name).detach()
            assert_same(weight.cpu(), parameter)
            parameter.copy_(weight)  # so that each step is compared by itself
        assert not names, f"not handed out: {names}"


def compare_oswft(patch: pytest.MonkeyPatch, tied: bool = True, **settings) -> None:
    args = train_oswft.Args(**SETTINGS | settings)
    twins = Twins(patch, args, tied)
    generator = torch.Generator().manual_seed(1)
    some = torch.tensor([0, 0.5, 1, 0, 1, 0.25, 0, 0.75, 1, 0, 1])
    one = (torch.arange(ROWS) == 3).float()  # fewer rows than ranks
    for weights in (some, one, torch.zeros(ROWS))[: 1 if args.precision == "bf16" else 3]:
        rows = make_rows(generator)
        tokens = sum(len(row.response_ids) for row in rows)
        normalizer = tokens if args.normalizer == "token" else ROWS
        loss = dense.dense_oswft_loss(twins.dense, rows, weights, normalizer)
        twins.live = weights > 0
        stats = train_oswft.update(twins.engine, rows, weights, args)
        assert stats["skipped_sequences"] == int((weights == 0).sum()), stats
        learnt = [row for row, weight in zip(rows, weights.tolist(), strict=True) if weight]
        assert stats["train_tokens"] == sum(map(len, learnt)), stats
        twins.compare(loss, stats)


def compare_grpo(patch, steps_per_batch=2, tied=True, vocabulary=VOCABULARY, **settings) -> None:
    """Two batches; where a batch has several updates, the ratio leaves its bounds in the later."""
    size = 4 // steps_per_batch  # queries, of three answers each
    batch = {"temperature": 0.7, "rollout_batch_size": 4, "train_batch_size": size}
    args = train_grpo.Args(**SETTINGS | batch | settings)
    twins = Twins(patch, args, tied, vocabulary)
    close = 0.2 if args.precision == "bf16" else 2e-3  # nats
    generator, clipped = torch.Generator().manual_seed(3), torch.zeros(2)
    for rewards in ([[1, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 0]], [[0, 0, 0]] * 3 + [[0, 1, 0]]):
        advantages = train_grpo.grpo_advantages(torch.tensor(rewards))  # (4, 3)
        keep = advantages.flatten() != 0
        queries = make_rows(generator, 4)
        answers = [row.response_ids for row in make_rows(generator, len(keep))]
        groups = [
            [Completion(n, ids, "", "stop", []) for ids in answers[3 * n : 3 * n + 3]]
            for n in range(len(queries))
        ]
        rows = trajectories(queries, groups)
        with torch.no_grad():
            old = [dense_logprobs(twins.dense, row, args.temperature) for row in rows]
        twins.live = keep
        scores = train_grpo.log_pi_old(twins.engine, queries, groups, advantages, args)
        assert (scores is None) == (steps_per_batch == 1)
        if scores is not None:
            expected = lay_out(old, rows) * keep[:, None]
            scored = scores.flatten(0, 1).cpu()
            torch.testing.assert_close(scored, expected, rtol=0, atol=close)
        for start in range(0, 4, size):
            part, piece = slice(start, start + size), slice(3 * start, 3 * (start + size))
            flat = advantages[part].flatten().tolist()
            loss, low, high, kl = dense_grpo_loss(twins.dense, rows[piece], flat, old[piece], args)
            old_part = None if scores is None else scores[part].flatten(0, 1)
            twins.live = keep[piece]
            stats = train_grpo.update(twins.engine, rows[piece], advantages[part], old_part, args)
            live = [row for row, advantage in zip(rows[piece], flat, strict=True) if advantage]
            assert stats["skipped_sequences"] == 3 * size - len(live), stats
            twins.compare(loss, stats)
            if args.precision == "bf16":
                return
            tokens = sum(len(row.response_ids) for row in live)
            assert stats["clipped_low_share"] * tokens == pytest.approx(low), (stats, low)
            assert stats["clipped_high_share"] * tokens == pytest.approx(high), (stats, high)
            assert stats["approx_kl"] * tokens == pytest.approx(kl, rel=1e-3, abs=1e-4), (stats, kl)
            assert (stats["approx_kl"] > 1e-6) == (start > 0 and bool(live)), stats
            clipped += torch.tensor([low, high])
    assert steps_per_batch == 1 or clipped.min() > 0, "no token was ever clipped"


def compare_sums(patch: pytest.MonkeyPatch, zero_stage: int) -> None:
    """In bf16, too, many small gradients count beside a large one: the sum is kept in fp32."""
    patch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    engine = Engine(dense.make_model(), EngineArgs(precision="bf16", zero_stage=zero_stage))
    rows = make_rows(torch.Generator().manual_seed(0), count=dist.get_world_size())

    def norm(*sizes: float) -> float:
        for n, size in enumerate(sizes, start=1):
            for batch in engine.micro_batches(rows):
                engine.backward(size * engine.logprobs(batch).sum(), is_last=n == len(sizes))
        engine.step(learning_rate=0.0)
        return float(engine.engine.get_global_grad_norm())

    small = 2**-9  # bf16 rounds 1 + small to 1
    assert norm(1, *[small] * 32) == pytest.approx(1.0625 * norm(1), rel=1e-3)


# a row, some rows, and all rows in a micro-batch
CASES = [partial(compare_oswft, max_tokens_per_micro_batch=n) for n in (1, 60, 10_000)]
CASES += [partial(compare_grpo, max_tokens_per_micro_batch=n) for n in (1, 60, 10_000)]
CASES += [
    partial(compare_oswft, tied=False),
    *[partial(compare_oswft, zero_stage=stage, normalizer="sequence") for stage in (1, 2)],
    *[partial(compare_oswft, zero_stage=stage, precision="bf16") for stage in (1, 2, 3)],
    partial(compare_oswft, gradient_checkpointing=True),
    partial(compare_oswft, tied=False, cpu_offload=True),
    partial(compare_grpo, steps_per_batch=1),
    partial(compare_grpo, steps_per_batch=4, tied=False, zero_stage=2, clip_low=0.9, clip_high=1.1),
    # so large matrices that ZeRO-3 shards them anew after every pass, also after scoring
    partial(compare_grpo, zero_stage=3, vocabulary=4000, gradient_checkpointing=True),
    partial(compare_grpo, precision="bf16"),
    *[partial(compare_sums, zero_stage=stage) for stage in (1, 2, 3)],
]
# On one rank: the rest of ZeRO, and what only the number of ranks can break, is left to the slow.
QUICK = [case for case in CASES if case.keywords.get("zero_stage") not in (1, 3)]


def compare_gradients(*comparisons: partial) -> None:
    """On every rank. On a GPU the reference stays on the CPU."""
    if not dist.is_initialized():
        init_training()
    if torch.cuda.is_available():
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # vLLM is not imported here
    with pytest.MonkeyPatch.context() as patch:
        for compare in comparisons:
            print(compare, flush=True)  # the last one, if it fails
            compare(patch)


LEARNING_RATE = 1e-3
Weights = dict[str, torch.Tensor]


def open_engine(folder: Path, precision: str, zero_stage: int, cpu_offload=False) -> Engine:
    settings = {"precision": precision, "zero_stage": zero_stage, "cpu_offload": cpu_offload}
    return load_engine(str(folder), EngineArgs(max_length=64, **settings))


def take_step(engine: Engine, number: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(number)
    ids = lambda: torch.randint(40, (9,), generator=generator).tolist()  # noqa: E731
    rows = [Trajectory("id", ids(), ids()) for _ in range(5)]
    args = train_sft.Args(model="", data="", learning_rate=LEARNING_RATE)
    return train_sft.update(engine, rows, torch.ones(len(rows)), args)


def weights_of(engine: Engine) -> Weights:
    """The fp32 ones."""
    names = dict(engine.model.named_parameters())
    return {name: safe_get_full_fp32_param(names[name]).cpu().clone() for name in names}


def assert_close(ours: Weights, theirs: Weights, tolerance: float = 0.0) -> None:
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=tolerance)


def save_states(folder: Path) -> dict[str, tuple[Weights, Weights]]:
    """In each precision two steps, a state, and a third step; returns the weights after both."""
    init_training()
    steps = {}
    for precision in ("fp32", "bf16"):
        engine = open_engine(folder / "model", precision, zero_stage=3)
        for number in range(2):
            take_step(engine, number)
        engine.save_state(folder / precision)
        engine.save_model(load_tokenizer(str(folder / "model")), folder / precision)
        at_two = weights_of(engine)
        take_step(engine, 2)
        steps[precision] = at_two, weights_of(engine)
    return steps


def go_on(folder: Path, steps: dict[str, tuple[Weights, Weights]]) -> None:
    """With each ZeRO stage, and with offload, from the saved states to the same third step."""
    init_training()
    for precision, (at_two, at_three) in steps.items():
        for stage in (1, 2, 3):
            take_third_step(folder / precision, at_two, at_three, precision, stage)
    for stage in (1, 3):  # the weights are rounded, too
        take_third_step(folder / precision, at_two, at_three, precision, stage, cpu_offload=True)


def take_third_step(folder: Path, at_two: Weights, at_three: Weights, *settings, **more) -> None:
    engine = open_engine(folder, *settings, **more)
    engine.load_state(folder)
    assert engine.num_steps == 2, engine.num_steps
    saved = {path.stem: load_file(path) for path in (folder / "state").iterdir()}
    names = dict(engine.model.named_parameters())
    assert saved.keys() == names.keys()
    for name, tensors in saved.items():
        assert tensors.keys() == set(STATE_KEYS)
        for key, tensor in tensors.items():  # every number of the state, to the last bit
            ours = safe_get_full_optimizer_state(names[name], STATE_KEYS[key])
            assert torch.equal(ours.cpu(), tensor), (settings, more, name, key)
    assert_close(weights_of(engine), at_two)
    for name, weight in engine.named_parameters():  # what the model computes with: rounded from it
        assert torch.equal(weight.cpu(), at_two[name].to(weight.dtype)), (settings, more, name)
    take_step(engine, 2)
    share = 0.02 if engine.model.dtype == torch.float32 else 0.6
    assert_close(weights_of(engine), at_three, share * LEARNING_RATE)
    take_no_step_without_a_finite_gradient(engine)


def take_no_step_without_a_finite_gradient(engine: Engine) -> None:
    adam = [value for state in engine.adam.state.values() for value in state.values()]
    before, adam_before = weights_of(engine), copy.deepcopy(adam)
    zero_with_nan = lambda loss: (0 * loss).sqrt()  # its value is 0, its gradient NaN  # noqa: E731
    for bad, named in ((zero_with_nan, "gradient"), (lambda loss: loss / 0, "loss")):
        for batch in engine.micro_batches([Trajectory("bad", [1, 2], [3])]):
            engine.backward(bad(engine.logprobs(batch).sum()), batch.is_last)
        step = f"step {engine.num_steps + 1}"
        with pytest.raises(FloatingPointError, match=rf"{step}: the {named} is -?(inf|nan)"):
            engine.step(LEARNING_RATE)
    assert_close(weights_of(engine), before)
    assert all(map(torch.equal, adam, adam_before)), "a moment of Adam has changed"


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
    args = train_oswft.Args(model=folder, data="", learning_rate=0.05)
    engine = Engine(model, EngineArgs(precision=precision, max_tokens_per_micro_batch=200))
    settings = {"max_length": 512, "max_completion_length": 511, "temperature": TEMPERATURE}
    settings |= {"precision": precision, "vllm_memory": 0.1, "vllm_sleep": True}
    sampler = Rollout(folder, tokenizer, RolloutArgs(**settings))

    # Long prompts with a common beginning: several blocks that the prefix cache would keep.
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(8, 28, (300,), generator=generator).tolist()
    prompts = [shared + torch.randint(8, 28, (n,), generator=generator).tolist() for n in (3, 1, 5)]
    queries = [Trajectory("id", prompt, []) for prompt in prompts]

    def sample(*seeds: int) -> list[Completion]:
        options = {"seeds": seeds, "temperature": TEMPERATURE, "with_logprobs": 3}
        mine = sampler.generate(prompts, 2, max_tokens=40, **options)
        return sorted(gather(mine), key=lambda completion: completion.query)

    def largest_gap(completions: list[Completion]) -> float:
        rows = [Trajectory("id", prompts[c.query], c.token_ids) for c in completions]
        vllms = lay_out([torch.tensor(c.logprobs) for c in completions], rows).to(engine.device)
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
        train_oswft.update(engine, rows, torch.ones(3), args)
    assert largest_gap(first) > 3, "the update was not large: this test shows nothing"
    with pytest.raises(InputError, match="vLLM does not sample from the model"):
        engine.check_vllm(queries, [[c] for c in first], TEMPERATURE, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.GATHER_BYTES", 20_000)  # several buckets
        sampler.load_parameters(engine.named_parameters())
    second = sample(1, 2, 3)
    assert second != first, "the weights are the old ones"
    gap = largest_gap(second)
    assert gap < TOLERANCE[precision], gap
    shown = engine.check_vllm(queries, [[c] for c in second], TEMPERATURE, strict=True)
    assert 0 <= shown["vllm_gap_mean"] <= shown["vllm_gap_max"] < TOLERANCE[precision], shown
    return f"gap {gap:.2g} nats, {engine.device.type}, {sampler.model_runner}, {freed}"


def reload(sampler: Rollout, weights: Iterator[tuple[str, torch.Tensor]]) -> str:
    """On a GPU after a sleep, with what an update leaves behind; returns what came back."""
    if not sampler.sleeps:
        sampler.load_parameters(weights)
        return "no sleep"
    args = sampler.args
    cache = kv_cache_bytes(sampler.model, args.max_length, args.precision)  # of one sequence
    before = torch.cuda.mem_get_info()[0]
    sampler.sleep()
    freed = torch.cuda.mem_get_info()[0] - before
    assert freed > 0.9 * cache, f"{freed / 2**20:.0f} of {cache / 2**20:.0f} MiB came back"
    reserved = torch.cuda.memory_reserved()
    torch.empty(2**30, dtype=torch.uint8, device="cuda")  # an update's activations: freed, kept
    sampler.load_parameters(weights)
    assert torch.cuda.memory_reserved() < reserved + 2**29, "beside it vLLM would not fit"
    return f"{freed / 2**30:.1f} GiB came back"


def rss() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not look like free memory
    return psutil.Process().memory_info().rss


def held_by_a_step(folder: str, length: int, rows_per_rank: int) -> dict[str, int]:
    """Bytes of a rank: on a CPU by part, as `memory.memory` names them; on a GPU the peak."""
    init_training()
    on_gpu = torch.cuda.is_available()
    passes = 1 + on_gpu  # the second adds to the gradients of the first
    num_rows = passes * rows_per_rank * dist.get_world_size()
    rows = [Trajectory("id", [0], [*range(1, length)])] * num_rows
    settings = {"max_tokens_per_micro_batch": rows_per_rank * length}
    settings["zero_stage"] = 2 if on_gpu else 3  # on one GPU 3 runs as 2
    engine = load_engine(folder, EngineArgs(max_length=length, **settings))
    between_steps = torch.cuda.memory_allocated() if on_gpu else 0
    resident = []  # after the embedding, and before the log-probabilities
    network = engine.model.base_model
    network.layers[0].register_forward_pre_hook(lambda *_: resident.append(rss()))
    network.norm.register_forward_hook(lambda *_: resident.append(rss()))

    def update(rows) -> None:
        weights, args = torch.ones(len(rows)), train_sft.Args(model="", data="")
        train_sft.update(engine, rows, weights, args)

    update(rows[: dist.get_world_size()])  # Adam's state exists from here
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        update(rows)
        free, total = torch.cuda.mem_get_info()
        peak = {"allocated": torch.cuda.max_memory_allocated(), "of the GPU": total - free}
        return {**peak, "between steps": between_steps}
    resident.clear()
    update(rows)
    zero = engine.engine.optimizer
    states = [x for state in engine.adam.state.values() for x in state.values()]
    assert all(torch.isfinite(p.ds_tensor).all() for p in engine.model.parameters())
    return {
        "weights": sum(p.ds_tensor.nbytes for p in engine.model.parameters()),
        "gradients": zero.grad_partitions_flat_buffer.nbytes,
        "reduce bucket": sum(bucket.buffer.nbytes for bucket in zero.ipg_buckets.values()),
        "optimizer": sum(x.nbytes for x in [*zero.fp32_partitioned_groups_flat, *states]),
        "activations": resident[1] - resident[0],
    }
