"""The technique `allocator`."""
