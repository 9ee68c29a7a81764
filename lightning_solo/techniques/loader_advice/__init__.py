"""The technique `loader_advice`."""
