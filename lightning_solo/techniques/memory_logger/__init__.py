"""The technique `memory_logger`."""
