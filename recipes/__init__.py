"""OSW-FT inside other codebases, and its neighbours; each recipe is tested against ours."""

import cpu  # noqa: F401  before torch
