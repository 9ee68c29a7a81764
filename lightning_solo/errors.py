"""One exception class per kind of failure. Every message names the wrong value, the allowed ones and the remedy.

```
SoloError
├── PresetError       (ValueError)    unknown or ill-formed preset or field
├── ConflictError     (ValueError)    two choices that cannot be combined
├── NothingToDoError  (ValueError)    a technique that matched nothing in this module
├── CapabilityError   (RuntimeError)  this machine lacks CUDA, bf16, a compiler or a package
├── BudgetError       (RuntimeError)  device or host memory does not suffice
├── CheckpointError   (RuntimeError)  no valid checkpoint, or one that this run can't continue
├── PlanError         (RuntimeError)  a module whose training can't be predicted
└── GradientError     (RuntimeError)  a gradient that no step should use: infinite, NaN, sparse, or computed twice
    └── RefusedStepError                a step whose loss or gradients aren't finite, or whose loss is a spike
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class SoloError(Exception):
    """Base of all errors that this package raises."""


class PresetError(SoloError, ValueError):
    """An unknown or ill-formed preset, field or value."""


class ConflictError(SoloError, ValueError):
    """Two choices that cannot be combined; the message names both and the remedy."""


class NothingToDoError(SoloError, ValueError):
    """A technique that matched nothing in this module; the message lists the candidates."""


class CapabilityError(SoloError, RuntimeError):
    """Something this machine lacks; the message names the remedy."""


class BudgetError(SoloError, RuntimeError):
    """Too little device memory, host memory or disk; the message lists the missing bytes by part.

    Attributes:
        needed: bytes that the run needs, including a margin.
        available: available bytes.
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class CheckpointError(SoloError, RuntimeError):
    """No valid checkpoint, or one that this run can't continue."""


class PlanError(SoloError, RuntimeError):
    """A module whose training can't be predicted; the message gives the reason and the least memory that it needs."""


class GradientError(SoloError, RuntimeError):
    """A gradient that no step should use; the message names the parameter and what was changed already.

    Attributes:
        step: number of the optimizer step in its fit, from 0; None outside a fit.
        batch_idx: index of the batch in its epoch, from 0; None outside a fit.
    """

    step: int | None = None
    batch_idx: int | None = None

    def locate(self, step: int, epoch: int, batch_idx: int) -> None:
        """Add the place in a fit to attributes and message, once."""
        if self.step is None:
            self.step, self.batch_idx = step, batch_idx
            self.args = (f"{self} (optimizer step {step}, batch {batch_idx} of epoch {epoch}, counted from 0)",)


class RefusedStepError(GradientError):
    """A step that must not be taken: its loss or a gradient is infinite or NaN, or its loss is a spike.

    Attributes:
        reason: the message without the place in a fit.
        touched: whether weights were changed all the same, before the gradient was known.
    """

    def __init__(self, message: str, *, touched: bool = False) -> None:
        super().__init__(message)
        self.reason, self.touched = message, touched


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the words between a wrong name and the list of right names: a question if one of them is close.

    >>> f"no preset 'bf61'{nearest('bf61', ['bf16', 'baseline'])}there are bf16, baseline"
    "no preset 'bf61'; did you mean 'bf16'? there are bf16, baseline"
    """
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}? " if close else "; "


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, and the number of the others.

    >>> listed("abcde"), listed("ab")
    ('a, b, c and 2 more', 'a, b')
    """
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def with_reasons(reasons: Mapping[str, str], most: int = 3) -> str:
    """Return names with the reasons of each, those of one reason together.

    >>> with_reasons({"a": "frozen", "b": "tied", "c": "frozen", "d": "frozen"})
    'a, c and 1 more (frozen), b (tied)'
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return listed([f"{listed(each, 2)} ({reason})" for reason, each in names.items()], most)


def unknown_name(option: str, name: object, kind: str, names: Iterable[str]) -> str:
    """Return the message for an unknown name of a technique, model or other kind.

    >>> unknown_name("optimizer", "sdg", "optimizer", ["adamw", "sgd"]).partition(". ")[0]
    "optimizer='sdg': no optimizer of that name; did you mean 'sgd'? there are adamw, sgd"
    """
    names = list(names)
    return (
        f"{option}={name!r}: no {kind} of that name{nearest(str(name), names)}there are {', '.join(names)}. "
        f"For a {kind} of your own write `_target_: your_package.YourClass` and allow=['your_package']"
    )
