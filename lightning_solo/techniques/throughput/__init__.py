"""The technique `throughput`."""
