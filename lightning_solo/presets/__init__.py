"""Presets as plain configuration: composing, parsing, and the names that become objects; without torch."""
