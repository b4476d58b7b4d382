def oswft_weights(rewards):
    return 1 - rewards.detach().float().mean(dim=1)


HINTS = """
1 - rewards -> rewards
    gives p̂, the share of right answers: what is mastered would count most
mean(dim=1) -> amin(dim=1)
    counts a question that is sometimes solved like one that never is: the share is lost
mean(dim=1) -> amax(dim=1)
    gives 0 to a question that is sometimes solved. Was its share cut off, as integers are?
mean(dim=1) -> sum(dim=1)
    subtracts a number of answers, where a share is meant: weights would fall below 0
mean(dim=1) -> sum(dim=1) / 2
mean(dim=1) -> sum(dim=1) / 3
mean(dim=1) -> sum(dim=1) / 4
    divides by a number of its own: K is how many answers there are, and not the same in each run
1 - rewards.detach().float().mean(dim=1) -> (1 - rewards.detach().float()).sum(dim=1)
    counts wrong answers: with more answers to each question weights would grow beyond 1
mean(dim=1) -> select(1, 0)
    looks at the first answer alone: the others are sampled for nothing
dim=1 -> dim=0
dim=1 -> dim=(0, 1)
    averages over several questions, which say nothing about each other
"""
