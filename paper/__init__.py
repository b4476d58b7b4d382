"""What reproduces the paper, and the study's tables and control."""
