"""Run by test_engine.py through the launcher: the distributed gradient beside a dense reference.

Every case trains two steps on rows of mixed lengths and weights, some of them 0, and compares the
loss, the gradient and the parameters after each step with one process that knows no chunks, no
micro-batches, no ranks and no DeepSpeed.
"""

import copy
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from transformers import Qwen3Config, Qwen3ForCausalLM

import engine as engine_module
from data import Example, TokenizedExample
from engine import Engine, init_distributed
from train_oswft import update

VOCABULARY, ROWS, LEARNING_RATE, MAX_GRAD_NORM = 97, 11, 1e-2, 0.05
engine_module.LOGIT_CHUNK = 7 * VOCABULARY  # 7 tokens a chunk: every pass has several, and a rest


def make_rows(generator: torch.Generator) -> list[TokenizedExample]:
    example = Example("id", "question", "solution", "answer", "source")
    lengths = torch.randint(2, 20, (ROWS, 2), generator=generator).tolist()
    ids = lambda n: torch.randint(VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    return [TokenizedExample(example, ids(prompt), ids(answer)) for prompt, answer in lengths]


def dense_loss(model, rows, weights, normalizer):
    """Algorithm 1, a row at a time, from full logits."""
    loss = torch.zeros(())
    for row, weight in zip(rows, weights.tolist(), strict=True):
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        start = len(row.prompt_ids) - 1
        answer = logprobs[start:].gather(-1, ids[0, start + 1 :, None]).sum()
        loss = loss - weight * answer / normalizer
    return loss


@dataclass
class Case:
    tied: bool = True
    zero_stage: int = 3
    max_tokens: int = 60
    normalizer: str = "token"
    precision: str = "fp32"
    gradient_checkpointing: bool = False
    cpu_offload: bool = False


def assert_same(ours: torch.Tensor, reference: torch.Tensor, case: Case) -> None:
    """Equal to rounding: in bf16 the direction and the size, in fp32 every number."""
    if case.precision == "bf16":
        assert (ours - reference).norm() <= 0.06 * reference.norm() + 1e-6
    else:
        torch.testing.assert_close(ours, reference, rtol=2e-4, atol=2e-6)


def compare(case: Case) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
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
    adam = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    engine = Engine(
        model,
        learning_rate=LEARNING_RATE,
        max_grad_norm=MAX_GRAD_NORM,
        precision=case.precision,
        zero_stage=case.zero_stage,
        gradient_checkpointing=case.gradient_checkpointing,
        cpu_offload=case.cpu_offload,
    )
    for name, buffer in engine.model.named_buffers():  # rotary frequencies stay exact in bf16
        assert buffer.dtype == torch.float32, name
    gradients = {}
    step = engine.step

    def step_and_keep_gradients():
        for name, parameter in engine.model.named_parameters():
            gradients[name] = safe_get_full_grad(parameter).clone()
        return step()

    engine.step = step_and_keep_gradients
    args = SimpleNamespace(normalizer=case.normalizer, max_tokens_per_micro_batch=case.max_tokens)
    generator = torch.Generator().manual_seed(1)
    all_zero = torch.zeros(ROWS)
    some = torch.tensor([0, 0.5, 1, 0, 1, 0.25, 0, 0.75, 1, 0, 1])
    one = (torch.arange(ROWS) == 3).float()  # fewer rows than ranks
    for weights in (some, one, all_zero):
        rows = make_rows(generator)
        tokens = sum(len(row.completion_ids) for row in rows)
        loss = dense_loss(reference, rows, weights, tokens if case.normalizer == "token" else ROWS)
        adam.zero_grad()
        (loss + 0 * sum(p.sum() for p in reference.parameters())).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])

        stats = update(engine, rows, weights, args)
        assert_same(torch.tensor(stats["loss"]), loss.detach(), case)
        assert_same(torch.tensor(stats["grad_norm"]), norm, case)
        assert stats["skipped_sequences"] == int((weights == 0).sum())
        for name, parameter in reference.named_parameters():
            assert_same(gradients[name].float(), parameter.grad, case)
        if case.precision == "bf16":
            break  # two roundings do not take the same path from here on

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
            torch.testing.assert_close(weight, names.pop(name).detach(), rtol=1e-2, atol=2e-4)
        assert not names, f"not handed out: {names}"
    if dist.get_rank() == 0:
        print("equal:", case, flush=True)


if __name__ == "__main__":
    sys.argv = sys.argv[:1]
    init_distributed()
    cases = [Case(tied, 3, tokens) for tied in (True, False) for tokens in (1, 60, 10_000)]
    cases += [Case(zero_stage=stage, normalizer="sequence") for stage in (0, 1, 2)]
    cases += [Case(zero_stage=stage, precision="bf16") for stage in (0, 1, 2, 3)]
    cases += [Case(gradient_checkpointing=True), Case(tied=False, cpu_offload=True)]
    for case in cases:
        compare(case)
