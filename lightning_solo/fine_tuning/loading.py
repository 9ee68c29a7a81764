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
            f"model.path={path}: no such folder{_where(folder)}; download the model first: hf download {name}"
            f" --local-dir {to}"
        )
    return folder.absolute()


def _where(path: Path) -> str:
    return "" if path.is_absolute() else f" in {Path.cwd()}"


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
            f" ({str(error).strip().partition(chr(10))[0]}); download the folder again, or install a version of"
            " transformers that knows this model"
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
        folder: folder with safetensors.
        config: the folder's configuration.
        dtype: one of `DTYPES`.
        quantized: format of frozen linear weights ("nf4", "int8"), which are cached as mapped files; None for none.
        unused: patterns of names of tensors in the files that the model may lack.
        new_head: whether parameters outside the base model, and its pooler, may be missing or of another shape. They
            are initialised, named in a line, and in the model's ``newly_initialised``.

    Raises:
        CheckpointError: a file is missing or damaged; a parameter has no tensor, or one of another shape; or a tensor
            has no parameter.
    """
    import transformers

    if dtype not in DTYPES:
        raise PresetError(f"model.dtype={dtype!r}: write one of {', '.join(DTYPES)}")
    cls = getattr(transformers, auto)
    build = partial(_built, cls, config, dtype)
    if without_numbers():
        return build().train()
    if quantized is not None:
        model: Any = load_quantized(build, folder, format=quantized)
        if model.can_generate() and (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        return model.train()
    with ExitStack() as stack:
        tensors = open_files(weight_files(folder), stack)
        stack.enter_context(quiet())
        options = {"config": config, "dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            model, info = cls.from_pretrained(folder, local_files_only=True, use_safetensors=True, **options)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{folder}: the model can't be loaded ({reason})") from error
    model.newly_initialised = []
    if new_head:
        _leave_out_head(model, folder.name, info)
    _check(model, folder, info, {name: stored.file.name for name, stored in tensors.items()}, unused)
    return model.train()


def _leave_out_head(model: Any, name: str, info: dict[str, Any]) -> None:
    """Remove the names of a head from those that are missing, superfluous or of another shape; print them."""
    names = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    head = {
        key
        for key in names | {*info["unexpected_keys"]}
        if not key.startswith(f"{model.base_model_prefix}.") or ".pooler." in key
    }
    new, left = sorted(head & names), sorted(head & {*info["unexpected_keys"]})
    model.newly_initialised = [p for key, p in model.named_parameters() if key in new]
    if head:
        rank_zero_info(f"{name}: initialised: {', '.join(new) or 'nothing'}; unused: {', '.join(left) or 'nothing'}")
    info["missing_keys"], info["unexpected_keys"] = info["missing_keys"] - head, info["unexpected_keys"] - head
    info["mismatched_keys"] = [entry for entry in info["mismatched_keys"] if entry[0] not in head]


def _check(model: Any, folder: Path, info: dict[str, Any], files: dict[str, str], unused: Sequence[str]) -> None:
    """Refuse tensors of another shape, missing ones and superfluous ones; ``files`` are the files of the names."""
    if wrong := [
        f"{name} in {files.get(name, 'a file')} is {tuple(stored)}, and {tuple(own)} in the model"
        for name, stored, own in sorted(info["mismatched_keys"])
    ]:
        raise CheckpointError(f"{folder}: {listed(wrong)}; download the folder again, or correct its config.json")
    if missing := sorted(info["missing_keys"]):
        places = listed(sorted({*files.values()}))
        raise CheckpointError(f"{folder}: no tensor for {listed(missing)} in {places}; download the folder again")
    extra = sorted(name for name in info["unexpected_keys"] if not any(fnmatch(name, each) for each in unused))
    if extra:
        named = listed([f"{name} ({files.get(name, 'a file')})" for name in extra])
        raise CheckpointError(
            f"{folder}: {type(model).__name__} has no place for {named}; correct config.json, or write"
            f" model.unused=[{extra[0]}] to leave it out"
        )


def _built(auto: Any, config: Any, dtype: str) -> nn.Module:
    own = getattr(config, "dtype", None) or torch.float32
    model: nn.Module = auto.from_config(config, dtype=own if dtype == "auto" else getattr(torch, dtype))
    return model
