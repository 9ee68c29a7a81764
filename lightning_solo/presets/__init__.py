"""Presets as plain configuration, without torch: composition, parsing, and the names that become objects."""
