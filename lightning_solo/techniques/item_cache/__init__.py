"""The technique `item_cache`."""
