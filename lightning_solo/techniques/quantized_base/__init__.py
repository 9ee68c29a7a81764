"""The technique `quantized_base`."""
