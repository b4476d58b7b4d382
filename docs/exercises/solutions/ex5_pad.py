import torch


def mask_by_position(tokens, prompt_lengths, lengths):
    positions = torch.arange(tokens.shape[1])
    return (positions >= prompt_lengths[:, None]) & (positions < lengths[:, None])


ENDS_LEARNT = 0

IT_WRITES = "B"
# Nothing was ever learnt at the place where the solution is over, so what comes there is chance.
# Every answer runs on to the token limit, which costs time, and is then cut off. (This model was
# trained from scratch. A model that could stop before may forget it.)

HINTS = """
(positions < lengths[:, None]) -> (tokens != 2)
    leaves out the end of turn. Ask for positions, not for ids
(positions < lengths[:, None]) -> True
(positions < -> (positions <=
    learns padding: positions go up to lengths - 1
< lengths[:, None] -> < lengths[:, None] - 1
    ends too early, and leaves out the end of turn: it is counted in `lengths`
>= prompt_lengths -> > prompt_lengths
    leaves out the solution's first token: positions are counted from 0
positions >= -> positions + 1 >=
    learns the last token of the prompt: positions are counted from 0
(positions >= prompt_lengths[:, None]) -> True
    learns the prompt: only what the expert has written is learnt
< lengths -> < (prompt_lengths + lengths)
    adds the prompt twice: `lengths` are of prompt and solution together
ENDS_LEARNT
    END and PAD are the same id, and `tokens != PAD` leaves it out
IT_WRITES
    it has learnt the solution. Has anything taught it to stop?
"""
