"""The paper's tables and figures: commands, plots, and which checkpoint to evaluate."""
