"""The precision that techniques refuse which use gradients in backward."""

from __future__ import annotations


def scaled_gradients(option: str, precision: str | None) -> str | None:
    """Return why a technique that uses gradients in backward refuses a precision, and what to write; else None.

    >>> scaled_gradients("callback.gradient_release", "bf16-mixed")
    """
    if precision != "16-mixed":
        return None
    return (
        f"{option} and precision=16-mixed, whose gradients are scaled until the step; write precision=bf16-mixed, or"
        f" ~{option}"
    )
