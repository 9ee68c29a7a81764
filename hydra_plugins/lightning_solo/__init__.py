"""Plugins that Hydra discovers in every application once lightning-solo is installed; they don't import torch."""
