"""The technique `early_zero_grad`."""
