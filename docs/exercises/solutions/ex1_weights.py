def oswft_weights(rewards):
    return 1 - rewards.detach().float().mean(dim=1)
