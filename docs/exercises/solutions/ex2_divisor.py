def loss_by_tokens(logprobs, mask, weights):
    return -(weights * (logprobs * mask).sum(dim=1)).sum() / mask.sum()


def loss_by_weights(logprobs, mask, weights):
    return -(weights * (logprobs * mask).sum(dim=1)).sum() / (weights * mask.sum(dim=1)).sum()


FACTOR_BY_TOKENS = 0.1
FACTOR_BY_WEIGHTS = 1.0  # numerator and divisor both fall to a tenth

VANISHES = "B"
# Solutions of weight 1 and 1/2 still differ by a factor of two: the divisor is the same for both.
# But whether the model fails at nine tenths of the batch or at one tenth no longer matters. (Adam
# hides a constant factor, too, and clipping hides any while the norm is above its limit. A factor
# that falls during a run Adam hides only in part: docs/theory.md.)

VANISHES_ONE_BY_ONE = "C"
# w / w = 1 (and 0 / 0 for w = 0): all solutions count alike, as in plain fine-tuning, SFT. The same
# happens in part where each micro-batch or each GPU divides by a sum of its own. So the divisor is
# counted over the global batch.
