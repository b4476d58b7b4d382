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
