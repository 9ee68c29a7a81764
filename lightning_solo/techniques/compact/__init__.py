"""The technique `compact`."""
