"""One folder per technique or observer: its card, its mechanism and the moment at which Lightning runs it."""
