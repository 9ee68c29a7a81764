"""The technique `distillation`."""
