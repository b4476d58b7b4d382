"""The embedded default: a tiny model, synthetic problems, and the demo on them."""
