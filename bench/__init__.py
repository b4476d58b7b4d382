"""What each part costs beside what one would use instead; and a plan: does a run fit?"""

import os

import torch

if not torch.cuda.is_available():
    # Else DeepSpeed, when it is imported, says on stdout that it found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
