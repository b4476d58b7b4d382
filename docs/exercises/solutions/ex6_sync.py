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

HINTS = """
(scored - sampled).abs().mean() -> (scored - sampled).mean()
(scored - sampled).abs().mean() -> (sampled - scored).mean()
(scored - sampled).abs().mean() -> (scored - sampled).mean().abs()
    cancels differences of both signs: take their sizes before the mean
abs().mean() -> abs().sum()
    adds up: with more tokens it would be larger, though nothing is wrong
abs().mean() -> abs().max()
    takes the largest difference: one odd token would decide
abs().mean() -> square().mean()
abs().mean() -> square().mean().sqrt()
    squares the differences: then a few large ones decide
(scored - sampled) -> (scored.exp() - sampled.exp())
    compares p, not log p: rare tokens would not count
if largest > 3 * usual else None -> if True else None
    names a step in every run: does its gap stand out, or is it only the largest?
gaps.index(largest) if largest > 3 * usual else None -> None
    never finds one: what does the others' gap say about a usual one?
gaps.index(largest) -> 1 + gaps.index(largest)
    is one step late: steps are counted from 0
else None -> else -1
    does not give None for a run in which no sync was forgotten
if largest > 3 * usual -> if gaps.index(largest) and largest > 3 * usual
    misses step 0: does a loop begin at 1, or does `if` or `or` read 0 as false?
gaps.index(largest) if -> largest if
    gives the gap, not its step
usual, largest = statistics.median(gaps) -> usual, largest = statistics.mean(gaps)
    compares with a mean that the forgotten sync has raised: in a short run it hides behind it
usual, largest = statistics.median(gaps), max(gaps) -> usual, largest = 0.1 / 3, gaps[0]
    looks at the first gap alone: any sync may be forgotten
WHY_NOT_ZERO
    both models score the same answers, with the same weights
STOPPED_IF_FORGOTTEN_AT_0
    look at run(forgotten=0)
STOPPED_IF_FORGOTTEN_AT_5
    its first gap is small, and only that one is looked at
"""
