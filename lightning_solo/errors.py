"""One exception class per kind of failure; every message says what was given, what is allowed and what to write.

```
SoloError
├── PresetError       (ValueError)    unknown or ill-formed preset or field
├── ConflictError     (ValueError)    two choices that cannot be combined
├── NothingToDoError  (ValueError)    a technique that matched nothing in this module
├── CapabilityError   (RuntimeError)  this machine lacks CUDA, bf16, a compiler or a package
├── BudgetError       (RuntimeError)  device or host memory does not suffice
├── CheckpointError   (RuntimeError)  no valid checkpoint, or a run that is not the one it continues
├── PlanError         (RuntimeError)  a module whose training can't be predicted: why, and the least it needs
└── GradientError     (RuntimeError)  a gradient that no step should take: infinite, NaN, sparse, or twice the same
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SoloError(Exception):
    """Any failure that this library explains itself."""


class PresetError(SoloError, ValueError):
    """An unknown or ill-formed preset, field or value."""


class ConflictError(SoloError, ValueError):
    """Two choices that cannot be combined; the message names both and what to write instead."""


class NothingToDoError(SoloError, ValueError):
    """A technique that matched nothing in this module; the message lists what there is."""


class CapabilityError(SoloError, RuntimeError):
    """Something this machine lacks; the message names the remedy."""


class BudgetError(SoloError, RuntimeError):
    """Device memory, host memory or disk does not suffice; the message says how much is missing, part by part.

    Attributes:
        needed: bytes that the run needs, the margin included.
        available: bytes that there are.
    """

    def __init__(self, message: str, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class CheckpointError(SoloError, RuntimeError):
    """No valid checkpoint, or a run that is not the one it should continue."""


class PlanError(SoloError, RuntimeError):
    """A module whose training can't be predicted; the message says why, and the least that it needs."""


class GradientError(SoloError, RuntimeError):
    """A gradient that no step should take; the message names the parameter, and says what has been touched."""


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return what joins a wrong name and the list of right ones: the closest name as a question, if one is close.

    >>> f"no preset 'bf61'{nearest('bf61', ['bf16', 'baseline'])}there are bf16, baseline"
    "no preset 'bf61'; did you mean 'bf16'? there are bf16, baseline"
    """
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}? " if close else "; "


def unknown_name(option: str, name: object, kind: str, names: Iterable[str]) -> str:
    """Return the message for a name of a technique, a model or the like that there is none of.

    >>> unknown_name("optimizer", "sdg", "optimizer", ["adamw", "sgd"]).partition(". ")[0]
    "optimizer='sdg': no optimizer of that name; did you mean 'sgd'? there are adamw, sgd"
    """
    names = list(names)
    return (
        f"{option}={name!r}: no {kind} of that name{nearest(str(name), names)}there are {', '.join(names)}. "
        f"For a {kind} of your own write `_target_: your_package.YourClass` and allow=['your_package']"
    )
