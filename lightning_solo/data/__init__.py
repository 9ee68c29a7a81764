"""Batches, loaders and their orders, on plain torch, without Lightning."""
