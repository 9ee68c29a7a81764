"""A technique of one's own: a card, a class, a configuration file; lightning-solo finds it by its entry point."""
