"""The check that the loss of a batch is the mean over its parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_solo.data.micro_batches import MicroBatch, Splitter
from lightning_solo.data.nested import map_tensors
from lightning_solo.errors import ConflictError, listed
from lightning_solo.memory.attempts import attempt
from lightning_solo.nn.rollback import RandomStates, Rollback, Unchanged, attributes_kept
from lightning_solo.nn.split_parity import is_mean, mismatch, same_for_parts
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.techniques.micro_batching.logged import Logged, merged

EMBED = "callback.micro_batching.embed"
TOLERANCE = {"64-true": 1e-8, "32-true": 1e-3}
"""Relative difference that counts as rounding, by precision; 0.02 for others."""


def tells_weights_apart(splitter: Splitter, batch: Any, samples: int) -> bool:
    """Return whether the weights of tokens and of samples differ for halves of a batch, or it has no labels."""
    few, samples = splitter.parts(batch, samples)[0]
    shares = _shares(splitter, few, splitter.micro_batches([few], -(-samples // 2)))
    return len(shares) == 1 or len(set(map(tuple, shares.values()))) > 1


def require_mean(ctx: Run, splitter: Splitter, batch: Any, batch_idx: int, samples: int) -> None:
    """Check that the loss of ``samples`` of a batch, or as many as fit, is the mean over two parts of them.

    ``training_step`` runs without backward, and all state is restored.
    """
    while samples > 1:
        few, samples = splitter.parts(batch, samples)[0]
        parts = splitter.micro_batches([few], -(-samples // 2))
        refusal, failure = attempt(partial(_refusal, ctx, splitter, few, parts, batch_idx))
        if refusal is not None:
            raise ConflictError(refusal)
        if failure is None:
            return
        samples = -(-samples // 2) if samples > 2 else 1
    ctx.info("micro_batching: the loss isn't checked, since a forward of two samples doesn't fit")


def _refusal(ctx: Run, splitter: Splitter, few: Any, parts: Sequence[MicroBatch], batch_idx: int) -> str | None:
    """Return why the loss of a batch isn't the mean over parts, and what to write; None if it is."""
    trial = Trial(ctx.module, ctx.device, partial(patches.step_result, ctx.trainer, batch_idx=batch_idx))
    parameters = Unchanged(dict(ctx.module.named_parameters()))
    tolerance = TOLERANCE.get(ctx.precision, 0.02)

    def compare() -> tuple[float, Sequence[float], list[str]] | None:
        with trial:
            difference = mismatch(partial(trial.loss, few), partial(trial.terms, parts), tolerance)
            return difference and (*difference, trial.called(few))

    try:
        with torch.no_grad():
            different = compare()
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        different = compare()  # the step takes gradients itself
    if names := parameters.changed():
        return changes_in_place(names)
    if names := trial.changed_otherwise(tolerance):
        warnings.warn(
            f"callback.micro_batching: training_step changes {listed(names)} for each micro-batch, not once per batch;"
            " count by batch_idx or self.global_step, and average in on_train_batch_end",
            stacklevel=2,
        )
    samples = sum(part.samples for part in parts)
    if different is None:
        by = _closer_weights(ctx, splitter, few, parts, batch_idx)
        if by is None:
            _warn_of_counts(trial, tolerance)
        return by and (
            f"callback.micro_batching: the loss of {samples} samples is their mean by {by}, not by"
            f" {splitter.weight_by}, which differs where sequences have different lengths; write"
            f" callback.micro_batching.weight_by={by}, or callback.micro_batching.check=false to train on that one"
        )
    loss, terms, called = different
    embed = called[0] if len(called) == 1 else f"[{','.join(called)}]" if called else "<module or method>"
    remedy = _remedy_of_mean(splitter, few, parts, loss, terms, tolerance)
    remedy = remedy or (
        f"if it compares samples, write {EMBED}={embed} with the part that embeds them; if it is a mean by other"
        " weights, as of masked elements, write callback.micro_batching.weight_by=<the key of the weights in a batch"
        " that is a mapping>"
    )
    return (
        f"callback.micro_batching: the loss of {samples} samples is {loss:.6g}, and the mean over {len(parts)} parts of"
        f" them by {splitter.weight_by} is {sum(terms):.6g}; {remedy}, or callback.micro_batching.check=false to train"
        " on that mean"
    )


def _warn_of_counts(trial: Trial, tolerance: float) -> None:
    """Warn of metrics and logged values that the parts of a batch count otherwise than the whole batch."""
    if names := trial.metrics_otherwise(tolerance):
        warnings.warn(
            f"callback.micro_batching: training_step updates the metric {listed(names)} for each micro-batch, and its"
            " state isn't that of the whole batch: pass it values of samples, or their number as a weight, as"
            f" self.{names[0]}.update(value, weight=len(batch))",
            stacklevel=2,
        )
    if names := trial.logged_otherwise(tolerance):
        warnings.warn(
            f"callback.micro_batching: training_step logs {listed(names)}, which of the whole batch isn't the mean over"
            " its micro-batches that is logged; log the metric itself, as self.log(name, self.metric), or the value of"
            " all samples in on_train_epoch_end",
            stacklevel=2,
        )


def changes_in_place(names: Sequence[str]) -> str:
    """Return the message for a ``training_step`` that changes parameters in place."""
    return (
        f"callback.micro_batching: training_step changes {listed(names)} in place, and would do so for each part of a"
        " batch: move that to on_train_batch_end, or write ~callback.micro_batching"
    )


def _closer_weights(ctx: Run, splitter: Splitter, few: Any, parts: Sequence[MicroBatch], batch_idx: int) -> str | None:
    """Return the ``weight_by`` by which the loss is a mean much more closely than by the chosen one; None if none is.

    Where the weights of tokens differ from those of samples, a cross entropy is sharpened, so that the means differ.
    """
    shares = {by: each for by, each in _shares(splitter, few, parts).items() if min(each) > 0}
    if len(set(map(tuple, shares.values()))) < 2 or splitter.weight_by not in shares:
        return None
    step = partial(patches.step_result, ctx.trainer, batch_idx=batch_idx)
    trial = Trial(ctx.module, ctx.device, step, sharpened=True)
    try:
        with torch.no_grad(), trial:
            whole = [trial.loss(few, seed) for seed in (0, 1)]
            terms = trial.terms(parts)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        return None
    if terms is None or whole[0] is None or whole[0] != whole[1]:  # random numbers
        return None
    losses = [term / part.share for term, part in zip(terms, parts, strict=True)]
    errors = {
        by: abs(whole[0] - sum(share * loss for share, loss in zip(each, losses, strict=True)))
        for by, each in shares.items()
    }
    best = min(errors, key=lambda by: errors[by])
    return best if errors[splitter.weight_by] > 4 * errors[best] + 1e-6 * abs(whole[0]) else None


def _shares(splitter: Splitter, few: Any, parts: Sequence[MicroBatch]) -> dict[str, list[float]]:
    """Return each ``weight_by`` that the batch has, with the shares of its parts."""
    shares = {}
    for by in ("samples", "tokens", "shifted_tokens"):
        with suppress(ConflictError):  # there are no labels
            weighed = Splitter(splitter.batch_dim, splitter.split, by).micro_batches([few], parts[0].samples)
            shares[by] = [part.share for part in weighed]
    return shares


def _remedy_of_mean(
    splitter: Splitter, few: Any, parts: Sequence[MicroBatch], loss: float, terms: Sequence[float], tolerance: float
) -> str | None:
    """Return the remedy for a loss that is a sum, or a mean by other weights; None if it is neither."""
    if not all(part.share for part in parts):
        return None
    losses = [term / part.share for term, part in zip(terms, parts, strict=True)]
    if is_mean(loss, losses, tolerance):
        return "it is a sum over samples: return their mean from training_step"
    for by, shares in _shares(splitter, few, parts).items():
        if is_mean(loss, [share * each for share, each in zip(shares, losses, strict=True)], tolerance):
            return f"write callback.micro_batching.weight_by={by}"
    return None


class Trial:
    """Runs training steps without backward in a context; all state of the module is restored.

    Args:
        module: the module; its parts don't drop elements in the context.
        device: on which it runs.
        step: returns the result of ``training_step`` for a batch, and passes what it logs to ``log``.
        sharpened: as in `same_for_parts`.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, step: Callable[..., Any], *, sharpened: bool = False
    ) -> None:
        self._module, self._step, self._sharpened = module, step, sharpened
        self._rollback = Rollback(module, device)
        self._random = RandomStates(module, device)
        self._stack = ExitStack()
        self._versions: dict[str, tuple[int, int]] = {}  # of buffers, when a batch began
        self._counts: list[dict[str, float]] = []  # before, after the first batch, and after its parts
        self._buffers: list[dict[str, Tensor]] = []  # those that changed
        self._metrics: list[dict[str, dict[str, Tensor]]] = []  # their states, likewise
        self._logged: list[Logged] = []  # of the first batch, and of its parts

    def __enter__(self) -> Trial:
        self._rollback.save()
        self._note()
        self._stack.callback(self._rollback.restore)
        self._stack.enter_context(attributes_kept(self._module))
        self._stack.enter_context(same_for_parts(self._module, sharpened=self._sharpened))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def loss(self, batch: Any, seed: int = 0) -> float | None:
        """Return the loss of a batch, or None; at seed 0 with the random numbers that come next."""
        self._begin(seed)
        with nullcontext() if len(self._logged) > 1 else self._random.watching():
            loss = self._loss_of(batch)
        self._note()
        return loss

    def terms(self, parts: Sequence[MicroBatch], seed: int = 0) -> list[float] | None:
        """Return the loss of each part by its share in the mean; None if a part has no loss."""
        self._begin(seed)
        losses = [self._loss_of(part.data, part.share) if part.share else 0.0 for part in parts]
        self._note()
        terms = [part.share * loss for part, loss in zip(parts, losses, strict=True) if loss is not None]
        return terms if len(terms) == len(losses) else None

    def changed_otherwise(self, tolerance: float) -> list[str]:
        """Return the names of counts and buffers that the parts of a batch change otherwise than the whole batch."""
        if len(self._counts) < 3:
            return []
        (before, whole, parts), (_, *changed) = self._counts, self._buffers
        counts = []
        for name in parts.keys() & whole.keys():
            once, again = whole[name] - before.get(name, 0), parts[name] - whole[name]
            if min(abs(again), abs(again - once)) > tolerance * max(abs(once), abs(again)):
                counts.append(name)
        both = changed[0].keys() & changed[1].keys()
        return [*counts, *(name for name in both if not _alike(changed[0][name], changed[1][name], tolerance))]

    def metrics_otherwise(self, tolerance: float) -> list[str]:
        """Return the names of the metrics that the parts update otherwise; none where random numbers are drawn."""
        if len(self._metrics) < 3 or self._random.drawn:
            return []
        _, whole, parts = self._metrics
        return [
            name
            for name, states in whole.items()
            if not all(_alike(value, parts[name][state], tolerance) for state, value in states.items())
        ]

    def logged_otherwise(self, tolerance: float) -> list[str]:
        """Return the names of logged values of the whole batch that the parts' mean, sum or extremum isn't."""
        if len(self._logged) < 2 or self._random.drawn:
            return []
        whole, parts = self._logged[:2]
        names = []
        for (hook, name), calls in parts.calls.items():
            shares, values, options = zip(*calls, strict=True)
            _, value, _ = whole.calls.get((hook, name), calls)[-1]
            of_parts = merged(values, shares, options[-1].get("reduce_fx", "mean"))
            if isinstance(value, Tensor) and isinstance(of_parts, Tensor) and bool(value.isfinite().all()):
                scale = torch.stack([value, *values]).abs().max() * tolerance
                if not bool((value - of_parts).abs().max() <= scale):
                    names.append(name)
        return names

    def _note(self) -> None:
        if len(self._counts) < 3:
            named = [(f"{path}." if path else "", part) for path, part in self._module.named_modules()]
            values = ((f"{path}{key}", n) for path, part in named for key, n in vars(part).items())
            self._counts.append({name: n for name, n in values if type(n) in (int, float)})
            self._metrics.append({path: _states(part) for path, part in self._module.named_modules() if _states(part)})
            versions, buffers = self._versions_now(), dict(self._module.named_buffers())
            changed = [name for name, version in versions.items() if self._versions.get(name, version) != version]
            self._buffers.append({name: buffers[name].clone() for name in changed})

    def _versions_now(self) -> dict[str, tuple[int, int]]:
        return {name: (id(b), b._version) for name, b in self._module.named_buffers() if not b.is_inference()}

    def called(self, batch: Any) -> list[str]:
        """Return the names of the trained modules that ``training_step`` calls, without those inside them."""
        names: dict[str, None] = {}
        depth = [0]

        def enter(name: str, *_: Any) -> None:
            depth[0] += 1
            if depth[0] == 1:
                names[name] = None

        def leave(*_: Any) -> None:
            depth[0] -= 1

        with ExitStack() as hooks:
            for name, part in self._module.named_modules():
                if part is not self._module and any(p.requires_grad for p in part.parameters()):
                    hooks.callback(part.register_forward_pre_hook(partial(enter, name)).remove)
                    hooks.callback(part.register_forward_hook(leave, always_call=True).remove)
            self.loss(batch)
        return [*names]

    def _begin(self, seed: int) -> None:
        self._rollback.restore()
        self._logged.append(Logged())
        self._versions = self._versions_now()
        if seed:
            self._rollback.seed(seed)

    def _loss_of(self, batch: Any, share: float = 1.0) -> float | None:
        logged = self._logged[-1]
        logged.share = share
        result = self._step(map_tensors(batch, Tensor.clone), log=logged.log)  # it may change its batch
        loss = result.get("loss") if isinstance(result, Mapping) else result
        return None if loss is None else float(loss.detach())


def _states(part: nn.Module) -> dict[str, Tensor]:
    """Return copies of a metric's states, those that are lists joined; none of another module."""
    defaults = getattr(part, "_defaults", None)
    values = {name: getattr(part, name) for name in defaults} if isinstance(defaults, dict) else {}
    return {
        name: value.clone() if isinstance(value, Tensor) else torch.cat([each.flatten() for each in value])
        for name, value in values.items()
        if isinstance(value, Tensor) or (value and all(isinstance(each, Tensor) for each in value))
    }


def _alike(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    one, other = one.double(), other.double()
    return not one.numel() or bool((one - other).abs().max() <= tolerance * one.abs().max())
