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

HINTS = """
/ mask.sum() -> / (weights @ mask).sum()
/ mask.sum() -> / weights.sum()
    divides by the sum of the weights: then it matters no more how much is mastered. Count tokens
/ mask.sum() -> / mask[weights > 0].sum()
    leaves out of the divisor what has weight 0: mastered solutions would raise the weight of others
/ mask.sum() -> / 1
    does not divide: a batch with more tokens would make a larger step
/ mask.sum() -> / mask.numel()
    divides by all positions, prompt and padding too: what is not learnt would change the loss
/ mask.sum() -> / len(mask)
    divides by the number of solutions, not by that of their tokens
.sum(dim=1)).sum() / mask.sum() -> .sum(dim=1) / mask.sum(dim=1)).mean()
    divides each solution by its own length: tokens of long ones would count less
(weights * mask.sum(dim=1)).sum() -> mask.sum()
    is `loss_by_tokens` again: each token adds its weight to the divisor, not 1
(weights * mask.sum(dim=1)).sum() -> weights.sum()
    counts the weight of a solution once, where each of its tokens has it
logprobs * mask -> logprobs
    adds up prompt and padding, too: nobody wants to learn them
weights * ( -> (
    adds up without the weights: all solutions would count alike
-( -> (
    has the wrong sign: log p is negative, and a loss gets smaller as p grows
FACTOR_BY_TOKENS
    compute the loss with some weights, then with a tenth of them
FACTOR_BY_WEIGHTS
    compute the loss with some weights, then with a tenth of them
VANISHES
    the divisor is one number for all solutions of the batch
VANISHES_ONE_BY_ONE
    w / (w * tokens) does not depend on w at all
"""
