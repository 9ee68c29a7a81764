"""The technique `micro_batching`."""
