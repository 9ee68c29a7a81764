"""The technique `quantization`."""
