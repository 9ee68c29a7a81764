"""The technique `packing`."""
