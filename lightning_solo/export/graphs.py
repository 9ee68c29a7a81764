"""A module's forward as a graph that runs without its code: ONNX, or the file of `torch.export`."""

from __future__ import annotations

import inspect
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.data.nested import leaves, map_leaves
from lightning_solo.errors import (
    BudgetError,
    CapabilityError,
    CheckpointError,
    ConflictError,
    NothingToDoError,
    PresetError,
    listed,
)
from lightning_solo.export.sources import new_file, refuse_existing
from lightning_solo.machine import is_installed
from lightning_solo.nn.adaptation import adapter_names
from lightning_solo.nn.forwards import evaluating
from lightning_solo.nn.quantized import quantized_weights_of
from lightning_solo.units import format_bytes

SUFFIXES = {"onnx": ".onnx", "torch_export": ".pt2"}
"""Format -> ending of its file."""
BATCH = (1, 1024)
LARGEST = 3 * 2**29
"""Bytes of weights above which ONNX needs a second file."""
TOLERANCE = 1e-3
"""Largest difference of outputs, relative to the largest output, that rounding in fp32 explains."""
STEPS = ("predict_step", "validation_step", "test_step", "training_step")
UNSAFE = "torch.export.load unpickles a .pt2 file, which can run code: load only files that you wrote or trust"
INSTEAD = "for any module write --format weights (in Python solo.export_weights)"


def export_graph(
    module: nn.Module,
    batch: Any,
    output: str | Path,
    format: str = "onnx",
    *,
    batch_range: tuple[int, int] = BATCH,
    length_range: tuple[int, int] | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write a module's forward in evaluation mode as a graph with the weights in it; return lines about it.

    The graph's inputs are the tensors with which the module's own step calls ``forward``, without unused ones; its
    outputs are the tensors that ``forward`` returns. The written file is run at other batch sizes, and its outputs are
    compared with the module's.

    Args:
        module: a LightningModule with fp32 weights, or any other module.
        batch: of the loader; of other modules the tuple of forward's arguments.
        output: the file to write, ``.onnx`` or ``.pt2``.
        format: "onnx", or "torch_export": the file of ``torch.export.save``.
        batch_range: smallest and largest number of rows; equal numbers fix it.
        length_range: of the second dimension of inputs that are as long as the first input that has one; None fixes it.
        overwrite: whether an existing file is replaced.

    Raises:
        CapabilityError: the packages of ONNX are missing, or ``forward`` can't be traced; names the reason.
        NothingToDoError: no step calls ``forward``.
        ConflictError: the module has adapters, or weights in 4, 8 or 16 bits.
        BudgetError: the weights are larger than a file of ONNX may be.
        CheckpointError: the file can't be written, or its outputs are others than the module's; nothing is left then.
        PresetError: a wrong range or suffix.
    """
    path = Path(output)
    _require(module, path, format, batch_range, length_range)
    refuse_existing(path, overwrite=overwrite)
    with _evaluating(module):
        graph = _Graph(module, *call_of(module, batch))
        graph.resize(batch_range)
        program = graph.traced(batch_range, length_range)
        program = graph.without_unused(program, batch_range, length_range)
        with new_file(path) as new:
            _save(program, graph, new, format, batch_range, length_range)
            differences = [
                graph.difference(_runner(new, format), sizes) for sizes in graph.sizes(batch_range, length_range)
            ]
    sizes = f"{len(differences)} batch sizes" if len(differences) > 1 else "the example's batch size"
    return [
        f"{format}: {path}, {format_bytes(path.stat().st_size)}",
        f"inputs: {graph.described(batch_range, length_range)}",
        f"outputs: {', '.join(graph.outputs)}; at {sizes} they differ by at most {max(differences):.1e} of the module's"
        " largest output",
        *([UNSAFE] if format == "torch_export" else []),
    ]


def _require(
    module: nn.Module, path: Path, format: str, batch: tuple[int, int], length: tuple[int, int] | None
) -> None:
    if format not in SUFFIXES or path.suffix != SUFFIXES[format]:
        written = " or ".join(f"{name} with a file that ends in {suffix}" for name, suffix in SUFFIXES.items())
        raise PresetError(f"format={format!r}, output={path}: write {written}")
    for name, sizes in {"batch": batch, **({} if length is None else {"length": length})}.items():
        if not isinstance(sizes, tuple | list) or [type(size) for size in sizes] != [int, int]:
            raise PresetError(
                f"{name}_range={sizes!r}: write the smallest and the largest size, such as {name}_range=(1, 1024), or"
                " one size twice, which fixes it"
            )
        least, most = sizes
        if not 1 <= least <= most:
            raise PresetError(f"--{name} {least}:{most}: write the smallest and the largest size, such as 1:1024")
    lacking = [package for package in ("onnx", "onnxscript") if format == "onnx" and not is_installed(package)]
    if lacking:
        raise CapabilityError(
            f"--format onnx needs {' and '.join(lacking)}; write pip install lightning-solo[onnx], or --format"
            " torch_export"
        )
    if adapter_names(module):
        raise ConflictError(f"{type(module).__name__} has adapters; write solo.merge_adapters(module) first")
    if quantized_weights_of(module):
        raise ConflictError(f"{type(module).__name__} has weights in 4 or 8 bits, which a graph can't read; {INSTEAD}")
    narrow = [name for name, p in module.named_parameters() if p.is_floating_point() and p.dtype is not torch.float32]
    if narrow:
        raise ConflictError(f"{listed(narrow)} aren't fp32, in which graphs compute; write module.float() first")
    size = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    if format == "onnx" and size > LARGEST:
        raise BudgetError(
            f"the weights take {format_bytes(size)}, and a file of ONNX {format_bytes(LARGEST)} at most; write --format"
            " torch_export",
            size,
            LARGEST,
        )


@contextmanager
def _evaluating(module: Any) -> Iterator[None]:
    """Put a module into evaluation mode, without its Trainer, whose values a graph would keep."""
    trainer = getattr(module, "_trainer", None)
    if trainer is not None:
        module.trainer = None
    try:
        with evaluating(module), torch.no_grad():
            yield
    finally:
        if trainer is not None:
            module.trainer = trainer


# --- the arguments of forward ---


class _CalledError(Exception):
    """Ends a step once it calls forward."""


def call_of(module: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the first step of a LightningModule that does so calls its forward.

    Raises:
        NothingToDoError: no step does; names the errors of steps that ended before.
    """
    if not hasattr(module, "training_step"):
        return (batch if isinstance(batch, tuple) else (batch,)), {}
    calls: list[tuple[Any, Any]] = []

    def record(_: Any, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        raise _CalledError

    ended = []
    hook = module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        # Lightning's own predict_step, which calls forward with the batch as it is, comes last
        for name in sorted(STEPS, key=lambda name: getattr(module, name).__module__.endswith("core.module")):
            step = getattr(module, name)
            try:
                step(*[batch, 0][: max(1, min(2, len(inspect.signature(step).parameters)))])
            except _CalledError:
                return calls[0]
            except Exception as error:
                ended.append(f"{name}: {_reason(error)}")
    finally:
        hook.remove()
    raise NothingToDoError(
        f"no step of {type(module).__name__} calls its forward{''.join(f' ({each})' for each in ended[:1])}, which is"
        f" what a graph holds; define forward(self, x), and write self(x) in predict_step; {INSTEAD}"
    )


# --- the graph ---


class _Graph(nn.Module):
    """Calls a module with flat tensors, in the nesting of an example; returns its output's tensors.

    Attributes:
        inputs: name -> tensor of the example.
        outputs: names of the output's tensors.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.module = module
        self._call = {**{f"{index}": arg for index, arg in enumerate(args)}, **kwargs}
        self._positions = len(args)
        names = list(inspect.signature(module.forward).parameters)
        paths = [path for path, leaf in leaves(self._call) if isinstance(leaf, Tensor)]
        shown = {path: _named(path, names) for path in paths}
        short = {path: name.rpartition(".")[2] for path, name in shown.items()}
        unique = len({*short.values()}) == len(short)
        self._names = {path: (short if unique else shown)[path].replace(".", "_") for path in paths}
        self.inputs = {self._names[path]: leaf for path, leaf in leaves(self._call) if path in self._names}
        self.outputs: list[str] = []
        first = next(iter(self.inputs.values()), None)
        if first is None or not first.dim():
            raise NothingToDoError(f"{type(module).__name__}.forward takes no tensor with rows, so there is no graph")
        self._rows = len(first)
        self._length = next((each.shape[1] for each in self.inputs.values() if each.dim() > 1), 0)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        by_name = dict(zip(self.inputs, tensors, strict=True))
        call = map_leaves(self._call, lambda path, leaf: by_name.get(self._names.get(path, ""), leaf))
        args = [call.pop(f"{index}") for index in range(self._positions)]
        output = self.module(*args, **call)
        found = {path or "output": leaf for path, leaf in leaves(output) if isinstance(leaf, Tensor)}
        self.outputs = [path.replace(".", "_") if not path.isdecimal() else f"output_{path}" for path in found]
        return tuple(found.values())

    def traced(self, batch: tuple[int, int], length: tuple[int, int] | None) -> Any:
        """Return the program of `torch.export`."""
        try:
            self(*self.inputs.values())  # finds the outputs: torch undoes what tracing assigns
            with _quiet():
                shapes = (tuple(self._dynamic(batch, length).values()),)
                return torch.export.export(self, tuple(self.inputs.values()), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # of any kind, also of the module's own code
            raise CapabilityError(self._untraceable(error)) from error

    def without_unused(self, program: Any, batch: tuple[int, int], length: tuple[int, int] | None) -> Any:
        """Drop inputs whose numbers aren't used, such as labels, and return the program that is traced without them."""
        size, user_inputs = torch.ops.aten.sym_size.int, {*program.graph_signature.user_inputs}
        nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in user_inputs]
        used = [any(user.target != size for user in node.users) for node in nodes]
        if all(used):
            return program
        if not any(used):
            raise NothingToDoError(
                f"{type(self.module).__name__}.forward uses none of its inputs: {listed(self.inputs)}"
            )
        before = self.inputs
        self.inputs = {name: tensor for (name, tensor), use in zip(before.items(), used, strict=True) if use}
        try:
            return self.traced(batch, length)
        except CapabilityError:  # their sizes are needed
            self.inputs = before
            return program

    def _untraceable(self, error: Exception) -> str:
        name, text = type(self.module).__name__, str(error)
        if "not attached to a `Trainer`" in text:
            return (
                f"{name}.forward uses self.trainer, which a graph hasn't; keep what it needs in the module; {INSTEAD}"
            )
        if "specialized it to be a constant" in text:
            line = next(line for line in text.splitlines() if "specialized it to be a constant" in line)
            return (
                f"{name}.forward fixes a size ({line.strip(' -').partition('. ')[0]}); compute sizes from its inputs,"
                f" as x.shape[0], or write --batch {self._rows}, and no --length; {INSTEAD}"
            )
        if "data-dependent" in text:
            return f"{name}.forward branches on a tensor's values, and a graph can't; write torch.where; {INSTEAD}"
        return f"{name}.forward can't be traced ({_reason(error)}): its Python code runs once; {INSTEAD}"

    def _dynamic(self, batch: tuple[int, int], length: tuple[int, int] | None) -> dict[str, dict[int, Any]]:
        """Return the named dimensions of each input; none of a size that is fixed."""
        rows = torch.export.Dim("batch", min=batch[0], max=batch[1]) if batch[0] < batch[1] else None
        long = torch.export.Dim("length", min=length[0], max=length[1]) if length and length[0] < length[1] else None
        named: dict[str, dict[int, Any]] = {}
        for name, tensor in self.inputs.items():
            named[name] = {0: rows} if rows is not None and tensor.dim() and len(tensor) == self._rows else {}
            if long is not None and tensor.dim() > 1 and tensor.shape[1] == self._length:
                named[name][1] = long
        return named

    def resize(self, sizes: tuple[int, int]) -> None:
        """Give the example a number of rows in a range, and at least 2 if the range has that: 1 would be fixed."""
        wanted = min(max(self._rows, sizes[0], 2), sizes[1])
        self.inputs = self._with_sizes(wanted, self._length)
        self._rows = wanted

    def _with_sizes(self, rows: int, length: int) -> dict[str, Tensor]:
        resized = {}
        for name, tensor in self.inputs.items():
            if tensor.dim() and len(tensor) == self._rows:
                tensor = tensor[torch.arange(rows) % len(tensor)]
            if tensor.dim() > 1 and tensor.shape[1] == self._length:
                tensor = tensor[:, torch.arange(length) % self._length]
            resized[name] = tensor
        return resized

    # --- comparison ---

    def sizes(self, batch: tuple[int, int], length: tuple[int, int] | None) -> list[tuple[int, int]]:
        """Return the (rows, length) at which the graph is compared: those of the example, and others in the ranges."""
        rows = sorted({self._rows, batch[0], min(batch[1], self._rows + 1)})
        other = self._length if length is None else min(max(length[0], self._length // 2), length[1])
        return [(each, self._length if each == self._rows else other) for each in rows]

    def difference(self, run: Callable[[Mapping[str, Tensor]], list[Tensor]], sizes: tuple[int, int]) -> float:
        """Return the largest difference of outputs, relative to the largest output."""
        inputs = self._with_sizes(*sizes)
        expected, found = self(*inputs.values()), run(inputs)
        worst = 0.0
        for name, one, other in zip(self.outputs, expected, found, strict=True):
            one, other = one.double(), other.double()
            finite = one.isfinite()
            same = one.shape == other.shape and bool(
                torch.isclose(one, other, TOLERANCE, math.inf, equal_nan=True).all()  # infinities and NaNs are the same
            )
            largest = one[finite].abs().max().clamp(min=1e-30) if finite.any() else 1.0
            far = float(((one - other)[finite] / largest).abs().max()) if same and finite.any() else 0.0
            if not same or not far <= TOLERANCE:
                raise CheckpointError(
                    f"the graph gives other outputs than {type(self.module).__name__} for {sizes[0]} rows ({name}:"
                    f" {tuple(other.shape)} for {tuple(one.shape)}, difference {far:.1e}); its forward may depend on"
                    f" random numbers, or on sizes or values of the example; {INSTEAD}"
                )
            worst = max(worst, far)
        return worst

    def described(self, batch: tuple[int, int], length: tuple[int, int] | None) -> str:
        """Return the inputs with type and shape, and the ranges."""
        dims = self._dynamic(batch, length)
        shapes = {
            name: ", ".join(
                getattr(dims[name].get(dim), "__name__", str(size)) for dim, size in enumerate(tensor.shape)
            )
            for name, tensor in self.inputs.items()
        }
        parts = [f"{name} {str(self.inputs[name].dtype).removeprefix('torch.')} ({shapes[name]})" for name in shapes]
        used = {dim.__name__ for each in dims.values() for dim in each.values()}
        ranges = {name: sizes for name, sizes in (("batch", batch), ("length", length)) if sizes and name in used}
        return "; ".join(
            [", ".join(parts), *(f"{name} from {least} to {most}" for name, (least, most) in ranges.items())]
        )


def _named(path: str, parameters: Sequence[str]) -> str:
    """Return a path with the parameter's name in place of its position."""
    first, _, rest = path.partition(".")
    index = int(first) if first.isdecimal() else -1
    name = parameters[index] if 0 <= index < len(parameters) else first
    return f"{name}.{rest}" if rest else name


def _reason(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return f"{type(error).__name__}: {next(filter(None, lines), '')}".removesuffix(": ")


# --- files ---


def _save(
    program: Any, graph: _Graph, path: Path, format: str, batch: tuple[int, int], length: tuple[int, int] | None
) -> None:
    if format == "torch_export":
        with path.open("wb") as file, _quiet():
            torch.export.save(program, file)
        return
    try:
        with _quiet():
            onnx: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=list(graph.inputs),
                output_names=graph.outputs,
                dynamic_shapes=(tuple(graph._dynamic(batch, length).values()),),
            )
    except Exception as error:
        raise CapabilityError(
            f"{type(graph.module).__name__}: torch can't write this graph as ONNX"
            f" ({_reason(error.__cause__ or error)}); write --format torch_export; {INSTEAD}"
        ) from error
    onnx.save(path, external_data=False)


def _runner(path: Path, format: str) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    """Return a function that runs the file: inputs by name -> outputs."""
    if format == "torch_export":
        with path.open("rb") as file, _quiet():
            loaded = torch.export.load(file).module()
        return lambda inputs: list(loaded(*inputs.values()))
    if is_installed("onnxruntime"):
        import onnxruntime

        session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    else:
        from onnx.reference import ReferenceEvaluator

        session = ReferenceEvaluator(str(path))
    return partial(_run_session, session)


def _run_session(session: Any, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    try:
        outputs = session.run(None, {name: tensor.cpu().numpy() for name, tensor in inputs.items()})
    except Exception as error:  # the reference evaluator lacks cases of some operators
        evaluator = type(session).__name__
        another = "pip install onnxruntime, which checks the file instead, or " * (evaluator == "ReferenceEvaluator")
        raise CapabilityError(
            f"the file can't be checked: {evaluator} fails on the graph ({_reason(error)}); {another}write --format"
            f" torch_export; {INSTEAD}"
        ) from error
    return [torch.from_numpy(each) for each in outputs]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's reports about its own tracing."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx", "torch.export", "torch._export")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
