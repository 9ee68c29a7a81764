"""A folder's model of transformers, with every weight from its files, which stay mapped."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_solo.errors import CapabilityError, CheckpointError, PresetError, listed
from lightning_solo.export.trained_models import quiet
from lightning_solo.machine import is_installed
from lightning_solo.nn.quantized_loading import load_quantized, open_files, weight_files

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Types of loaded weights; auto is the folder's own."""


def folder_of(path: str | Path) -> Path:
    """Return the absolute path of a folder.

    Raises:
        CheckpointError: there is none; the message has the command that downloads it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        is_name = len(folder.parts) == 2 and folder.parts[0] not in ("/", "..")
        name, to = (path, f"{folder.name}, and write model.path={folder.name}") if is_name else ("<owner>/<name>", path)
        raise CheckpointError(
            f"model.path={path}: no such folder; download the model first: hf download {name} --local-dir {to}"
        )
    return folder.absolute()


def config_of(folder: Path) -> Any:
    """Return transformers' configuration of a folder.

    Raises:
        CapabilityError: transformers is missing.
        CheckpointError: it has no configuration or an unknown one, or holds adapters or quantized weights.
    """
    if not is_installed("transformers"):
        raise CapabilityError('model: needs transformers; write pip install "lightning-solo[fine_tuning]"')
    import transformers

    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"model.path={folder}: it holds an adapter (adapter_config.json); write the folder of its base model"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"model.path={folder}: no config.json; write the folder that save_pretrained or hf download makes"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} can't use it"
            f" ({str(error).strip().partition(chr(10))[0]}); download the folder again, or install the transformers"
            " that knows this model"
        ) from error
    if method := getattr(config, "quantization_config", None):
        name = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", method)
        raise CheckpointError(
            f"model.path={folder}: its weights are quantized already (quantization_config: {name}); write the folder of"
            " the 16-bit model, and solo=qlora to quantize it here"
        )
    return config


def without_numbers() -> bool:
    """Return whether parameters that are created now have no numbers, as in a plan."""
    weight = nn.Linear(1, 1).weight
    return weight.is_meta or isinstance(weight, FakeTensor)


def load(
    auto: str,
    folder: Path,
    config: Any,
    *,
    dtype: str = "auto",
    quantized: str | None = None,
    unused: Sequence[str] = (),
    new_head: bool = False,
) -> Any:
    """Return a folder's model in training mode.

    Weights stay mapped from the files, and take memory only as they are written. Buffers that aren't in the files are
    computed, and tied weights are tied.

    Args:
        auto: class of transformers that builds the model, such as "AutoModelForCausalLM".
        folder: of safetensors.
        config: the folder's configuration.
        dtype: one of `DTYPES`.
        quantized: format of frozen linear weights ("nf4", "int8"), which are cached as mapped files; None for none.
        unused: patterns of names of tensors in the files that the model may lack.
        new_head: whether parameters outside the base model, and its pooler, may be missing or of another shape, and are
            initialised then; and whether such tensors of the files are left out. They are named in a line, and the
            model's ``newly_initialised`` has them.

    Raises:
        CheckpointError: a file is missing or damaged; a parameter has no tensor, or one of another shape; or a tensor
            has no parameter.
    """
    import transformers

    if dtype not in DTYPES:
        raise PresetError(f"model.dtype={dtype!r}: write one of {', '.join(DTYPES)}")
    build = partial(_built, getattr(transformers, auto), config, dtype)
    if without_numbers():
        return build().train()
    if quantized is not None:
        model: Any = load_quantized(build, folder, format=quantized)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        return model.train()
    files = weight_files(folder)
    with ExitStack() as stack:
        tensors = open_files(files, stack)
        stack.enter_context(quiet())
        try:
            model, info = getattr(transformers, auto).from_pretrained(
                folder,
                config=config,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
                use_safetensors=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{folder}: the model can't be loaded ({reason})") from error
    place = {name: stored.file.name for name, stored in tensors.items()}
    missing, strange = info["missing_keys"], info["unexpected_keys"]
    mismatched = {name: shapes for name, *shapes in info["mismatched_keys"]}
    model.newly_initialised = []
    if new_head:
        base = f"{model.base_model_prefix}."
        apart = {n for n in (*missing, *strange, *mismatched) if not n.startswith(base) or ".pooler." in n}
        new, left = apart & {*missing, *mismatched}, apart & {*strange}
        model.newly_initialised = [p for name, p in model.named_parameters() if name in new]
        if apart:
            without = f"; of the files is left out: {', '.join(sorted(left))}" if left else ""
            rank_zero_info(f"{folder.name}: initialised is {', '.join(sorted(new)) or 'nothing'}{without}")
        missing, strange = missing - apart, strange - apart
        mismatched = {name: shapes for name, shapes in mismatched.items() if name not in apart}
    if mismatched:
        wrong = [
            f"{name} in {place.get(name, 'a file')} is {tuple(stored)}, and {tuple(own)} in the model"
            for name, (stored, own) in sorted(mismatched.items())
        ]
        raise CheckpointError(f"{folder}: {listed(wrong)}; download the folder again, or correct its config.json")
    if missing:
        raise CheckpointError(
            f"{folder}: no tensor for {listed(sorted(missing))} in {listed([file.name for file in files])}; download"
            " the folder again"
        )
    if strange := {name for name in strange if not any(fnmatch(name, pattern) for pattern in unused)}:
        named = listed([f"{name} ({place.get(name, 'a file')})" for name in sorted(strange)])
        raise CheckpointError(
            f"{folder}: {type(model).__name__} has no place for {named}; correct config.json, or write"
            f" model.unused=[{min(strange)}] if it is to be left out"
        )
    return model.train()


def _built(auto: Any, config: Any, dtype: str) -> nn.Module:
    own = getattr(config, "dtype", None) or torch.float32
    model: nn.Module = auto.from_config(config, dtype=own if dtype == "auto" else getattr(torch, dtype))
    return model
