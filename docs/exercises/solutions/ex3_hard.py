import itertools


def expectation(value, p, k):
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=k):
        right = sum(outcome)
        total += p**right * (1 - p) ** (k - right) * value(outcome)
    return total


MEAN_OSWFT_K1 = 0.1
MEAN_OSWFT_K4 = 0.1  # 1 - p, whatever K is: the weight is unbiased
MEAN_HARD_K4 = 0.34  # 1 - p^K: one slip in four answers, and the solution counts in full
ZERO_OSWFT_K4 = 0.66
ZERO_HARD_K4 = 0.66  # p^K for both: they differ in the weights above 0

SAME_AT_K = 1
# With one answer, "all" and "the share of" are the same. Weights between 0 and 1 need K >= 2.

MORE_ANSWERS_CHANGE = "B"
# The variance is p (1 - p) / K. A small K makes weights noisy, never wrong on average.

HARD_GOES_TO = 1.0
# Sooner or later one of many answers is wrong: then each solution counts in full, as in SFT.
