"""A technique of one's own: a card and a class; lightning-solo finds it by its entry point."""
