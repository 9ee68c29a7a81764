"""Modules whose parameters are fake tensors, without data: how to build them, and what lets them train."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorConverter, FakeTensorMode
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode


def fake_mode() -> FakeTensorMode:
    """Return a mode in which no operator computes; one without a rule for fake tensors fails instead of running."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    mode.fake_tensor_converter = _Converter(copy_data=False, export=False)
    return mode


class _Converter(FakeTensorConverter):
    """Lets real tensors that meet fake ones keep their numbers: a table that a module has as an attribute, say."""

    def from_real_tensor(
        self, fake_mode: FakeTensorMode, t: Tensor, make_constant: bool = False, *args: Any, **kwargs: Any
    ) -> FakeTensor:
        few = type(t) is Tensor and not t.requires_grad and t.device.type == "cpu" and t.numel() <= KNOWN
        return super().from_real_tensor(fake_mode, t, make_constant or few, *args, **kwargs)


KNOWN = 2**20
"""Elements up to which the numbers of a batch, and of what is made of it alone, are kept beside the fake tensor."""


@contextmanager
def known_numbers() -> Iterator[None]:
    """Let fake tensors of up to `KNOWN` elements remember numbers: by themselves they do so for one."""
    before = fake_tensor.CONSTANT_NUMEL_LIMIT
    fake_tensor.CONSTANT_NUMEL_LIMIT = KNOWN
    try:
        yield
    finally:
        fake_tensor.CONSTANT_NUMEL_LIMIT = before


@contextmanager
def taken_for_real() -> Iterator[None]:
    """Let transformers look at masks as in a run: of a fake tensor it wouldn't ask whether anything is masked."""
    home: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(home, "is_fake_tensor", None)
    if before is None:
        yield
        return
    home.is_fake_tensor = lambda tensor: False
    try:
        yield
    finally:
        home.is_fake_tensor = before


def with_numbers(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """Return a fake tensor that knows its numbers, unless there are too many."""
    few = tensor.numel() <= KNOWN
    made: Tensor = mode.fake_tensor_converter.from_real_tensor(mode, tensor.detach(), make_constant=few)
    return made


@contextmanager
def empty_parameters() -> Iterator[None]:
    """Build modules whose parameters are on the meta device; everything else of a constructor runs for real.

    Not a constructor under fake tensors: there, widths and drop rates that come out of ``.item()`` would be made up.
    """
    register, initializers = nn.Module.register_parameter, {}
    made: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}  # one that two modules are given stays one

    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta and not isinstance(param, UninitializedParameter):
            there = made.get(id(param))
            if there is None or there[0]() is not param:  # ids are used again: compare the object too
                there = made[id(param)] = weakref.ref(param), on_meta(param)
            module._parameters[name] = there[1]

    def skips_meta(initializer: Callable[..., Any]) -> Callable[..., Any]:
        def initialize(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
            return initializer(tensor, *args, **kwargs)

        return initialize

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign, assignment]
    for name in [name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")]:
        initializers[name] = getattr(nn.init, name)
        setattr(nn.init, name, skips_meta(initializers[name]))
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        for name, initializer in initializers.items():
            setattr(nn.init, name, initializer)


def on_meta(parameter: nn.Parameter) -> nn.Parameter:
    """Return a parameter of the same shape, strides and attributes without data."""
    made = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made


def stripped(module: nn.Module) -> nn.Module:
    """Return a deep copy without the data of parameters and buffers; the module is left as it is, ties are kept."""
    memo: dict[int, Any] = {id(p): on_meta(p) for p in module.parameters()}
    memo |= {id(b): torch.empty_like(b, device="meta") for b in module.buffers()}
    return copy.deepcopy(module, memo)


def built_without_data(make: Callable[[], Any], mode: FakeTensorMode) -> Any:
    """Return a module of fake parameters.

    A constructor that computes with its weights, such as one that learns a width from a forward, can't do so on the
    meta device, but on fake tensors; one that reads numbers of them can on neither.
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

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    with mode:
        refill(module, fake)


def to_random(module: nn.Module) -> None:
    """Give parameters and buffers without data some, in place: normal numbers of a standard deviation of 0.02."""

    def random(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor.detach()
        made = torch.zeros_like(tensor, device="cpu")
        return made.normal_(std=0.02) if made.is_floating_point() else made

    refill(module, random)


def refill(module: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put another tensor in the place of each parameter and buffer; one that is there twice stays one."""
    made: dict[int, Tensor] = {}

    def new(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            plain = make(tensor)
            made[id(tensor)] = nn.Parameter(plain, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else plain
            made[id(tensor)].__dict__.update(tensor.__dict__)
        return made[id(tensor)]

    for part in module.modules():
        both: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for held in both:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = new(tensor)


@contextmanager
def replaced_by_apply() -> Iterator[None]:
    """Let ``module.to(...)`` put new parameters in place: torch refuses to swap fake ones."""
    original = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True, seen: Any = None) -> nn.Module:
        seen = {} if seen is None else seen
        for child in module.children() if recurse else ():
            apply(child, fn, True, seen)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in seen:
                new = fn(parameter.detach())
                same = (new.dtype, new.device) == (parameter.dtype, parameter.device)
                made = parameter if same else nn.Parameter(new, parameter.requires_grad)
                seen[id(parameter)] = made, parameter  # the old one is kept, so that its id stays its own
            module._parameters[name] = seen[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


class CopiedByClone(TorchFunctionMode):
    """Answers ``deepcopy`` of a fake tensor with a clone: torch would copy the mode with it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            tensor, memo = args
            if id(tensor) not in memo:
                with torch.no_grad():  # as torch's own
                    new: Tensor = tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
