"""Teachers: from a checkpoint of ours, a folder of Hugging Face's, a module, or the student as it begins."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, ConflictError, listed
from lightning_solo.export.formats import START
from lightning_solo.export.sources import checkpoint_of, read
from lightning_solo.export.trained_models import pretrained, trained_model
from lightning_solo.export.weights import source_of, widest_weights
from lightning_solo.nn.teacher import AUTO, OPTION, Teacher

REMEDY = f"write {OPTION}.teacher=<a run's folder, a checkpoint, a folder of Hugging Face's, or start>"


def make_teacher(
    source: str | nn.Module,
    student: nn.Module,
    device: torch.device,
    dtype: str,
    start: Mapping[str, Tensor] | None = None,
    *,
    streamed: bool = False,
    layers: Iterable[str] = (),
) -> Teacher:
    """Return a teacher of a student.

    Args:
        source: a module; the path of a run, a checkpoint or a folder of Hugging Face's; or `START` for a copy.
        student: the module of the fit, before it is changed.
        device: where the teacher is moved.
        dtype: one of `TEACHER_DTYPES`.
        start: weights of the copy; None for the student's.
        streamed: whether its blocks stay on the host; see `Teacher`.
        layers: names of those whose outputs are kept.

    Raises:
        ConflictError: it is the student, or shares weights with it.
        CheckpointError: it can't be loaded.
    """
    if isinstance(source, nn.Module):
        module, has_parts = of_module(source, student), type(source) is type(student)
    elif source == START:
        module, has_parts = copy.deepcopy(student), True
        if start is not None:
            module.load_state_dict(start)
    else:
        module, has_parts = of_path(source, student, type_of(dtype))
    return Teacher(module, device, type_of(dtype), has_parts=has_parts, streamed=streamed, layers=layers)


def of_module(module: nn.Module, student: nn.Module) -> nn.Module:
    """Return a module that may be a teacher.

    Raises:
        ConflictError: it is the student, or shares weights with it.
    """
    own = {id(p) for p in student.parameters()}
    if module is student or any(id(p) in own for p in module.parameters()):
        raise ConflictError(
            f"{OPTION}: the teacher is the student itself, or shares weights with it; write a copy,"
            f" Distillation.from_module(copy.deepcopy(module)), or {OPTION}.teacher=start"
        )
    return module


def of_path(path: str, student: nn.Module, dtype: torch.dtype | None) -> tuple[nn.Module, bool]:
    """Return the module of a folder of Hugging Face's, a checkpoint or a run, and whether its parts are the student's.

    A checkpoint's module has the student's class and the checkpoint's hyperparameters.

    Raises:
        CheckpointError: there is no such file or folder, it is an adapter's, has no weights, or weights of another
            class of modules.
    """
    place = Path(path).expanduser()
    if not place.exists():
        raise CheckpointError(f"{OPTION}.teacher={path}: no such file or folder; {REMEDY}")
    if (place / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{OPTION}.teacher={path}: it holds an adapter (adapter_config.json); write the run that trained it, or the"
            " folder that lightning-solo export RUN --format hf writes, with the adapter merged"
        )
    if (place / "config.json").is_file():
        if not any(place.glob("*.safetensors")) and not any(place.glob("*.bin")):
            raise CheckpointError(f"{OPTION}.teacher={path}: no *.safetensors beside config.json; download the weights")
        return pretrained(place, dtype), False
    checkpoint = checkpoint_of(place)
    options = {} if checkpoint.is_dir() else read(checkpoint, inert=True).get("hyper_parameters", {})
    if "path" in options and hasattr(student, "config"):  # of a model of transformers from a folder
        return trained_model(checkpoint).model, False
    return _of_class(student, dict(options), checkpoint), True


def _of_class(student: nn.Module, options: dict[str, Any], checkpoint: Path) -> nn.Module:
    """Return a module of the student's class with a checkpoint's hyperparameters and weights."""
    cls = type(student)
    weights = widest_weights(source_of(checkpoint))
    if not weights:
        raise CheckpointError(f"{OPTION}.teacher={checkpoint}: it has no weights; {REMEDY}")
    if options:
        known = inspect.signature(cls.__init__).parameters
        try:
            module: Any = cls(**{name: value for name, value in options.items() if name in known})
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"{OPTION}.teacher={checkpoint}: its hyperparameters don't make a {cls.__name__} ({error}); in Python"
                " write Distillation.from_module(teacher)"
            ) from error
        module.configure_model()
    else:  # of a module that saves none: the weights of the student's own architecture
        module = copy.deepcopy(student)
    own = module.state_dict()
    wrong = [name for name in own.keys() | weights.keys() if _shape(own, name) != _shape(weights, name)]
    if wrong:
        raise CheckpointError(
            f"{OPTION}.teacher={checkpoint}: its weights aren't of a {cls.__name__} as its hyperparameters make it, in"
            f" {listed(sorted(wrong))}; call self.save_hyperparameters() in {cls.__name__}, or in Python write"
            " Distillation.from_module(teacher)"
        )
    module.load_state_dict(weights)
    return module  # type: ignore[no-any-return]


def _shape(weights: dict[str, Any], name: str) -> Any:
    return getattr(weights.get(name), "shape", None)


def type_of(dtype: str) -> torch.dtype | None:
    """Return the type that a setting names; None for auto."""
    return None if dtype == AUTO else getattr(torch, dtype)
