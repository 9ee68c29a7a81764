"""How model states are laid out: one strategy per file."""
