"""Removes channels and heads of a module before or in a fit, and cuts the states of its optimizers alike."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, listed, with_reasons
from lightning_solo.export.pruned_structure import RECORD
from lightning_solo.nn.named_weights import matching
from lightning_solo.nn.pruned_layers import keep_head_width
from lightning_solo.nn.rollback import Rollback, attributes_kept
from lightning_solo.nn.structure import Removal, Structure, remove, tensor_of
from lightning_solo.nn.structure_checks import checked
from lightning_solo.nn.structure_search import find_structures
from lightning_solo.random_states import OwnSources
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.techniques.pruning.card import OPTION, Settings


class Structured:
    """The removal of channels or heads from the module of one run."""

    def __init__(self, settings: Settings, ctx: Run) -> None:
        self._settings = settings
        self._ctx = ctx
        self._amount = settings.amount
        self._indices: dict[str, list[tuple[int, Tensor]]] = {}  # kept ones of parameters, by name

    @property
    def _module(self) -> nn.Module:
        module: nn.Module = self._ctx.module
        return module

    def remove(self, batch: tuple[Any, int] | None = None, amount: float | None = None, *, trial: bool = False) -> None:
        """Remove channels or heads, unless an earlier fit or a checkpoint's did by the same settings.

        Args:
            batch: the batch that is trained next, and its index; by default the first one of the training loader.
            amount: of the schedule at this step; by default that of the settings.
            trial: whether the module stays as it is.

        Raises:
            NothingToDoError: none can be removed, or a pattern of names matches nothing.
            ConflictError: a chosen layer can't become smaller; weights are NaN; manual optimization.
            CheckpointError: an optimizer's state hasn't the shape of its weight; then the module stays.
        """
        ctx, settings, module = self._ctx, self._settings, self._module
        self._amount = settings.amount if amount is None else amount
        refuse_callbacks(OPTION, frozenset({"layers"}), ctx.trainer.callbacks)
        record = getattr(module, RECORD, None)
        ours = _as_record(settings, self._amount)
        if record is not None and ours in record["settings"]:
            return
        if any(p.is_meta for p in module.parameters()):
            raise ConflictError(
                f"{OPTION}.pattern={settings.pattern} and weights that aren't loaded yet; load them before the fit, or"
                f" write {OPTION}.pattern=unstructured"
            )
        for name, p in module.named_parameters():
            if not bool(p.isfinite().all()):
                raise ConflictError(
                    f"{OPTION} and {name}, which has weights that are NaN or infinite; resume from an earlier"
                    " checkpoint, and write +callback=finite_guard, which stops before a weight becomes NaN"
                )
        step = self._step(batch)
        keep_head_width(module, everywhere=True)
        try:
            findings = find_structures(module, step)
            structures, left_out = self._chosen(findings.structures, findings.left_out)
            kept = self._kept(structures, record or {}, trial=trial)
            good, reasons = checked(module, step, structures, kept)
            self._require(good, {**left_out, **reasons}, asked=reasons)
            if trial or all(bool(kept[each.layer].all()) for each in good):
                return
            before = sum(p.numel() for p in module.parameters())
            shapes = {each.path: list(tensor_of(module, each).shape) for one in good for each in one.slices}
            removal = remove(module, good, kept)
            try:
                self._cut_states(removal.indices)
            except CheckpointError:
                removal.undo()
                raise
        finally:
            keep_head_width(module)
        setattr(module, RECORD, _joined(record, shapes, removal, good, ours))
        after = sum(p.numel() for p in module.parameters())
        sizes = [f"{int(kept[each.layer].sum())} of {each.units} of {each.layer}" for each in good]
        others = with_reasons({**left_out, **reasons}, 3)
        ctx.info(
            f"pruning: {settings.pattern} are removed, and {after:,} of {before:,} parameters are left:"
            f" {listed(sizes)}; left out are {others or 'none'}"
        )

    def _step(self, batch: tuple[Any, int] | None) -> Any:
        """Return a function that runs a training step on one batch, and leaves no trace."""
        ctx, module = self._ctx, self._module
        if not ctx.module.automatic_optimization:
            raise ConflictError(
                f"{OPTION}.pattern={self._settings.pattern} and manual optimization, under which no batch can be tried;"
                f" write {OPTION}.pattern=unstructured"
            )
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        if batch is not None:
            step = patches.batch_step(ctx.trainer, ctx.home, *batch)
        else:
            rollback = Rollback(module, device)
            rollback.save()
            own = OwnSources(data=patches.training_source(ctx.trainer))
            states = own.get()
            step = patches.first_batch_step(ctx.trainer, ctx.home)
            own.put(states, "the loader")
            rollback.restore()

        def one() -> Any:
            with ExitStack() as stack:
                if "torch._dynamo" in sys.modules:  # whose graphs hide the layers
                    stack.enter_context(torch.compiler.set_stance("force_eager"))
                rollback = Rollback(module, device)
                rollback.save()
                stack.callback(rollback.restore)
                stack.enter_context(attributes_kept(module))
                copies: dict[Tensor, Tensor] = {}  # on which backward depends; the buffers are restored in place
                for part in module.modules():
                    for name, value in part._buffers.items():
                        if value is not None:
                            part._buffers[name] = copies.setdefault(value, value.clone())
                return step()

        return one

    def _cut_states(self, indices: dict[str, list[tuple[int, Tensor]]]) -> None:
        """Cut the states of the optimizers in use, or those that a checkpoint will load."""
        self._indices = indices
        names: dict[Tensor, str] = {p: name for name, p in self._module.named_parameters()}
        cut = [
            (state, _cut_state(state, p, names[p], indices[names[p]]))
            for optimizer in self._ctx.strategy.optimizers
            for p, state in optimizer.state.items()
            if names.get(p) in indices
        ]
        for state, smaller in cut:
            state.update(smaller)

    def _chosen(
        self, structures: Sequence[Structure], left_out: Mapping[str, str]
    ) -> tuple[list[Structure], dict[str, str]]:
        """Return the structures of the pattern and of the chosen names, and why others are left out."""
        settings, reasons, usable = self._settings, dict(left_out), list[Structure]()
        for each in structures:
            frozen = [
                one.path
                for one in each.slices
                if isinstance(p := tensor_of(self._module, one), nn.Parameter) and not p.requires_grad
            ]
            if each.kind != settings.pattern:
                reasons[each.layer] = f"{OPTION}.pattern={each.kind} removes its inputs"
            elif frozen:
                reasons[each.layer] = f"{frozen[0]} is frozen"
            else:
                usable.append(each)
        names = [*dict.fromkeys([*reasons, *(name for each in structures for name in each.layers)])]
        weights = [f"{name}.weight" for name in names]
        spared = matching(weights, settings.kept, f"{OPTION}.kept")
        for each in [each for each in usable if any(f"{name}.weight" in spared for name in each.layers)]:
            usable.remove(each)
            reasons[each.layer] = f"in {OPTION}.kept"
        if settings.layers is None:
            return usable, reasons
        matrices = [name for name, p in self._module.named_parameters() if p.ndim > 1]
        alone, chosen = [name for name in matrices if name not in weights], []
        for pattern in settings.layers:
            hits = matching([*weights, *alone], [pattern], f"{OPTION}.layers")
            ours = [each for each in usable if any(f"{name}.weight" in hits for name in each.layers)]
            if not ours:
                hit = [name for name in names if f"{name}.weight" in hits]
                named = [f"{name} ({reasons[name]})" if name in reasons else name for name in hit]
                named += [f"{name} (no weight of a linear layer or convolution)" for name in alone if name in hits]
                others = listed([each.layer for each in usable], 8) or "none"
                raise ConflictError(
                    f"{OPTION}.layers={pattern!r} matches {listed(named)}, of which no {settings.pattern} can be"
                    f" removed; layers with such inputs are {others}: write {OPTION}.layers=[<names of these>], or"
                    f" {OPTION}.pattern=unstructured"
                )
            chosen += [each for each in ours if each not in chosen]
        return chosen, reasons

    def _kept(self, structures: Sequence[Structure], record: Mapping[str, Any], *, trial: bool) -> dict[str, Tensor]:
        """Return for each structure which units are kept: those with the largest norms.

        A trial takes the smallest below the threshold, which norms may fall below later.
        """
        settings, amount = self._settings, self._amount or 0.0
        scores = {each.layer: each.scores(self._module) for each in structures}
        if settings.threshold is not None:
            bounds = {name: values.sort().values[1] if trial else settings.threshold for name, values in scores.items()}
            kept = {name: values >= bounds[name] for name, values in scores.items()}
        elif settings.scope == "global" and scores:
            values = torch.cat([*scores.values()])
            count = round(amount * len(values))
            mask = torch.ones(len(values), dtype=torch.bool)
            mask[values.argsort(stable=True)[:count]] = False
            parts = torch.split(mask, [len(each) for each in scores.values()])
            kept = dict(zip(scores, parts, strict=True))
        else:
            kept = {}
            for each in structures:
                inputs = record.get("inputs", {}).get(each.kind, {}).get(each.layer, [1, 1])
                first = each.units * inputs[0] // inputs[1]  # before earlier fits
                count = max(0, each.units - first + round(amount * first))
                kept[each.layer] = torch.ones(each.units, dtype=torch.bool)
                kept[each.layer][scores[each.layer].argsort(stable=True)[:count]] = False
        for name, mask in kept.items():
            if not bool(mask.any()):
                raise ConflictError(
                    f"{OPTION} would remove all {len(mask)} {settings.pattern} of {name}; write a smaller"
                    f" {OPTION}.amount or threshold, scope=layer, or {OPTION}.kept=[{name}]"
                )
        if kept and all(bool(mask.all()) for mask in kept.values()) and not record and self._amount == settings.amount:
            smallest = min(float(values.min()) for values in scores.values())
            fewest = min(len(mask) for mask in kept.values())
            raise NothingToDoError(
                f"{OPTION}: no {settings.pattern} would be removed; the smallest norm is {smallest:.3g}, and a layer"
                f" has {fewest}: write {OPTION}.amount={1 / fewest:.3g} or more"
            )
        return kept

    def _require(self, good: Sequence[Structure], reasons: Mapping[str, str], asked: Mapping[str, str]) -> None:
        settings = self._settings
        if settings.layers is not None and asked:
            name, reason = next(iter(asked.items()))
            raise ConflictError(
                f"{OPTION}.layers matches {name}, but {reason}; write {OPTION}.kept=[{name}], or names of others"
            )
        if not good:
            named = with_reasons(reasons, 8)
            raise NothingToDoError(
                f"{OPTION}.pattern={settings.pattern} finds none that can be removed from"
                f" {type(self._module).__name__}; it leaves out"
                f" {named or 'nothing, since it has no linear layer or convolution'}; write"
                f" {OPTION}.pattern=unstructured, or ~{OPTION}"
            )

    def load_states(self, proceed: Any, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states, cut to the kept channels and heads where the checkpoint has all.

        Raises:
            CheckpointError: a state has another shape than its parameter.
        """
        if not self._indices:
            proceed(checkpoint)
            return
        names: dict[Tensor, str] = {p: name for name, p in self._module.named_parameters()}
        states = [
            _cut_saved(saved, optimizer, names, self._indices)
            for saved, optimizer in zip(checkpoint["optimizer_states"], self._ctx.strategy.optimizers, strict=True)
        ]
        proceed({**checkpoint, "optimizer_states": states})


def _as_record(settings: Settings, amount: float | None) -> dict[str, Any]:
    values = {name: getattr(settings, name) for name in ("pattern", "threshold", "scope")}
    layers = None if settings.layers is None else [*settings.layers]
    return {**values, "amount": amount, "layers": layers, "kept": [*settings.kept]}


def _joined(
    record: Mapping[str, Any] | None,
    shapes: Mapping[str, list[int]],
    removal: Removal,
    structures: Sequence[Structure],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the record of a module after a removal, with that of earlier ones.

    It has the shapes of each smaller tensor before and after, changed attributes, by kind the numbers of inputs of each
    layer before and after, and the settings.
    """
    before = record or {"sizes": {}, "numbers": {}, "inputs": {}, "settings": []}
    sizes = {name: [before["sizes"].get(name, [shapes[name]])[0], size] for name, size in removal.sizes.items()}
    inputs = {kind: dict(layers) for kind, layers in before["inputs"].items()}
    for each in structures:
        own = each.slices[0]
        inputs.setdefault(each.kind, {})[each.layer] = [size[own.dim] for size in sizes[own.path]]
    return {
        "sizes": {**before["sizes"], **sizes},
        "numbers": {**before["numbers"], **removal.numbers},
        "inputs": inputs,
        "settings": [*before["settings"], dict(settings)],
    }


def _cut_saved(
    saved: Mapping[str, Any],
    optimizer: Any,
    names: Mapping[Tensor, str],
    indices: Mapping[str, list[tuple[int, Tensor]]],
) -> dict[str, Any]:
    """Return an optimizer's saved states with the kept indices of each parameter."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = dict(saved["state"])
    for number, p in zip(numbers, parameters, strict=True):
        if number in states and names.get(p) in indices:
            states[number] = _cut_state(states[number], p, names[p], indices[names[p]])
    return {**saved, "state": states}


def _cut_state(state: Mapping[str, Any], p: Tensor, name: str, indices: Sequence[tuple[int, Tensor]]) -> dict[str, Any]:
    for dim, index in indices:
        state = {key: _cut(value, p, dim, index, name, key) for key, value in state.items()}
    return dict(state)


def _cut(value: Any, p: Tensor, dim: int, index: Tensor, name: str, key: str) -> Any:
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    if value.ndim != p.ndim:
        raise CheckpointError(
            f"{OPTION}: the optimizer's state {key} of {name} has the shape {tuple(value.shape)}, which can't be cut"
            " as its weight; begin a new fit from the weights of a checkpoint alone:"
            " module.load_state_dict(torch.load(path)['state_dict'])"
        )
    return value if value.shape[dim] == 1 else value.index_select(dim, index.to(value.device))
