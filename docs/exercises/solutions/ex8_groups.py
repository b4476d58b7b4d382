def grpo_advantages(rewards):
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)


def no_signal(p, g):
    return p**g + (1 - p) ** g


GRPO_G8 = 0.99**8 + 0.01**8  # 0.92
OSWFT_K2 = 0.01**2  # 0.0001

WEIGHT = 1
ADVANTAGE = 0
# Where all answers fail, GRPO learns nothing, and OSW-FT learns most: it has an expert to ask.
# Where all are right, neither learns. GRPO needs no expert: it learns what it writes itself.

HINTS = """
(rewards.std(dim=1, keepdim=True) + 1e-6) -> rewards.std(dim=1, keepdim=True)
    divides 0 by 0 where all answers are alike
std(dim=1, -> std(dim=1, correction=0,
    has the std of a population, which divides by G: a sample's divides by G - 1
return centred / (rewards.std(dim=1, keepdim=True) + 1e-6) -> return centred
    does not divide by the std: groups that scatter more would count more
std -> var
    divides by the variance: the std is its root
return centred -> return rewards
    does not subtract the mean: then nothing is suppressed
return centred -> return -centred
    has the wrong sign: what is right would be suppressed
dim=1 -> dim=0
    compares answers to different questions: those to one question are a row
dim=1 -> dim=(0, 1)
rewards.std(dim=1, keepdim=True) -> rewards.std()
rewards.mean(dim=1, keepdim=True) -> rewards.mean()
    compares with the whole batch: take the mean and the std of each group
1e-6 -> 1e-2
1e-6 -> 0.1
1e-6 -> 1
    adds so much to the std that all advantages shrink
p**g + (1 - p) ** g -> p**g
    forgets that a group that is all wrong has no signal either
p**g + (1 - p) ** g -> (1 - p) ** g
    forgets that a group that is all right has no signal either
p**g + (1 - p) ** g -> 1 - p**g - (1 - p) ** g
    is how probable a signal is: the question is the other way round
+ (1 - p) ** g -> * (1 - p) ** g
    multiplies: no group is all right and all wrong at once
GRPO_G8
    ask no_signal(0.01, 8)
OSWFT_K2
    the weight is 0 only if both answers are right
WEIGHT
    it is 1 - p̂, and no answer is right
ADVANTAGE
    no answer is better than the mean of its group
"""
