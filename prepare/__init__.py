"""Training sets: the paper's 10k, two public sets, and a look at any training file."""
