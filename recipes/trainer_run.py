"""A whole run of a recipe for a Trainer: arguments, data, and weights by vLLM in this process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from data import Queries, derive_seed, load_examples
from models import count_examples, load_model, load_tokenizer, stop_token_ids, tokenize_examples
from ranks import gather, init_ranks
from recipes.oswft_mixin import Query
from rollout import Rollout, RolloutArgs
from train_oswft import oswft_weights
from verify import Verifier

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments


@dataclass
class RolloutWeights:
    """Weighs queries by K answers that vLLM samples from the current weights.

    The model is whole on every rank: vLLM cannot take the shards of ZeRO-3 or FSDP.
    """

    rollout: Rollout
    verifier: Verifier
    num_rollouts: int  # K
    max_completion_length: int

    def __call__(self, model: PreTrainedModel, queries: list[Query], seed: int) -> torch.Tensor:
        first = sum(gather([len(queries)])[: dist.get_rank()])
        mine, queries = slice(first, first + len(queries)), gather(queries)  # those of all ranks
        self.rollout.load_parameters((n, p.detach()) for n, p in model.named_parameters())
        completions = self.rollout.generate(
            [query.prompt_ids for query in queries],
            num_samples=self.num_rollouts,
            max_tokens=self.max_completion_length,
            seeds=[derive_seed(seed, index) for index in range(len(queries))],
        )  # this rank's share
        self.rollout.sleep()
        answers = [queries[completion.query].answer for completion in completions]
        verdicts = self.verifier.score([completion.text for completion in completions], answers)
        judged = gather([(c.query, v) for c, v in zip(completions, verdicts, strict=True)])
        rewards = torch.tensor([verdict for _, verdict in sorted(judged)])  # (B * K,)
        return oswft_weights(rewards.view(len(queries), -1))[mine]


@dataclass(kw_only=True)
class Args:
    """Added to the Trainer's own arguments, of which some get the paper's values."""

    model: str  # hub id or folder
    data: str  # JSONL or hub id with question, solution and answer
    num_rollouts: int = 2  # K, answers sampled per query
    steps_per_rollout: int = 1  # optimizer steps whose queries are weighed together
    max_sequence_length: int = 5120  # tokens of prompt and solution, or of prompt and rollout
    max_completion_length: int = 4096  # of a rollout
    vllm_memory: float = 0.5  # of a GPU, for vLLM
    verifier_workers: int = 2  # processes that grade

    learning_rate: float = 1e-5
    lr_scheduler_type: str = "constant"
    num_train_epochs: float = 1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 16  # 8 * 16 = 128 queries, on one GPU
    max_length: int | None = None  # of TRL: nothing is cut off
    remove_unused_columns: bool = False
    report_to: str = "none"
    use_cpu: bool = not torch.cuda.is_available()


def to_columns(examples: Queries) -> dict[str, list]:
    """The columns that `OSWFTMixin` reads."""
    return {
        "input_ids": [[*e.prompt_ids, *e.response_ids] for e in examples],
        "labels": [[-100] * len(e.prompt_ids) + e.response_ids.tolist() for e in examples],
        "answer": [e.example.answer for e in examples],
    }


def run(
    trainer: type[Trainer],
    arguments: type[TrainingArguments],
    collator: Callable = lambda tokenizer: None,
) -> None:
    """Train as the command line says.

    Args:
        trainer: made with an `OSWFTMixin`.
        arguments: a dataclass of `Args` and the trainer's own.
        collator: from the tokenizer to what makes a batch of rows; default: the trainer's own.
    """
    args = HfArgumentParser(arguments).parse_args_into_dataclasses()[0]
    if not dist.is_initialized():  # the Trainer does it for several ranks
        init_ranks("gloo")
    tokenizer = load_tokenizer(args.model)
    lengths = (args.max_sequence_length, args.max_completion_length)
    examples, dropped = tokenize_examples(load_examples(args.data), tokenizer, *lengths)
    if dist.get_rank() == 0:
        print(count_examples(examples, dropped), file=sys.stderr)
    model = load_model(args.model, args.max_sequence_length, "fp32")
    own = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = stop_token_ids(tokenizer, own)
    settings = {"max_length": args.max_sequence_length, "vllm_memory": args.vllm_memory}
    settings["precision"] = "bf16" if args.bf16 else "fp32"
    rollout = Rollout(args.model, tokenizer, RolloutArgs(**settings, vllm_sleep=True))
    with Verifier(args.verifier_workers) as verifier:
        weigh = RolloutWeights(rollout, verifier, args.num_rollouts, args.max_completion_length)
        oswft = trainer(
            model,
            args,
            weigh=weigh,
            steps_per_rollout=args.steps_per_rollout,
            train_dataset=Dataset.from_dict(to_columns(examples)),
            data_collator=collator(tokenizer),
            processing_class=tokenizer,
        )
        oswft.train(resume_from_checkpoint=args.resume_from_checkpoint)
    oswft.save_model()
