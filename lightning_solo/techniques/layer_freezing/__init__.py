"""Layer freezing: parts of the module are not trained, or only later."""
