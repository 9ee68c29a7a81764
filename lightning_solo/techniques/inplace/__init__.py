"""The technique `inplace`."""
