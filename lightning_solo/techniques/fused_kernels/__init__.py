"""The technique `fused_kernels`."""
