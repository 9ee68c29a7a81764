"""Pruning: the smallest weights become zero, and stay zero while the others are trained."""
