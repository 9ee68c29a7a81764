"""What Hydra discovers in every application once lightning-solo is installed; nothing here imports torch."""
