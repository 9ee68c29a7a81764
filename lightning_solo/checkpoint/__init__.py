"""Files of checkpoints that are never lost: how they are written, recorded, verified and found again."""
