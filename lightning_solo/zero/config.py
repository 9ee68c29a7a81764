"""DeepSpeed's configuration: our defaults merged with the user's, with contradictions refused."""

from __future__ import annotations

import copy
import difflib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_solo.errors import ConflictError, PresetError

# Key of the configuration -> the argument of the Trainer or part of the module to write instead
ELSEWHERE = {
    "train_batch_size": "the batch size of your loader and accumulate_grad_batches",
    "train_micro_batch_size_per_gpu": "the batch size of your loader",
    "gradient_accumulation_steps": "accumulate_grad_batches=<N>",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "fp16": "precision=16-mixed",
    "bf16": "precision=bf16-mixed",
    "optimizer": "the optimizer of your module's configure_optimizers",
    "scheduler": "the scheduler of your module's configure_optimizers",
    "activation_checkpointing": "+callback=activation_checkpointing",
    "zero_allow_untested_optimizer": "nothing (any optimizer is allowed), or strategy.host_optimizer=...",
    "zero_force_ds_cpu_optimizer": "strategy.host_optimizer=deepspeed",
}
INSTEAD = "take the preset compact_host"
BUCKET_ELEMENTS = 50_000_000


def zero_config(
    stage: int = 2,
    *,
    offload_parameters: bool = False,
    nvme_path: str | None = None,
    pin_memory: bool = True,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration; the strategy adds accumulation, clipping and precision when a run starts."""
    place: dict[str, Any] = {"device": "cpu", "pin_memory": pin_memory}
    if nvme_path is not None:
        place = {"device": "nvme", "pin_memory": pin_memory, "nvme_path": nvme_path}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": dict(place),
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        # It would replace torch.nn.functional.linear for good. linear_saves_the_parameter does so during a run.
        "memory_efficient_linear": False,
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = BUCKET_ELEMENTS
        if offload_parameters:
            zero["offload_param"] = dict(place)
        if offload_parameters and nvme_path is not None:
            # Otherwise weights that are used again within 1e9 elements stay in the few buffers.
            zero["stage3_max_reuse_distance"] = 0
    else:
        zero["allgather_bucket_size"] = BUCKET_ELEMENTS
    return {
        # For DeepSpeed's throughput log only. Lightning's guess fails for loaders without a batch sampler.
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        # Otherwise only DeepSpeed's CPU optimizers are accepted. Lightning has no argument for it.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def merge(ours: Mapping[str, Any], given: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return our configuration, updated with the user's; a value ``"auto"`` keeps ours.

    Args:
        ours: from :func:`zero_config`.
        given: a mapping, or the path of a JSON file.

    Raises:
        ConflictError: a key contradicts an argument of the Trainer or the strategy, or makes DeepSpeed train
            incorrectly.
        PresetError: the file is missing or holds no JSON mapping, or a section is misspelt, which DeepSpeed ignores.
    """
    merged = copy.deepcopy(dict(ours))
    known = {**ours, **ELSEWHERE}
    for key, value in _read(given).items():
        if not isinstance(key, str):
            raise PresetError(
                f"zero_offload.config: the key {key!r} is no name of a section; write strings, as in JSON"
            )
        if key not in known and (close := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
            raise PresetError(f"zero_offload.config.{key}: DeepSpeed has no such section; did you mean {close[0]!r}?")
        if key in ELSEWHERE and value != "auto" and not _is_empty(value):
            raise ConflictError(f"zero_offload.config.{key}={value!r}: write {ELSEWHERE[key]} instead")
        if key not in ELSEWHERE:
            _merge_into(merged, key, value, "zero_offload.config")
    if message := trains_wrong(merged["zero_optimization"]):
        raise ConflictError(message)
    return merged


def trains_wrong(zero: Mapping[str, Any]) -> str | None:
    """Return a message if an option of ``zero_optimization`` breaks training in DeepSpeed 0.19.8, else None."""
    option, offload = "zero_offload.config.zero_optimization", zero.get("offload_optimizer")
    offload = offload if isinstance(offload, Mapping) else {}
    if (ratio := offload.get("ratio", 1)) not in (1, "auto"):
        return (
            f"{option}.offload_optimizer.ratio={ratio}: the rest is stepped on the device by a second AdamW, which"
            " learning-rate schedules don't reach and whose states no checkpoint has; allowed is 1, all on the host:"
            " leave ratio out"
        )
    if zero.get("zenflow") not in (None, "auto"):
        return (
            f"{option}.zenflow: DeepSpeed's ZenFlow trains from transposed weights, and applies most of each update"
            f" late; leave zenflow out, or {INSTEAD}"
        )
    if offload.get("super_offload") not in (None, False, "auto"):
        return (
            f"{option}.offload_optimizer.super_offload=True: SuperOffload skips parameters that got no gradient, and"
            f" its optimizer states are in another process, which no checkpoint has; leave super_offload out, or"
            f" {INSTEAD}"
        )
    return None


def _is_empty(value: object) -> bool:
    """Return whether a section is null, switched off, or holds only ``"auto"``."""
    if value is None:
        return True
    if isinstance(value, Mapping):
        return value.get("enabled") is False or all(item == "auto" for item in value.values())
    return False


def _merge_into(merged: dict[str, Any], key: str, value: Any, option: str) -> None:
    option = f"{option}.{key}"
    if value == "auto" or (key == "offload_param" and key not in merged and _offloads_nothing(value)):
        return
    if key == "offload_param" and key not in merged:
        raise ConflictError(
            f"{option}={value!r}: write offload_parameters=True, and stage=3, in zero_offload's arguments"
        )
    if isinstance(merged.get(key), dict) and not isinstance(value, Mapping):
        raise ConflictError(
            f"{option}={value!r}: it is a section that zero_offload needs; write a mapping of what to change in it, or"
            " leave it out"
        )
    if isinstance(value, Mapping):
        below = merged.setdefault(key, {})
        if isinstance(below, dict):
            for name, item in value.items():
                _merge_into(below, name, item, option)
            return
    if _is_argument(option) and merged.get(key) != value:
        raise ConflictError(
            f"{option}={value!r}, but the strategy's own arguments make it {merged.get(key)!r}; write one of them: "
            "stage=, offload_parameters=, nvme_path= and pin_memory= are arguments of zero_offload"
        )
    merged[key] = copy.deepcopy(value)


def _offloads_nothing(section: object) -> bool:
    """Return whether an offloading section offloads nothing."""
    return section is None or (
        isinstance(section, Mapping)
        and section.get("device") in (None, "none", "auto")
        and not (set(section) - {"device"})
    )


def _is_argument(option: str) -> bool:
    names = ("stage", "device", "nvme_path", "pin_memory")
    return option.startswith("zero_offload.config.zero_optimization.") and option.rpartition(".")[2] in names


def _read(given: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    if given is None or isinstance(given, Mapping):
        return given or {}
    if not isinstance(given, str | Path):
        raise PresetError(
            f"zero_offload.config={given!r} is a {type(given).__name__}; write a mapping, or the path of a JSON file"
        )
    try:
        section = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PresetError(
            f"zero_offload.config={given!r}: {error}; write the path of a JSON file, or a mapping"
        ) from None
    if not isinstance(section, Mapping):
        raise PresetError(f"zero_offload.config={given!r}: holds a {type(section).__name__}; write a mapping into it")
    return section


def check_zero_section(config: Mapping[str, Any]) -> None:
    """Validate the ZeRO section by DeepSpeed's own model, which refuses unknown keys and wrong types.

    Raises:
        PresetError: a key or a type is wrong.
    """
    from lightning_solo.zero.deepspeed_internals import zero_section_type  # imports torch, which plans do without

    pydantic = importlib.import_module("pydantic")
    try:
        zero_section_type()(**copy.deepcopy(config["zero_optimization"]))
    except pydantic.ValidationError as error:
        refused = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}, {e['input']!r}" for e in error.errors())
        raise PresetError(
            f"zero_offload.config.zero_optimization: DeepSpeed refuses {refused}; its keys are listed at"
            " https://www.deepspeed.ai/docs/config-json/"
        ) from None
