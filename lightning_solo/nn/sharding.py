"""Shard a module over the processes of a mesh with FSDP2, without any code in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_solo.errors import ConflictError, listed
from lightning_solo.memory.sharded_tensors import sharded_like
from lightning_solo.nn.streaming import hooked


def shard(
    module: nn.Module,
    mesh: Any,
    blocks: Iterable[nn.Module],
    *,
    forward_methods: Iterable[str] = (),
    reshard_after_forward: bool = True,
    find_unused_parameters: bool = False,
    converts: bool = False,
) -> Callable[[], Mapping[Tensor, nn.Parameter]]:
    """Shard each block's parameters over a mesh, then all others of the module as one group.

    A block with a parameter that is used outside of it too stays in the module's group. Weights and buffers become
    those of the first process.

    Args:
        module: becomes a `torch.distributed.fsdp.FSDPModule`, as its blocks do.
        mesh: one-dimensional device mesh.
        blocks: modules below ``module``, gathered one at a time.
        forward_methods: methods of ``module`` besides ``forward`` that gather its weights when they are called.
        reshard_after_forward: whether a block's weights are freed after its forward, and gathered again in backward.
        find_unused_parameters: whether processes may have gradients of different parameters; those that no process has
            are then zeros. Otherwise they must be the same, or the processes wait for one another.
        converts: whether the caller converts all weights to one precision afterwards.

    Returns:
        A function that makes the module plain again, with whole weights on the host, and returns them by the sharded
        parameters; all processes must call it.

    Raises:
        ConflictError: a parameter of the module is a number, which can't be sharded; or isn't sharded, and so each
            process would train its own.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    _require_shardable(module)
    alone = without_shared_parameters(module, list(dict.fromkeys(blocks)))
    _require_one_precision(module, alone, converts)
    before = [(part, type(part), {**vars(part)}) for part in (*alone, module)]
    group, device = mesh.get_group(), torch.device(mesh.device_type)
    for p in module.parameters():
        send(p.data, group, device)
    share_buffers(module, group, device)
    for block in alone:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(module, mesh=mesh)
    if find_unused_parameters:
        cast(FSDPModule, module).set_reduce_scatter_unused_params(True)  # and its parts
    for name in forward_methods:
        register_fsdp_forward_method(module, name)
    require_sharded(module)
    handles = [block.register_forward_hook(_hook_views) for block in alone]
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    ignored = warnings.filters[0]
    return partial(_restore, module, before, handles, ignored)


def _hook_views(block: nn.Module, args: Any, output: Any) -> None:
    """Gather a block's weights for backward where its output is a view.

    FSDP2 hooks the view alone, and only warns that a change of it in place drops the hook.
    """
    gather = cast(Any, block)._get_fsdp_state()._pre_backward
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and (base := hooked(tensor)) is not tensor:
            base.register_hook(gather)  # type: ignore[no-untyped-call]


def _require_shardable(module: nn.Module) -> None:
    """Refuse parameters that are numbers, and give the others a memory order that FSDP2 takes."""
    if numbers := [name for name, p in module.named_parameters() if not p.dim()]:
        raise ConflictError(
            f"FSDP2 and {listed(numbers)}: a number can't be sharded; write a vector of one, such as"
            " nn.Parameter(torch.tensor([0.5])), or take the preset ddp"
        )
    if sparse := sparse_embeddings(module):
        raise ConflictError(
            f"FSDP2 and {listed(sparse)}: sparse gradients can't be sharded; write sparse=False, or take the preset ddp"
        )
    for p in module.parameters():
        p.data = p.data.contiguous()


def sparse_embeddings(module: nn.Module) -> list[str]:
    """Return the names of embeddings whose gradients are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [name for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse]


def _require_one_precision(module: nn.Module, blocks: Sequence[nn.Module], converts: bool) -> None:
    """Refuse trained parameters of several types of numbers in one group, and complex ones, by their names."""
    names = {p: name for name, p in module.named_parameters() if p.requires_grad}
    inside = {p for block in blocks for p in block.parameters()}
    groups = [[p for p in block.parameters() if p in names] for block in blocks]
    for group in [*groups, [p for p in names if p not in inside]]:
        others = [p for p in group if p.is_complex()]
        others = others or [p for p in group if p.dtype != group[0].dtype and not converts]
        if others:
            types = " and ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in group))
            raise ConflictError(
                f"FSDP2 and {listed(names[p] for p in others)}: weights of a group that are {types} can't be sharded;"
                " write real numbers of one precision, as torch.view_as_real gives them, or take the preset ddp"
            )


def share_buffers(module: nn.Module, group: Any, device: torch.device) -> None:
    """Give each process the first one's buffers, which may be random; ``device`` is what the group sends from."""
    for buffer in module.buffers():
        send(buffer, group, device)


def send(tensor: Tensor, group: Any, device: torch.device, first: int = 0) -> None:
    """Give each process of a group the values that its process ``first`` has, of any shape and type of numbers."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or not tensor.numel() or tensor.is_meta:
        return
    sent = tensor.detach().contiguous().flatten().view(torch.uint8).to(device)
    torch.distributed.broadcast(sent, group=group, group_src=first)
    if torch.distributed.get_rank(group) != first:
        value = sent.to(tensor.device).view(tensor.dtype).view(tensor.shape)
        if not torch.equal(value, tensor):  # a copy, or NaN
            tensor.copy_(value)


def _restore(
    module: nn.Module,
    before: Sequence[tuple[nn.Module, type, dict[str, Any]]],
    handles: Sequence[RemovableHandle],
    ignored: Any,
) -> Mapping[Tensor, nn.Parameter]:
    for handle in handles:
        handle.remove()
    with suppress(ValueError):  # of a context of warnings that has ended
        cast(list[Any], warnings.filters).remove(ignored)
    whole: dict[Tensor, nn.Parameter] = {}
    for parameter in module.parameters():
        value = parameter.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value).cpu()
        whole[parameter] = nn.Parameter(value, parameter.requires_grad)
    for part in module.modules():
        own = vars(part)
        own["_parameters"].update({key: whole[p] for key, p in own["_parameters"].items() if p is not None})
        for name, hooks in own.items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for key in [key for key, hook in hooks.items() if _is_fsdps(hook)]:
                    del hooks[key]
        for name in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            own.pop(name, None)
    for part, cls, attributes in before:
        part.__class__ = cls
        _module_state_mapping.pop(part, None)
        new = {name: value for name, value in vars(part).items() if name not in attributes}
        for name in [each for each, value in new.items() if each.startswith("__composable_api_") or _is_fsdps(value)]:
            delattr(part, name)
        for name, value in attributes.items():
            if callable(value) and vars(part).get(name) is not value and _is_fsdps(vars(part).get(name)):
                vars(part)[name] = value
    return whole


def _is_fsdps(value: Any) -> bool:
    """Return whether FSDP2 has put a hook, a method or a state there."""
    value = getattr(value, "hook", value)
    kinds = [value, type(value), type(getattr(value, "__self__", None)), getattr(value, "__func__", None)]
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return any(str(getattr(each, "__module__", "")).startswith("torch.distributed.fsdp") for each in kinds) or (
        code is not None and "_fully_shard" in code.co_filename
    )


def without_shared_parameters(module: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks with parameters, none of which another part of the module has too."""
    owners: dict[Tensor, set[int]] = {}
    inside = {part for block in blocks for part in block.modules()}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            owners.setdefault(parameter, set()).add(number)
    outside = {p for part in module.modules() if part not in inside for p in part.parameters(recurse=False)}
    shared = outside | {p for p, numbers in owners.items() if len(numbers) > 1}
    return [block for block in blocks if (own := set(block.parameters())) and not own & shared]


def require_sharded(module: nn.Module) -> None:
    """Refuse a module with a parameter that isn't sharded: no process would learn of another's gradient of it."""
    whole = [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]
    if whole:
        raise ConflictError(
            f"FSDP2 and {listed(whole)}: not sharded, so that each process would train a weight of its own;"
            " make these parameters in __init__ or configure_model, or take the preset ddp"
        )


def load_weights(module: nn.Module, weights: Mapping[str, Any], strict: bool = True) -> Any:
    """Load whole weights into a sharded module; each process takes its shards of them."""
    own = dict(module.named_parameters(remove_duplicate=False))
    placed = {name: sharded_like(value, own[name]) if name in own else value for name, value in weights.items()}
    return module.load_state_dict(placed, strict=strict)
