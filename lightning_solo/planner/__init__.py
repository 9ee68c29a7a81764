"""Predicts peak memory and step time of a training run before it starts, by running it on tensors without data."""
