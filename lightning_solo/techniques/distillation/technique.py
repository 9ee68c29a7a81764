"""Distillation: the module also learns a teacher's predictions, from its logits or from stored draws."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.data.soft_labels import SoftLabels
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.export.formats import START
from lightning_solo.export.teachers import make_teacher
from lightning_solo.nn.divergence import divergence, divergence_from_draws
from lightning_solo.nn.features import Features, distance, feature_of, layer_of, width_dim
from lightning_solo.nn.teacher import (
    AUTO,
    OPTION,
    Call,
    Calls,
    Teacher,
    candidates,
    counted_positions,
    labels_of_losses,
    of_one_part,
    of_same_shape,
)
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Checkpoint, Technique
from lightning_solo.techniques.distillation.card import CARD, TEACHER, Settings
from lightning_solo.techniques.distillation.projections import Projections, require_one_optimizer
from lightning_solo.units import format_bytes

PROJECTIONS = "projections"


class Distillation(Technique, Settings):
    """Adds to the loss of ``training_step`` the divergence of the module's logits from a teacher's.

    The loss becomes ``(1 - alpha) * loss + alpha * temperature ** 2 * KL(teacher || student)``, with the mean over the
    positions that the module's own loss counts. With ``features`` the mean distance of these, times ``feature_weight``,
    is added. The teacher is no part of the module: no tensor of it is in a
    checkpoint, an optimizer or an average, except that a checkpoint has the copy of ``teacher=start``, which a resumed
    run needs. Validation doesn't change.

    Raises:
        ConflictError: Two arguments contradict each other.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._module: nn.Module | None = None  # the teacher of `from_module`
        self._teacher: Teacher | None = None
        self._labels: SoftLabels | None = None
        self._calls: Calls | None = None
        self._start: dict[str, Tensor] | None = None  # weights of the copy, from a checkpoint
        self._kept: dict[str, Tensor] | None = None  # weights of the last fit's copy, for a checkpoint after it
        self._plain: nn.Module | None = None  # the module before a checkpoint's weights and adapters
        self._last: ReferenceType[nn.Module] | None = None  # the module of the last fit
        self._projections = Projections()

    @classmethod
    def from_module(cls, module: nn.Module, **settings: Any) -> Distillation:
        """Return the technique with a module as teacher, which is frozen, moved and set to evaluation.

        A module of the student's class is called in the part that ``training_step`` calls; any other one takes the
        inputs of that part.

        Args:
            module: the teacher.
            settings: as in the constructor, without ``teacher`` and ``labels``.

        Raises:
            PresetError: the teacher is no module.
        """
        if not isinstance(module, nn.Module):
            raise PresetError(
                f"Distillation.from_module({module!r}) takes a module; of a path or start write"
                " Distillation(teacher='start')"
            )
        distillation = cls(**settings)
        distillation._module = module
        return distillation

    def checkpoint(self, ctx: Run) -> Checkpoint:
        return _Saved(self, ctx)

    def transform(self, ctx: Run) -> None:
        """Make the teacher, or open the file of its labels."""
        name = type(ctx.module).__name__
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"{OPTION} and {name}.automatic_optimization=False: it changes the loss that training_step returns;"
                f" write automatic_optimization=True, or ~{OPTION} and add"
                " lightning_solo.nn.divergence.divergence(student_logits, teacher_logits) to your loss"
            )
        ctx.undo.callback(self._forget)
        for layer in self.features or ():
            layer_of(ctx.module, layer, "student")
        if self.labels is not None:
            labels = self._labels = SoftLabels(Path(self.labels).expanduser())
            ctx.info(
                f"distillation: {len(labels):,} rows, {labels.positions:,} positions of {labels.origin.draws} draws of"
                f" {labels.origin.name}"
            )
            return
        source = self._module if self._module is not None else self.teacher
        if source is None:
            raise PresetError(f"{OPTION} has no teacher; write {TEACHER}")
        student, self._plain = ctx.module if self._plain is None else self._plain, None
        where = "a module" if self._module is not None else str(self.teacher)
        if self._start is None and self._kept is not None and self._last is not None and self._last() is ctx.module:
            self._start, where = self._kept, "the start of its first fit"  # by now the module has been trained
        self._last = ref(ctx.module)
        layers = (self.features or {}).values()
        teacher = self._teacher = make_teacher(
            source, student, ctx.device, self.dtype, self._start, streamed=self.streamed, layers=layers
        )
        ctx.info(
            f"distillation: the teacher, {where}, takes {format_bytes(teacher.bytes)} ({teacher.dtype}, {ctx.device})"
            + (f", of which {format_bytes(teacher.ring.host_bytes)} stay on the host" if teacher.ring else "")
        )

    def training_step(self, ctx: Run, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step, and the teacher on its inputs; return the loss with the divergence."""
        calls = self._calls or self._hooked(ctx)
        with calls.recording() as recorded:
            with labels_of_losses() as seen:
                output = proceed(*args, **kwargs)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                return output
            batch = args[0] if args else kwargs.get("batch")
            divergences, distances = [], []
            for call in of_one_part(ctx.module, recorded, self.part):
                counted = counted_positions(call, seen, batch)
                divergences.append(self._divergence(call, counted))
                distances.append(
                    [self._distance(ctx, call, counted, *names) for names in (self.features or {}).items()]
                )
        total = self.alpha * self._logged(ctx, "divergence", divergences)
        ctx.module.log("distillation/own_loss", loss.detach())
        if self.alpha < 1:
            total = total + (1 - self.alpha) * loss
        if self.features:
            means = [
                self._logged(ctx, f"features/{name}", each)
                for name, each in zip(self.features, zip(*distances, strict=True), strict=True)
            ]
            total = total + self.feature_weight * torch.stack(means).mean()
        return {**output, "loss": total} if isinstance(output, Mapping) else total

    def _logged(self, ctx: Run, name: str, values: Sequence[Tensor]) -> Tensor:
        """Return the mean of a part of the loss over the student's calls, and log it."""
        mean = torch.stack([*values]).mean()
        ctx.module.log(f"distillation/{name}", mean.detach())
        return mean

    def _distance(self, ctx: Run, call: Call, counted: Tensor | None, name: str, other: str) -> Tensor:
        """Return the distance of a layer's features from those of the teacher's other layer, which has just run."""
        assert self._teacher is not None  # transform comes first
        ours = feature_of(call.outputs, name, "student")
        theirs = feature_of(self._teacher.outputs, other, "teacher")
        if torch.is_grad_enabled() and not ours.requires_grad:
            raise ConflictError(
                f"{OPTION}.features: the output of {name} has no gradient, since the layers up to it are frozen, or run"
                " in a checkpoint of torch with use_reentrant=True; write a layer after them, or use_reentrant=False"
            )
        dim = width_dim(name, ours, theirs)
        return distance(ours, theirs, self.feature_loss, counted, self._projection(ctx, name, ours, theirs, dim), dim)

    def _projection(self, ctx: Run, name: str, ours: Tensor, theirs: Tensor, dim: int) -> Tensor | None:
        """Return the projection between two widths, which the optimizer trains from its first step on."""
        inputs, outputs = ours.shape[dim], theirs.shape[dim]
        if inputs == outputs:
            return None
        optimizer = require_one_optimizer(ctx, f"{name} has width {inputs}, and the teacher's layer {outputs}")
        self._projections.attach(optimizer, ctx.device)
        projection = self._projections.weights.get(name)
        if projection is None:
            like = next(p for group in optimizer.param_groups for p in group["params"])
            projection = self._projections.add(name, inputs, outputs, like)
            ctx.info(f"distillation: trains a projection of {name} from width {inputs} to {outputs}")
        elif projection.shape != (outputs, inputs):
            raise CheckpointError(
                f"{OPTION}.features: the projection of {name} is of widths {tuple(projection.shape)}, and the layers of"
                f" {(outputs, inputs)}; resume with the same teacher and features"
            )
        return projection

    def _divergence(self, call: Call, counted: Tensor | None) -> Tensor:
        if self._labels is not None:
            return self._by_labels(self._labels, call, counted)
        assert self._teacher is not None  # transform comes first
        logits = of_same_shape(call, self._teacher.logits(call))
        return divergence(call.logits, logits, self.temperature, counted)

    def _by_labels(self, labels: SoftLabels, call: Call, counted: Tensor | None) -> Tensor:
        """Return the divergence from a call's rows in the file."""
        words, width = labels.origin.vocabulary, call.logits.shape[-1]
        if words != width:
            raise ConflictError(
                f"{OPTION}.labels={self.labels}: they are of {words} words, and the module's logits have {width}; write"
                " labels of a teacher with the same vocabulary"
            )
        stored = labels.read((call.args, call.kwargs), call.logits.shape[:-1])
        if stored is None:
            raise ConflictError(
                f"{OPTION}.labels={self.labels}: it lacks a row of this batch, so it was written for other data, other"
                " lengths (context, max_length), or fewer batches; write labels for this data by lightning-solo"
                f" soft-labels, or {OPTION}.teacher= where rows change from epoch to epoch"
            )
        drawn, entropies, mask = (None if each is None else each.to(call.logits.device) for each in stored)
        assert drawn is not None
        assert entropies is not None
        if mask is not None:
            counted = mask if counted is None else counted & mask
        return divergence_from_draws(call.logits, drawn, entropies, counted)

    def _hooked(self, ctx: Run) -> Calls:
        """Return the recorder of the parts that may make the logits; they have their final form by the first batch."""
        part = self.part
        if self._labels is not None and part == AUTO:
            part = self._labels.origin.part
            if part not in dict(ctx.module.named_modules()):
                raise ConflictError(
                    f"{OPTION}.labels={self.labels}: they were written for the part {part!r} of another module, and"
                    f" {type(ctx.module).__name__} has none of this name; write {OPTION}.part=<the part that is called"
                    " with the same inputs and returns logits>, or labels for this module"
                )
        features = Features(ctx.module, self.features, "student") if self.features else None
        self._calls = calls = Calls(candidates(ctx.module, part, self._teacher), features)
        ctx.undo.callback(calls.remove)
        return calls

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the copy of ``teacher=start``, also after the fit, and the projections."""
        state = {PROJECTIONS: each} if (each := self._projections.state_dict()) else {}
        if self.teacher != START:
            return state
        copied = self._kept if self._teacher is None else dict(self._teacher.module.state_dict())
        return state if copied is None else {**state, START: copied}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the copy's weights, and the projections."""
        self._start = state_dict.get(START)
        if self._start is not None and self._teacher is not None:  # FSDP loads checkpoints after transform
            self._teacher.module.load_state_dict(self._start)
        self._projections.load_state_dict(state_dict.get(PROJECTIONS, {}), self.features or ())

    def _forget(self) -> None:
        self._projections.detach()
        if self._teacher is not None:
            self._teacher.close()
            if self.teacher == START:
                self._kept = {name: value.cpu() for name, value in self._teacher.module.state_dict().items()}
        self._teacher = self._labels = self._calls = self._start = self._plain = None


class _Saved(Checkpoint):
    """Keeps a copy of the module as it is before a checkpoint's adapters, and projections out of optimizer states."""

    def __init__(self, technique: Distillation, ctx: Run) -> None:
        self._technique, self._ctx = technique, ctx

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        if self._technique.teacher == START and self._technique._teacher is None:
            self._technique._plain = copy.deepcopy(self._ctx.module)
        yield

    def saved_states(self, optimizer: Optimizer, states: dict[str, Any]) -> dict[str, Any]:
        return self._technique._projections.without(states)

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load states without projections, and add these; a run that goes back takes the checkpoint's."""
        technique = self._technique
        technique._projections.detach()
        proceed(checkpoint)
        if state := checkpoint.get("callbacks", {}).get(technique.state_key, {}).get(PROJECTIONS):
            technique._projections.load_state_dict(state, technique.features or ())
            technique._projections.attach(self._ctx.strategy.optimizers[0], self._ctx.device)
