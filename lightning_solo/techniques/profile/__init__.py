"""The technique `profile`."""
