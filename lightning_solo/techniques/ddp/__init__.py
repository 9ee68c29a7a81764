"""The technique `ddp`."""
