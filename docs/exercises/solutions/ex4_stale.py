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
