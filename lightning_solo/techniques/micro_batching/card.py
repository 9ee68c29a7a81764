"""The card of `micro_batching`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_solo.cards.card import Card
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing


def _not_callable(split: Any) -> str | None:
    if split is None or callable(split):
        return None
    return "a function is given in Python, MicroBatching(split=my_function); in a configuration write null"


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of MicroBatching."""

    micro_batch: int | Literal["auto"] = setting(
        "auto", "largest number of samples in a forward and backward; auto: as many as fit", at_least=1
    )
    global_batch: int | None = setting(
        None,
        "samples in an optimizer step, a multiple of the loader's batch size; null: one batch of the loader, or "
        "accumulate_grad_batches of them",
        at_least=1,
    )
    batch_dim: int | Mapping[str, int | None] = setting(
        0,
        "the batch dimension of all tensors, or of each by its path in the batch: {x: 1, graph.mask: null}; null: all "
        "samples share the tensor",
    )
    split: Any = setting(  # noqa: RUF009  (a frozen field, as the others; a function has no immutable type)
        None,
        "function of (batch, size) that returns a list of (part, its samples), each of at most ``size``; for batches "
        "of other objects than nested tensors with a batch dimension",
        check=_not_callable,
    )
    weight_by: str = setting(
        "samples",
        "the weight of a part in the loss: samples; tokens (labels other than -100); shifted_tokens (those without each"
        " row's first); or a key of the batch",
        check=lambda key: None if key else "write samples, tokens, shifted_tokens, or the key of the batch's weights",
    )
    embed: str | Sequence[str] | None = setting(
        None,
        "for a loss that compares samples: name of the module or method that embeds them, or list of names; the batch"
        " is embedded in parts, and the loss is that of the whole batch (gradient caching)",
    )
    batch_norm: str = setting(
        "refuse",
        "ghost allows batch norm with the statistics of each micro-batch instead of the whole batch",
        allowed=("refuse", "ghost"),
    )
    check: bool = setting(
        True, "refuse a loss that isn't the mean over parts; compared in forwards, before the first batch that is split"
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan a micro-batch that fits, and gradients that are kept through several micro-batches."""
    if settings.embed is not None:  # the batch isn't split, only its embedding is
        auto = "micro_batching: micro_batch=auto is planned with the whole batch; write a number to plan that one"
        assumptions = [auto] if settings.micro_batch == "auto" else []
        return tracing.assuming(*assumptions, attached=replace(settings, check=False), scales=False)
    limit = None if settings.micro_batch == "auto" else int(settings.micro_batch)
    assumption = "micro_batching: the batches of a step, which wait on the device, are not counted"
    return tracing.assuming(assumption, splits=True, at_most=limit, attached=None)


def _under_engines(settings: Settings, configuration: Configuration) -> str:
    """Return what several processes make of micro-batches, of which each must run as many."""
    if settings.micro_batch == "auto":
        return (
            "a process that runs out of memory and repeats a part would wait for the others; write"
            " callback.micro_batching.micro_batch=8 (a number that fits)"
        )
    return ROUNDING


CARD = Card(
    name="micro_batching",
    target="lightning_solo.techniques.micro_batching.technique:MicroBatching",
    phase=Phase.DATA,
    settings=Settings,
    saves="activations of all but one micro-batch",
    costs="smaller kernels; after an out-of-memory error the batch runs again. If gradients are released in backward,"
    " their sum is kept, 4 bytes per parameter. The batches of a step wait on the device",
    numerics="gradients and logged loss equal those of the undivided batch within rounding, by samples or tokens; bit"
    " for bit if the batch isn't divided",
    conflicts="manual optimization; BatchNorm, unless ``batch_norm: ghost``; ``spectral_norm``, unless ``check: false``"
    "; losses that compare samples, unless ``embed`` names what embeds them; engines that can't repeat a failed"
    " backward, unless ``micro_batch`` is a number",
    reference="Huang et al. 2019, GPipe, https://arxiv.org/abs/1811.06965 (micro-batches); Hoffer et al. 2017,"
    " https://arxiv.org/abs/1705.08741 (ghost batch norm); Gao et al. 2021, https://arxiv.org/abs/2101.06983 (gradient"
    " caching)",
    owns=lambda settings: (
        frozenset({"micro_batches", "micro_batch_weights"})
        | ({"accumulation_factor"} if settings.global_batch is not None else frozenset())
    ),
    reads=lambda settings: frozenset({"repeated_backward"} if settings.micro_batch == "auto" else ()),
    instead={
        "repeated_backward": "callback.micro_batching.micro_batch=8 (a number that fits)",
        "accumulation_factor": "callback.micro_batching.global_batch=null, where the factor is set elsewhere, or drop"
        " accumulate_grad_batches",
    },
    solved="micro_batch",
    planned="lightning_solo.techniques.micro_batching.card:planned",
    engines=answers(
        ddp=_under_engines, fsdp=_under_engines, zero3="parts of a batch weren't compared on its partitioned gradients"
    ),
)
