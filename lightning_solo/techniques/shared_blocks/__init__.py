"""Shared blocks: groups of equal blocks use one block's weights."""
