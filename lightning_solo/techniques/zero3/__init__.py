"""The technique `zero3`."""
