"""OSW-FT inside TRL's SFTTrainer, whose fused head, metrics and data preparation stay.

The head returns log-probabilities, `outputs.log_probs`, whose sum the trainer divides by all tokens
of the optimizer step. So a forward hook multiplies each row's by its weight, and nothing else has
to change.

    python -m recipes.trl_sft --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl \
        --output_dir runs/trl
    torchrun --nproc_per_node 8 -m recipes.trl_sft ...                  # several GPUs, by DDP

The arguments are those of SFTConfig, and the few of `OSWFTArguments`. Copy `WeightedSFTTrainer`,
and from transformers_trainer.py `OSWFTCollator` and `OSWFTMixin`. A row of your own data set needs
the column `answer` beside those that SFTTrainer reads.
"""

from dataclasses import dataclass
from typing import ClassVar

import datasets
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer

from prompts import PAPER_PROMPT, instruction
from recipes.transformers_trainer import OSWFTArguments, OSWFTMixin, RolloutWeights, load
from verify import Verifier


class WeightedSFTTrainer(OSWFTMixin, SFTTrainer):
    # Packed rows share one weight, other losses read log_probs once more, and a solution that is
    # truncated never ends.
    needs: ClassVar = {**OSWFTMixin.needs, "packing": False, "loss_type": "nll", "max_length": None}

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """This micro-batch's part of Algorithm 1's loss; without weights, as in evaluation, SFT."""
        inputs.pop("queries", None)
        weights, seq_idx = inputs.pop("weights", None), inputs.get("seq_idx")  # (b,)
        if weights is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if seq_idx is None and len(inputs["input_ids"]) != len(weights):
            raise ValueError("rows were flattened without seq_idx: whose tokens are whose?")

        def weigh(module, args, outputs):
            rows = weights[:, None] if seq_idx is None else weights[seq_idx[:, 1:]]  # (b, 1 or T)
            outputs.log_probs = outputs.log_probs * rows  # (b, T)

        hook = self.accelerator.unwrap_model(model).register_forward_hook(weigh)
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            hook.remove()


@dataclass(kw_only=True)
class Args(OSWFTArguments, SFTConfig):
    max_length: int | None = None  # nothing is truncated


def main(args: Args) -> None:
    tokenizer, examples, model, rollout = load(args)
    rows = [
        {
            "prompt": PAPER_PROMPT.messages(example.question, instruction(example.answer)),
            "completion": [{"role": "assistant", "content": example.solution}],
            "answer": example.answer,
        }
        for example in (row.example for row in examples)
    ]
    with Verifier(args.verifier_workers) as verifier:
        trainer = WeightedSFTTrainer(
            model,
            args,
            weigh=RolloutWeights(rollout, verifier, args.num_rollouts, args.max_completion_length),
            steps_per_rollout=args.steps_per_rollout,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main(HfArgumentParser(Args).parse_args_into_dataclasses()[0])
