"""The names that a configuration may turn into objects; everything else is refused.

A node of a configuration becomes an object by ``name``, of a technique's card or of the classes below; or by
``_target_: some.path``, where the user allowed that path's prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_solo.errors import PresetError, unknown_name

NAMES: dict[str, dict[str, str]] = {
    "model": {"byte_gpt": "lightning_solo.reference.byte_gpt:ByteGPT"},
    "data": {"stdlib_text": "lightning_solo.reference.stdlib_text:StdlibText"},
    "optimizer": {"adamw": "torch.optim.adamw:AdamW", "sgd": "torch.optim.sgd:SGD"},
}
"""Kind -> name -> class, for models, data and optimizers."""


def target_of(kind: str, name: object, option: str) -> str:
    """Return the ``"module:Class"`` of a name.

    Raises:
        PresetError: there is none of that name; ``option`` is the path that the message names.
    """
    names = NAMES[kind]
    if not isinstance(name, str) or name not in names:
        raise PresetError(unknown_name(option, name, kind, names))
    return names[name]


def is_allowed(path: str, allow: Sequence[str]) -> bool:
    """Return whether ``path`` is one of the prefixes in ``allow`` or below one.

    >>> is_allowed("my_project.models.Net", ["my_project"]), is_allowed("my_projects.Net", ["my_project"])
    (True, False)
    """
    return any(path == prefix or path.startswith(prefix + ".") for prefix in allow)


def leaves(node: Any, path: str = "", *, of_lists: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield each value at any depth of a plain configuration, with its path; without ``of_lists`` lists are values.

    >>> list(leaves({"a": {"b": [1, 2]}})), list(leaves({"a": {"b": [1, 2]}}, of_lists=False))
    ([('a.b[0]', 1), ('a.b[1]', 2)], [('a.b', [1, 2])])
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key), of_lists=of_lists)
    elif isinstance(node, list) and of_lists:
        for index, value in enumerate(node):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, node


def targets(node: Any, option: str) -> Iterator[tuple[str, object]]:
    """Yield ``(option path, target)`` of every ``_target_`` in a plain configuration, at any depth, lists included."""
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
    """Refuse every ``_target_`` outside the prefixes in ``allow``, before anything is imported.

    Raises:
        PresetError: a target is not a string, or outside ``allow``.
    """
    for path, target in targets(node, option):
        if not isinstance(target, str) or not is_allowed(target, allow):
            allowed = ", ".join(allow) if allow else "nothing"
            root = str(target).split(".")[0]
            raise PresetError(
                f"{path}._target_={target!r}: only registered names and allowed prefixes become objects; "
                f"allowed is {allowed}. If you trust it, write allow=[{root!r}] (command line: allow=[{root}])"
            )
