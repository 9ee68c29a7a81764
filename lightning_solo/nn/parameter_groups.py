"""Parameters by their kind: those that decay, and the matrices of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_solo.errors import NothingToDoError
from lightning_solo.nn.blocks import named_blocks


def tables(module: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings, with those of heads that are tied to them."""
    return {part.weight for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)}


def without_decay(module: nn.Module, *, decay_embeddings: bool = True) -> set[Tensor]:
    """Return the parameters that weight decay would harm: vectors, biases, those of norms, embeddings by choice."""
    still: set[Tensor] = set() if decay_embeddings else tables(module)
    for part in module.modules():
        is_norm = "norm" in type(part).__name__.lower()
        still |= {
            p
            for name, p in part._parameters.items()
            if p is not None and (p.dim() < 2 or is_norm or name.startswith("bias"))
        }
    return still


def hidden_matrices(module: nn.Module, blocks: str | Sequence[str] = "auto", option: str = "blocks") -> set[Tensor]:
    """Return the parameters of two dimensions in a module's blocks, other than embeddings.

    Args:
        module: with repeated blocks.
        blocks: ``"auto"``, or class names of blocks.
        option: path of that setting, for messages.

    Raises:
        NothingToDoError: there are no such blocks, or no matrices in them.
    """
    inside: set[Tensor] = {p for block in named_blocks(module, blocks, option).values() for p in block.parameters()}
    matrices = {p for p in inside if p.dim() == 2} - tables(module)
    if matrices:
        return matrices
    raise NothingToDoError(f"{option}: the blocks of {type(module).__name__} have no matrices")


def parameter_groups(module: nn.Module, make_optimizer: Callable[..., Any]) -> list[dict[str, Any]]:
    """Return groups of a module's trained parameters: those that decay, and the others.

    Args:
        module: with the parameters.
        make_optimizer: an optimizer's class or a ``partial`` of it. For one that has an attribute ``takes_matrices``
            the matrices of the module's blocks are the first group, with ``matrices=True``.

    Raises:
        NothingToDoError: that optimizer finds no blocks.
    """
    still = without_decay(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    decayed = [p for p in trained if p not in still]
    groups: list[dict[str, Any]] = []
    if getattr(getattr(make_optimizer, "func", make_optimizer), "takes_matrices", False):
        matrices = hidden_matrices(module)
        groups = [{"params": [p for p in decayed if p in matrices], "matrices": True}]
        decayed = [p for p in decayed if p not in matrices]
    groups += [{"params": decayed}, {"params": [p for p in trained if p in still], "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
