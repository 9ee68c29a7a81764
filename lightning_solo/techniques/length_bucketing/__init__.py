"""The technique `length_bucketing`."""
