"""OSW-FT inside transformers' Trainer.

The obvious hooks are the wrong ones: `compute_loss_func` never sees the rows' weights, and the
model's own loss is a sum over rows already. So `compute_loss` takes the log-probabilities itself.

    python -m recipes.transformers_trainer --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl \
        --output_dir runs/trainer --bf16 True --gradient_checkpointing True
    torchrun --nproc_per_node 8 -m recipes.transformers_trainer ...      # several GPUs, with DDP

The arguments are those of TrainingArguments, and a few of trainer_run.py. To copy: oswft_mixin.py,
and this class with `oswft_loss` pasted above it. The data collator has to pad, as
`DataCollatorForSeq2Seq` does. The logits of a micro-batch are in memory, as in any Trainer.
"""

from dataclasses import dataclass

from recipes.oswft_mixin import OSWFTMixin
from train_oswft import oswft_loss

from torch.nn.functional import cross_entropy
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments


class OSWFTTrainer(OSWFTMixin, Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """A micro-batch's part of Algorithm 1's loss; in evaluation, without weights, SFT's."""
        inputs.pop("queries", None)
        if "weights" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        weights, targets = inputs.pop("weights"), inputs.pop("labels")[:, 1:]  # (b,), (b, T)
        logits = model(**inputs).logits[:, :-1].float()  # (b, T, vocabulary)
        logprobs = -cross_entropy(logits.transpose(1, 2), targets, reduction="none")  # (b, T)
        loss = oswft_loss(logprobs, targets != -100, weights, num_items_in_batch)
        return loss * self.accelerator.num_processes  # DDP takes the mean over ranks


if __name__ == "__main__":
    from recipes.trainer_run import Args, run

    @dataclass(kw_only=True)
    class Arguments(Args, TrainingArguments):
        pass

    run(OSWFTTrainer, Arguments, collator=DataCollatorForSeq2Seq)
