"""The technique `attention`."""
