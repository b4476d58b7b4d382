def grpo_advantages(rewards):
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)


def no_signal(p, g):
    return p**g + (1 - p) ** g


GRPO_G8 = 0.92
OSWFT_K2 = 0.0001

WEIGHT = 1
ADVANTAGE = 0
# Where all answers fail, GRPO learns nothing, and OSW-FT learns most: it has an expert to ask.
# Where all are right, neither learns. GRPO needs no expert: it learns what it writes itself.
