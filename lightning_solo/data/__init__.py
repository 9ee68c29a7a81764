"""Batches, loaders and the order of their items, on plain torch, without Lightning."""
