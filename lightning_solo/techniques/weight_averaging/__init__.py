"""The technique `weight_averaging`."""
