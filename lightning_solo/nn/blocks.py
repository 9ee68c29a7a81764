"""Find the repeated blocks of a module by their structure, never by their names.

Blocks are the units of techniques such as activation checkpointing: a transformer's layers, a ResNet's bottlenecks.
``repeated_blocks`` finds them in any module; ``blocks_of_class`` finds them by class names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations

from torch import nn

from lightning_solo.errors import NothingToDoError, nearest
from lightning_solo.nn.adapted import plain, plain_modules
from lightning_solo.nn.factorized_layers import Factorized, LinearFactors
from lightning_solo.nn.quantized import QuantizedWeight, weights_in

Build = frozenset[tuple[str, int]]  # a module's structure: (name, dimensions) of each parameter

# Classes that say nothing of a module's structure.
_GENERIC = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


def named_blocks(
    module: nn.Module, blocks: str | Sequence[str] = "auto", option: str = "blocks"
) -> dict[str, nn.Module]:
    """Return qualified name -> block for the setting ``blocks``: ``"auto"``, or class names; ``option`` is its path.

    Raises:
        NothingToDoError: there is no such block; the message lists the candidates.
    """
    if blocks == "auto":
        return repeated_blocks(module, option)
    return blocks_of_class(module, [blocks] if isinstance(blocks, str) else blocks, option)


def repeated_blocks(module: nn.Module, option: str = "blocks") -> dict[str, nn.Module]:
    """Return qualified name -> repeated block, outermost only, in module order.

    Direct children of one module with equal structure are repeated. They need not be adjacent, so alternating kinds are
    all found, and a module that is listed twice counts as two. If repeated blocks inside such children make up nearly
    all of them, they are the blocks instead (stages of a hierarchical network, student and teacher; see ``_made_of``).
    Modules elsewhere with the structure of a block are blocks, too. If nothing repeats, members of module lists are the
    blocks: one layer that is called many times (ALBERT), or a stack of one.

    Raises:
        NothingToDoError: nothing repeats; the message lists the candidates.
    """
    blocks = _search(module) or _listed(module)
    if not blocks:
        raise NothingToDoError(
            f"no repeated blocks in {type(module).__name__}; there are {_listing(module)}; write the class names of the"
            f" modules that are one block each: {option}=[ClassName]"
        )
    return _outermost(module, _likeness(blocks))


def blocks_of_class(module: nn.Module, names: Sequence[str], option: str = "blocks") -> dict[str, nn.Module]:
    """Return qualified name -> outermost module below ``module`` whose class has one of ``names``, in module order.

    Raises:
        NothingToDoError: a name matches nothing; the message lists the classes in the module.
    """
    classes = {type(child).__name__: None for _, child in plain_modules(module) if child is not module}
    for name in names:
        if name not in classes:
            raise NothingToDoError(
                f"{option}=[{', '.join(names)}]: no module of class {name!r} in {type(module).__name__}"
                f"{nearest(name, classes)}there are {', '.join(classes) or 'no modules'}"
            )
    return _outermost(module, lambda m: type(m).__name__ in names)


def after_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return qualified name without adapters -> part that comes after the last repeated block, in module order.

    Raises:
        NothingToDoError: nothing repeats.
    """
    inside = {id(plain(part)) for block in repeated_blocks(module).values() for part in block.modules()}
    parts = list(plain_modules(module))
    last = max(number for number, (_, part) in enumerate(parts) if id(part) in inside)
    return dict(parts[last + 1 :])


def expert_lists(module: nn.Module) -> dict[str, nn.ModuleList]:
    """Return qualified name -> list of modules among which a router may choose.

    A router is any matrix beside the list that has a row for each module.

    Most are the experts of a mixture with their router. The blocks of a classifier with as many classes are another.
    """
    found: dict[str, nn.ModuleList] = {}
    for name, part in plain_modules(module):
        children = [(own, plain(child)) for own, child in _children(part)]
        for own, each in children:
            if isinstance(each, nn.ModuleList) and len(each) > 1:
                others = [part, *(child for _, child in children if child is not each)]
                shapes = {tuple(weight.shape) for other in others for weight in _own_weights(other).values()}
                if any(len(shape) == 2 and shape[0] == len(each) for shape in shapes):
                    found[f"{name}.{own}".lstrip(".")] = each
    return found


def feed_forward_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return qualified name -> feed-forward part, outermost only.

    A part has one or two linear layers to a larger width (a gated part has two, or one of twice the width) and one
    back. Its other parameters are vectors, of normalisations and scales.

    Raises:
        NothingToDoError: there is none; the message lists the modules that have linear layers.
    """
    parts = _outermost(module, _is_feed_forward)
    if not parts:
        kinds = dict.fromkeys(
            type(m).__name__ for m in module.modules() if any(isinstance(c, nn.Linear) for c in m.children())
        )
        raise NothingToDoError(
            f"no feed-forward parts in {type(module).__name__}, of linear layers to a larger width and back; these have"
            f" linear layers: {', '.join(kinds) or 'none'}; write the class names of parts that act on each token"
            " alone: callback.tiled_mlp.parts=[ClassName]"
        )
    return parts


def _is_feed_forward(module: nn.Module) -> bool:
    if not _is_callable(module):
        return False
    linear: list[tuple[int, int]] = []
    factors = {part for each in module.modules() if isinstance(each, LinearFactors) for part in each.children()}
    for _, part in plain_modules(module):
        if part in factors:
            continue
        weights = _own_weights(part)
        if isinstance(part, LinearFactors) or any(len(weight.shape) > 1 for weight in weights.values()):
            if isinstance(part, nn.Linear | LinearFactors):
                linear.append((part.in_features, part.out_features))
            elif type(part).__name__.endswith("Conv1D") and set(weights) <= {
                "weight",
                "bias",
            }:  # of transformers: transposed
                before, after = weights["weight"].shape
                linear.append((before, after))
            else:
                return False
    wider = [pair for pair in linear if pair[1] > pair[0]]
    narrower = [pair for pair in linear if pair[1] < pair[0]]
    if len(narrower) != 1 or len(wider) not in (1, 2) or len(linear) != len(wider) + 1:
        return False
    (inner, width), fused = narrower[0], 2 if len(wider) == 1 else 1
    return all(before == width and after in (inner, fused * inner) for before, after in wider)


def counted(blocks: Iterable[nn.Module]) -> str:
    """Describe the number of blocks of each class.

    >>> counted([nn.ReLU(), nn.GELU(), nn.ReLU()])
    '2 ReLU, 1 GELU'
    """
    kinds = Counter(type(block).__name__ for block in blocks)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _search(module: nn.Module, known: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return the blocks below ``module``; a single module counts if it has the structure of one in ``known``."""
    children, is_known = _composites(module), _likeness(known)
    found = [child for child in children if is_known(child)]
    groups = _groups([child for child in children if not is_known(child)])
    for group in groups:
        members = list({id(member): member for member in group}.values())
        inner = [block for member in members for block in _search(member, known)]
        inner = [plain(block) for member in members for block in _outermost(member, _likeness(inner)).values()]
        can_be_blocks = all(_is_callable(member) for member in members)
        found += inner if inner and (not can_be_blocks or _made_of(members, inner)) else members * can_be_blocks
    done = {id(child) for child in (*found, *(member for group in groups for member in group))}
    for child in {id(child): child for child in children if id(child) not in done}.values():
        found += _search(child, [*known, *found])
    return found


def _listed(module: nn.Module) -> list[nn.Module]:
    """Return the innermost callable members of module lists that have parts."""
    lists = [part for _, part in plain_modules(module) if isinstance(part, nn.ModuleList)]
    members = [child for part in lists for child in _composites(part) if _is_callable(child)]
    return [member for member in members if not _listed(member)]


def _likeness(blocks: Sequence[nn.Module]) -> Callable[[nn.Module], bool]:
    """Return a function that tests whether a module has the class or the structure of one of ``blocks``."""
    classes = {type(block) for block in blocks if type(block) not in _GENERIC}
    builds = {_build(block) for block in blocks}
    return lambda m: (
        bool(builds) and _is_callable(m) and _is_composite(m) and (type(m) in classes or _build(m) in builds)
    )


def _composites(module: nn.Module) -> list[nn.Module]:
    """Return the direct children that could be or contain blocks; a child that is listed twice is returned twice."""
    return [child for _, outer in _children(module) if _is_composite(child := plain(outer))]


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, child) of a module, which may be inside an adapter, as its children may be."""
    return [(name, child) for name, child in plain(module)._modules.items() if child is not None]


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module's children have parameters, or it has two or more itself, one of them a matrix.

    False for a childless layer of ``torch.nn`` (linear, convolution, LSTM), for the two layers in place of a factorized
    one, and for a normalisation written by hand.
    """
    if isinstance(module, Factorized):
        return False
    if module._modules and any(_own_weights(part) for child in module.children() for part in child.modules()):
        return True
    if any(cls.__module__.startswith("torch.nn.") for cls in type(module).__mro__ if cls is not nn.Module):
        return False
    own = _own_weights(module).values()
    return len(own) >= 2 and any(len(weight.shape) >= 2 for weight in own)


def _is_callable(module: nn.Module) -> bool:
    """Return whether the module implements forward, which a list of modules does not."""
    return type(module).forward is not nn.Module.forward


def _build(module: nn.Module) -> Build:
    return frozenset(
        (f"{name}.{key}", len(weight.shape))
        for name, part in plain_modules(module, remove_duplicate=False)
        for key, weight in _own_weights(part).items()
    )


def _own_weights(part: nn.Module) -> dict[str, nn.Parameter | QuantizedWeight]:
    """Return the parameters of a module itself, and those that are quantized."""
    return {**dict(part.named_parameters(recurse=False)), **weights_in(part)}


def _groups(children: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return the groups of two or more equally built modules, in order; A and C share a group if both equal B."""
    builds = [_build(child) for child in children]
    label = list(range(len(children)))
    for a, b in combinations(range(len(children)), 2):
        if label[a] != label[b] and _equally_built(children[a], children[b], builds[a], builds[b]):
            label = [label[a] if entry == label[b] else entry for entry in label]
    groups = ([child for child, entry in zip(children, label, strict=True) if entry == own] for own in sorted({*label}))
    return [group for group in groups if len(group) >= 2]


def _equally_built(a: nn.Module, b: nn.Module, build_a: Build, build_b: Build) -> bool:
    """Return whether two modules have the same class, or the same parameters except for a few extra ones.

    Extra parameters are, for example, a ResNet's shortcut or T5's position bias, which only the first block of a stage
    or stack has. They must be fewer than the common ones. Numbered containers must agree in all parameters, since
    their names carry no meaning.
    """
    if build_a == build_b or (type(a) is type(b) and type(a) not in _GENERIC):
        return True
    small, large = sorted((build_a, build_b), key=len)
    numbered = any(name.isdigit() for module in (a, b) for name in module._modules)
    return not numbered and small < large and 2 * len(small) > len(large)


def _made_of(members: Sequence[nn.Module], inner: Sequence[nn.Module]) -> bool:
    """Return whether ``inner`` blocks make up nearly all of the ``members`` that contain them.

    They must have more than 2/3 of the parameters (without embedding tables), more than half of the kinds of
    parameterised modules, and a normalisation if the members have any. The experts of a mixture-of-experts layer have
    nearly all of its parameters but not its norms, so the layer stays one block; so does one without norms whose
    router is seen (`expert_lists`). At least one of the inner blocks must have two matrices: a convolution with its
    normalisation isn't a block.
    """
    numbers_in, kinds_in = _content(inner)
    numbers_all, kinds_all = _content(members)
    norms = {kind for kind in kinds_all if all(ndim == 1 for _, ndim in kind)}
    return (
        3 * numbers_in > 2 * numbers_all
        and 2 * len(kinds_in) > len(kinds_all)
        and (not norms or bool(norms & kinds_in))
        and any(sum(ndim >= 2 for _, ndim in _build(block)) >= 2 for block in inner)
        and not any(expert_lists(member) for member in members)
    )


def _content(modules: Iterable[nn.Module]) -> tuple[int, set[Build]]:
    """Return the parameters outside embedding tables, each counted once, and the kinds of parameterised modules."""
    sizes: dict[int, int] = {}
    kinds: set[Build] = set()
    parts = (part for module in modules for _, part in plain_modules(module))
    for part in (part for part in parts if not isinstance(part, nn.Embedding)):
        own = _own_weights(part)
        sizes.update({id(weight): weight.shape.numel() for weight in own.values()})
        if own:
            kinds.add(frozenset((name, len(weight.shape)) for name, weight in own.items()))
    return sum(sizes.values()), kinds


def _outermost(module: nn.Module, matches: Callable[[nn.Module], bool]) -> dict[str, nn.Module]:
    """Return qualified name without adapters -> match below ``module`` that no other match contains.

    A match inside an adapter is returned with its adapter.
    """
    seen: set[int] = set()

    def visit(parent: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in _children(parent):
            if id(child) in seen:
                continue
            seen.add(id(child))
            if matches(plain(child)):
                yield prefix + name, child
            else:
                yield from visit(child, f"{prefix}{name}.")

    return dict(visit(module, ""))


def _parts(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the named children with parameters; a wrapper with a single such child is skipped."""
    parts = [(name, child) for name, child in _children(module) if any(True for _ in child.parameters())]
    if len(parts) == 1 and (inner := _parts(parts[0][1])):
        return [(f"{parts[0][0]}.{name}", child) for name, child in inner]
    return parts


def _listing(module: nn.Module) -> str:
    rows = [
        f"{name}: {type(child).__name__} ({sum(p.numel() for p in child.parameters()):,} parameters)"
        for name, child in _parts(module)
    ]
    return ", ".join(rows) or "no parameters in children"
