"""The technique `accumulation_schedule`."""
