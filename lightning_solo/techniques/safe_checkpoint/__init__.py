"""The technique `safe_checkpoint`."""
