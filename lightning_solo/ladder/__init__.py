"""A ladder: each technique measured on one module, alone and on top of the others, each in a fresh process."""
