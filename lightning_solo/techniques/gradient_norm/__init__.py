"""The technique `gradient_norm`."""
