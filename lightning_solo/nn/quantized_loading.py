"""Load a folder of safetensors into a module with quantized weights, without a peak of memory.

The module is built without numbers. Each weight is then quantized from its mapped file, and written to a file of its
own, which is mapped: the host's memory holds one weight at a time. The next start finds these files.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lightning_solo.atomic_files import whole_file
from lightning_solo.attributes import replaced
from lightning_solo.errors import CapabilityError, CheckpointError, PresetError, listed
from lightning_solo.machine import is_installed, user_cache
from lightning_solo.nn.quantizable import chosen_weights
from lightning_solo.nn.quantized import FLOATS, FORMATS, HOST, TABLES, QuantizedWeight, on_host, quantize, quantized

LAYOUT = b"2"
"""Number of the cache's layout; a change makes new files."""
SAMPLE = 2**20
"""Bytes at either end of a file that the name of its cache covers."""
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Stored(NamedTuple):
    """A tensor in a folder's files: its shape and type, the function that maps it, and its file."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    file: Path


def load_quantized(
    build: Callable[[], AnyModule],
    folder: str | Path,
    *,
    format: str = "nf4",
    embeddings: str = "unchanged",
    head: str = "unchanged",
    layers: Sequence[str] | None = None,
    cache: str | Path | None = None,
) -> AnyModule:
    """Return a frozen module with the weights of a folder, those of linear layers in 4 or 8 bits.

    All weights stay mapped from files, and take host memory only as they are used. The experts of a mixture are stacked
    as transformers' modules hold them.

    Args:
        build: returns the module, such as ``lambda: AutoModelForCausalLM.from_config(config)``. Its parameters are
            created without numbers; buffers are as it makes them.
        folder: of ``model.safetensors``, or of the shards in ``model.safetensors.index.json``.
        format: "nf4" or "int8".
        embeddings: "unchanged", "int8", or "host": they stay in host memory wherever the module moves, and copy the
            rows of a batch to its device.
        head: "unchanged", "int8", or "host", of the output head; where it is tied to an embedding, write both alike.
        layers: patterns of names of the weights to quantize; None for all but output heads.
        cache: folder of the quantized weights, by default ``lightning_solo/quantized`` in the user's cache folder. They
            are quantized anew if the model's files have changed.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors aren't those of the module.
        CapabilityError: the package safetensors is missing.
        PresetError: an unknown format.
    """
    if format not in FORMATS or not {embeddings, head} <= {*TABLES}:
        raise PresetError(
            f"format={format!r}, embeddings={embeddings!r}, head={head!r}: write {' or '.join(FORMATS)}; for embeddings"
            f" and head {', '.join(TABLES)}"
        )
    if not is_installed("safetensors"):
        raise CapabilityError("load_quantized reads safetensors; write pip install lightning-solo[safetensors]")
    folder = Path(folder)
    with ExitStack() as stack, torch.no_grad():
        files = weight_files(folder)
        tensors = open_files(files, stack)
        with parameters_without_numbers():
            module = build().requires_grad_(False)
        tensors = _with_experts(module, tensors)
        stored = _matched(module, tensors, folder)
        choice = chosen_weights(module, layers, embeddings=embeddings, head=head)
        _assign(module, tensors, stored, {id(p) for p in choice.parameters().values()})
        folder = (_default_cache() if cache is None else Path(cache)) / _cache_folder(folder, files)
        weights: dict[str, QuantizedWeight] = {}  # tied weights stay tied
        for part, names in choice.modules.values():
            numbers = {name: id(part._parameters[name]) for name in names}
            for number in numbers.values():
                if (source := stored[number]) not in weights:
                    _, form = choice.tables.get(number, ("", format))
                    weights[source] = _quantized(source, tensors[source], form, folder)
            quantize(part, {name: weights[stored[number]] for name, number in numbers.items()})
    return module


def _default_cache() -> Path:
    if (folder := user_cache()) is None:
        raise PresetError("load_quantized: this user has no cache folder; write cache=<a folder with room>")
    return folder / "lightning_solo" / "quantized"


@contextmanager
def parameters_without_numbers() -> Iterator[None]:
    """Make parameters of modules that are created in this context ``meta`` tensors; buffers are created as ever."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied one is already
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(self, name, param)

    with replaced(nn.Module, "register_parameter", on_meta):
        yield


# --- the folder's files ---


def weight_files(folder: Path) -> list[Path]:
    """Return the files of weights in a folder.

    Raises:
        CheckpointError: it is no folder, has no safetensors or lacks some, or its weights are quantized.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; download the model first: hf download <owner>/<name> --local-dir {folder}"
        )
    config = _json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if method := (config.get("quantization_config") or {}).get("quant_method", "quantization_config" in config):
        raise CheckpointError(
            f"{folder}: its weights are quantized already (quantization_config: {method}); write the folder of the"
            " 16-bit model"
        )
    if (folder / INDEX).is_file():
        names = sorted(set(_json(folder / INDEX).get("weight_map", {}).values()))
    else:
        names = [SINGLE] if (folder / SINGLE).is_file() else []
    missing = [name for name in names if not (folder / name).is_file()]
    if names and not missing:
        return [folder / name for name in names]
    if missing:
        raise CheckpointError(
            f"{folder}: {INDEX} names {listed(missing)}, which isn't there; download the folder again"
        )
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder}: it holds adapters alone (adapter_config.json); write the folder of their base model"
        )
    there = [path.name for path in sorted(folder.iterdir()) if path.suffix in (".bin", ".pt", ".pth", ".safetensors")]
    raise CheckpointError(
        f"{folder}: neither {SINGLE} nor {INDEX}; there are {listed(there) or 'no weights'}; write the folder that"
        " save_pretrained makes"
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: no JSON: {error}; download the folder again") from error
    return content if isinstance(content, dict) else {}


def open_files(files: Sequence[Path], stack: ExitStack) -> dict[str, Stored]:
    """Return the name of each tensor in files -> its place; the files stay open until the stack is closed.

    Raises:
        CheckpointError: a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Stored] = {}
    for path in files:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise CheckpointError(f"{path}: damaged or cut off ({error}); download the file again") from error
        for name in file.keys():  # noqa: SIM118  # not a mapping
            mapped = file.get_tensor(name)
            tensors[name] = Stored(mapped.shape, mapped.dtype, partial(file.get_tensor, name), path)
    return tensors


def _with_experts(module: nn.Module, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors with those of a mixture's experts as one, where the module has one parameter of three dimensions.

    Folders of transformers have ``experts.0.gate_proj.weight`` and so on, and its modules ``experts.gate_up_proj``.
    """
    result = dict(tensors)
    for name, p in module.named_parameters():
        prefix, _, last = name.rpartition(".")
        if name in tensors or p.ndim != 3:
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        names = [[f"{prefix}.{index}.{part}.weight" for part in parts] for index in range(len(p))]
        if not all(each in tensors for row in names for each in row):
            continue
        rows = [[tensors[each] for each in row] for row in names]
        if all((sum(t.shape[0] for t in row), *row[0].shape[1:]) == p.shape[1:] for row in rows):
            for each in (each for row in names for each in row):
                del result[each]
            result[name] = Stored(p.shape, rows[0][0].dtype, partial(_stacked, p.shape, rows), rows[0][0].file)
    return result


def _stacked(shape: torch.Size, rows: Sequence[Sequence[Stored]]) -> Tensor:
    whole = torch.empty(shape, dtype=rows[0][0].dtype)
    for expert, row in zip(whole, rows, strict=True):
        torch.cat([stored.read() for stored in row], out=expert)
    return whole


def _matched(module: nn.Module, tensors: Mapping[str, Stored], folder: Path) -> dict[int, str]:
    """Return id of parameter -> name of its tensor; tied parameters need only one."""
    names: dict[int, list[str]] = {}
    parameters = {id(p): p for p in module.parameters()}
    for name, p in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    stored = {key: name for key, each in names.items() for name in reversed(each) if name in tensors}
    own = dict(module.named_parameters(remove_duplicate=False))
    buffers = [name for name in module.state_dict() if name not in own]
    others = [name for name in tensors if name not in own and name not in buffers]
    missing = [each[0] for key, each in names.items() if key not in stored]
    if missing := [*missing, *(name for name in buffers if name not in tensors)]:
        raise CheckpointError(
            f"{folder}: no tensor for {listed(missing)}; there are {listed(others) or 'no others'} that the module"
            " lacks: write the build function of this folder's architecture"
        )
    if others:
        warnings.warn(
            f"{folder}: the module lacks {listed(others)}, which are left out; if it should have them, build it from"
            " this folder's config",
            stacklevel=3,
        )
    for key, name in stored.items():
        shape = tensors[name].shape
        if shape != parameters[key].shape:
            raise CheckpointError(
                f"{folder}: {name} is {tuple(shape)}, and {tuple(parameters[key].shape)} in the module; build it from"
                " this folder's config"
            )
    return stored


# --- the cache ---


def _cache_folder(folder: Path, files: Sequence[Path]) -> str:
    """Return the name of the cache of a folder, which changes with its files' names, sizes, times and ends."""
    key = hashlib.sha256(LAYOUT)
    for path in files:
        status = path.stat()
        key.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
        with path.open("rb") as file:
            key.update(file.read(SAMPLE))
            file.seek(-min(SAMPLE, status.st_size), os.SEEK_END)
            key.update(file.read())
    return f"{folder.name}-{key.hexdigest()[:16]}"


def _quantized(name: str, stored: Stored, format: str, folder: Path) -> QuantizedWeight:
    """Return a quantized weight, mapped from its file in the cache; write that file if it is missing or damaged."""
    if stored.dtype not in FLOATS:
        raise CheckpointError(
            f"{name} is {stored.dtype}, and so quantized already; write the folder of the 16-bit model"
        )
    if format == HOST:
        return on_host(stored.read(), torch.device("cpu"))
    path = folder / f"{name}.{format}.pt"
    read = partial(torch.load, path, map_location="cpu", mmap=True, weights_only=True)
    try:
        parts = read()
    except (RuntimeError, OSError):
        try:
            with whole_file(path) as new, new.open("wb") as file:
                torch.save(dict(quantized(stored.read(), format).state_dict()), file)
            _free_heap()
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"{path}: the quantized weights can't be written ({error}); write cache=<a folder with room>"
            ) from error
        parts = read()
    return QuantizedWeight(stored.shape, stored.dtype, **parts)


def _free_heap() -> None:
    """Return freed memory to the system: glibc would keep that of all weights' temporaries."""
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _assign(module: nn.Module, tensors: Mapping[str, Stored], stored: Mapping[int, str], without: set[int]) -> None:
    """Give each parameter its mapped tensor, and load buffers; parameters in ``without`` are left as they are."""
    new: dict[int, nn.Parameter] = {}
    for name, part in module.named_modules():
        for key, p in part._parameters.items():
            if p is None or (id(p) in without):
                continue
            if id(p) not in new:
                new[id(p)] = nn.Parameter(tensors[stored[id(p)]].read(), requires_grad=False)
            part._parameters[key] = new[id(p)]
        for key, buffer in part._buffers.items():
            full = f"{name}.{key}" if name else key
            if buffer is not None and key not in part._non_persistent_buffers_set and full in tensors:
                part._buffers[key] = tensors[full].read().clone()  # which training may change
