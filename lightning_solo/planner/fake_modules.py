"""Modules whose parameters are fake tensors, without data: how they are built and trained."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.nn.parameter import UninitializedParameter
from torch.utils._mode_utils import no_dispatch

from lightning_solo.attributes import replaced


def fake_mode() -> FakeTensorMode:
    """Return a mode in which no operator computes; an operator without a fake rule fails instead of running."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    mode.fake_tensor_converter = _Converter(copy_data=False, export=False)
    mode.cache_enabled = False  # `OperatorCache` comes first, and a look-up here takes as long as an operator
    return mode


class _Converter(FakeTensorConverter):
    """Keeps the numbers of real tensors that meet fake ones, such as a table in a module's attribute."""

    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: Tensor, make_constant: bool = False, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        return super().from_real_tensor(fake_mode, t, make_constant or may_have_numbers(t), *args, **kwargs)


_CPU = torch.device("cpu")
KNOWN = 2**23
"""Largest number of elements for which a fake tensor keeps the numbers of a batch, and of values computed from it."""


def known_numbers() -> AbstractContextManager[None]:
    """Raise torch's limit of one element to `KNOWN`: fake tensors up to it keep their numbers."""
    return replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", KNOWN)


def inspected_masks() -> AbstractContextManager[None]:
    """Make transformers inspect attention masks of fake tensors, as it does in a run."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()
    return replaced(module, "is_fake_tensor", lambda tensor: False)


def may_have_numbers(tensor: Tensor) -> bool:
    """Return whether a fake tensor may keep the numbers of this real one."""
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
    return is_plain and tensor.device.type == "cpu" and tensor.numel() <= KNOWN


def fake_like(mode: FakeTensorMode, tensor: Tensor, constant: Tensor | None = None) -> FakeTensor:
    """Return a fake tensor on the CPU with the shape, strides and type of another, which is a parameter if that is.

    torch takes ten times as long to run ``empty_strided`` on fake tensors.
    """
    with torch._C._DisableTorchDispatch():
        data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    fake = FakeTensor(mode, data, _CPU, constant)
    if isinstance(tensor, nn.Parameter):  # torch 2.13 has arguments for these, which earlier ones refuse
        fake.requires_grad = tensor.requires_grad
        fake._is_param = True
    return fake


def with_new_numbers(tensor: Tensor) -> FakeTensor:
    """Return a fake tensor in the current mode that keeps a tensor's numbers. No other tensor may use its memory."""
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    with no_dispatch():
        constant = tensor.clone()
        fake = fake_like(mode, constant, constant)
    converter = mode.fake_tensor_converter
    converter.set_tensor_memo(constant, fake)  # an operator in place returns the constant again
    converter.add_constant_storage_mapping(fake)
    return fake


def with_numbers(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor that keeps its numbers if there are at most `KNOWN`."""
    fake: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, tensor.detach())
    return fake


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build modules with parameters on the meta device; everything else in a constructor runs on real tensors.

    On fake tensors, the widths and drop rates that a constructor reads by ``.item()`` would be unknown.
    """
    register = nn.Module.register_parameter
    replacements: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # keeps shared parameters shared

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta and not isinstance(param, UninitializedParameter):
            original, empty = replacements.get(id(param), (None, None))
            if original is None or original() is not param:  # ids are reused: compare the object too
                empty = on_meta(param)
                replacements[id(param)] = weakref.ref(param), empty
            module._parameters[name] = empty

    def skips_meta(initializer: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            is_meta = isinstance(tensor, Tensor) and tensor.is_meta
            return tensor if is_meta else initializer(tensor, *args, **kwargs)

        return initialize

    names = [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "register_parameter", register_parameter))
        for name in names:
            stack.enter_context(replaced(nn.init, name, skips_meta(getattr(nn.init, name))))
        yield


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter with the same shape, strides and attributes, without data."""
    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    empty.__dict__.update(parameter.__dict__)
    return empty


def stripped(module: nn.Module) -> nn.Module:
    """Return a deep copy without the data of parameters and buffers; ties are kept, the module isn't changed."""
    memo: dict[int, Any] = {id(p): on_meta(p) for p in module.parameters()}
    memo |= {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    return copy.deepcopy(module, memo)


def built_without_data(make: Callable[[], Any], mode: FakeTensorMode) -> Any:
    """Return a module with fake parameters.

    A constructor that computes with its weights, such as one that learns a width from a forward, fails on the meta
    device and runs on fake tensors instead; one that reads numbers of its weights fails on both.
    """
    try:
        with empty_parameters():
            module = make()
    except Exception as error:
        try:
            with mode:
                module = make()
        except Exception:
            raise error from None
    to_fake(module, mode)
    return module


def to_fake(module: nn.Module, mode: FakeTensorMode) -> None:
    """Turn parameters and buffers into fake tensors on the CPU, in place."""
    refill(module, partial(fake_like, mode))


def to_random(module: nn.Module) -> None:
    """Fill parameters and buffers without data, in place: normal numbers with a standard deviation of 0.02."""

    def random(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        zeros = torch.zeros_like(tensor, device="cpu")
        numbers = zeros.normal_(std=0.02) if zeros.is_floating_point() else zeros
        return nn.Parameter(numbers, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else numbers

    refill(module, random)


def refill(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by ``make(tensor)``, with its attributes; shared tensors stay shared."""
    replacements: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            new = make(tensor)
            new.__dict__.update(tensor.__dict__)
            replacements[id(tensor)] = new
        return replacements[id(tensor)]

    for part in module.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            table.update({name: replacement(tensor) for name, tensor in table.items() if tensor is not None})


def replaced_by_apply() -> AbstractContextManager[None]:
    """Make ``module.to(...)`` replace parameters, since torch refuses to swap fake ones in place."""

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True, seen: Any = None) -> nn.Module:
        seen = {} if seen is None else seen
        for child in module.children() if recurse else ():
            apply(child, fn, True, seen)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in seen:
                tensor = fn(parameter.detach())
                same = (tensor.dtype, tensor.device) == (parameter.dtype, parameter.device)
                new = parameter if same else nn.Parameter(tensor, parameter.requires_grad)
                seen[id(parameter)] = new, parameter  # the old one is kept alive, so that its id isn't reused
            module._parameters[name] = seen[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    return replaced(nn.Module, "_apply", apply)


def copied_by_clone() -> AbstractContextManager[None]:
    """Make ``deepcopy`` of a fake tensor clone it, since torch would copy the mode too."""

    def deepcopy(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            with torch.no_grad():  # as in torch's own
                new: Tensor = tensor.detach().clone()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
        return memo[id(tensor)]

    return replaced(FakeTensor, "__deepcopy__", deepcopy)
