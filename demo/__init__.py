"""The embedded default: a tiny model, synthetic problems, and the demo on them."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads would spin
