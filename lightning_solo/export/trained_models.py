"""A model of Hugging Face's as it was trained, as a copy on the host, from a module or a checkpoint."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lightning_solo.atomic_files import read_json
from lightning_solo.data.tokenizers import add_tokens, chat_template_of, new_tokens_of, tokenizer_of
from lightning_solo.errors import CapabilityError, CheckpointError, ConflictError, NothingToDoError, listed
from lightning_solo.export.pruned_config import smaller_config
from lightning_solo.export.pruned_structure import RECORD as PRUNED
from lightning_solo.export.pruned_structure import structure_of
from lightning_solo.export.sources import checkpoint_of, read
from lightning_solo.export.weights import source_of, widest_weights
from lightning_solo.machine import is_installed
from lightning_solo.nn.adaptation import (
    AdapterConfig,
    adapter_configs,
    adapter_modules,
    adapter_names,
    adapter_parameters,
    base_tensors,
    insert,
    plain_key,
    whole_parameters,
)
from lightning_solo.nn.adapted import plain_modules
from lightning_solo.nn.adapter_weights import (
    RECORD,
    base_record,
    load_adapter_weights,
    refuse_other_base,
    require_modules,
    trained_keys,
)
from lightning_solo.nn.embedding_rows import add_rows
from lightning_solo.nn.quantized import quantized, quantized_weights_of, with_plain_weights

ARCHITECTURE = "architecture"
"""Key of a checkpoint with class and configuration of the model, where those aren't the folder's."""
INSTEAD = "for any module write lightning-solo export RUN --format weights (in Python solo.export_weights)"


def architecture_of(model: Any) -> dict[str, Any]:
    """Return class and configuration of a model of transformers, as plain data."""
    return {"class": type(model).__name__, "config": json.loads(model.config.to_json_string(use_diff=False))}


class Words(NamedTuple):
    """The tokenizer of a model: a folder's, with new tokens and another chat template."""

    folder: Path | None
    new_tokens: Sequence[str] = ()
    chat_template: str | None = None


@dataclass
class TrainedModel:
    """A model of Hugging Face's on the host, with its adapter beside the weights."""

    model: Any  # the model, in evaluation mode
    adapter: AdapterConfig | None = None  # what its adapter is, by the names of ``model``; None without one
    folder: Path | None = None  # of the base; None where it is unknown
    # name of a weight that training had in 4 or 8 bits -> "nf4" or "int8"
    formats: Mapping[str, str] = field(default_factory=dict)
    # name of a weight that may be rounded in ``model`` -> that of the base's folder
    originals: Mapping[str, Tensor] = field(default_factory=dict)
    # type of the weights in the base's folder, where ``model`` may have another; None where it hasn't
    dtype: torch.dtype | None = None
    words: Words = field(default_factory=lambda: Words(None))  # what its tokenizer is
    notes: list[str] = field(default_factory=list)  # lines for the user
    has_originals: bool = False  # whether all weights before rounding are known

    def use_originals(self) -> None:
        """Put the weights of the base's folder in the place of rounded ones."""
        tensors = base_tensors(self.model)
        for name, weight in self.originals.items():
            tensors[name].data = weight.to(tensors[name].dtype)

    def first_factors(self, config: AdapterConfig) -> dict[str, nn.Parameter]:
        """Return the weights of an adapter of PiSSA as they were when training began.

        Raises:
            ConflictError: they would be computed from the base's folder, which is unknown.
        """
        if self.folder is None:
            raise ConflictError(
                "PiSSA starts from the base's weights, and their folder is unknown; write base_folder=<that folder>"
            )
        whole = whole_parameters(self.model, config.modules_to_save)
        base = _loaded(self.folder, type(self.model), None, others=whole)
        insert(base, replace(config, tokens={}))  # rows have no factors, and the folder may lack them
        return adapter_parameters(base, config.name)

    def insert(self, config: AdapterConfig, weights: Mapping[str, Tensor]) -> None:
        """Put an adapter into the model, with its trained weights."""
        insert(self.model, config)
        tensors = base_tensors(self.model)
        for name in (*config.tokens, *config.modules_to_save):  # whose numbers are overwritten in place
            for key in tensors:
                if key.rpartition(".")[0] == name or key.startswith(f"{name}."):
                    tensors[key].data = tensors[key].data.clone()
        load_adapter_weights(
            self.model, config, {key: weights[key] for key in trained_keys(self.model, config, weights)}
        )
        self.adapter = config


def trained_model(
    source: nn.Module | Path,
    part: str | None = None,
    folder: Path | None = None,
    dtype: str | None = None,
    *,
    unaveraged: bool = False,
) -> TrainedModel:
    """Return the model of a module, which stays as it is, or of a checkpoint.

    Args:
        source: the module, or the path of a checkpoint or a run.
        part: qualified name of the model in the module; None for its only one.
        folder: of the base; by default the module's ``path``.
        dtype: of the export, one of `DTYPES`, or None. Weights are widened to fp32 here, and never narrowed.
        unaveraged: whether the trained weights are taken where there is an average of them.

    Raises:
        NothingToDoError: the module has no model of Hugging Face's.
        CheckpointError: the file has none, its base isn't where it was, or it is another one.
        ConflictError: there are several models, or adapters of something else.
    """
    if not is_installed("transformers"):
        raise CapabilityError("folders of Hugging Face need transformers; write pip install transformers safetensors")
    widest = torch.float32 if dtype == "fp32" else None
    trained = (
        _of_module(source, part, folder, widest, unaveraged=unaveraged)
        if isinstance(source, nn.Module)
        else _of_checkpoint(source, folder, widest, unaveraged=unaveraged)
    )
    trained.model.eval()
    return trained


# --- from a module ---


def find_model(module: nn.Module, name: str | None) -> tuple[str, Any]:
    """Return (qualified name, model) of the model of Hugging Face's in a module.

    Raises:
        NothingToDoError: there is none, or none of this name.
        ConflictError: there are several, and no name.
    """
    from transformers import PreTrainedModel

    models: dict[str, Any] = {}
    for path, part in plain_modules(module):
        is_inside = any(path.startswith(f"{outer}." if outer else "") for outer in models)
        if isinstance(part, PreTrainedModel) and not is_inside:
            models[path] = part
    if not models:
        raise NothingToDoError(f"{type(module).__name__} has no model of transformers; {INSTEAD}")
    if name is None and len(models) == 1:
        return next(iter(models.items()))
    if name not in models:
        raise ConflictError(
            f"model={name!r}: {type(module).__name__} has the models {', '.join(models)}; write"
            f" model={next(iter(models))!r}"
        )
    return name, models[name]


def _of_module(
    module: nn.Module, part: str | None, folder: Path | None, widest: torch.dtype | None, *, unaveraged: bool
) -> TrainedModel:
    name, live = find_model(module, part)
    config = _active_adapter(live)
    folder = folder or next(filter(_is_model, (getattr(module, "path", None), live.name_or_path)), None)
    folder = None if folder is None else Path(folder)
    prefix = f"{name}." if name else ""
    weights, formats = _weights_of(module, widest, unaveraged=unaveraged)
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    plain = {plain_key(key): value for key, value in own.items()}
    model = _with_weights(live, plain, type(module).__name__, widest, structure_of(module))
    if live.can_generate():
        model.generation_config = copy.deepcopy(live.generation_config)
    saved = (read_json(folder / "config.json") or {}) if folder is not None else {}
    data = getattr(getattr(module, "_trainer", None), "datamodule", None)
    trained = TrainedModel(
        model,
        folder=folder,
        formats={plain_key(key).removeprefix(prefix): form for key, form in formats.items()},
        dtype=getattr(torch, str(saved.get("dtype") or saved.get("torch_dtype")), live.dtype),
        words=_words(folder, getattr(module, "new_tokens", None), vars(data) if data is not None else {}),
        notes=_left_out(weights, prefix),
    )
    if config is None:
        return trained
    # PiSSA has changed the weights when it was put in, and would do so again
    trained.insert(replace(config, method="lora") if config.method == "pissa" else config, own)
    trained.adapter = config
    return trained


def _weights_of(
    module: nn.Module, widest: torch.dtype | None, *, unaveraged: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return (all weights on the host, dequantized and joined; name of a quantized one -> format)."""
    quantized_weights = quantized_weights_of(module)
    weights = with_plain_weights(module.state_dict(), quantized_weights)
    weights = {key: value.detach().cpu() for key, value in weights.items()}
    weights |= widest_weights(source_of(module, live=unaveraged))  # which under adapters are those alone
    if widest is not None:  # not rounded to the type in which training computed
        weights |= {key: each.dequantized(widest).cpu() for key, each in quantized_weights.items() if each.rounding}
    return weights, {key: each.rounding for key, each in quantized_weights.items() if each.rounding}


def _is_model(path: object) -> bool:
    return isinstance(path, str | Path) and (Path(path) / "config.json").is_file()


def _active_adapter(live: nn.Module) -> AdapterConfig | None:
    """Return the active adapter of a model, by its names."""
    configs, names = adapter_configs(live), adapter_names(live)
    if foreign := [name for name in names if name not in configs]:
        raise ConflictError(
            f"the adapter {foreign[0]!r} was put in by something else; merge it there, for example by peft's"
            " merge_and_unload(), and export then"
        )
    layers: list[Any] = [layer for _, layer in adapter_modules(live)]
    active = (layer.active_adapters for layer in layers if hasattr(layer, "active_adapters"))
    chosen = next((each[0] for each in active if each), next(iter(names), None))
    if chosen is None:
        return None
    config = configs[chosen]
    prefix = _prefix({name for name, _ in plain_modules(live)}, _names(config))
    return _without_prefix(config, prefix or "")


# --- from a checkpoint ---


def _of_checkpoint(source: Path, folder: Path | None, widest: torch.dtype | None, *, unaveraged: bool) -> TrainedModel:
    path = checkpoint_of(source)
    checkpoint = {} if path.is_dir() else read(path, inert=True)
    options = checkpoint.get("hyper_parameters", {})
    folder = folder or _base_of(path, options)
    words = _words(folder, options.get("new_tokens"), checkpoint.get("datamodule_hyper_parameters", {}))
    weights = widest_weights(source_of(path, live=unaveraged))
    model = _loaded(folder, None, widest, checkpoint.get(ARCHITECTURE), weights)
    if words.new_tokens:
        with torch.no_grad():
            add_rows(model, add_tokens(tokenizer_of(folder), words.new_tokens))
    record = checkpoint.get(RECORD)
    if record is None:
        prefix = _prefix(model.state_dict().keys(), weights)
        if prefix is None:
            raise CheckpointError(f"{path} has no weights of {type(model).__name__}, the model in {folder}; {INSTEAD}")
        own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
        _enlarge(model, own)
        trained = TrainedModel(model, folder=folder, dtype=model.dtype, words=words, notes=_left_out(weights, prefix))
        trained.model = _with_weights(model, own, str(path), widest, checkpoint.get(PRUNED))
        return trained
    config = AdapterConfig(**record["config"])
    modules = {name for name, _ in model.named_modules()}
    prefix = _prefix(modules, _names(config))
    if prefix is None:
        raise CheckpointError(
            f"{path} has adapters of layers that {type(model).__name__}, the model in {folder}, lacks"
        )
    notes = _left_out([*_names(config), *weights], prefix)
    config = _without_prefix(config, prefix)
    own = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
    require_modules(model, config)
    ours = base_record(model, config) or {}
    base = {key.removeprefix(prefix): each for key, each in (record["base"] or {}).items() if key.startswith(prefix)}
    base = {key: each for key, each in base.items() if key in ours}  # the module may have had other parts
    refuse_other_base({key: ours[key] for key in base}, base)
    trained = TrainedModel(model, folder=folder, words=words, notes=notes, has_originals=True)
    trained.insert(config, own)
    _round(trained, base, options.get("dtype"))
    return trained


def _round(trained: TrainedModel, base: Mapping[str, Any], loaded_as: str | None) -> None:
    """Round weights that were in 4 or 8 bits in training, and keep the originals.

    Args:
        trained: with the adapter.
        base: what identifies the adapter's base, from `base_record`.
        loaded_as: type of the weights before they were rounded, if it wasn't that of the files.
    """
    tensors = base_tensors(trained.model)
    trained.formats = {name: each["format"] for name, each in base.items() if each["format"] is not None}
    trained.originals = {name: tensors[name].data for name in trained.formats}
    for name, form in trained.formats.items():
        weight = tensors[name]
        first = weight.data.to(getattr(torch, str(loaded_as), weight.dtype))
        weight.data = quantized(first, form).dequantized(weight.dtype)


def _base_of(path: Path, options: Mapping[str, Any]) -> Path:
    """Return the folder of the base by a checkpoint's hyperparameters, or by the configuration of its run."""
    config = path.parent.parent / "config.yaml"
    saved = OmegaConf.load(config) if config.is_file() else OmegaConf.create()
    folder = options.get("path") or OmegaConf.select(saved, "model.path", throw_on_resolution_failure=False)
    if not isinstance(folder, str | Path):
        raise CheckpointError(
            f"{path} doesn't name the folder of a Hugging Face model (hyper_parameters['path']); if it was trained from"
            f" one, write --base-folder FOLDER, or in Python solo.export_pretrained(module, folder); {INSTEAD}"
        )
    return Path(folder)


def _words(folder: Path | None, new_tokens: Any, data: Mapping[str, Any]) -> Words:
    """Return the tokenizer that training used: its data's, or the base's."""
    own = data.get("tokenizer")
    if isinstance(own, str | Path) and Path(own).is_dir():
        folder = Path(own)
    return Words(folder, new_tokens_of(new_tokens), chat_template_of(data.get("chat_template") or None))


def pretrained(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the model of a folder in evaluation mode, in a type or in that of its files.

    Raises:
        CheckpointError: a tensor is missing, or its weights are in 4 or 8 bits.
        CapabilityError: transformers is missing.
    """
    if not is_installed("transformers"):
        raise CapabilityError(f"{folder}: its model needs transformers; write pip install transformers safetensors")
    return _loaded(folder, None, dtype).eval()


def _loaded(
    folder: Path,
    cls: Any,
    widest: torch.dtype | None,
    architecture: Mapping[str, Any] | None = None,
    others: Collection[str] = (),
) -> Any:
    """Return the model of a folder, whose weights stay mapped from its files unless they are widened.

    Args:
        folder: of the base.
        cls: its class; None for that of ``architecture`` or of the folder.
        widest: type of the weights; None for those in the files.
        architecture: as `architecture_of` returned it in training.
        others: names of weights that the folder needn't have, or may have of another shape.
    """
    import transformers

    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no config.json of a base model there; write --base-folder FOLDER (in Python base_folder=...),"
            " where it is now"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if getattr(config, "quantization_config", None):
            raise CheckpointError(
                f"{folder}: its weights are in 4 or 8 bits already; write the folder of the 16-bit model"
            )
        name = (config.architectures or [""])[0]
        if architecture is not None and cls is None:
            name = architecture["class"]
            saved = type(config).from_dict(dict(architecture["config"]))
            if (rows := getattr(config.get_text_config(), "vocab_size", None)) is not None:
                saved.get_text_config().vocab_size = rows  # those for new tokens are added later
            config = saved
        cls = cls or getattr(transformers, name, transformers.AutoModelForCausalLM)
        return _from_pretrained(cls, folder, folder, others, config=config, dtype=widest or "auto")
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder} can't be loaded: {str(error).strip().partition(chr(10))[0]}") from error


def _names(config: AdapterConfig) -> list[str]:
    return [*config.layers, *config.modules_to_save, *config.tokens]


def _without_prefix(config: AdapterConfig, prefix: str) -> AdapterConfig:
    """Return an adapter's configuration without the names that have no such prefix, and the others without it."""

    def cut(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    return replace(
        config,
        layers=cut(config.layers),
        feed_forward=cut(config.feed_forward),
        modules_to_save=cut(config.modules_to_save),
        tokens={name.removeprefix(prefix): rows for name, rows in config.tokens.items() if name.startswith(prefix)},
    )


def _prefix(own: Collection[str], names: Iterable[str]) -> str | None:
    """Return what precedes a model's own names in those of a module: the most frequent prefix, or None.

    >>> _prefix({"lm_head.weight", "model.norm.weight"}, ["net.lm_head.weight", "net.model.norm.weight"])
    'net.'
    """
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        places = (at for at in range(len(parts)) if ".".join(parts[at:]) in own)
        if (at := next(places, None)) is not None:
            found["".join(f"{part}." for part in parts[:at])] += 1
    return found.most_common(1)[0][0] if found else None


def _left_out(names: Iterable[str], prefix: str) -> list[str]:
    left = list(dict.fromkeys(name for name in names if not name.startswith(prefix)))
    return [f"left out, since they aren't of {prefix.rstrip('.')}: {listed(left)}"] if left else []


# --- weights into a model ---


def _enlarge(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Give a model as many embeddings as the weights have, so that its configuration says so."""
    table = model.get_input_embeddings()
    name = next(name for name, part in model.named_modules() if part is table)
    rows = len(weights.get(f"{name}.weight", table.weight))
    if rows != len(table.weight):
        model.resize_token_embeddings(rows, mean_resizing=False)


def _with_weights(
    model: Any,
    weights: Mapping[str, Tensor],
    source: str,
    widest: torch.dtype | None,
    structure: Mapping[str, Any] | None,
) -> Any:
    """Return a model like another with these weights and buffers, in fp32 if one of them is, so that it can compute.

    It is smaller if channels or heads were removed. An output head of which the weight differs from the embedding's is
    untied, also in the configuration.
    """
    if any(weights[name].dtype is torch.float32 for name, _ in model.named_parameters() if name in weights):
        widest = torch.float32
    kernel = "sdpa" if model._supports_sdpa else "eager"  # others need a GPU
    options: Any = {"attn_implementation": kernel, "state_dict": untied(weights), "dtype": widest or model.dtype}
    config = copy.deepcopy(model.config) if structure is None else smaller_config(model, weights, structure)
    result = _from_pretrained(type(model), None, source, config=config, **options)
    head = result.get_output_embeddings()
    if head is not None and head.weight is not result.get_input_embeddings().weight:
        for config in (result.config, result.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False
    return result


def untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of which no two share memory, such as those that are tied in training alone."""
    first: dict[int, str] = {}
    return {
        name: weight if first.setdefault(weight.data_ptr(), name) == name else weight.clone()
        for name, weight in weights.items()
    }


def _from_pretrained(
    cls: Any, folder: Path | None, source: object, others: Collection[str] = (), **options: Any
) -> Any:
    """Return a model by transformers' ``from_pretrained``.

    Args:
        cls: its class.
        folder: of its weights; None if the options have them.
        source: of the weights, for messages.
        others: names of weights that may be missing, or may have another shape.
        options: of ``from_pretrained``.
    """
    with quiet():
        model, report = cls.from_pretrained(
            folder, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    missing = {*report["missing_keys"], *(each[0] for each in report["mismatched_keys"])}
    if missing := {key for key in missing if not any(f".{name}".endswith(f".{key}") for name in others)}:
        raise CheckpointError(f"{source} lacks {listed(sorted(missing))}, or has it in another shape")
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and reports of transformers."""
    from transformers.utils import logging as reports

    logging: Any = reports
    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
