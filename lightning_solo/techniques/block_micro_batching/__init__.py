"""The technique `block_micro_batching`."""
