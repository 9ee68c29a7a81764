"""What leaves a run: weights and checkpoints that others read without this package."""
