"""The technique `layer_drop`."""
