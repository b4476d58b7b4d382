"""Run by test_engine.py through the launcher: the distributed gradient beside a dense reference.

Every case takes steps on rows of mixed lengths, some of them without a gradient, and compares the
loss, the gradient and the parameters after each step with one process that knows no chunks, no
micro-batches, no ranks and no DeepSpeed. The reference stays on the CPU; test_gpu.py runs the
engine on a GPU.
"""

import copy
import itertools
import math
import sys
from functools import partial

import logprobs as logprobs_module
import train_grpo
import train_oswft
from arguments import keywords
from data import Trajectory, pad_completions
from engine import Engine, finish, init_distributed
from rounding import assert_same

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCABULARY, ROWS = 97, 11
SETTINGS = {  # of every case, unless it says otherwise
    **{"model": "", "data": "", "learning_rate": 1e-2, "max_grad_norm": 0.05},
    **{"precision": "fp32", "max_tokens_per_micro_batch": 60},
}


def make_model(**fields) -> Qwen3ForCausalLM:
    """A small one with random weights."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields = {**sizes, "tie_word_embeddings": True, "initializer_range": 0.2, **fields}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**fields))


def make_rows(generator: torch.Generator, count: int = ROWS) -> list[Trajectory]:
    lengths = torch.randint(2, 20, (count, 2), generator=generator).tolist()
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    return [Trajectory("id", ids(prompt), ids(answer)) for prompt, answer in lengths]


def dense_logprobs(model, row: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """(completion tokens,) from full logits."""
    ids = torch.tensor([row.prompt_ids + row.completion_ids])
    logprobs = (model(input_ids=ids).logits[0, :-1] / temperature).log_softmax(-1)
    start = len(row.prompt_ids) - 1
    return logprobs[start:].gather(-1, ids[0, start + 1 :, None])[:, 0]


def dense_oswft_loss(model, rows, weights, normalizer):
    """Algorithm 1, a row at a time."""
    loss = torch.zeros(())
    for row, weight in zip(rows, weights.tolist(), strict=True):
        loss = loss - weight * dense_logprobs(model, row).sum() / normalizer
    return loss


def dense_grpo_loss(model, rows, advantages, old_logprobs, args):
    """DAPO's equation, a token at a time: min(r A, clip(r) A) / all tokens; how many clipped."""
    total, low, high = torch.zeros(()), 0, 0
    for row, advantage, old in zip(rows, advantages, old_logprobs, strict=True):
        for ratio in (dense_logprobs(model, row, args.temperature) - old).exp():
            if advantage > 0:
                total = total + advantage * min(ratio, torch.tensor(args.clip_high))
                high += bool(ratio > args.clip_high)
            if advantage < 0:
                total = total + advantage * max(ratio, torch.tensor(args.clip_low))
                low += bool(ratio < args.clip_low)
    return -total / sum(len(row.completion_ids) for row in rows), low, high


def make_engine(args, tied: bool = True, vocabulary: int = VOCABULARY):
    """An engine, its dense twin with an optimizer, and where a step leaves the full gradients."""
    # so few logits at a time that a pass has several chunks; above 20 tokens none is kept
    logprobs_module.MAX_LOGITS = dict.fromkeys(("cpu", "cuda"), 7 * vocabulary)
    logprobs_module.MAX_KEPT = 20 * vocabulary
    model = make_model(tie_word_embeddings=tied, vocab_size=vocabulary)
    reference = copy.deepcopy(model)
    adam = torch.optim.AdamW(reference.parameters(), lr=args.learning_rate, weight_decay=0.0)
    engine = Engine(model, **keywords(args, Engine))
    assert engine.model.config._attn_implementation == args.attn
    for name, buffer in engine.model.named_buffers():  # rotary frequencies stay exact in bf16
        assert buffer.dtype == torch.float32, name
    gradients = {}
    step = engine.step

    def step_and_keep_gradients(learning_rate: float):
        for name, parameter in engine.model.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).cpu().clone()
        return step(learning_rate)

    engine.step = step_and_keep_gradients
    return engine, reference, adam, gradients


def same_step(engine, reference, adam, gradients, loss, stats, args) -> None:
    """One step of the dense twin, compared with what the engine has just done."""
    share = 0.06 / args.temperature**2  # of bf16's rounding; dividing logits makes more of it
    bounds = {"largest": share, "norm": share} if args.precision == "bf16" else {}
    adam.zero_grad()
    (loss + 0 * sum(p.sum() for p in reference.parameters())).backward()
    norm = torch.cat([p.grad.double().flatten() for p in reference.parameters()]).norm()
    assert_same(torch.tensor(stats["loss"]), loss.detach(), **bounds)
    assert_same(torch.tensor(stats["grad_norm"]), norm, **bounds)
    for name, parameter in reference.named_parameters():
        assert_same(gradients[name].float(), parameter.grad, **bounds)
        # Adam divides by a gradient's size, so it would make rounding large: both take the same one
        parameter.grad.copy_(gradients[name])
    if args.precision == "bf16":
        return  # two roundings do not take the same path from here on

    torch.nn.utils.clip_grad_norm_(reference.parameters(), args.max_grad_norm)
    adam.step()
    names = dict(reference.named_parameters())
    for name, weight in engine.named_weights(gather_bytes=4096):
        parameter = names.pop(name).detach()
        assert_same(weight.cpu(), parameter)
        parameter.copy_(weight)  # so that each step is compared by itself
    assert not names, f"not handed out: {names}"


def compare_oswft(tied: bool = True, **settings) -> None:
    args = train_oswft.Args(**SETTINGS | settings)
    engine, reference, adam, gradients = make_engine(args, tied)
    generator = torch.Generator().manual_seed(1)
    all_zero = torch.zeros(ROWS)
    some = torch.tensor([0, 0.5, 1, 0, 1, 0.25, 0, 0.75, 1, 0, 1])
    one = (torch.arange(ROWS) == 3).float()  # fewer rows than ranks
    for weights in (some, one, all_zero):
        rows = make_rows(generator)
        tokens = sum(len(row.completion_ids) for row in rows)
        normalizer = tokens if args.normalizer == "token" else ROWS
        loss = dense_oswft_loss(reference, rows, weights, normalizer)
        stats = train_oswft.update(engine, rows, weights, args)
        assert stats["skipped_sequences"] == int((weights == 0).sum())
        learnt = [row for row, weight in zip(rows, weights.tolist(), strict=True) if weight]
        assert stats["train_tokens"] == sum(map(len, learnt))
        same_step(engine, reference, adam, gradients, loss, stats, args)
        if args.precision == "bf16":
            break
    if dist.get_rank() == 0:
        print("equal: OSW-FT", tied, settings, flush=True)


def compare_grpo(steps_per_batch: int, tied=True, vocabulary=VOCABULARY, **settings) -> None:
    """Two batches; where a batch has several updates, the ratio leaves its bounds in the later."""
    sizes = {"rollout_batch_size": 4, "train_batch_size": 4 // steps_per_batch}
    args = train_grpo.Args(**SETTINGS | {"temperature": 0.7} | sizes | settings)
    engine, reference, adam, gradients = make_engine(args, tied, vocabulary)
    close = 0.2 if args.precision == "bf16" else 2e-3  # nats
    generator = torch.Generator().manual_seed(2)
    clipped = torch.zeros(2)
    for rewards in ([[1, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 0]], [[0, 0, 0]] * 3 + [[0, 1, 0]]):
        by_query = train_grpo.grpo_advantages(torch.tensor(rewards))  # (4, 3)
        advantages = by_query.flatten()
        rows = make_rows(generator, len(advantages))
        with torch.no_grad():
            old = [dense_logprobs(reference, row, args.temperature) for row in rows]
        keep = advantages != 0
        scores = engine.eval_logprobs(rows, args.temperature, keep)
        expected = pad_completions([logprobs.tolist() for logprobs in old], rows) * keep[:, None]
        torch.testing.assert_close(scores.cpu(), expected, rtol=0, atol=close)
        size = len(rows) // steps_per_batch
        for start in range(0, len(rows), size):
            piece = slice(start, start + size)
            loss, low, high = dense_grpo_loss(
                reference, rows[piece], advantages[piece].tolist(), old[piece], args
            )
            part = slice(start // 3, start // 3 + 4 // steps_per_batch)  # of the queries
            old_piece = scores.view(4, 3, -1)[part] if steps_per_batch > 1 else None
            stats = train_grpo.update(engine, rows[piece], by_query[part], old_piece, args)
            live = [i for i in range(start, start + size) if advantages[i]]
            tokens = sum(len(rows[i].completion_ids) for i in live)
            assert stats["skipped_sequences"] == size - len(live)
            same_step(engine, reference, adam, gradients, loss, stats, args)
            if args.precision == "bf16":
                break
            assert stats["clipped_low_share"] * tokens == pytest.approx(low)
            assert stats["clipped_high_share"] * tokens == pytest.approx(high)
            assert (stats["approx_kl"] > 1e-6) == (start > 0 and bool(live))
            clipped += torch.tensor([low, high])
        if args.precision == "bf16":
            break
    else:
        assert steps_per_batch == 1 or clipped.min() > 0, "no token was ever clipped"
    if dist.get_rank() == 0:
        print("equal: GRPO", steps_per_batch, tied, vocabulary, settings, flush=True)


def count_reads() -> None:
    """A further pass costs the host a single read: transformers asks if its rows are packed.

    An operation on tensors of both devices counts, too: it copies one of them, and waits.
    """
    args = train_oswft.Args(**SETTINGS)
    engine, *_ = make_engine(args)
    rows = make_rows(torch.Generator().manual_seed(0))
    reads = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal reads
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            mixed = len({x.device.type for x in tensors if x.dim()}) > 1
            reads += mixed or function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    def reads_of_a_step(max_tokens: int) -> int:
        nonlocal reads
        reads, engine.max_tokens = 0, max_tokens
        with Watch():
            train_oswft.update(engine, rows, torch.ones(ROWS), args)
        return reads

    for max_tokens in (10_000, 1):  # the first steps set up what later ones use
        reads_of_a_step(max_tokens)
    many, one = reads_of_a_step(1), reads_of_a_step(10_000)
    assert many - one == math.ceil(ROWS / dist.get_world_size()) - 1, (many, one)
    if dist.get_rank() == 0:
        print("equal: reads of the host,", engine.device.type)


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    init_distributed()
    if torch.cuda.is_available():
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # vLLM is not imported here
    pairs = itertools.product((True, False), (1, 60, 10_000))
    cases = [{"tied": tied, "max_tokens_per_micro_batch": tokens} for tied, tokens in pairs]
    cases += [{"zero_stage": stage, "normalizer": "sequence"} for stage in (1, 2)]
    cases += [{"zero_stage": stage, "precision": "bf16"} for stage in (1, 2, 3)]
    cases += [{"gradient_checkpointing": True}, {"tied": False, "cpu_offload": True}]
    cases += [{"attn": "eager"}, {"attn": "eager", "precision": "bf16"}]
    jobs = [partial(compare_oswft, **case) for case in cases]
    jobs += [
        *[partial(compare_grpo, 2, max_tokens_per_micro_batch=n) for n in (1, 60, 10_000)],
        partial(compare_grpo, 1),
        partial(compare_grpo, 4, tied=False, zero_stage=2, clip_low=0.9, clip_high=1.1),
        # so large an embedding that ZeRO-3 shards it anew after every pass, also after scoring
        partial(compare_grpo, 2, vocabulary=4000),
        partial(compare_grpo, 2, precision="bf16"),
        partial(count_reads),
    ]
    for job in jobs:
        print(job.func.__name__, job.args, job.keywords, flush=True)  # the last one, if it fails
        job()
    finish(0)
