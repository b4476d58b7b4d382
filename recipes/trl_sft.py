"""OSW-FT inside TRL's SFTTrainer, whose fused head, metrics and data preparation stay.

The head returns log-probabilities, `outputs.log_probs`. The trainer sums them and divides by all
tokens of the optimizer step, so a forward hook that multiplies each row's by its weight is enough.

    python -m recipes.trl_sft --model Qwen/Qwen3-0.6B-Base --data data/train.jsonl \
        --output_dir runs/trl
    torchrun --nproc_per_node 8 -m recipes.trl_sft ...                   # several GPUs, with DDP

The arguments are those of SFTConfig, and a few of trainer_run.py. To copy: oswft_mixin.py and this
file; its last lines, which run it, need this repository. Your data set also needs a column
`answer`. From rows given as messages SFTTrainer would learn more than the solution.
"""

from dataclasses import dataclass
from typing import ClassVar

from recipes.oswft_mixin import OSWFTMixin

from trl import SFTConfig, SFTTrainer


class WeightedSFTTrainer(OSWFTMixin, SFTTrainer):
    # Packed rows would share a weight. The other loss reads log_probs a second time. A solution
    # that is cut off has no end.
    needs: ClassVar = {**OSWFTMixin.needs, "packing": False, "loss_type": "nll", "max_length": None}

    def __init__(self, model, args, *rest, train_dataset, **kwargs):
        if args.eos_token is None and "input_ids" not in (train_dataset.column_names or ()):
            # Else TRL appends the tokenizer's, which for Qwen3-Base does not end a turn.
            raise ValueError("OSW-FT needs eos_token=, with which the chat template ends a turn")
        super().__init__(model, args, *rest, train_dataset=train_dataset, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """A micro-batch's part of Algorithm 1's loss; in evaluation, without weights, SFT's."""
        inputs.pop("queries", None)
        weights, row = inputs.pop("weights", None), inputs.get("seq_idx")  # (b,), (1, T) or None
        if weights is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if row is None and len(inputs["input_ids"]) != len(weights):
            raise ValueError("padding-free rows without seq_idx: which token belongs to which row?")
        weights = weights[:, None] if row is None else weights[row[:, 1:]]  # (b, 1) or (1, T)

        def weigh(module, args, outputs):
            outputs.log_probs = weights * outputs.log_probs  # (b, T)

        hook = self.accelerator.unwrap_model(model).register_forward_hook(weigh)
        try:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        finally:
            hook.remove()


if __name__ == "__main__":
    from recipes.trainer_run import Args, run

    @dataclass(kw_only=True)
    class Arguments(Args, SFTConfig):
        pass

    run(WeightedSFTTrainer, Arguments)
