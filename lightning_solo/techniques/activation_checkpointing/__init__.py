"""The technique `activation_checkpointing`."""
