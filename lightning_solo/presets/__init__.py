"""Presets as plain configuration: their schema, composition, conflicts and the names that become objects."""
