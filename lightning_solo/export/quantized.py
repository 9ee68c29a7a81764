"""Folders with weights of 2 to 8 bits, which a module loads by a file of plain torch that is written with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError, PresetError, listed, with_reasons
from lightning_solo.export.pretrained import new_folder, require_tensors, write_with_loader
from lightning_solo.export.pruned_structure import loaded_structure, structure_of
from lightning_solo.export.weights import source_of
from lightning_solo.nn import packed_weights
from lightning_solo.nn.blocks import counted
from lightning_solo.nn.fake_quantization import (
    ACTIVATIONS,
    BITS,
    INSIDE,
    LINEAR,
    Layers,
    Rounding,
    chosen_layers,
    levels_and_scales,
    unfused_attention,
)
from lightning_solo.nn.named_weights import kind_of
from lightning_solo.optim.checkpoint_masters import place
from lightning_solo.units import format_bytes

STATIC = "int8_static"
"""Activations that are rounded by a scale per layer, from calibration batches."""
_INPUTS = {
    "unchanged": "",
    "int8": ", inputs of linear layers with 8 bits",
    STATIC: ", inputs of linear layers with 8 bits and fixed scales",
}
CALIBRATE = "calibrate=lambda module: trainer.validate(module, data)"


def export_quantized(
    module: nn.Module,
    output: str | Path,
    bits: int | str = 4,
    group_size: int = 32,
    activations: str = "unchanged",
    layers: str | Sequence[str] = LINEAR,
    *,
    calibrate: Callable[[nn.Module], Any] | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write a module with weights of few bits as a folder; return lines about it. The module stays as it is.

    The folder has ``model.safetensors``, ``config.json`` and ``load.py``, which needs torch and safetensors alone:
    ``load(MyModule(), "folder")`` returns the module with quantized layers. A module that was trained with
    fake quantization gives the numbers that it was trained with, if the arguments are the same; of any other it is
    quantization after training. Factors in place of a linear layer are rounded each.

    Args:
        module: a LightningModule during or after its fit, or any other module.
        output: the folder to write.
        bits: of a weight, 2 to 8, or "fp8" for numbers of torch.float8_e4m3fn.
        group_size: inputs of a layer whose weights share a scale; 0 for a scale per row.
        activations: "int8" rounds each token of a layer's input to 8 bits; "int8_static" rounds all inputs of a layer
            by one scale, the largest magnitude in calibration / 127; else "unchanged".
        layers: "linear" for all linear layers but output heads, attention of torch and experts; or patterns of names.
        calibrate: for "int8_static", runs the module on some batches, as ``lambda module: trainer.validate(module,
            data)``. A layer that it doesn't reach stays as it is.
        overwrite: whether an earlier export is replaced.

    Raises:
        NothingToDoError: no layer can be quantized, or a pattern matches none.
        PresetError: an unknown argument, or the size of a group doesn't divide a layer's inputs.
        ConflictError: a weight has few bits already, isn't finite, or is inside an adapter; or inputs of a layer in
            calibration aren't finite.
        CheckpointError: the folder exists or can't be written; then nothing is left.
        BudgetError: the disk has too little space.
    """
    if not isinstance(module, nn.Module):
        raise PresetError(
            f"solo.export_quantized({str(module)!r}, ...) takes a module; load the weights into one first, or write"
            " lightning-solo export RUN --format quantized"
        )
    is_size = isinstance(group_size, int) and group_size >= 0
    if bits not in BITS or not is_size or activations not in (*ACTIVATIONS, STATIC):
        raise PresetError(
            f"bits={bits!r}, group_size={group_size!r}, activations={activations!r}: write bits={BITS[0]} to 8 or"
            f" 'fp8', group_size=0 or more, and activations={' or '.join(map(repr, (*ACTIVATIONS, STATIC)))}"
        )
    if (calibrate is None) is (activations == STATIC):
        given = "without batches to calibrate by" if calibrate is None else "with calibration, which it doesn't use"
        raise PresetError(
            f"activations={activations!r} {given}; write activations={STATIC!r} with {CALIBRATE}, or"
            " activations='int8' without, which finds scales while it runs"
        )
    if calibrate is not None and not callable(calibrate):
        raise PresetError(
            f"calibrate={type(calibrate).__name__} isn't a function that runs the module on batches; write {CALIBRATE}"
        )
    folder = new_folder(module, output, "quantized", overwrite=overwrite)
    rounding = Rounding(bits, group_size, activations)
    choice = chosen_layers(module, rounding, layers, with_factors=True)
    scales = {} if calibrate is None else _calibrated(module, choice, calibrate)
    source = source_of(module, factors=True)
    weights = dict(source.weights)
    require_tensors(folder, weights)
    before = sum({place(value): value.nbytes for value in weights.values()}.values())
    stored, config = _packed(choice, weights, rounding, scales)
    config |= loaded_structure(structure_of(module))
    if source.factors:
        config["factors"] = {name: each["form"] for name, each in source.factors["layers"].items()}
    after = write_with_loader(folder, stored, config, packed_weights)
    scale = f"in groups of {group_size}" if group_size else "by rows"
    left = with_reasons(choice.left_out, 5)
    return [
        f"quantized: {folder}, {counted(choice.modules)} {'in fp8' if bits == 'fp8' else f'with {bits} bits'} {scale}"
        f"{_INPUTS[activations]};"
        f" {choice.left_share:.0%} of the numbers are as they were{f': {left}' if left else ''}",
        f"bytes: {format_bytes(before)} before, {format_bytes(after)} after",
    ]


def _calibrated(module: nn.Module, choice: Layers, calibrate: Callable[[nn.Module], Any]) -> dict[int, float]:
    """Return id of a linear layer -> scale of its inputs; drop weights from the choice whose layers have none."""
    layers = {name: part for name, part in choice.layers.items() if not isinstance(part, nn.Embedding)}
    scales = input_scales(layers, lambda: calibrate(module))
    if layers and not scales:
        raise PresetError(
            f"activations={STATIC!r}: calibration ran none of {listed(list(layers))} on a number other than zero; give"
            f" it batches, as by {CALIBRATE}, or write activations='int8', which needs none"
        )
    for full, weight in list(choice.weights.items()):
        users = {name.rpartition(".")[0]: part for name, part in weight.layers.items()}
        linear = users.keys() & layers.keys()
        if linear and not any(id(users[name]) in scales for name in linear):
            del choice.weights[full]
            choice.left_out[full] = "no calibration batch reached it"
            choice.left_share += weight.parameter.numel() / sum(p.numel() for p in module.parameters())
            for name in users:
                choice.layers.pop(name, None)
    return scales


def _packed(
    choice: Layers, weights: dict[str, Any], rounding: Rounding, scales: Mapping[int, float]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors to store, each once, and what `packed_weights.load` needs to know."""
    layers: dict[str, dict[str, Any]] = {}
    tied: dict[str, str] = {}
    shared: dict[str, str] = {}
    stored: dict[str, Tensor] = {}
    places: dict[Any, str] = {}
    how = {"bits": rounding.bits, "group_size": rounding.group_size}
    called = {id(part) for part in choice.layers.values() if not isinstance(part, nn.Embedding)}
    for first, each in choice.weights.items():
        names = [first, *(name for name in each.users if name != first)]
        values = [weights.pop(name) for name in names]
        weight = values[0].detach().to("cpu")
        weight = weight.t() if "transposed" in each.kinds else weight
        levels, of_groups = levels_and_scales(weight, rounding.bits, rounding.group_size)
        place_of = [_place(name, each.users[name], layers, tuple(weight.shape), how) for name in names]
        stored[f"{place_of[0]}.codes"] = packed_weights.pack(levels.flatten(0, -2), rounding.bits)
        stored[f"{place_of[0]}.scales"] = of_groups.flatten(0, -2).view(torch.int16)
        for other in place_of[1:]:
            shared[other] = place_of[0]
            tied |= {f"{other}.{key}": f"{place_of[0]}.{key}" for key in ("codes", "scales")}
        for name, at in zip(names, place_of, strict=True):
            if (scale := scales.get(id(each.users[name]))) is not None:
                layers[at]["activations"] = STATIC
                stored[f"{at}.input_scale"] = torch.tensor([scale]).view(torch.int32)
            elif rounding.activations == "int8" and id(each.users[name]) in called:
                layers[at]["activations"] = "int8"
    for name, value in weights.items():
        if (other := places.setdefault(place(value), name)) == name:
            whole = value.untyped_storage().nbytes() == value.nbytes  # else it may be a part of another tensor
            stored[name] = (value if whole else value.clone()).detach().to("cpu").contiguous()
        else:
            tied[name] = other
    return stored, {"format": "lightning-solo quantized 2", "layers": layers, "shared": shared, "tied": tied}


def _place(
    name: str, part: nn.Module, layers: dict[str, dict[str, Any]], shape: tuple[int, ...], how: Mapping[str, Any]
) -> str:
    """Add a parameter to the layers of a configuration; return the name of the module that has its codes."""
    path, _, own = name.rpartition(".")
    if (kind := kind_of(part, own)) in INSIDE:
        layers.setdefault(path, {"kind": "parameters", "shapes": {}, **how})["shapes"][own] = list(shape)
        return f"{path}.packed_weights.{own}".removeprefix(".")
    rows, width = shape
    layers[path] = {"kind": "embedding" if kind == "embedding" else "linear", "rows": rows, "width": width, **how}
    if kind != "embedding":
        layers[path]["bias"] = part.bias is not None
    return path


LARGEST = 127
"""The largest integer to which inputs are rounded."""


def input_scales(layers: Mapping[str, nn.Module], run: Callable[[], Any]) -> dict[int, float]:
    """Return id of a layer -> largest magnitude of its inputs while a function runs the module / 127.

    A layer that isn't called, or with zeros alone, is missing. Inputs may have any number of dimensions.

    Raises:
        ConflictError: inputs of a layer aren't finite.
    """
    largest: dict[int, Tensor] = {}

    def watch(name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else kwargs["input"]).detach()
        if not x.numel():
            return
        magnitude = x.float().abs().amax()
        if not magnitude.isfinite():
            raise ConflictError(
                f"calibration: inputs of {name} aren't finite, and their scale would mean nothing; leave such batches"
                f" out, leave {name} out of layers, or write activations=unchanged"
            )
        largest[id(layer)] = torch.maximum(magnitude, largest.get(id(layer), magnitude))

    with ExitStack() as stack:
        stack.enter_context(unfused_attention())
        stack.enter_context(torch.no_grad())
        for name, layer in layers.items():

            def hook(layer: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                watch(name, layer, args, kwargs)

            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        run()
    return {layer: float(each) / LARGEST for layer, each in largest.items() if float(each) > 0}
