"""Run by test_engine.py through the launcher: the distributed gradient beside a dense reference.

Every case takes steps on rows of mixed lengths, some of them without a gradient, and compares the
loss, the gradient and the parameters after each step with one process that knows no chunks, no
micro-batches, no ranks and no DeepSpeed. The reference stays on the CPU; test_gpu.py runs the
engine on a GPU.
"""

import copy
import sys
import traceback
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import logprobs as logprobs_module
import train_grpo
import train_oswft
from data import Trajectory, pad_completions
from engine import Engine, init_distributed
from logprobs import CAUSAL_ATTENTION

VOCABULARY, ROWS, LEARNING_RATE, MAX_GRAD_NORM = 97, 11, 1e-2, 0.05


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


def dense_grpo_loss(model, rows, advantages, old_logprobs, corrections, args):
    """DAPO's equation, a token at a time: min(r A, clip(r) A) / all tokens; how many clipped."""
    total, low, high = torch.zeros(()), 0, 0
    for row, advantage, old, correction in zip(
        rows, advantages, old_logprobs, corrections, strict=True
    ):
        new = dense_logprobs(model, row, args.temperature)
        for t in range(len(row.completion_ids)):
            ratio = (new[t] - old[t]).exp()
            if advantage > 0:
                total = total + correction[t] * advantage * min(ratio, torch.tensor(args.clip_high))
                high += bool(ratio > args.clip_high)
            if advantage < 0:
                total = total + correction[t] * advantage * max(ratio, torch.tensor(args.clip_low))
                low += bool(ratio < args.clip_low)
    return -total / sum(len(row.completion_ids) for row in rows), low, high


@dataclass
class Case:
    tied: bool = True
    zero_stage: int = 3
    max_tokens: int = 60
    normalizer: str = "token"
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    cpu_offload: bool = False
    attn: str = "sdpa"
    vocabulary: int = VOCABULARY


def assert_same(ours: torch.Tensor, reference: torch.Tensor, case: Case) -> None:
    """Equal to rounding: in bf16 the direction and the size, in fp32 every number."""
    if case.precision == "bf16":
        assert (ours - reference).norm() <= 0.06 * reference.norm() + 1e-6
    else:
        torch.testing.assert_close(ours, reference, rtol=2e-4, atol=2e-6)


def make_engine(case: Case):
    """An engine, its dense twin, and where each step leaves the engine's full gradients."""
    chunk = 7 * case.vocabulary  # so that a pass has several of them
    logprobs_module.MAX_LOGITS = dict.fromkeys(("cpu", "cuda"), chunk)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=case.tied,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    reference = copy.deepcopy(model)
    engine = Engine(
        model,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        precision=case.precision,
        zero_stage=case.zero_stage,
        gradient_checkpointing=case.gradient_checkpointing,
        cpu_offload=case.cpu_offload,
        attn=case.attn,
    )
    assert engine.model.config._attn_implementation == case.attn.replace("sdpa", CAUSAL_ATTENTION)
    for name, buffer in engine.model.named_buffers():  # rotary frequencies stay exact in bf16
        assert buffer.dtype == torch.float32, name
    gradients = {}
    step = engine.step

    def step_and_keep_gradients():
        for name, parameter in engine.model.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).cpu().clone()
        return step()

    engine.step = step_and_keep_gradients
    return engine, reference, gradients


def same_step(engine, reference, adam, gradients, loss, stats, case: Case) -> None:
    """One step of the dense twin, compared with what the engine has just done."""
    adam.zero_grad()
    (loss + 0 * sum(p.sum() for p in reference.parameters())).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    assert_same(torch.tensor(stats["loss"]), loss.detach(), case)
    assert_same(torch.tensor(stats["grad_norm"]), norm, case)
    for name, parameter in reference.named_parameters():
        assert_same(gradients[name].float(), parameter.grad, case)
    if case.precision == "bf16":
        return  # two roundings do not take the same path from here on

    before = [p.detach().clone() for p in reference.parameters()]
    torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_GRAD_NORM)
    adam.step()
    pairs = list(zip(reference.parameters(), before, strict=True))
    moved = sum(((new - old) ** 2).sum() for new, old in pairs).sqrt()
    size = sum((new**2).sum() for new, _ in pairs).sqrt()
    torch.testing.assert_close(
        torch.tensor(stats["update_norm_ratio"]), (moved / size).detach(), rtol=1e-2, atol=1e-6
    )
    names = dict(reference.named_parameters())
    for name, weight in engine.named_weights(gather_bytes=4096):
        # Adam divides by the gradient's size: where that is all rounding, so is the update
        parameter = names.pop(name).detach()
        torch.testing.assert_close(weight.cpu(), parameter, rtol=1e-2, atol=2e-4)
        parameter.copy_(weight)  # so that each step is compared by itself
    assert not names, f"not handed out: {names}"


def compare_oswft(case: Case) -> None:
    engine, reference, gradients = make_engine(case)
    adam = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    args = SimpleNamespace(normalizer=case.normalizer, max_tokens_per_micro_batch=case.max_tokens)
    generator = torch.Generator().manual_seed(1)
    all_zero = torch.zeros(ROWS)
    some = torch.tensor([0, 0.5, 1, 0, 1, 0.25, 0, 0.75, 1, 0, 1])
    one = (torch.arange(ROWS) == 3).float()  # fewer rows than ranks
    for weights in (some, one, all_zero):
        rows = make_rows(generator)
        tokens = sum(len(row.completion_ids) for row in rows)
        normalizer = tokens if case.normalizer == "token" else ROWS
        loss = dense_oswft_loss(reference, rows, weights, normalizer)
        stats = train_oswft.update(engine, rows, weights, args)
        assert stats["skipped_sequences"] == int((weights == 0).sum())
        same_step(engine, reference, adam, gradients, loss, stats, case)
        if case.precision == "bf16":
            break
    if dist.get_rank() == 0:
        print("equal: OSW-FT", case, flush=True)


def compare_grpo(case: Case, steps_per_batch: int, **settings) -> None:
    """Two batches; where a batch has several updates, the ratio leaves its bounds in the later."""
    engine, reference, gradients = make_engine(case)
    adam = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    args = train_grpo.Args(
        model="",
        data="",
        temperature=0.7,
        rollout_batch_size=4,
        train_batch_size=4 // steps_per_batch,
        max_tokens_per_micro_batch=case.max_tokens,
        **settings,
    )
    close = 0.2 if case.precision == "bf16" else 2e-3  # nats
    generator = torch.Generator().manual_seed(2)
    clipped = torch.zeros(2)
    for rewards in ([[1, 0, 0], [1, 1, 1], [0, 0, 1], [1, 1, 0]], [[0, 0, 0]] * 3 + [[0, 1, 0]]):
        advantages = train_grpo.grpo_advantages(torch.tensor(rewards)).flatten()
        rows = make_rows(generator, len(advantages))
        with torch.no_grad():
            old = [dense_logprobs(reference, row, args.temperature) for row in rows]
        noise = [0.8 * torch.randn(len(logprobs), generator=generator) for logprobs in old]
        sampling = [(logprobs - gap).tolist() for logprobs, gap in zip(old, noise, strict=True)]
        sampling = pad_completions(sampling, rows).to(engine.device)
        corrections = [torch.ones_like(gap) for gap in noise]
        if args.importance_correction:
            corrections = [gap.exp().clamp(max=args.importance_cap) for gap in noise]
        has_signal = advantages != 0
        scores = engine.score(rows, case.max_tokens, args.temperature, keep=has_signal)
        padded = pad_completions([logprobs.tolist() for logprobs in old], rows)
        expected = padded * has_signal[:, None]
        torch.testing.assert_close(scores.cpu(), expected, rtol=0, atol=close)
        size = len(rows) // steps_per_batch
        for start in range(0, len(rows), size):
            piece = slice(start, start + size)
            loss, low, high = dense_grpo_loss(
                *(reference, rows[piece], advantages[piece].tolist()),
                *(old[piece], corrections[piece], args),
            )
            stats = train_grpo.update(
                *(engine, rows[piece], advantages[piece], sampling[piece], scores[piece], args)
            )
            live = [i for i in range(start, start + size) if advantages[i]]
            tokens = sum(len(rows[i].completion_ids) for i in live)
            assert stats["skipped_sequences"] == size - len(live)
            same_step(engine, reference, adam, gradients, loss, stats, case)
            if case.precision == "bf16":
                break
            assert stats["clipped_low_share"] * tokens == pytest.approx(low)
            assert stats["clipped_high_share"] * tokens == pytest.approx(high)
            assert (stats["approx_kl"] > 1e-6) == (start > 0 and bool(live))
            clipped += torch.tensor([low, high])
        if case.precision == "bf16":
            break
    else:
        assert steps_per_batch == 1 or clipped.min() > 0, "no token was ever clipped"
    if dist.get_rank() == 0:
        print("equal: GRPO", case, steps_per_batch, settings, flush=True)


def count_reads(case: Case) -> None:
    """The host reads as many values from the device in a step of many passes as in one of one."""
    engine, *_ = make_engine(case)
    rows = make_rows(torch.Generator().manual_seed(0))
    reads = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal reads
            reads += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    def reads_of_a_step(max_tokens: int) -> int:
        nonlocal reads
        reads = 0
        with Watch():
            train_oswft.update(engine, rows, torch.ones(ROWS), args(max_tokens))
        return reads

    def args(max_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(normalizer="token", max_tokens_per_micro_batch=max_tokens)

    for max_tokens in (10_000, 1):  # the first steps set up what later ones use
        reads_of_a_step(max_tokens)
    assert reads_of_a_step(1) == reads_of_a_step(10_000) > 0
    if dist.get_rank() == 0:
        print("equal: reads of the host,", engine.device.type)


def holds(job: partial) -> bool:
    """Whether a case holds; if not, this says why, and the next one is tried."""
    try:
        job()
    except Exception:
        print(f"FAILED: {job.func.__name__} {job.args} {job.keywords}\n{traceback.format_exc()}")
        if dist.get_world_size() > 1:  # the other ranks may wait within this case
            raise
        return False
    return True


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    init_distributed()
    Engine.max_stage_alone = 3 if torch.cuda.is_available() else 2
    cases = [Case(tied, 3, tokens) for tied in (True, False) for tokens in (1, 60, 10_000)]
    cases += [Case(zero_stage=stage, normalizer="sequence") for stage in (0, 1, 2)]
    cases += [Case(zero_stage=stage, precision="bf16") for stage in (0, 1, 2, 3)]
    cases += [Case(gradient_checkpointing=True), Case(tied=False, cpu_offload=True)]
    cases += [Case(attn="eager"), Case(attn="eager", precision="bf16")]
    jobs = [partial(compare_oswft, case) for case in cases]
    jobs += [partial(compare_grpo, Case(max_tokens=tokens), 2) for tokens in (1, 60, 10_000)]
    jobs += [
        partial(compare_grpo, Case(), 1, importance_correction=True, importance_cap=1.5),
        partial(compare_grpo, Case(tied=False, zero_stage=2), 4, clip_low=0.9, clip_high=1.1),
        # so large an embedding that ZeRO-3 shards it anew after every pass, also after scoring
        partial(compare_grpo, Case(vocabulary=4000), 2),
        partial(compare_grpo, Case(precision="bf16"), 2),
        partial(count_reads, Case()),
    ]
    failed = [job for job in jobs if not holds(job)]
    sys.exit(f"{len(failed)} of {len(jobs)} cases failed" if failed else 0)
