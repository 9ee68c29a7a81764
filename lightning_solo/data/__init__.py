"""What several techniques know about batches: on plain torch, without Lightning."""
