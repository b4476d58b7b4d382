"""OSW-FT inside other codebases; each recipe is tested against ours."""

import cpu  # noqa: F401  before torch
