"""Replace a model's normalisations and gated feed-forward parts by fused kernels that compute the same.

A layer of any class is recognised by its structure, then tried: its outputs and gradients on random inputs, in fp32 and
in bf16, must agree with the kernel's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from lightning_solo.errors import GradientError
from lightning_solo.nn import forwards, fused_operators, liger

KERNELS = ("rms_norm", "layer_norm", "swiglu", "geglu")
BACK_ENDS: Mapping[str, ModuleType] = {"liger": liger, "operators": fused_operators}
"""Liger's kernels, and torch's operators, which save the same tensors for backward."""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Largest relative distance of a row from the layer's: sums have another order, and some numbers are rounded."""
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_MODULES = frozenset(vars(nn.Module())) | forwards.ATTRIBUTES


@dataclass(frozen=True)
class RmsNorm:
    """``x / rms(x) * (offset + weight)``, rounded to the input's type before the product (llama) or after it (gemma).

    ``eps`` None stands for the machine epsilon of the input's type, as in ``nn.RMSNorm``.
    """

    weight: str
    eps: float | None
    offset: float
    casting: str
    kernel = "rms_norm"

    def __call__(self, layer: nn.Module, x: Tensor, kernels: ModuleType) -> Tensor | None:
        weight: Tensor = getattr(layer, self.weight)
        if not _fits(x, weight):
            return None
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _RmsNorm.apply(x, weight, eps, self.offset, self.casting, kernels)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class LayerNorm:
    """``(x - mean(x)) / std(x) * weight + bias``."""

    weight: str
    bias: str | None
    eps: float
    kernel = "layer_norm"

    def __call__(self, layer: nn.Module, x: Tensor, kernels: ModuleType) -> Tensor | None:
        weight: Tensor = getattr(layer, self.weight)
        bias: Tensor = torch.zeros_like(weight) if self.bias is None else getattr(layer, self.bias)
        if not _fits(x, weight) or bias.dtype is not weight.dtype:
            return None
        return _LayerNorm.apply(x, weight, bias, self.eps, kernels)  # type: ignore[no-any-return,no-untyped-call]


@dataclass(frozen=True)
class Gated:
    """``down(activation(gate(x)) * up(x))``; ``gate``, ``up`` and ``down`` name children of the layer."""

    gate: str
    up: str
    down: str
    activation: str

    @property
    def kernel(self) -> str:
        """The kernel's name, one of `KERNELS`."""
        return "swiglu" if self.activation == "silu" else "geglu"

    def __call__(self, layer: nn.Module, x: Tensor, kernels: ModuleType) -> Tensor | None:
        gate, up, down = (layer.get_submodule(name) for name in (self.gate, self.up, self.down))
        a, b = gate(x), up(x)
        if a.dtype is b.dtype and a.dtype in _TYPES and a.shape == b.shape and a.numel():
            unshared = _keeps_no_output(gate) and _keeps_no_output(up)
            inner = _Gated.apply(a, b, self.activation, unshared, kernels)  # type: ignore[no-untyped-call]
        else:
            inner = fused_operators.activated(a, self.activation) * b
        output: Tensor = down(inner)
        return output


Computation = RmsNorm | LayerNorm | Gated
"""A computation that one fused kernel replaces.

Called with a layer, its input and a back end's module, it returns the layer's output, or None where the kernel would
compute something else.
"""


@dataclass(frozen=True)
class Fused:
    """A layer's computation, and the name in `BACK_ENDS` of the back end that runs it."""

    computation: Computation
    back_end: str


def _fits(x: Tensor, weight: Tensor) -> bool:
    """Return whether a norm computes in the input's type: without 16-bit autocast, and with weights of that type."""
    exact = x.dtype is torch.float32 or not torch.is_autocast_enabled(x.device.type)
    return exact and x.dtype is weight.dtype and x.dtype in _TYPES and x.shape[-1:] == weight.shape and x.numel() > 0


def _keeps_no_output(layer: nn.Module) -> bool:
    """Return whether no other operation needs a layer's output, so that backward may overwrite it."""
    return type(layer).forward is nn.Linear.forward and not layer._forward_hooks


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # by create_graph=True alone; torch would take the gradient for a constant
        raise GradientError(
            "fused kernels: their gradients can't be differentiated again; drop create_graph=True, or write"
            " ~callback.fused_kernels"
        )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, kernels: ModuleType
    ) -> Tensor:
        x = x.contiguous()
        output, rstd = kernels.rms_norm_forward(x, weight, eps, offset, casting)
        ctx.save_for_backward(x, weight, rstd)
        ctx.options, ctx.kernels = (offset, casting), kernels
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        of_x, of_weight = ctx.kernels.rms_norm_backward(
            gradient, *ctx.saved_tensors, *ctx.options, ctx.needs_input_grad[1]
        )
        return of_x.view_as(gradient), of_weight, None, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: ModuleType) -> Tensor:
        x = x.contiguous()
        output, mean, rstd = kernels.layer_norm_forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.kernels = kernels
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        needed = ctx.needs_input_grad[1:3]
        of_x, of_weight, of_bias = ctx.kernels.layer_norm_backward(gradient, *ctx.saved_tensors, needed)
        return of_x.view_as(gradient), of_weight, of_bias, None, None


class _Gated(torch.autograd.Function):
    """``activation(gate) * up``, which saves only gate and up for backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str, overwrite: bool, kernels: ModuleType) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        output = kernels.gated_forward(gate, up, activation)
        ctx.save_for_backward(gate, up)
        ctx.options, ctx.kernels, ctx.walked = (activation, overwrite), kernels, False
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _refuse_second_derivative()
        if ctx.walked:
            raise GradientError(
                "fused kernels: the first backward of this graph has overwritten its tensors, so a second can't run;"
                " drop retain_graph=True, or write ~callback.fused_kernels"
            )
        ctx.walked = ctx.options[1]
        return *ctx.kernels.gated_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None


def fuse_layers(layers: Mapping[str, nn.Module], computations: Mapping[str, Computation], back_end: str) -> None:
    """Run layers by fused kernels; ``restore_forwards(layers, Fused)`` undoes it."""
    for name, layer in layers.items():
        forwards.replace_forward(layer, forward, Fused(computations[name], back_end))


def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a layer by its kernel if the kernel takes these inputs."""
    fused = forwards.record_of(layer, Fused)
    plain = len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and 2 <= args[0].ndim <= 4
    if fused is not None and plain and not torch.compiler.is_compiling():  # a compiler fuses these itself
        output = fused.computation(layer, args[0], BACK_ENDS[fused.back_end])
        if output is not None:
            return output
    return type(layer).forward(layer, *args, **kwargs)


def fusable_layers(
    module: nn.Module, kernels: Sequence[str], back_end: str, device: torch.device
) -> tuple[dict[str, Computation], dict[str, str]]:
    """Return name -> computation of the layers that a kernel can run, and name -> reason of those that failed.

    Args:
        module: the model; its layers are tried on copies.
        kernels: names of `KERNELS`.
        back_end: a name of `BACK_ENDS`.
        device: the device of the trials.
    """
    computations: dict[str, Computation] = {}
    reasons: dict[str, str] = {}
    known: dict[Any, Computation | str] = {}
    for name, layer in module.named_modules():
        candidates = [candidate for candidate in _candidates(layer) if candidate.kernel in kernels]
        if not candidates:
            continue
        if "forward" in vars(layer):
            reasons[name] = "its forward is replaced already"
            continue
        kind = _kind(layer)
        if kind not in known:
            known[kind] = _tried(layer, candidates, BACK_ENDS[back_end], device)
        result = known[kind]
        if isinstance(result, str):
            reasons[name] = result
        else:
            computations[name] = result
    return computations, reasons


def _candidates(layer: nn.Module) -> list[Computation]:
    """Return the computations that a layer's parameters, numbers and children allow."""
    if any(True for _ in layer.buffers()):
        return []
    own = {name: p for name, p in layer._parameters.items() if p is not None}
    if not own:
        return _gated_candidates(layer)
    shapes = {p.shape for p in own.values()}
    if layer._modules or len(own) > 2 or len(shapes) > 1 or len(*shapes) != 1:
        return []
    numbers = {value: None for key, value in vars(layer).items() if type(value) is float and 0 < value <= 1e-2}
    epsilons: list[float | None] = list(numbers)
    if len(own) == 2:
        return [LayerNorm(weight, bias, eps) for (weight, bias), eps in product(permutations(own), numbers)]
    if "eps" in vars(layer) and vars(layer)["eps"] is None:
        epsilons += [None, torch.finfo(torch.float32).eps]  # torch's kernels differ in what None is in 16 bits
    (name,) = own
    rms = [RmsNorm(name, eps, *how) for eps, how in product(epsilons, product((0.0, 1.0), ("llama", "gemma")))]
    return [*rms, *(LayerNorm(name, None, eps) for eps in numbers)]


def _gated_candidates(layer: nn.Module) -> list[Computation]:
    sizes = {}
    for name, child in layer._modules.items():
        into, out = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if isinstance(into, int) and isinstance(out, int):  # also one that an adapter wraps
            sizes[name] = (into, out)
        elif child is not None and any(True for _ in child.parameters()):
            return []
    if len(sizes) != 3:
        return []
    return [
        Gated(gate, up, down, activation)
        for (gate, up, down), activation in product(permutations(sizes), ("silu", "gelu_tanh"))
        if sizes[gate] == sizes[up] and sizes[gate][1] == sizes[down][0]
    ]


def _kind(layer: nn.Module) -> Any:
    """Return a key that is equal for layers of equal classes, attributes and shapes, children included."""

    def one(part: nn.Module) -> Any:
        values = {key: value for key, value in vars(part).items() if key not in _OF_MODULES}
        plain = (str, int, float, bool, type(None))
        own = [(key, value if isinstance(value, plain) else id(value)) for key, value in values.items()]
        shapes = [(key, tuple(p.shape)) for key, p in part.named_parameters(recurse=False)]
        return type(part), tuple(own), tuple(shapes)

    return tuple((name, one(part)) for name, part in layer.named_modules())


def _tried(
    layer: nn.Module, candidates: Sequence[Computation], kernels: ModuleType, device: torch.device
) -> Computation | str:
    """Return the candidate that computes the same as a layer, or the reason why none does."""
    gaps = dict.fromkeys(candidates, 0.0)
    with _apart(device):
        for dtype in TOLERANCES:
            probe, inputs = _probe(layer, candidates[0], dtype, device)
            for x in inputs:
                before = _random_state(device)
                try:
                    expected = _results(probe, partial(type(layer).forward, probe), x)
                except Exception as error:  # a forward may raise anything
                    return f"it can't be tried alone: {error!r}"
                if not torch.equal(_random_state(device), before):
                    return "it draws random numbers"
                for candidate in gaps:
                    gaps[candidate] += _gap(probe, candidate, kernels, x, expected)
    best = min(gaps, key=lambda candidate: gaps[candidate])
    if gaps[best] < math.inf:
        return best
    return f"it doesn't compute {' or '.join(dict.fromkeys(c.kernel for c in candidates))}"


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Enable gradients and disable autocast and torch's modes in this context; then restore the random numbers."""
    devices = [device] if device.type == "cuda" else []
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        with torch.autocast(device.type, enabled=False), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            yield


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _probe(
    layer: nn.Module, candidate: Computation, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, list[Tensor]]:
    """Return a copy of a layer with random weights, with small linear layers, and inputs for it."""
    probe: nn.Module = object.__new__(type(layer))
    vars(probe).update({**vars(layer), **vars(nn.Module())})
    shapes: list[tuple[int, ...]]
    if isinstance(candidate, Gated):
        width, inner = 8, 24
        for name, child in layer._modules.items():
            if name in (candidate.gate, candidate.up, candidate.down):
                sizes = (inner, width) if name == candidate.down else (width, inner)
                probe.add_module(name, nn.Linear(*sizes, device=device, dtype=dtype))
            else:
                probe.add_module(name, None if child is None else copy.deepcopy(child).to(device).train())
        shapes = [(6, width), (2, 3, width)]
        scales = [1.0]
    else:
        (width,) = {len(p) for p in layer.parameters()}
        for name, p in layer._parameters.items():
            weight = None if p is None else nn.Parameter(torch.randn(width, device=device, dtype=dtype))
            probe.register_parameter(name, weight)
        shapes = [(2, 6, width), (2, 3, 5, width)]
        eps = candidate.eps or torch.finfo(dtype).eps
        scales = [1.0, 30.0, eps**0.5]  # rows so small that eps counts
    inputs = []
    for shape in shapes:
        rows = torch.randn(shape, device=device, dtype=dtype).view(-1, width)
        rows *= torch.tensor(scales, device=device, dtype=dtype).repeat(len(rows))[: len(rows), None]
        inputs.append(rows.view(shape).requires_grad_())
    return probe, inputs


def _results(probe: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    """Return the output of ``run(x)``, and the gradients of its input and of the probe's weights."""
    output = run(x)
    factors = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    return [output.detach(), *torch.autograd.grad(output, [x, *probe.parameters()], factors)]


def _gap(probe: nn.Module, candidate: Computation, kernels: ModuleType, x: Tensor, expected: Sequence[Tensor]) -> float:
    """Return the largest relative error of a row of the output or a gradient; infinite above the tolerance."""
    try:
        got = _results(probe, lambda x: candidate(probe, x, kernels), x)
    except (RuntimeError, TypeError, ValueError, AttributeError):  # the kernel can't run it
        return math.inf
    gap = 0.0
    for one, other in zip(got, expected, strict=True):
        if one.dtype is not other.dtype or one.shape != other.shape:
            return math.inf
        one, other = one.double(), other.double()
        rows = torch.linalg.vector_norm(one - other, dim=-1) / torch.linalg.vector_norm(other, dim=-1).clamp_min(1e-30)
        gap = max(gap, float(rows.max()))
    return gap if gap <= TOLERANCES[x.dtype] else math.inf  # and of NaN
