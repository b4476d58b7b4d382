import torch


def mask_by_position(tokens, prompt_lengths, lengths):
    positions = torch.arange(tokens.shape[1])
    return (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])


ENDS_LEARNT = 0

IT_WRITES = "B"
# Nothing was ever learnt at the place where the solution is over, so what comes there is chance.
# Every answer runs on to the token limit, which costs time, and is then cut off. (This model was
# trained from scratch. A model that could stop before may forget it.)
