"""The choices of `lightning-solo export` and `convert`, known without importing torch."""

DTYPES = ("fp32", "bf16")
"""The types of exported weights."""
FORMS = ("plain", "compact")
"""The forms of a checkpoint's optimizer states, as `lightning-solo convert --to` takes them."""
