"""The technique `curriculum`."""
