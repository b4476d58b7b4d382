"""OSW-FT inside other codebases, and its neighbours; each recipe is tested against ours."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads would spin
