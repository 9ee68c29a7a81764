"""A search space in Hydra's own grammar: `choice`, `range` and `interval` as Optuna's distributions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from lightning_solo.errors import NothingToDoError, PresetError, nearest

EXAMPLE = "'optimizer.lr=tag(log, interval(1e-5, 1e-2))' or model.depth=2,4,8"


@dataclass(frozen=True)
class SearchSpace:
    """Distributions by override key, and the fixed overrides of every trial."""

    distributions: Mapping[str, BaseDistribution]
    fixed: tuple[str, ...]

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial; the values of choices are override texts already."""
        return [*self.fixed, *(f"{name}={params[name]}" for name in self.distributions)]

    def samples(self) -> list[list[str]]:
        """Return trials that cover every choice and both ends of each range."""
        ends = {name: _ends(distribution) for name, distribution in self.distributions.items()}
        first = {name: values[0] for name, values in ends.items()}
        others = [{**first, name: value} for name, values in ends.items() for value in values[1:]]
        return [self.overrides(params) for params in (first, *others)]

    def described(self) -> dict[str, str]:
        """Return each key's distribution as text, to compare it with another command's."""
        return {name: _text(distribution) for name, distribution in sorted(self.distributions.items())}


def search_space(texts: Sequence[str], config_loader: ConfigLoader | None = None) -> SearchSpace:
    """Return the space of overrides; the later of two with the same key wins.

    Raises:
        PresetError: a range is empty or Optuna can't search it.
        NothingToDoError: there is nothing to search.

    >>> space = search_space(["seed=1", "lr=tag(log, interval(1e-4, 1e-2))", "width=choice(64,128)"])
    >>> space.fixed, space.overrides({"lr": 0.001, "width": "64"})
    (('seed=1',), ['seed=1', 'lr=0.001', 'width=64'])
    """
    parsed = {o.get_key_element(): o for o in OverridesParser.create(config_loader).parse_overrides(list(texts))}
    searched = {key: override for key, override in parsed.items() if override.is_sweep_override()}
    if not searched:
        raise NothingToDoError(
            f"hydra/sweeper=solo_optuna: nothing to search, {', '.join(texts) or 'no overrides'}; write ranges on the"
            f" command line or into hydra.sweeper.params, such as {EXAMPLE}"
        )
    return SearchSpace(
        {key: _distribution(key, override) for key, override in searched.items()},
        tuple(str(override.input_line) for key, override in parsed.items() if key not in searched),
    )


def _distribution(key: str, override: Override) -> BaseDistribution:
    value: Any = override.value()
    text = str(override.input_line)
    numbers = isinstance(value, IntervalSweep | RangeSweep)
    for tag in sorted(getattr(value, "tags", ())):
        if tag != "log" or not numbers:
            raise PresetError(
                f"{text!r}: no tag {tag!r} here{nearest(tag, ['log'])}intervals and ranges may have 'log'"
            )
    log = numbers and "log" in value.tags
    try:
        if isinstance(value, IntervalSweep):
            return _between(value.start, value.end, log=log)
        if isinstance(value, RangeSweep):
            first, *others = list(value.range())
            low, high = min(first, *others, first), max(first, *others, first)
            return _between(low, high, log=log, step=None if log and value.step == 1 else abs(value.step))
        if hasattr(value, "shuffle"):
            value.shuffle = False  # a search ignores the order, and two orders would be two spaces
        return CategoricalDistribution(list(dict.fromkeys(override.sweep_string_iterator())))
    except ValueError as error:  # unpacking an empty range, or Optuna's own message
        why = "an empty range" if "unpack" in str(error) else str(error).rstrip(".")
        raise PresetError(f"{text!r}: {why}; write for example {EXAMPLE}") from error


def _between(low: Any, high: Any, *, log: bool, step: Any = None) -> BaseDistribution:
    if isinstance(low, int) and isinstance(high, int):
        return IntDistribution(low, high, log=log, step=1 if step is None else int(step))
    return FloatDistribution(low, high, log=log, step=None if step is None else float(step))


def _ends(distribution: BaseDistribution) -> list[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return [distribution.low, distribution.high]


def _text(distribution: BaseDistribution) -> str:
    plain = json.loads(distribution_to_json(distribution))["attributes"]
    if "choices" in plain:
        return f"choice({', '.join(plain['choices'])})"
    words = f"{plain['low']} to {plain['high']}"
    words += f" in steps of {plain['step']}" if plain["step"] is not None else ""
    return words + (", log" if plain["log"] else "")
