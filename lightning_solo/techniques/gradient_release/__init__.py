"""The technique `gradient_release`."""
