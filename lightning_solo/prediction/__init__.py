"""Predictions of a trained module, streamed to files."""
