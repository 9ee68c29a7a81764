"""What the library knows about modules: which of their children are the repeated blocks."""
