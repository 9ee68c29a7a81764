"""Injected faults: `make faults` runs all of them, and the quick ones are tests."""
