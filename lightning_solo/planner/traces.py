"""Traces of a module for every micro-batch: on fake tensors, or by real steps on the CPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_solo.errors import BudgetError, PlanError, SoloError
from lightning_solo.machine import host_memory
from lightning_solo.memory.snapshot import is_users
from lightning_solo.planner.batch_scaling import AffineTrace, affine_trace
from lightning_solo.planner.capture import Trace
from lightning_solo.planner.fake_modules import empty_parameters
from lightning_solo.units import format_bytes

SMALL = (2, 3, 4)  # micro-batches traced besides the given one; 1 may have special cases in torch
KINDS: tuple[dict[str, Any], ...] = (
    {"fake": True, "attention": "fused"},
    {"fake": True, "attention": "math"},
    {"fake": False, "attention": "math"},
)
"""Kinds of traces, in the order in which they are tried; the first are the defaults of `capture.capture`."""
FIRST_KIND = KINDS[0]
FAKE, REAL = "fake tensors", "real steps on the CPU"
ONE_SIZE = (
    "so this plan is for its own micro-batch only, and the largest that fits is unknown; write micro_batch=8, say, to"
    " plan another"
)


@dataclass
class ScalableTrace:
    """The trace of one micro-batch, from which the traces of other sizes follow if costs are linear in the size.

    Attributes:
        size: examples in the traced micro-batch.
        trace: the trace of this micro-batch.
        affine: the traces of other sizes, or None if they can't be derived.
        how: the kind of tensors, in words.
        alone: whether other sizes weren't traced because a single example doesn't fit.
        pair: sizes of two traces from which ``affine`` can be derived; other presets can use the same ones. ``affine``
            may not hold for a single example.
    """

    size: int
    trace: Trace
    affine: AffineTrace | None
    how: str
    alone: bool = False
    pair: tuple[int, int] | None = None

    def at(self, size: int) -> Trace:
        """Return the trace of a micro-batch of ``size`` examples."""
        return self.trace if self.affine is None or size == self.size else self.affine.at(size)


def scalable_trace(
    capture: Callable[..., Trace],
    make: Callable[[], Any],
    size: int,
    weight_bytes: int,
    pair: tuple[int, int] | None = None,
    scales: bool = True,
    fits: Callable[[Trace], bool] = lambda trace: True,
) -> ScalableTrace:
    """Trace by the first way that works: fake tensors, fake tensors with math attention, or real steps on the CPU.

    Args:
        capture: function of ``(size, fake=..., attention=...)`` that returns a trace; arguments as in
            `capture.capture`.
        make: returns the module.
        size: examples per micro-batch.
        weight_bytes: bytes per element of a weight, for the estimate in the error.
        pair: the pair found for the same module and size under the first preset; no third trace then checks the
            prediction.
        fits: returns whether a trace fits; if a single example doesn't, no other size is traced.
        scales: whether micro-batches of all sizes run the same operators; otherwise only ``size`` is traced.

    Raises:
        BudgetError: a technique can't keep its budget.
        PlanError: no way works; the message says why, and how much the model states alone take.
    """
    first: Exception | None = None
    for kind in KINDS:
        fake, attention = kind["fake"], kind["attention"]
        try:
            if not fake and (needed := 2 * _state_bytes(make)) > host_memory()[1]:
                raise PlanError(f"real steps on the CPU need {format_bytes(needed)} of host memory and more")
            one = partial(capture, **kind)
            if not scales:
                scalable = ScalableTrace(size, one(size), None, FAKE if fake else REAL)
                scalable.trace.assumptions.append(
                    f"the choice of what is kept depends on bytes, and so on the micro-batch, {ONE_SIZE}"
                )
            else:
                scalable = _on_fake_tensors(one, size, pair, fits) if fake else _by_real_steps(one, size)
        except BudgetError:  # raised by a technique, for either kind of tensors
            raise
        except Exception as error:
            first = first or error
            continue
        if attention == "math" and fake:
            scalable.trace.assumptions.append("attention keeps all scores: the fused kernels could not be planned")
        return scalable
    assert first is not None
    if isinstance(first, ImportError):  # of a technique, without which the module's states would be others
        raise PlanError(_reason(first)) from first
    raise PlanError(f"{_reason(first)}; {_least(make, weight_bytes)}") from first


def _on_fake_tensors(
    capture: Callable[[int], Trace], size: int, known: tuple[int, int] | None, fits: Callable[[Trace], bool]
) -> ScalableTrace:
    """Return the trace of a micro-batch, and of all others if two small traces predict it, or predict a third."""
    low, high, third = [*(other for other in SMALL if other != size), max(SMALL)][:3]
    pair = known or (low, high)
    trace = capture(size)
    if size == 1 and not fits(trace):
        return ScalableTrace(size, trace, None, FAKE, alone=True)
    first, second = (trace if each == size else capture(each) for each in pair)
    affine = affine_trace(pair[0], first, pair[1], second)
    if affine is None:
        trace.assumptions.append(_unlike(pair))
        return ScalableTrace(size, trace, None, FAKE)
    if known is None:
        if affine.predicts(size, trace):
            pair = min(size, low), max(size, low)
        # a single example rarely follows from others: it lacks copies, or there are scores of all pairs of examples
        elif size > 1 or not (affine.contains(size, trace) or affine.predicts(third, capture(third))):
            trace.assumptions.append(f"memory isn't linear in the micro-batch, {ONE_SIZE}")
            return ScalableTrace(size, trace, None, FAKE)
    return ScalableTrace(size, trace, affine, FAKE, pair=pair)


def _by_real_steps(capture: Callable[[int], Trace], size: int) -> ScalableTrace:
    """Return traces from two small micro-batches, since real steps take time and memory; else for the size only."""
    low, high, _ = SMALL
    trace = capture(low)
    if (affine := affine_trace(low, trace, high, capture(high))) is not None:
        return ScalableTrace(low, trace, affine, REAL)
    trace = capture(size)
    trace.assumptions.append(_unlike((low, high)))
    return ScalableTrace(size, trace, None, REAL)


def _unlike(pair: tuple[int, int]) -> str:
    low, high = pair
    return f"batches of {low} and {high} don't allocate the same tensors in the same order, {ONE_SIZE}"


def _state_bytes(make: Callable[[], Any]) -> int:
    """Return the bytes of the model states with AdamW in fp32."""
    try:
        with empty_parameters():
            module = make()
    except Exception:  # a constructor that computes with its weights
        module = make()
    # fp32 weight 4 + gradient 4 + two states of AdamW 8
    return sum(16 * p.numel() if p.requires_grad else 4 * p.numel() for p in module.parameters())


def _least(make: Callable[[], Any], weight_bytes: int) -> str:
    try:
        states = _state_bytes(make)
    except Exception as error:
        return f"and the module can't be built without data either: {_reason(error)}"
    return f"its model states alone, with AdamW, take {format_bytes(states * weight_bytes // 4)}"


def _reason(error: BaseException) -> str:
    """Return an error's first line, and the last line of the user's code in its traceback."""
    if isinstance(error, SoloError):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    place = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}{place}"
