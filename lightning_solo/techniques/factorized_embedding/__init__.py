"""Factorized embedding: a table of narrow rows, and a linear layer to the model's width."""
