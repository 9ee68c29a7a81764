"""The choices of `lightning-solo export` and `convert`, known without importing torch."""

FORMATS = {"weights": "lightning_solo.export.weights:write_weights"}
"""Name of a format -> "module:function"; the function writes a file and returns a line about it."""
DTYPES = ("fp32", "bf16")
"""The types of exported weights."""
FORMS = ("plain", "compact")
"""The forms of a checkpoint's optimizer states, as `lightning-solo convert --to` takes them."""
