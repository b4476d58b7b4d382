import itertools


def expectation(value, p, k):
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=k):
        right = sum(outcome)
        total += p**right * (1 - p) ** (k - right) * value(outcome)
    return total


MEAN_OSWFT_K1 = 0.1
MEAN_OSWFT_K4 = 0.1  # 1 - p, whatever K is: the weight is unbiased
MEAN_HARD_K4 = 1 - 0.9**4  # 0.34: one slip in four answers, and the solution counts in full
ZERO_OSWFT_K4 = 0.9**4  # 0.66
ZERO_HARD_K4 = 0.9**4  # p^K for both: they differ in the weights above 0

SAME_AT_K = 1
# With one answer, "all" and "the share of" are the same. Weights between 0 and 1 need K >= 2.

MORE_ANSWERS_CHANGE = "B"
# The variance is p (1 - p) / K. A small K makes weights noisy, never wrong on average.

HARD_GOES_TO = 1.0
# Sooner or later one of many answers is wrong: then each solution counts in full, as in SFT.

HINTS = """
p**right * (1 - p) ** (k - right) -> 0.5**k
    takes all outcomes as equally probable: they are so for p = 0.5 alone
p**right * (1 - p) ** (k - right) -> 1
    only adds values up: a mean multiplies each by how probable its outcome is
p**right * (1 - p) ** (k - right) -> p ** (k - right) * (1 - p) ** right
    takes p for the probability of a wrong answer
p**right * (1 - p) ** (k - right) -> p**right
    leaves out how probable the wrong answers are: all k must come out so
product([0, 1], repeat=k) -> combinations_with_replacement([0, 1], k)
    counts each number of right answers once, though it comes in several orders
return total -> return total / 2**k
    divides in the end: the probabilities add up to 1 already
return total -> return round(total, 2)
    rounds: whoever calls it may need the digits
MEAN_OSWFT_K1
    ask expectation(oswft, 0.9, 1)
MEAN_OSWFT_K4
    ask expectation(oswft, 0.9, 4)
MEAN_HARD_K4
    ask expectation(hard, 0.9, 4)
ZERO_OSWFT_K4
    it is 0 where all four answers are right
ZERO_HARD_K4
    it is 0 where all four answers are right
SAME_AT_K
    one answer right, the others wrong: `hard` says 1, OSW-FT less
MORE_ANSWERS_CHANGE
    compare MEAN_OSWFT_K1 and MEAN_OSWFT_K4
HARD_GOES_TO
    it is 1 - 0.9^K: what becomes of 0.9^K as K grows without end?
"""
