"""The technique `leak_finder`."""
