"""What each part costs next to what one would use instead; and a plan: does a run fit?"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: its threads would spin
