"""What prepares a run: training sets, a real model, and whether a run fits on the GPUs."""
