"""Logged values of a batch's parts, combined into values of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Logged:
    """The calls of ``self.log`` in the parts of a batch."""

    share: float = 1.0  # weight of the current part in the mean over the batch
    # (share, value, options) of each call, by hook and name
    calls: dict[tuple[str, str], list[tuple[float, Any, dict[str, Any]]]] = field(default_factory=dict)

    def log(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Record a value."""
        if isinstance(value, Tensor) and not options.get("enable_graph"):
            value = value.detach()
        self.calls.setdefault((hook, name), []).append((self.share, value, options))

    def replay(self, log: Callable[..., None], samples: int | None) -> None:
        """Log each name once, with the parts' weighted mean, their sum, minimum or maximum, or the metric.

        Args:
            log: Lightning's own function.
            samples: samples in the batch, for means over an epoch; None if Lightning is to count them.
        """
        for (hook, name), calls in self.calls.items():
            _, value, options = calls[-1]
            if len(calls) > 1:
                shares, values, _ = zip(*calls, strict=True)
                value = merged(values, shares, options.get("reduce_fx", "mean"))
            sizes: list[Any] = [each.get("batch_size") for _, _, each in calls]
            size = samples if None in sizes else sum(sizes)
            if size is not None:
                options = {**options, "batch_size": size}
            log(hook, name, value, **options)


def merged(values: Sequence[Any], shares: Sequence[float], reduce: Any) -> Any:
    """Return the batch's value for the values of its parts.

    >>> merged([torch.tensor(1.0), torch.tensor(4.0)], [0.75, 0.25], "mean")
    tensor(1.7500)
    """
    if len(values) == 1 or not all(isinstance(value, Tensor) for value in values):
        return values[-1]  # a metric has been updated by all parts
    name = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", "")
    if name == "sum":
        return torch.stack([*values]).sum(0)
    if name in ("max", "min"):
        stacked = torch.stack([*values])
        return stacked.amax(0) if name == "max" else stacked.amin(0)
    return weighted_mean(values, shares)


def weighted_mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """Return the mean of tensors by their shares, whose sum may differ from 1."""
    total = sum(shares)
    mean = values[0] * (shares[0] / total)
    for value, share in zip(values[1:], shares[1:], strict=True):
        mean = mean + value * (share / total)
    return mean


def merged_outputs(
    outputs: Sequence[dict[str, Any]], shares: Sequence[float], samples: Sequence[int]
) -> dict[str, Any]:
    """Return the outputs of ``training_step`` without the loss: tensors per sample are joined, numbers averaged."""
    if len(outputs) == 1:
        return outputs[0]
    whole: dict[str, Any] = {}
    for key, last in outputs[-1].items():
        values = [value for value in (output.get(key) for output in outputs) if isinstance(value, Tensor)]
        values = [value.detach() for value in values]
        alike = len(values) == len(outputs) and all(value.dim() == last.dim() for value in values)
        if alike and last.dim() and [len(value) for value in values] == [*samples]:
            whole[key] = torch.cat(values)
        elif alike and not last.dim() and last.is_floating_point():
            whole[key] = weighted_mean(values, shares)
        else:
            whole[key] = last
    return whole
