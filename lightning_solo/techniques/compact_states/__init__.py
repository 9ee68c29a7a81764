"""The technique `compact_states`."""
