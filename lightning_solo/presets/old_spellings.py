"""Names of earlier versions: new commands that use them are refused with a remedy, old runs are still read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_solo.errors import PresetError
from lightning_solo.presets.spelling import written

PRESETS = dict.fromkeys(
    ("super_offload", "zenflow"), "write compact_host, which keeps states on the host too, or zero_offload"
)  # name -> remedy


def refuse_old_preset(name: str) -> None:
    """Refuse a preset of an earlier version."""
    if name in PRESETS:
        raise PresetError(f"preset {name!r} was removed; {PRESETS[name]}")


_STATES = ("master_bits", "moment_bits", "state_budget", "checkpoint_weights", "back_end")
_GRADIENTS = ("release_gradients", "gradient_buffer")
_CLASS = "CompactStrategy"
_CALLBACKS = "compact is no strategy any more, but two callbacks"


def refusal(name: object) -> str | None:
    """Return the message for the old strategy's name or class; None for any other name."""
    if name == "compact":
        return (
            f"strategy='compact': {_CALLBACKS}; write the preset compact, or"
            " +callback=[compact_states,gradient_release]"
        )
    if name == _CLASS:
        return (
            f"{_CLASS}: {_CALLBACKS}; write callbacks=[CompactStates(...), GradientRelease(...)], or the preset compact"
        )
    return None


def refusal_of_argument(value: object) -> str | None:
    """Return the message for the old strategy as the Trainer's argument; None for any other value."""
    if value != "compact":
        return None
    return f"trainer.strategy='compact': {_CALLBACKS}; drop trainer.strategy, and choose the preset compact"


def refusal_of_strategy(node: object) -> str | None:
    """Return the message for the old strategy in a preset's fields; None for any other strategy."""
    if node == "compact":
        node = {"name": "compact"}
    if not isinstance(node, Mapping):
        return None
    if set(node) == {"compact"}:
        node = {"name": "compact", **(node["compact"] or {})}
    if str(node.get("_target_", "")).endswith(f".{_CLASS}"):
        return refusal(_CLASS)
    is_named = node.get("name") == "compact"
    if not is_named and {"name", "_target_"} & set(node):
        return None
    settings = [name for name in (*_STATES, *_GRADIENTS) if name in node]
    if not is_named and not settings:
        return None
    remedies = {name: f"callback.compact_states.{name}={written(node[name])}" for name in _STATES if name in node}
    if "gradient_buffer" in node:
        remedies["gradient_buffer"] = f"callback.gradient_release.buffer={written(node['gradient_buffer'])}"
    if "release_gradients" in node:
        remedies["release_gradients"] = "~callback.gradient_release, to keep gradients"
    old = [f"strategy.{name}={written(node[name])}" for name in settings]
    new = [remedies[name] for name in settings]
    if is_named:
        old, new = ["strategy.name='compact'", *old], ["the preset compact", *new]
    return f"{' and '.join(old)}: {_CALLBACKS}; write {' and '.join(new)}"


def callbacks_of(strategy: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the callbacks, with their settings, that replace the strategy of 0.2.0."""
    callbacks = {"compact_states": {name: strategy[name] for name in _STATES if name in strategy}}
    if strategy.get("release_gradients", True):
        callbacks["gradient_release"] = {"buffer": strategy.get("gradient_buffer", "device")}
    return callbacks


def updated(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's fields, saved by 0.2.0 in a run's folder, in today's form."""
    strategy = fields.get("strategy") or {}
    if strategy.get("name") != "compact":
        return dict(fields)
    return {**fields, "strategy": {}, "callback": {**(fields.get("callback") or {}), **callbacks_of(strategy)}}
