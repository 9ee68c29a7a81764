"""The technique `finite_guard`."""
