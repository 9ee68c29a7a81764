"""The technique `weights_on_host`."""
