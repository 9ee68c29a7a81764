"""Write a configuration as the fields of a preset, and as a preset's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from lightning_solo.cards.configuration import Chosen, Configuration


def fields_of(configuration: Configuration) -> dict[str, Any]:
    """Return the fields from which `compose` makes a configuration, with the settings that aren't defaults."""
    fields: dict[str, Any] = {
        name: value
        for name in ("precision", "accumulate_grad_batches", "devices")
        if (value := getattr(configuration, name)) is not None
    }
    for part in configuration.parts:
        kind, _, key = part.option.partition(".")
        if isinstance(part, Chosen):
            defaults = part.card.defaults
            node = {name: value for name, value in vars(part.settings).items() if value != defaults.get(name)}
            if kind == "strategy" or key != part.card.name:
                node = {"name": part.card.name, **node}
        else:
            node = dict(part.node)
        if kind == "strategy":
            fields["strategy"] = node
        else:
            fields.setdefault("callback", {})[key] = node
    return fields


def preset_file(fields: Mapping[str, Any], description: str) -> str:
    """Return the text of a preset's file, whose first line says its purpose.

    >>> print(preset_file({"precision": "bf16-mixed", "callback": {"gradient_release": {}}}, "Mine."), end="")
    # Mine.
    defaults:
    - /solo/schema@_here_: [solo]
    - callback: [gradient_release]
    - _self_
    precision: bf16-mixed
    """
    callbacks = fields.get("callback", {})
    named = [key for key, node in callbacks.items() if "_target_" not in node and "name" not in node]
    defaults: list[Any] = [{"/solo/schema@_here_": ["solo"]}, *([{"callback": named}] if named else []), "_self_"]
    own = {key: value for key, value in fields.items() if key != "callback"}
    if nodes := {key: node for key, node in callbacks.items() if node or key not in named}:
        own["callback"] = nodes
    text = yaml.safe_dump(
        {"defaults": defaults, **own}, sort_keys=False, width=120, allow_unicode=True, default_flow_style=None
    )
    return f"# {description}\n{text}"
