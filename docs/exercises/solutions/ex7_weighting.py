def undecided_weights(rewards):
    k = rewards.shape[1]
    p_hat = rewards.float().mean(dim=1)
    return k / (k - 1) * p_hat * (1 - p_hat)  # also: rewards.float().var(dim=1)


PLUG_IN_IS_RIGHT = "A"
# The mean of p̂ is p, so all that is linear in p̂ is right on average. The mean of p̂^2 is not p^2 but
# p^2 + p (1 - p) / K. That is why p̂ (1 - p̂) is on average only (K - 1) / K of p (1 - p).

WEIGHTS_AT_K2 = [0.0, 0.5]
# 1/2 if the answers differ, else 0. One answer cannot differ from itself: with K = 1 there is no
# such weight. How to train with one like it: recipes/patches.md, "Weighting".

HINTS = """
k / (k - 1) * p_hat -> p_hat
    has a mean of 1/2, 2/3, 3/4 times p (1 - p), at K = 2, 3, 4
k / (k - 1) -> (k - 1) / k
    makes the mean smaller still: which way does the factor go?
k / (k - 1) -> 2
k / (k - 1) -> 3 / 2
k / (k - 1) -> 4 / 3
    has one factor for every K: by how much p̂ (1 - p̂) is off depends on K
rewards.shape[1] -> rewards.shape[0]
    takes the number of questions for K
return k / (k - 1) * p_hat * (1 - p_hat) -> return (k / (k - 1) * p_hat * (1 - p_hat)) ** 0.5
return k / (k - 1) * p_hat * (1 - p_hat) -> return (p_hat * (1 - p_hat)) ** 0.5
    takes a root: the mean of roots is not the root of the mean
return k / (k - 1) * p_hat * (1 - p_hat) -> return rewards[:, 0] * (1 - rewards[:, 1])
    has the right mean, but from two of the answers, and their order matters
PLUG_IN_IS_RIGHT
    at K = 2, p = 0.5 the means of p̂ (1 - p̂) and (1 - p̂)^2 are 1/8 and 3/8: of p they are 1/4
WEIGHTS_AT_K2
    each value once, the smallest first: two answers agree or differ
"""
