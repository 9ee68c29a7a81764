"""Names and layers of a module with adapters, as they are without them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def plain_modules(
    module: nn.Module, prefix: str = "", *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, module) as `named_modules` of the module without its adapters."""
    seen: set[int] = set()

    def visit(part: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        part = plain(part)
        if id(part) in seen and remove_duplicate:
            return
        seen.add(id(part))
        yield name, part
        for child_name, child in part._modules.items():
            if child is not None:
                yield from visit(child, f"{name}.{child_name}" if name else child_name)

    yield from visit(module, prefix)


def plain(module: nn.Module) -> nn.Module:
    """Return the layer inside an adapter of peft; any other module itself."""
    while True:
        rows = module._modules.get("token_adapter")
        inside = (module if rows is None else rows)._modules.get("base_layer")
        if inside is None:
            return module
        module = inside
