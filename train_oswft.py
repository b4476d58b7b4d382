"""Online Self-Weighted Fine-Tuning: supervised fine-tuning, weighted by how badly the model fails.

Every expert solution o* to a question q is learnt with weight 1 - p̂, where p̂ is the share of K
answers, sampled from the current model, that are right (Algorithm 1 of the paper):

    loss = - sum over the batch of  (1 - p̂(q)) * log pi(o* | q)  /  normalizer

What the model has mastered costs nothing; what it fails at is learnt in full. No gradient flows
through the weight, and none ever comes from a sampled answer. Deviations from the paper's text: the
normalizer is the number of completion tokens in the global batch, so that weight 1 gives standard
token-mean SFT (`--normalizer sequence` divides by the number of queries, as Algorithm 1 does);
gradients are clipped at norm 1. Everything else, by default, is the paper's setting.

    deepspeed train_oswft.py --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl
    deepspeed --num_gpus 1 train_oswft.py ...                  # one GPU of several
    deepspeed --hostfile hosts train_oswft.py ...              # several hosts, a shared output_dir
    deepspeed train_oswft.py ... --resume                      # go on from the newest checkpoint
"""

from dataclasses import asdict, dataclass
from typing import Literal

import torch

from data import (
    InputError,
    TokenizedExample,
    batch_indices,
    derive_seed,
    load_examples,
    load_tokenizer,
    tokenize_examples,
)
from engine import (
    Engine,
    Run,
    Stopwatch,
    exit_with,
    gather,
    init_distributed,
    load_model,
    parse_args,
)
from rollout import Rollout, completion_stats
from verify import Verifier


@dataclass
class Args:
    model: str  # hub id or folder of a causal language model with a chat template
    data: str  # hub id or JSONL file with id, question, solution, answer, source
    output_dir: str = "runs/oswft"  # for all that the run leaves; all hosts share it
    resume: bool = False  # go on from the newest checkpoint in output_dir
    seed: int = 0  # of the data order and of sampling

    # The method
    num_rollouts: int = 2  # K, answers sampled per query
    temperature: float = 1.0  # of sampling
    rollout_batch_size: int = 128  # queries weighed at once
    train_batch_size: int | None = None  # queries per optimizer step; default: all of them
    normalizer: Literal["token", "sequence"] = "token"  # what the summed loss is divided by
    learning_rate: float = 1e-5  # constant
    max_grad_norm: float = 1.0  # gradients are clipped to this norm
    num_epochs: int = 1  # passes over the data
    max_steps: int | None = None  # optimizer steps, instead of num_epochs

    # Lengths, in tokens
    max_length: int = 5120  # prompt + solution, prompt + rollout; longer rows are dropped
    max_completion_length: int = 4096  # of a rollout
    max_tokens_per_micro_batch: int = 8192  # in one forward pass of one rank, padding included

    # The machine
    precision: Literal["bf16", "fp32"] = "bf16"  # bf16 keeps fp32 master weights
    zero_stage: Literal[0, 1, 2, 3] = 3  # what DeepSpeed shards over ranks
    gradient_checkpointing: bool = False  # recompute activations: less memory, a third more time
    cpu_offload: bool = False  # optimizer state in host memory
    vllm_memory: float = 0.3  # share of the GPU's (on CPU: the host's) memory for vLLM
    vllm_tensor_parallel: int = 1  # GPUs that sample from one copy of the model together
    vllm_sleep: bool = False  # vLLM gives its GPU memory back while the model trains
    verifier_workers: int = 2  # processes per rank that check answers

    # What is kept
    save_every: int = 50  # optimizer steps between checkpoints
    keep_checkpoints: int = 2  # the newest ones that stay
    wandb: bool = False  # mirror the metrics to Weights & Biases


# ------------------------------------------------------------------------------------------------
# The method


def oswft_weights(rewards: torch.Tensor, strategy: str = "oswft") -> torch.Tensor:
    """w = 1 - p̂, the share of a query's K answers that are wrong (Algorithm 1, line 7).

    Args:
        rewards: (B, K), 1 for a right answer, 0 for a wrong one.
        strategy: "oswft".

    Returns:
        (B,) weights in [0, 1]; constants, as no gradient may flow through them.

    >>> oswft_weights(torch.tensor([[1., 1.], [1., 0.], [0., 0.]]))
    tensor([0.0000, 0.5000, 1.0000])
    """
    if strategy != "oswft":
        raise ValueError(f"unknown weighting strategy '{strategy}'")
    pass_rates = rewards.float().mean(dim=1)  # p̂: (B, K) -> (B,)
    return (1 - pass_rates).detach()


def oswft_loss(
    logprobs: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor, normalizer: float
) -> torch.Tensor:
    """- sum of w * log pi(o*|q) / normalizer (Algorithm 1, line 10).

    Args:
        logprobs: (B, T) log pi of each token of the expert solutions.
        mask: (B, T), true on the solutions' tokens, false on prompt and padding.
        weights: (B,) from `oswft_weights`.
        normalizer: completion tokens, or queries, in the *global* batch, queries of weight 0
            included. Never the sum of the weights: that would cancel the method.

    Returns:
        a scalar; summed over any split of the batch, it is the loss of the whole batch.
    """
    sequence_logprobs = torch.where(mask.bool(), logprobs, 0).sum(dim=1)  # (B, T) -> (B,)
    return -(weights * sequence_logprobs).sum() / normalizer


# ------------------------------------------------------------------------------------------------
# The loop


def train(args: Args) -> None:
    _, world_size = init_distributed()
    check(args, world_size)
    run = Run(args.output_dir, asdict(args), args.resume)

    tokenizer = load_tokenizer(args.model)
    examples, dropped = tokenize_examples(
        load_examples(args.data), tokenizer, args.max_length, args.max_completion_length
    )
    steps_per_batch = args.rollout_batch_size // (args.train_batch_size or args.rollout_batch_size)
    batches = len(examples) * args.num_epochs // args.rollout_batch_size
    max_steps = args.max_steps or batches * steps_per_batch
    if not examples or not max_steps:
        raise InputError(
            f"{args.data}: {len(examples)} examples are left (dropped: {dropped}), too few for a "
            f"batch of {args.rollout_batch_size}"
        )

    engine = Engine(
        load_model(args.model, args.max_length),
        learning_rate=args.learning_rate,
        max_grad_norm=args.max_grad_norm,
        precision=args.precision,
        zero_stage=args.zero_stage,
        gradient_checkpointing=args.gradient_checkpointing,
        cpu_offload=args.cpu_offload,
    )
    rollout = Rollout(
        args.model,
        tokenizer,
        max_length=args.max_length,
        precision=args.precision,
        memory_share=args.vllm_memory,
        tensor_parallel=args.vllm_tensor_parallel,
        sleep=args.vllm_sleep,
    )
    step = run.start(engine, max_steps)
    run.say(f"{len(examples):,} examples, dropped {dropped}; {max_steps} steps, {world_size} ranks")

    clock = Stopwatch()
    with Verifier(args.verifier_workers) as verifier:
        while step < max_steps:
            batch = step // steps_per_batch
            order = batch_indices(len(examples), args.rollout_batch_size, batch, args.seed)
            queries = [examples[i] for i in order]  # the same on every rank

            # ---- rollout: K answers to each query, from the current weights
            rollout.load_weights(engine.named_weights())
            clock.lap("sync_s")
            samples = rollout.generate(
                [query.prompt_ids for query in queries],
                num_samples=args.num_rollouts,
                max_tokens=args.max_completion_length,
                seeds=[derive_seed(args.seed, batch, query.example.id) for query in queries],
                temperature=args.temperature,
                on_progress=run.on_rollout,
            )  # this rank's share
            rollout.sleep()
            if run.should_stop():  # nothing was learnt since the last step
                break
            clock.lap("rollout_s")

            # ---- verify: which answers are right?
            verdicts = verifier.score(
                [sample.text for sample in samples],
                [queries[sample.query].example.answer for sample in samples],
            )
            answers = gather(list(zip(samples, verdicts, strict=True)))  # all ranks' shares
            answers.sort(key=lambda answer: answer[0].query)
            rewards = torch.tensor([right for _, right in answers]).view(len(queries), -1)  # (B, K)
            clock.lap("verify_s")

            # ---- weigh: w = 1 - p̂
            weights = oswft_weights(rewards)  # (B,)
            run.save_rollouts(step + 1, queries, answers, pass_rate=1 - weights, weight=weights)

            # ---- update: one optimizer step per `train_batch_size` queries
            size = len(queries) // steps_per_batch
            for start in range(0, len(queries), size):
                piece = slice(start, start + size)
                step += 1
                stats = update(engine, queries[piece], weights[piece], args)
                clock.lap("train_s")
                seconds = clock.read()
                sampled = completion_stats([a for a, _ in answers if start <= a.query < piece.stop])
                tokens = sampled["rollout_tokens"] + stats["train_tokens"]
                run.log(
                    {
                        "step": step,
                        "epoch": step * size / len(examples),
                        "mean_weight": weights[piece].mean().item(),
                        "pass_rate": rewards[piece].float().mean().item(),
                        **stats,
                        **sampled,
                        "tokens_per_second": tokens / sum(seconds.values()),
                        **seconds,
                    }
                )
            if step % args.save_every < steps_per_batch:
                run.save_checkpoint(engine, tokenizer, step, args.keep_checkpoints)
            if run.should_stop():
                break

    run.save_checkpoint(engine, tokenizer, step, args.keep_checkpoints)
    if step == max_steps:
        run.save_final(engine, tokenizer)
    run.finish(step, max_steps)


def update(
    engine: Engine, rows: list[TokenizedExample], weights: torch.Tensor, args: Args
) -> dict[str, float]:
    """One optimizer step on expert solutions with their weights (B,); returns its metrics."""
    completion_tokens = sum(len(row.completion_ids) for row in rows)
    normalizer = completion_tokens if args.normalizer == "token" else len(rows)

    # Weight 0 means no gradient, so these rows are left out; the normalizer still counts them.
    live = weights.nonzero()[:, 0]
    live_weights = weights[live].to(engine.device)
    stats = engine.update(
        [rows[i] for i in live],
        lambda logprobs, mask, i: oswft_loss(logprobs, mask, live_weights[i], normalizer),
        args.max_tokens_per_micro_batch,
    )
    return {
        **stats,
        "weight_0_share": (weights == 0).float().mean().item(),
        "weight_between_share": ((weights > 0) & (weights < 1)).float().mean().item(),
        "weight_1_share": (weights == 1).float().mean().item(),
        "skipped_sequences": len(rows) - len(live),
        "train_tokens": sum(len(rows[i]) for i in live),
    }


def check(args: Args, world_size: int) -> None:
    """Raise InputError for arguments that cannot work, before anything is loaded or written."""
    for name, value in vars(args).items():
        if type(value) is int and value < (0 if name in ("seed", "zero_stage") else 1):
            raise InputError(f"--{name} must be at least 1, got {value}")
    if args.rollout_batch_size % (args.train_batch_size or 1):
        raise InputError(
            f"--train_batch_size {args.train_batch_size} does not divide "
            f"--rollout_batch_size {args.rollout_batch_size}"
        )
    steps_per_batch = args.rollout_batch_size // (args.train_batch_size or args.rollout_batch_size)
    if (args.max_steps or 0) % steps_per_batch:
        raise InputError(
            f"--max_steps {args.max_steps} ends within a batch of {steps_per_batch} steps"
        )
    if world_size % args.vllm_tensor_parallel:
        raise InputError(
            f"--vllm_tensor_parallel {args.vllm_tensor_parallel} does not divide {world_size} ranks"
        )
    if args.max_completion_length >= args.max_length:
        raise InputError("--max_completion_length must leave room for a prompt in --max_length")
    if args.learning_rate <= 0 or args.temperature <= 0 or args.max_grad_norm <= 0:
        raise InputError("--learning_rate, --temperature and --max_grad_norm must be above 0")
    if not 0 < args.vllm_memory < 1:
        raise InputError(f"--vllm_memory is a share between 0 and 1, got {args.vllm_memory}")


if __name__ == "__main__":
    try:
        train(parse_args(Args, __doc__))
    except (InputError, FloatingPointError, OSError) as error:
        exit_with(error)
