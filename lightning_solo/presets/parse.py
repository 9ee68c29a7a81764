"""Parse plain fields to a checked `Configuration`, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning_solo.cards.arguments import accepts, check_arguments
from lightning_solo.cards.card import Card
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.cards.configuration import AutoSettings, Chosen, Configuration, Target
from lightning_solo.errors import PresetError, nearest, unknown_name
from lightning_solo.presets import old_spellings
from lightning_solo.presets.config_source import FIELDS
from lightning_solo.presets.devices import budget_bytes, budget_on, device
from lightning_solo.presets.registry import NAMES, target_of
from lightning_solo.presets.signature import parameters
from lightning_solo.presets.spelling import written

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
"""Name of a precision that Lightning accepts -> its long form."""

UNKNOWN: Any = object()
TRAINER = "lightning.pytorch.trainer.trainer:Trainer"


def parse_configuration(given: Mapping[str, Any], allow: Sequence[str] = (), preset: str = "") -> Configuration:
    """Return the configuration of plain fields. All checks of a preset happen here.

    Args:
        given: the fields of a preset in plain containers, without interpolations.
        allow: prefixes of ``_target_`` that the user trusts.
        preset: its name, as in `Configuration`.

    Raises:
        PresetError: an unknown field, argument or name, a wrong type, an impossible value, a forbidden target.
        ConflictError: two choices that cannot be combined.
    """
    if isinstance(allow, str) or not all(isinstance(prefix, str) and prefix for prefix in allow):
        raise PresetError(f"allow={allow!r}: must be a list of prefixes, such as allow=['my_project']")
    for name, value in given.items():
        if name not in FIELDS:
            raise PresetError(unknown_field(str(name), value))
    parts = [_part(node, option, allow) for option, node in _nodes(given)]
    configuration = Configuration(
        precision=_precision(given.get("precision")),
        accumulate_grad_batches=_count(given, "accumulate_grad_batches"),
        devices=_count(given, "devices"),
        techniques=tuple(part for part in parts if isinstance(part, Chosen)),
        foreign=tuple(part for part in parts if isinstance(part, Target)),
        auto=_auto(given.get("auto") or None),
        preset=preset,
    )
    configuration.check()
    return configuration


def _nodes(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the option path and the node of the strategy and of each callback."""
    if given.get("strategy"):
        yield "strategy", given["strategy"]
    callbacks = given.get("callback") or {}
    if not isinstance(callbacks, Mapping):
        known = callbacks in catalogue().group("callback")
        remedy = f"write +callback={callbacks}" if known else "such as callback.memory_logger"
        raise PresetError(f"callback={callbacks!r}: must map a name to its arguments; {remedy}")
    for key, node in callbacks.items():
        if node is not None:  # `callback.memory_logger=null` switches it off
            yield f"callback.{key}", node


def _part(node: object, option: str, allow: Sequence[str]) -> Chosen | Target:
    """Return the technique or target of a node; a callback's key is its name, unless its node has another one."""
    kind, _, key = option.partition(".")
    if kind == "strategy" and (message := old_spellings.refusal_of_strategy(node)):
        raise PresetError(message)
    node = check_node(node, option, allow)
    if "_target_" in node:
        return Target(option, node, tuple(allow))
    name = node.get("name", key)
    card = card_of(kind, name, option if name == key else f"{option}.name")
    values = {str(key): value for key, value in node.items() if key != "name"}
    return Chosen(card, card.settings.parse(values, option), option)


def card_of(group: str, name: object, option: str) -> Card:
    """Return the card of a name in a group.

    Raises:
        PresetError: an unknown name; the message starts with ``option``, the path of the name.
    """
    card = catalogue().cards.get(name) if isinstance(name, str) else None
    if card is None or card.group != group:
        raise PresetError(unknown_name(option, name, group, catalogue().group(group)))
    return card


def check_node(node: object, option: str, allow: Sequence[str]) -> Mapping[str, Any]:
    """Return a node, which is named by its ``name``, an allowed ``_target_``, or the key in ``callback.<key>``.

    Raises:
        PresetError: the node is no mapping, has no name, or has a target that isn't allowed.
    """
    if not isinstance(node, Mapping):
        is_name = node in catalogue().group(option)
        choice = f"+{option}={node}" if option == "strategy" else f"{option}.name={node}"
        example = f"{choice}; in Python and YAML {{'name': {node!r}}}" if is_name else ""
        raise PresetError(f"{option}={node!r}: must be a mapping, such as {example or f'{option}.<argument>=...'}")
    refuse_foreign_targets(node, option, allow)
    if not ("_target_" in node or "name" in node or "." in option):
        names = NAMES.get(option) or catalogue().group(option)
        raise PresetError(f"{option}: no `name`; write {' or '.join(f'{option}.name={name}' for name in names)}")
    return node


def is_allowed(path: str, allow: Sequence[str]) -> bool:
    """Return whether a prefix in ``allow`` is ``path`` or one of its parents.

    >>> is_allowed("my_project.models.Net", ["my_project"]), is_allowed("my_projects.Net", ["my_project"])
    (True, False)
    """
    return any(path == prefix or path.startswith(prefix + ".") for prefix in allow)


def targets(node: Any, option: str) -> Iterator[tuple[str, object]]:
    """Yield ``(option path, target)`` of every ``_target_`` in a plain configuration, including those in lists."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                yield option, value
            else:
                yield from targets(value, f"{option}.{key}")
    elif isinstance(node, (list, tuple)):
        for index, value in enumerate(node):
            yield from targets(value, f"{option}[{index}]")


def refuse_foreign_targets(node: Any, option: str, allow: Sequence[str]) -> None:
    """Refuse every ``_target_`` outside the prefixes in ``allow``; import nothing."""
    for path, target in targets(node, option):
        if not isinstance(target, str) or not is_allowed(target, allow):
            allowed = ", ".join(allow) if allow else "nothing"
            root = str(target).split(".")[0]
            raise PresetError(
                f"{path}._target_={target!r}: only registered names and allowed prefixes become objects; "
                f"allowed is {allowed}. If you trust it, write allow=[{root!r}] (command line: allow=[{root}])"
            )


def check_object(kind: str, node: object, allow: Sequence[str] = (), given: Sequence[str] = ()) -> None:
    """Check a ``model``, ``data`` or ``optimizer`` node.

    Args:
        kind: ``"model"``, ``"data"`` or ``"optimizer"``.
        node: ``name`` or ``_target_``, and arguments; None and ``{}`` stand for no object.
        allow: prefixes of ``_target_`` that the user trusts.
        given: names of arguments that the caller adds.
    """
    if not node:
        return
    checked = check_node({**node, **dict.fromkeys(given)} if isinstance(node, Mapping) else node, kind, allow)
    if "_target_" not in checked:
        arguments = {key: value for key, value in checked.items() if key != "name"}
        check_arguments(arguments, parameters(target_of(kind, checked["name"], f"{kind}.name")), kind)


def unknown_field(name: str, value: object = UNKNOWN, marks: str = "") -> str:
    """Return the message for an unknown field of a preset, with the likely meaning and what to write.

    ``marks`` are those of an override: ``+``, ``++`` or ``~``.
    """
    if marks == "~":
        given, tail = f"~{name}", ""
    else:
        given, tail = (name, "=...") if value is UNKNOWN else (f"{name}={value!r}", f"={written(value)}")
    if name == "num_nodes":
        return (
            f"{given}: no such field; with the preset ddp, fsdp or zero3 it goes to the Trainer:"
            f" L.Trainer(**trainer_kwargs('ddp'), num_nodes=...); any other trains on one device"
        )
    first, _, rest = name.replace("/", ".").partition(".")
    if first == "solo" and not rest:
        return f"{given}: no such field; write the preset's name, or the fields below `solo`, as the preset itself"
    if first == "solo":
        marks = "+" if rest == "callback" else marks  # a choice adds a callback
        return f"{given}: no such field; the prefix is for the command line; write {marks}{rest}{tail}"
    owners = [card for card in catalogue().cards.values() if first in {each.name for each in fields(card.settings)}]
    if owners:
        places = (f"strategy.{name}" if c.group == "strategy" else f"callback.{c.name}.{name}" for c in owners)
        remedies = " or ".join(f"{marks}{place}{tail}" for place in places)
        return f"{given}: no such field, but a technique's argument; write {remedies}"
    argument = rest if first == "trainer" else name
    message = f"{given}: no such field{nearest(name, FIELDS)}a preset sets {', '.join(FIELDS)}"
    if argument not in parameters(TRAINER):
        return message
    keyword = f"{argument}={'...' if value is UNKNOWN else repr(value)}"
    return f"{message}; a Trainer's own argument goes to it: L.Trainer(**trainer_kwargs(...), {keyword})"


def contradiction(name: str, given: Any, ours: Any, accepted: bool, application: bool = False) -> str:
    """Return the message for an argument that the Trainer got and the preset sets to another value.

    ``accepted``: whether the preset accepts the Trainer's value, so that an override is proposed; see `overriding`.
    ``application``: whether the preset is that of a Hydra application, with a command line.
    """
    remedy = f", or write overrides=['{overriding(name, given)}']" if name in FIELDS and accepted else ""
    if remedy and application and name != "strategy":
        remedy = f", or write solo.{overriding(name, given)} on the command line"
    return (
        f"trainer.{name}={_described(given)}, and the preset sets {name}={_described(ours)}: drop {name} from the"
        f" Trainer's arguments{remedy}"
    )


def overriding(name: str, value: Any) -> str:
    """Return the override by which a preset leaves a Trainer's argument to another value."""
    return "~strategy" if name == "strategy" else f"{name}={value}"


def _described(value: Any) -> str:
    return repr(value) if isinstance(value, str | int) else type(value).__name__


def _precision(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or str(value) not in PRECISIONS:
        allowed = ", ".join(dict.fromkeys(PRECISIONS.values()))
        raise PresetError(f"precision={value!r}: not a precision{nearest(str(value), PRECISIONS)}there are {allowed}")
    return PRECISIONS[str(value)]


def _count(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise PresetError(f"{name}={value!r}: must be an integer of at least 1, such as 4")
    return value


AUTO_EXAMPLES = {
    "device": "rtx-4090",
    "budget": "16GiB",
    "accept_tight": "true",
    "presets": "[bf16,checkpointing]",
    "save_preset": "my_run",
    "whole_batch": "true",
}
"""Field of the preset `auto` -> an example of its value."""


def _auto(given: object) -> AutoSettings | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise PresetError(
            f"auto={given!r}: must map {', '.join(AUTO_EXAMPLES)} to their values, such as auto.budget=16GiB"
        )
    kinds = {
        "device": str | None,
        "budget": str | int | None,
        "accept_tight": bool,
        "presets": Sequence[str] | None,
        "save_preset": str | None,
        "whole_batch": bool,
    }
    for name, value in given.items():
        if name not in kinds:
            raise PresetError(
                f"auto.{name}={value!r}: no such field{nearest(str(name), kinds)}there are {', '.join(kinds)}"
            )
        if not accepts(kinds[name], value):
            raise PresetError(f"auto.{name}={value!r}: write auto.{name}={AUTO_EXAMPLES[name]}")
    values = {str(name): value for name, value in given.items()}
    budget = budget_bytes(values.get("budget"), "auto.budget")
    if values.get("device") is not None:
        budget_on(device(values["device"], "auto.device"), budget, f"auto.budget={values.get('budget')}")
    if (name := values.get("save_preset")) is not None:
        check_name(name, "auto.save_preset=")
    if values.get("presets") is not None:
        values["presets"] = tuple(values["presets"])
    return AutoSettings(**values)


def check_name(name: str, option: str) -> None:
    """Check the name of a preset to write, which ``option`` gives."""
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise PresetError(f"{option}{name!r}: write a preset's name, of letters, digits and _: {option}my_run")
