"""The names that a configuration may turn into objects; everything else is refused.

A node of a configuration becomes an object by ``name``, of a technique's card or of the classes below; or by
``_target_: some.path``, where the user allowed that path's prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
