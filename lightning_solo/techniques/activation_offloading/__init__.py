"""The technique `activation_offloading`."""
