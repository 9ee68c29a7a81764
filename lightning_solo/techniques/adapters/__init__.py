"""Adapters: small trained factors beside frozen weights."""
