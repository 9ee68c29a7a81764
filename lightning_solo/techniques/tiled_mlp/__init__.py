"""The technique `tiled_mlp`."""
