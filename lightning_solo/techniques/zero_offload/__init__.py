"""The technique `zero_offload`."""
