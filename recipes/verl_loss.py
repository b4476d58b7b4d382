"""OSW-FT's weights in verl's SFT trainer. Read and tested with verl 0.9.1: recipes/codebases.md."""

import torch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.workers.utils.losses import sft_loss


class WeightedDataset(MultiTurnSFTDataset):
    """verl's dataset, with the `weight` of each row from the parquet column of that name."""

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        weight = self.dataframe.iloc[item]["weight"]
        # One number, but not a scalar: verl's collator makes jagged tensors of the rows.
        return {**super().__getitem__(item), "weight": torch.tensor([weight], dtype=torch.float32)}


def oswft_sft_loss(config, model_output, data, dp_group=None) -> tuple[torch.Tensor, dict]:
    """verl's `sft_loss`, each row's log-probabilities times the row's weight.

    Mask and divisor stay verl's: the mask's sum over the global batch, weight 0 included, and
    dp_size, because FSDP averages the gradients of the ranks.

    Args:
        model_output: its "log_probs" are jagged, (b, tokens of the row).
        data: the micro-batch, with "loss_mask" (jagged) and "weight" (jagged, one to a row).
    """
    log_probs = model_output["log_probs"]
    tokens = log_probs.offsets().diff()  # (b,) in each row
    weights = data["weight"].values().repeat_interleave(tokens)  # (all tokens,)
    weighted = torch.nested.nested_tensor_from_jagged(
        weights * log_probs.values(), log_probs.offsets()
    )
    return sft_loss(config, {**model_output, "log_probs": weighted}, data, dp_group)
