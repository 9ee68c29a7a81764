"""The technique `prefetch`."""
