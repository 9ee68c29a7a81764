"""Low rank: linear layers become two smaller ones, and are trained as such."""
