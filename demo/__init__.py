"""The embedded default: a tiny model, synthetic problems, and the demo on them."""

import cpu  # noqa: F401  before torch
