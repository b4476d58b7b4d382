import statistics


def gap_mean(sampled, scored):
    return (scored - sampled).abs().mean().item()


def find_forgotten(gaps):
    usual, largest = statistics.median(gaps), max(gaps)
    return gaps.index(largest) if largest > 3 * usual else None


WHY_NOT_ZERO = "B"
# bfloat16 has 8 binary digits. A GPU adds that the two programs sum up in another order.

STOPPED_IF_FORGOTTEN_AT_0 = True
STOPPED_IF_FORGOTTEN_AT_5 = False
# At step 0 the sampler still has random weights, as in the scripts (load_format="dummy"). One that
# had loaded the model from disk would not be noticed.
# At LEARNING_RATE = 1e-5 the gap of step 5 is lost in the rounding. Then one stale step does no
# harm. Syncs that are *never* done do: their gap grows.
