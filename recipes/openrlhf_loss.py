"""OSW-FT's weights in OpenRLHF's SFT trainer. Read and tested with OpenRLHF 0.11.2:
recipes/codebases.md."""

import torch
from openrlhf.models.loss import SFTLoss


class WeightedSFTLoss(SFTLoss):
    """OpenRLHF's SFTLoss, each row's log-probabilities times the row's weight.

    Mask and divisor stay OpenRLHF's: the mask's sum over the micro-batches of all ranks of an
    optimizer step, weight 0 included.
    """

    def forward(
        self,
        per_token_logps: torch.Tensor,
        loss_mask: torch.Tensor,
        weights: torch.Tensor,
        **loss_batch_info,
    ) -> torch.Tensor:
        """
        Args:
            per_token_logps: (b, T) as the actor returns them.
            loss_mask: (b, T), 0 and 1 only. A weight in here would be summed into the divisor.
            weights: (b,) of the rows.
            loss_batch_info: the global divisors, from `iter_grad_accum_global_norm`.
        """
        return super().forward(weights[:, None] * per_token_logps, loss_mask, **loss_batch_info)
