"""An adapter alone, in the layout of peft, which peft, transformers, vLLM and llama.cpp load onto its base."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_solo.errors import NothingToDoError
from lightning_solo.export.trained_models import TrainedModel
from lightning_solo.nn.adaptation import AdapterConfig, adapter_parameters, base_tensors, imported, whole_parameters
from lightning_solo.nn.adapted import plain_modules

PREFIX = "base_model.model."
TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
}
"""End of a class of transformers -> peft's task type."""
BASE_CONFIG = "base_config.json"
"""File with a classifier's configuration. As ``config.json`` it would make transformers take the folder for a model."""


def write_adapter(trained: TrainedModel, folder: Path, dtype: torch.dtype | None) -> list[str]:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; return lines about them.

    PiSSA has moved a part of each weight into its factors, which others have not: its adapter is written as one of LoRA
    of twice the rank, the trained factors less those at the start.

    Raises:
        NothingToDoError: there is no adapter.
    """
    from safetensors.torch import save_file

    config = trained.adapter
    if config is None:
        raise NothingToDoError("the weights themselves were trained, without an adapter; write --format hf")
    tensors = adapter_tensors(trained, config)
    stored = {f"{PREFIX}{key}": (p if dtype is None else p.to(dtype)).contiguous() for key, p in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    names = [name for name, _ in plain_modules(trained.model)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, about settings that are meant
        peft_config(trained, config, names).save_pretrained(folder)
    lines = list(trained.notes)
    if is_classifier(trained.model):
        trained.model.config.to_json_file(folder / BASE_CONFIG)
        lines.append(
            f"labels: {', '.join(trained.model.config.id2label.values())}; give config=AutoConfig.from_pretrained("
            f"'FOLDER/{BASE_CONFIG}') to from_pretrained"
        )
    if trained.formats:
        kinds = " and ".join(sorted(set(trained.formats.values())))
        lines.append(
            f"the adapter was trained on weights in {kinds}, and answers somewhat differently on the 16-bit base; load"
            " the base in the same format, or write --format hf, which adds it to the dequantized weights"
        )
    return lines


def is_classifier(model: Any) -> bool:
    """Return whether a model is a classifier, so that its configuration names labels."""
    return type(model).__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))


def adapter_tensors(trained: TrainedModel, config: AdapterConfig) -> dict[str, Tensor]:
    """Return the weights by their keys, as peft names them."""
    model = trained.model
    tensors = {_key(key): p.detach() for key, p in adapter_parameters(model, config.name).items()}
    if config.method == "pissa":
        for key, first in trained.first_factors(config).items():
            name = _key(key)
            is_a = name.endswith("lora_A.weight")
            tensors[name] = torch.cat([tensors[name], first.detach() if is_a else -first.detach()], 0 if is_a else 1)
    whole = {id(p) for p in whole_parameters(model, config.modules_to_save).values()}
    copies = {key: p.detach().clone() for key, p in base_tensors(model).items() if id(p) in whole}  # also of tied ones
    return tensors | copies


def _key(key: str) -> str:
    """Return an adapter's key without its name.

    Those of DoRA end in ``weight``: peft itself leaves that out, and then transformers doesn't find them.

    >>> _key("up.lora_A.default.weight"), _key("up.lora_magnitude_vector.default.weight"), _key("up.ia3_l.default")
    ('up.lora_A.weight', 'up.lora_magnitude_vector.weight', 'up.ia3_l')
    """
    *parts, _ = key.removesuffix(".weight").split(".")
    return ".".join(parts) + (".weight" if key.endswith(".weight") else "")


def peft_config(trained: TrainedModel, config: AdapterConfig, names: Collection[str]) -> Any:
    """Return peft's configuration of an adapter."""
    peft, model = imported("peft"), trained.model
    task = next((task for end, task in TASKS.items() if type(model).__name__.endswith(end)), None)
    whole = {id(p) for p in whole_parameters(model, config.modules_to_save).values()}
    tied = {key.rpartition(".")[0] for key, p in base_tensors(model).items() if id(p) in whole}
    inside = {name for name in tied if any(name.startswith(f"{each}.") for each in config.modules_to_save)}
    options: dict[str, Any] = {
        "base_model_name_or_path": None if trained.folder is None else str(trained.folder.resolve()),
        "inference_mode": True,
        "task_type": task,
        "target_modules": _shortest(config.layers, names),
        "modules_to_save": sorted({*config.modules_to_save, *tied} - inside) or None,
    }
    parts = dict(plain_modules(model))
    conv = [type(parts[name]).__name__ == "Conv1D" for name in config.layers]
    if config.method == "ia3":
        feed_forward = _shortest(config.feed_forward, config.layers)
        if not set(feed_forward) <= set(options["target_modules"]):  # as peft wants it
            feed_forward, options["target_modules"] = list(config.feed_forward), list(config.layers)
        return peft.IA3Config(feedforward_modules=feed_forward, fan_in_fan_out=all(conv), **options)
    twice = 2 if config.method == "pissa" else 1
    return peft.LoraConfig(
        r=twice * config.r,
        lora_alpha=twice * config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.method == "rslora",
        use_dora=config.method == "dora",
        fan_in_fan_out=bool(conv) and all(conv),
        trainable_token_indices={name: list(rows) for name, rows in config.tokens.items()} or None,
        **options,
    )


def _shortest(chosen: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the last parts of names where they match exactly these, as peft matches; else the names.

    >>> _shortest(["h.0.up", "h.1.up"], ["h.0", "h.0.up", "h.1.up"]), _shortest(["h.0.up"], ["h.0.up", "h.1.up"])
    (['up'], ['h.0.up'])
    """
    chosen = list(chosen)
    ends = sorted({name.rpartition(".")[2] for name in chosen})
    matched = {name for name in names if name.rpartition(".")[2] in ends}
    return ends if matched == set(chosen) else chosen
