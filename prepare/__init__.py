"""Training sets: the paper's curated one, converted public ones, and a look at any of them."""
