"""Folders that transformers and peft load: the merged model, or the adapter alone."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.attributes import replaced
from lightning_solo.checkpoint.folders import whole_folder
from lightning_solo.errors import (
    BudgetError,
    CapabilityError,
    CheckpointError,
    ConflictError,
    PresetError,
    SoloError,
    listed,
    nearest,
)
from lightning_solo.export.adapter_folder import is_classifier, write_adapter
from lightning_solo.export.few_bits import check_bits, exact_on_cpus, rounded
from lightning_solo.export.formats import BASES, DTYPES
from lightning_solo.export.generation_files import write_generation_files, write_tokenizer
from lightning_solo.export.gguf import find_llama_cpp, write_gguf
from lightning_solo.export.sources import checkpoint_of, refuse_inside_checkpoint
from lightning_solo.export.trained_models import TrainedModel, Words, quiet, trained_model
from lightning_solo.export.weights import TYPES
from lightning_solo.machine import is_installed
from lightning_solo.nn.adaptation import imported
from lightning_solo.nn.adapter_merging import merge, merge_summary
from lightning_solo.units import format_bytes

EXPORTED = ("config.json", "adapter_config.json", "model*.gguf")
"""Files of which each exported folder has one: others aren't replaced."""
NOT_COMPARED = "logits: not compared, since the model takes more than tokens"
ROWS, TOKENS = 4, 16
"""Size of the batch on which logits are compared."""
REASON = 300
"""Characters of an error of peft that are shown."""
NOTICED = 0.05
"""Relative difference of logits above which peft has put an adapter elsewhere; rounding to bf16 stays below."""


def export_pretrained(
    source: nn.Module | str | Path,
    output: str | Path | None = None,
    format: str = "hf",
    *,
    dtype: str | None = None,
    base: str = "dequantized",
    base_folder: str | Path | None = None,
    model: str | None = None,
    tokenizer: str | Path | None = None,
    shard_size: str = "5GB",
    llama_cpp: str | Path | None = None,
    quantize: str | None = None,
    bits: int | None = None,
    live: bool = False,
    overwrite: bool = False,
) -> list[str]:
    """Write a model of Hugging Face's as a folder that transformers loads without this package; return lines about it.

    Its logits on random tokens are compared with those of the trained model, and the difference is in the lines.

    Args:
        source: a module that has the model as any attribute, and stays as it is; or a checkpoint or run of one.
        output: the folder to write; by default beside the checkpoint.
        format: "hf": the model, with its adapter merged; "adapter": the adapter alone, in the layout of peft;
            "gguf": the merged model, converted by the user's llama.cpp.
        dtype: "fp32", "bf16" or "fp16"; by default the types of the base's folder, and of an adapter as it was trained.
        base: to which weights an adapter is added, where training had them in 4 or 8 bits: to the "dequantized" ones,
            as in training, or of a checkpoint to the "original" ones of the base's folder, which give other answers.
        base_folder: of the base model; by default the ``path`` of the module.
        model: qualified name of the model in the module, if there are several.
        tokenizer: folder of the tokenizer, if tokens were added; by default the base's.
        shard_size: largest size of a file.
        llama_cpp: folder of llama.cpp, for "gguf"; by default ``$LLAMA_CPP``, else the path of programs.
        quantize: type to which llama.cpp's own program quantizes, such as "q4_k_m".
        bits: 4 or 8, of "hf": linear weights are rounded, and transformers loads them by bitsandbytes.
        live: whether the trained weights themselves are written where there is an average of them.
        overwrite: whether an earlier export is replaced.

    Raises:
        NothingToDoError: the module has no model of Hugging Face's; or no adapter, of which the format is "adapter".
        CheckpointError: the base is missing or another one, or the folder can't be written; then nothing is left.
        BudgetError: the disk has too little space.
        CapabilityError: transformers, bitsandbytes or llama.cpp is missing, llama.cpp fails, or peft can't load the
            adapter.
        PresetError: an unknown argument.
    """
    choices: dict[str, tuple[str | None, tuple[str, ...]]] = {
        "format": (format, ("hf", "adapter", "gguf")),
        "dtype": (dtype, DTYPES),
        "base": (base, BASES),
    }
    for option, (value, allowed) in choices.items():
        if value not in allowed and (option, value) != ("dtype", None):
            raise PresetError(f"{option}={value!r}{nearest(str(value), allowed)}write {' or '.join(allowed)}")
    check_bits(format, bits)
    folder = new_folder(source, output, format if bits is None else f"{format}-{bits}bit", overwrite=overwrite)
    programs = find_llama_cpp(None if llama_cpp is None else Path(llama_cpp), quantize) if format == "gguf" else None
    _refuse_inside(folder, [base_folder, tokenizer, *([] if isinstance(source, nn.Module) else [source])])
    trained = trained_model(
        source if isinstance(source, nn.Module) else Path(source),
        model,
        None if base_folder is None else Path(base_folder),
        dtype,
        unaveraged=live,
    )
    _refuse_inside(folder, [trained.folder])
    if tokenizer is not None:
        trained.words = Words(Path(tokenizer))
    with written_folder(folder) as new:
        if format == "adapter":
            has_own_words = trained.words.new_tokens or trained.words.chat_template or tokenizer is not None
            lines = write_adapter(trained, new, None if dtype is None else TYPES[dtype])
            lines += write_tokenizer(trained.words, new) if has_own_words else []
            lines += _compared_by_peft(trained, new)
        elif programs is None:
            lines = write_model(trained, new, dtype, base, shard_size, bits)
        else:
            (model_folder := new / folder.name).mkdir()  # which llama.cpp takes as the model's name
            lines = write_model(trained, model_folder, dtype, base, shard_size)
            lines += write_gguf(programs, model_folder, new, dtype, quantize)
            shutil.rmtree(model_folder)
    return [f"{format}: {folder}, {format_bytes(sum(file.stat().st_size for file in folder.iterdir()))}", *lines]


# --- the merged model ---


def write_model(
    trained: TrainedModel, folder: Path, dtype: str | None, base: str, shard_size: str, bits: int | None = None
) -> list[str]:
    """Write the model with its adapter merged, and everything that generation needs; return lines about it."""
    model, lines = trained.model, list(trained.notes)
    before = logits(model)
    if base == "original":
        if trained.adapter is None:
            raise ConflictError("base='original' without an adapter: the weights themselves were trained; leave it out")
        if not trained.has_originals:
            raise ConflictError(
                "base='original' of a module, which has the rounded weights alone; export its checkpoint"
            )
        trained.use_originals()
    if trained.adapter is not None:
        lines.append(merge_summary(merge(model)))
    for p in model.parameters():
        if p.is_floating_point():
            p.data = p.data.to(trained.dtype or p.dtype if dtype is None else TYPES[dtype])
    options: dict[str, Any] = {}
    if bits is not None:
        merged = logits(model)
        with quiet():
            model, line = rounded(model, bits)
        lines.append(line)
        options["device_map"] = {"": "cpu"}  # where the others were computed
    require_space(folder, sum(p.nbytes for p in model.parameters()))
    with quiet():
        _save(model, folder, shard_size)
    lines += write_tokenizer(trained.words, folder)
    lines += write_generation_files(model, trained.folder, folder, "." if bits is None else None)
    with quiet():
        loaded = type(model).from_pretrained(folder, dtype="auto", local_files_only=True, **options)
        with exact_on_cpus(loaded):
            after = logits(loaded)
    if bits is not None:
        lines.append(difference(merged, after, "the merged model before it was rounded"))
        if not trained.formats:
            return lines
    return [*lines, difference(before, after) + _how(trained, base)]


def _save(model: Any, folder: Path, shard_size: str) -> None:
    with ExitStack() as stack:
        if model.can_generate():  # written later, since transformers refuses some of those that it reads
            stack.enter_context(replaced(model, "generation_config", type(model.generation_config)()))
        model.save_pretrained(folder, max_shard_size=shard_size)


@torch.no_grad()
def logits(model: Any) -> Tensor | None:
    """Return the outputs for random tokens, in fp32; None for a model that doesn't take tokens alone."""
    table: Any = model.get_input_embeddings()
    if model.main_input_name != "input_ids" or not isinstance(getattr(table, "weight", None), Tensor):
        return None
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or TOKENS
    shape = (ROWS, min(TOKENS, positions))
    ids = torch.randint(len(table.weight), shape, generator=torch.Generator().manual_seed(0))
    decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    output: Tensor = model.eval()(input_ids=ids, **decoder)[0]
    return output.float()


def _largest(before: Tensor, after: Tensor) -> float:
    return float((after - before).abs().max() / before.abs().max().clamp(min=1e-30))


def difference(before: Tensor | None, after: Tensor | None, of: str = "the trained model") -> str:
    """Return a line about the logits of another and of the exported model.

    Raises:
        CheckpointError: those of the exported model aren't finite.
    """
    if before is None or after is None:
        return NOT_COMPARED
    if bool(before.isfinite().all()) and not bool(after.isfinite().all()):
        raise CheckpointError("the exported weights overflow in 16 bits; write --dtype bf16 or --dtype fp32")
    largest = _largest(before, after)
    same = float((after.argmax(-1) == before.argmax(-1)).float().mean())
    return (
        f"logits of {before.shape[0]} rows: largest difference {largest:.1e} of the largest logit of {of};"
        f" {same:.0%} of the likeliest tokens are the same"
    )


def _how(trained: TrainedModel, base: str) -> str:
    """Return in brackets how training rounded the weights; empty if it didn't round them."""
    if not trained.formats:
        return ""
    kinds = " and ".join(sorted(set(trained.formats.values())))
    better = "; base=dequantized answers as in training" if base == "original" else ""
    return f" (it was trained on weights in {kinds}; the adapter is added to the {base} ones{better})"


def _compared_by_peft(trained: TrainedModel, folder: Path) -> list[str]:
    """Return a line about the logits of the base with the adapter, here and as peft loads it."""
    rows = len(trained.model.get_input_embeddings().weight)
    needed = f"the base needs rows for new tokens before the adapter: base.resize_token_embeddings({rows})"
    lines = [needed] if trained.words.new_tokens else []
    if trained.folder is None:
        return [*lines, "logits: not compared, since the base's folder is unknown"]
    trained.use_originals()
    before = logits(trained.model)
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about its own calls of transformers
        options = {"config": trained.model.config} if is_classifier(trained.model) else {}
        base = type(trained.model).from_pretrained(
            trained.folder, dtype="auto", local_files_only=True, ignore_mismatched_sizes=True, **options
        )
        if len(base.get_input_embeddings().weight) == rows:
            lines = []
        elif lines:
            base.resize_token_embeddings(rows, mean_resizing=False)
        try:
            loaded = imported("peft").PeftModel.from_pretrained(base, folder)
        except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
            reason = textwrap.shorten(str(error), REASON, placeholder=" ...")
            raise CapabilityError(
                f"peft {imported('peft').__version__} can't load this adapter ({reason}), so nothing was written; write"
                " --format hf"
            ) from error
        after = logits(loaded.get_base_model())
    if before is None or after is None:
        return [*lines, NOT_COMPARED]
    largest = _largest(before, after)
    line = (
        f"logits of the weights in {trained.folder} with the adapter, here and as peft {imported('peft').__version__}"
        f" loads it: largest difference {largest:.1e} of the largest logit"
    )
    wrong = largest > NOTICED and (trained.originals or not trained.formats)
    return [*lines, line + ("; this peft loads it otherwise than it was trained: write --format hf" if wrong else "")]


# --- folders ---


def new_folder(source: Any, output: str | Path | None, format: str, *, overwrite: bool) -> Path:
    """Return the folder to write, by default beside the checkpoint.

    Raises:
        CheckpointError: it exists, and is no earlier export or ``overwrite`` is False; or it is inside a checkpoint.
        PresetError: a module has no checkpoint beside which a folder could be.
    """
    if output is None:
        if isinstance(source, nn.Module):
            raise PresetError("output: write the folder for the export, as output='folder'")
        checkpoint = checkpoint_of(Path(source))
        output = checkpoint.with_name(f"{checkpoint.stem}-{format}")
    folder = Path(output)
    refuse_inside_checkpoint(folder)
    if folder.exists():
        ours = folder.is_dir() and (not any(folder.iterdir()) or any(any(folder.glob(name)) for name in EXPORTED))
        if not ours or folder.is_symlink():
            raise CheckpointError(f"{folder} exists, and is no exported folder; write --output FOLDER, a new one")
        if any(folder.iterdir()) and not overwrite:
            raise CheckpointError(f"{folder} exists; write --force (in Python overwrite=True) to replace it")
    return folder


def _refuse_inside(folder: Path, kept: list[Any]) -> None:
    """Refuse to replace a folder that has, or is, a folder that is read."""
    target = folder.resolve()
    for each in kept:
        if each is not None and Path(each).resolve().is_relative_to(target):
            raise CheckpointError(f"{folder} has {each}, which is read; write --output FOLDER, another one")


@contextmanager
def written_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``folder`` at a clean end.

    Raises:
        CheckpointError: it can't be written; nothing is left, and an earlier folder is unchanged.
    """
    try:
        with whole_folder(folder, hashes=False) as new:
            (probe := new / ".mode").touch()
            mode = probe.stat().st_mode
            probe.unlink()
            yield new
            for file in new.rglob("*.safetensors"):
                file.chmod(mode)  # safetensors lets nobody else read, such as Ollama's own user
    except SoloError:
        raise
    except Exception as error:  # OSError, or of the writing library, where the disk is full
        if type(error).__name__ != "SafetensorError" and not isinstance(error, OSError):
            raise
        raise CheckpointError(f"{folder} can't be written: {getattr(error, 'strerror', None) or error}") from error


def require_space(folder: Path, needed: int) -> None:
    """Refuse to write more bytes than the disk has free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BudgetError(
            f"{folder.parent}: the export takes {format_bytes(needed)}, and the disk has {format_bytes(free)} free;"
            f" free {format_bytes(needed - free)}, or write --output FOLDER on another disk",
            needed,
            free,
        )


_SHARED = re.compile(r"^from (lightning_solo\.nn\.\w+) import .*\n", re.MULTILINE)


def write_with_loader(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], loader: ModuleType
) -> int:
    """Write ``model.safetensors``, ``config.json`` and a module's source as ``load.py``; return the bytes of all.

    In place of its imports from this package are the sources of these modules.

    Raises:
        CheckpointError: the folder can't be written; then nothing is left.
        BudgetError: the disk has too little space.
    """
    from safetensors.torch import save_file

    with written_folder(folder) as new:
        require_space(new, sum(value.nbytes for value in tensors.values()))
        save_file(dict(tensors), new / "model.safetensors", metadata={"format": "pt"})
        (new / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        future = "from __future__ import annotations\n"
        shared = _SHARED.sub(
            lambda line: inspect.getsource(sys.modules[line[1]]).replace(future, ""), inspect.getsource(loader)
        )
        (new / "load.py").write_text(shared, encoding="utf-8")
    return sum(file.stat().st_size for file in folder.iterdir())


def require_tensors(folder: Path, weights: Mapping[str, Any]) -> None:
    """Refuse weights that safetensors can't store.

    Raises:
        CheckpointError: an entry isn't a tensor.
        CapabilityError: the package safetensors is missing.
    """
    if not is_installed("safetensors"):
        raise CapabilityError(
            f"{folder}: the package safetensors is not installed; write pip install lightning-solo[safetensors]"
        )
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"{folder}: safetensors stores tensors alone, not {listed(others)}")
