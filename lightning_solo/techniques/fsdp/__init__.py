"""The technique `fsdp`."""
