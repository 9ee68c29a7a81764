"""The technique `regional_compilation`."""
