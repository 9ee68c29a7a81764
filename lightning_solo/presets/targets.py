"""Create the objects of nodes with a ``_target_``."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_solo.cards.arguments import check_arguments, describe
from lightning_solo.errors import PresetError, nearest
from lightning_solo.presets.parse import is_allowed
from lightning_solo.presets.signature import parameters_of_class

_SPECIAL = ("_target_", "_args_", "_partial_", "_convert_", "_recursive_")  # keys with a meaning for Hydra
_NUMBERS: dict[type | str, type] = {int: int, float: float, bool: bool, "int": int, "float": float, "bool": bool}


def instantiate(node: Any, option: str, allow: Sequence[str]) -> Any:
    """Return the object of a plain, checked node with Hydra's `_target_`, `_args_` and `_partial_`.

    `hydra.utils.instantiate` would resolve interpolations again, which could make a new target after our check.
    """
    if isinstance(node, (list, tuple)):
        return [instantiate(value, f"{option}[{index}]", allow) for index, value in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    arguments = {
        key: instantiate(value, f"{option}.{key}", allow) for key, value in node.items() if key not in _SPECIAL
    }
    if "_target_" not in node:
        return arguments
    if "_recursive_" in node:
        raise PresetError(f"{option}._recursive_={node['_recursive_']!r}: not supported here; drop it")
    target = _allowed(str(node["_target_"]), option, allow)
    positional = instantiate(list(node.get("_args_", ())), f"{option}._args_", allow)
    accepted = parameters_of_class(target)
    if accepted is not None and not positional and not node.get("_partial_"):
        check_arguments(arguments, accepted, option)
    _refuse_words_for_numbers(target, arguments, option)
    if node.get("_partial_"):
        return functools.partial(target, *positional, **arguments)
    return target(*positional, **arguments)


def _refuse_words_for_numbers(target: Any, arguments: Mapping[str, Any], option: str) -> None:
    for name, parameter in inspect.signature(target).parameters.items():
        kind = _NUMBERS.get(parameter.annotation) if isinstance(parameter.annotation, type | str) else None
        value = arguments.get(name)
        if kind is not None and isinstance(value, str) and not isinstance(parameter.default, str):
            raise PresetError(f"{option}.{name}={value!r}: expected {describe(kind)}")


def _allowed(target: str, option: str, allow: Sequence[str]) -> Any:
    """Return the object at a path; refuse one that is defined elsewhere, such as ``my_project.os.system``."""
    thing = _locate(target, option)
    home = f"{getattr(thing, '__module__', None)}.{getattr(thing, '__qualname__', '')}"
    if not callable(thing) or not is_allowed(home, allow):
        raise PresetError(
            f"{option}._target_={target!r} is {home}, outside the allowed {', '.join(allow)}; "
            f"name it where it is defined, and allow that if you trust it"
        )
    return thing


def _locate(target: str, option: str) -> Any:
    parts = target.split(".")
    for depth in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:depth])
        try:
            thing: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is not None and not (module == error.name or module.startswith(error.name + ".")):
                raise  # the user's module exists, but a module that it imports doesn't
            continue
        for name in parts[depth:]:
            if not hasattr(thing, name):
                raise PresetError(
                    f"{option}._target_={target!r}: {module} has no {name!r}{_instead(name, thing, parts[0])}"
                )
            thing = getattr(thing, name)
        return thing
    raise PresetError(
        f"{option}._target_={target!r}: there is no module {parts[0]!r}; install it, or run in the folder that has it"
    )


def _instead(name: str, thing: Any, package: str) -> str:
    """Return the nearest name, and the names of the package's own classes and functions in a module or class."""
    names = [
        own
        for own, value in getattr(thing, "__dict__", {}).items()
        if callable(value) and not own.startswith("_") and f"{value.__module__}.".startswith(f"{package}.")
    ]
    return f"{nearest(name, names)}there are {', '.join(sorted(names)[:20])}" if names else ""
