"""The technique `memory_snapshot`."""
