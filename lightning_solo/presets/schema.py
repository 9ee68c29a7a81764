"""The closed set of fields of a preset, and the check of a composed preset against it, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Dict, Optional  # noqa: UP035 - OmegaConf reads these annotations

from omegaconf import MISSING

from lightning_solo.cards.arguments import check_arguments
from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import card_of, catalogue
from lightning_solo.cards.composition import Chosen, Composition
from lightning_solo.errors import ConflictError, PresetError, nearest
from lightning_solo.presets.devices import budget_on, device, parse_budget
from lightning_solo.presets.registry import NAMES, refuse_foreign_targets, target_of
from lightning_solo.presets.signature import parameters

PRECISIONS = {
    "32-true": "32-true",
    "32": "32-true",
    "16-mixed": "16-mixed",
    "16": "16-mixed",
    "bf16-mixed": "bf16-mixed",
    "bf16": "bf16-mixed",
    "16-true": "16-true",
    "bf16-true": "bf16-true",
    "64-true": "64-true",
    "64": "64-true",
    "transformer-engine": "transformer-engine",
    "transformer-engine-float16": "transformer-engine-float16",
}
"""What Lightning accepts -> the long form of it."""


@dataclass
class SoloConfig:
    """A composed preset. Only what is not None reaches the Trainer; the names are Lightning's."""

    precision: Optional[str] = None  # noqa: UP045
    accumulate_grad_batches: Optional[int] = None  # noqa: UP045
    strategy: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045
    callback: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    auto: Optional[Dict[str, Any]] = None  # noqa: UP006, UP045


FIELDS = tuple(f.name for f in fields(SoloConfig))


@dataclass
class PresetSchema:
    """The fields of a preset for Hydra's composition: what a preset leaves out keeps what one before it in a list set.

    So a missing value stands for "not set", which doesn't replace anything, as None would.
    """

    precision: Optional[str] = MISSING  # noqa: UP045
    accumulate_grad_batches: Optional[int] = MISSING  # noqa: UP045
    strategy: Optional[Dict[str, Any]] = field(default_factory=dict)  # noqa: UP006, UP045
    callback: Dict[str, Any] = field(default_factory=dict)  # noqa: UP006
    auto: Optional[Dict[str, Any]] = field(default_factory=dict)  # noqa: UP006, UP045


def from_mapping(given: Mapping[str, Any], allow: Sequence[str] = ()) -> SoloConfig:
    """Return the checked configuration behind a plain mapping.

    Args:
        given: the fields of a preset, plain containers only (no interpolations left).
        allow: prefixes of ``_target_`` that the user trusts.

    Raises:
        PresetError: an unknown field, argument or name, a wrong type, an impossible value, a target not allowed.
    """
    for name, value in given.items():
        if name not in FIELDS:
            raise PresetError(unknown_field(str(name), value))
    return SoloConfig(
        precision=_precision(given.get("precision")),
        accumulate_grad_batches=_factor(given.get("accumulate_grad_batches")),
        strategy=_object(given.get("strategy") or None, "strategy", allow),
        callback=_callbacks(given.get("callback"), allow),
        auto=_auto(given.get("auto") or None),
    )


def composition(config: SoloConfig) -> Composition:
    """Return a checked configuration as the techniques' cards see it."""
    nodes = [(config.strategy, "strategy")] if config.strategy is not None else []
    nodes += [(node, f"callback.{key}") for key, node in config.callback.items()]
    chosen = []
    for node, option in nodes:
        if "name" in node:
            card = card_of(option.split(".")[0], node["name"], f"{option}.name")
            arguments = {key: value for key, value in node.items() if key != "name"}
            chosen.append(Chosen(card, card.check(arguments, option), option))
    return Composition(tuple(chosen), config.precision, config.accumulate_grad_batches)


def unknown_field(name: str, value: object) -> str:
    """Return the message for a name that is no field of a preset: what it may be meant for, and what to write."""
    if name in ("devices", "num_nodes"):
        return (
            f"{name}={value!r}: lightning-solo trains on one device, devices=1; "
            f"for more than one use Lightning's own strategies ('ddp', 'fsdp') without a preset"
        )
    first, _, rest = name.replace("/", ".").partition(".")
    if first == "solo":
        return f"{name}={value!r}: no such field; the prefix is for the command line, write {rest}={value} here"
    owners = [card for card in catalogue().cards.values() if first in {each.name for each in fields(card.settings)}]
    if owners:
        places = (f"strategy.{name}" if c.group == "strategy" else f"callback.{c.name}.{name}" for c in owners)
        return f"{name}={value!r}: no such field, but a technique's argument; write {' or '.join(places)}={value}"
    argument = rest if first == "trainer" else name
    return (
        f"{name}={value!r}: no such field{nearest(name, FIELDS)}a preset sets {', '.join(FIELDS)}, "
        f"every other argument goes to the Trainer itself: "
        f"L.Trainer(**trainer_kwargs(...), {argument}={value!r})"
    )


def _precision(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or str(value) not in PRECISIONS:
        allowed = ", ".join(dict.fromkeys(PRECISIONS.values()))
        raise PresetError(f"precision={value!r}: not a precision{nearest(str(value), PRECISIONS)}there are {allowed}")
    return PRECISIONS[str(value)]


def _factor(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise PresetError(f"accumulate_grad_batches={value!r}: must be an integer of at least 1, such as 4")
    return value


AUTO = {
    "device": (str, type(None)),
    "budget": (str, int, type(None)),
    "accept_tight": (bool,),
    "presets": (list, type(None)),
}
"""What the preset `auto` may be told, and of which types."""


def _auto(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PresetError(f"auto={given!r}: must map {', '.join(AUTO)} to their values, such as auto.budget=16GiB")
    for name, value in given.items():
        if name not in AUTO:
            raise PresetError(
                f"auto.{name}={value!r}: no such field{nearest(str(name), AUTO)}there are {', '.join(AUTO)}"
            )
        if not isinstance(value, AUTO[name]) or (isinstance(value, bool) and name != "accept_tight"):
            write = {"device": "rtx-4090", "budget": "16GiB", "accept_tight": "true", "presets": "[bf16,checkpointing]"}
            raise PresetError(f"auto.{name}={value!r}: write auto.{name}={write[name]}")
    budget = parse_budget(given.get("budget"), "auto.budget")
    if given.get("device") is not None:
        budget_on(device(given["device"], "auto.device"), budget, f"auto.budget={given.get('budget')}")
    return {str(name): value for name, value in given.items()}


def _callbacks(given: object, allow: Sequence[str]) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise PresetError(f"callback={given!r}: must map a name to its arguments, such as callback.memory_logger")
    checked = {}
    for key, arguments in given.items():
        if arguments is None:  # `callback.memory_logger=null` switches it off
            continue
        option = f"callback.{key}"
        if isinstance(arguments, Mapping) and "_target_" not in arguments and "name" not in arguments:
            card_of("callback", key, option)
            checked[str(key)] = _object({"name": key, **arguments}, option, allow)
        else:
            checked[str(key)] = _object(arguments, option, allow)
    return checked


def check_object(kind: str, node: object, allow: Sequence[str] = (), given: Sequence[str] = ()) -> None:
    """Check a ``model``, ``data`` or ``optimizer`` node as a callback is checked; None and ``{}`` stand for none.

    Raises:
        PresetError: as `from_mapping`.
    """
    if node:
        _object({**node, **dict.fromkeys(given)} if isinstance(node, Mapping) else node, kind, allow)


def _object(node: object, option: str, allow: Sequence[str]) -> dict[str, Any] | None:
    if node is None:
        return None
    kind = option.split(".")[0]
    if not isinstance(node, Mapping):
        raise PresetError(f"{option}={node!r}: must be a mapping of arguments, such as {option}.<argument>=...")
    refuse_foreign_targets(node, option, allow)
    if "_target_" not in node:
        if "name" not in node:
            raise PresetError(f"{option}: no `name`; write {kind}=<name> to choose one")
        arguments = {key: value for key, value in node.items() if key != "name"}
        if kind in NAMES:
            check_arguments(arguments, parameters(target_of(kind, node["name"], f"{option}.name")), option)
        else:
            card = card_of(kind, node["name"], f"{option}.name")
            if kind == "strategy":
                _refuse_two_strategies(card, arguments)
            card.check(arguments, option)
    return {str(key): value for key, value in node.items()}


def _refuse_two_strategies(card: Card, arguments: Mapping[str, Any]) -> None:
    """Refuse the arguments of two strategies in one: what two presets come to in a Hydra application's ``cfg.solo``."""
    settings = {field.name for field in fields(card.settings)}
    for other in catalogue().group("strategy").values():
        names = {field.name for field in fields(other.settings)}
        if not names <= settings and names <= set(arguments):
            raise ConflictError(
                f"strategy: the arguments of {other.name} and of {card.name}: two presets each bring their strategy,"
                " and a run has one; drop one of them from `solo`"
            )
