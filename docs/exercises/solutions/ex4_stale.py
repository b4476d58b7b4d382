def weights_in_use(step, s, old, p):
    return 1 - p if step % s == 0 else old


AGES = [0, 1, 2, 3, 0, 1, 2, 3]

STALE_WEIGHTS_ARE = "A"
# p has grown since, also for questions not shown yet: they share the parameters. The error is
# largest at the start, where the model learns fastest. With S as long as the run, weights would be
# static: those of the model before training.

ANSWERS = 1
SYNCS = 1 / 4
# Each question is answered K times, with any S. What S saves is syncs, and the sampler's idle time:
# it works best on many prompts at once.

HINTS = """
1 - p -> p
    gives p where weights are renewed; a weight is 1 - p
return 1 - p if step % s == 0 else old -> return 1 - p
    renews the weights at every step: then nothing is stale
step % s -> step
1 - p if step % s == 0 else old -> old
    never renews the weights after step 0: old ones stay for ever
== 0 -> != 0
    has its two cases the wrong way round
step % s -> (step + 1) % s
step % s -> (step - 1) % s
    renews the weights one step off: steps are counted from 0
% s -> % 2
% s -> % 3
% s -> % 4
    has a fixed number in the place of s
else old -> else 1 - old
    turns `old` around: it holds weights, not values of p
AGES
    in the step that renews them weights are 0 updates old
STALE_WEIGHTS_ARE
    the model has learnt since. What has become of p, and of 1 - p?
ANSWERS
    each question is still answered K times, once in a pass
SYNCS
    one sync for four updates: S saves syncs, not answers
"""
