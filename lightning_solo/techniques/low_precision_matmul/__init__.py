"""The technique `low_precision_matmul`."""
