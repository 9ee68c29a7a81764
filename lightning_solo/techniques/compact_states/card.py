"""The card of `compact_states`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_solo.cards.budget import budget_setting
from lightning_solo.cards.card import Card, Requirement, Rung
from lightning_solo.cards.configuration import Configuration
from lightning_solo.cards.engines import ROUNDING, answers
from lightning_solo.cards.footprint import Footprint, Request
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import ConflictError, PlanError
from lightning_solo.optim.back_end_facts import BACK_ENDS, SETTINGS, parse_state_budget

MIXED_SHARDS = (
    "under bf16-mixed vectors stay in fp32 beside matrices in bf16, and FSDP2 gathers weights of one type; write"
    " precision=bf16-true"
)
SCALE_BYTES = 4 / 128  # per element of a moment in 8 bits: an fp32 scale for each block of 128


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of CompactStates."""

    master_bits: int | str = setting(
        24, "of the weights that are stepped; 16-stochastic: bf16, rounded at random", allowed=(32, 24, "16-stochastic")
    )
    moment_bits: int = setting(8, "of each of Adam's moments; 4 needs torchao", allowed=(32, 8, 4))
    state_budget: int | str | None = budget_setting(
        "bytes of optimizer states that stay on the device, such as 8GiB; the others are in pinned memory of the host;"
        " auto: as many stay as the first step leaves room for; null: all stay",
        parse_state_budget,
    )
    checkpoint_weights: str = setting(
        "bf16", "weights in a checkpoint: bf16, with corrections among the states; or masters in fp32",
        allowed=("bf16", "fp32"),
    )  # fmt: skip
    back_end: str = setting(
        "own", "whose optimizer steps; another library's has its own bits", allowed=("own", *BACK_ENDS)
    )

    def _check_together(self) -> None:
        bits = (self.master_bits, self.moment_bits, self.state_budget, self.checkpoint_weights)
        if self.back_end != "own" and bits != (24, 8, None, "bf16"):
            raise ConflictError(
                f"{SETTINGS}.back_end={self.back_end} has its own bits, no masters, and all states on the device: drop"
                f" master_bits, moment_bits, state_budget and checkpoint_weights, or write {SETTINGS}.back_end=own"
            )

    @property
    def budget(self) -> int | str | None:
        """Bytes of states that stay on the device, "auto", or None for all."""
        return parse_state_budget(self.state_budget)

    @property
    def needs_cuda(self) -> bool:
        """Whether the optimizer runs on CUDA devices alone."""
        return self.back_end in BACK_ENDS and BACK_ENDS[self.back_end].needs_cuda

    def precision_refusal(self, precision: str) -> str | None:
        """Return why these settings refuse a precision and what to write; None if they don't."""
        if self.back_end in BACK_ENDS:
            library = BACK_ENDS[self.back_end]
            why = "" if library.bf16_weights else ", whose bf16 weights it would round to the nearest"
            refusal = f"{SETTINGS}.back_end={self.back_end} and precision={precision}{why}"
            remedy = f"write precision={' or precision='.join(library.precisions)}"
            return None if precision in library.precisions else f"{refusal}: {remedy}"
        if precision in ("bf16-true", "bf16-mixed") or (precision == "32-true" and self.master_bits == 32):
            return None
        remedy = "write precision=bf16-true"
        if precision == "32-true":
            remedy += f", or {SETTINGS}.master_bits=32, which keeps fp32 weights"
        return f"{SETTINGS}.master_bits={self.master_bits} and precision={precision}: {remedy}"

    def bytes_per_parameter(self, precision: str = "bf16-true") -> tuple[int, float]:
        """Return bytes of weight and of optimizer states per trained parameter.

        >>> Settings().bytes_per_parameter()  # bf16; correction 1 + moments 2 x (1 + 1 / 32)
        (2, 3.0625)
        """
        if self.back_end in BACK_ENDS:
            library = BACK_ENDS[self.back_end]
            return 2 if precision != "32-true" and library.bf16_weights else 4, library.state_bytes
        weight = 4 if precision == "32-true" else 2
        correction = 4 - weight if self.master_bits == 32 else int(self.master_bits == 24)
        moment = {32: 4.0, 8: 1 + SCALE_BYTES, 4: 0.5}[self.moment_bits]
        return weight, correction + 2 * moment


def _refuse_precision(settings: Settings, configuration: Configuration) -> str | None:
    """Return why a configuration's precision is refused and what to write; None if it isn't."""
    return None if configuration.precision is None else settings.precision_refusal(configuration.precision)


def footprint(settings: Settings, request: Request, plain: Footprint) -> Footprint:
    """Return the bytes of weights, gradients and states, and of the states on the host under the budget."""
    precision, trained = request.precision or "bf16-true", sum(request.sizes.trainable)
    weight, each = settings.bytes_per_parameter(precision)
    frozen = (2 if precision == "bf16-true" else 4) * sum(request.sizes.frozen)
    states, budget = round(each * trained), settings.budget
    on_host = 0 if budget is None else states if isinstance(budget, str) else max(0, states - budget)
    return replace(
        plain,
        weights=weight * trained + frozen + request.sizes.buffer_bytes,
        gradients=weight * trained,
        optimizer_states=states - on_host,
        host=on_host,
    )


def planned(settings: Settings, tracing: Tracing) -> Tracing:
    """Plan the step as one kernel; with the budget ``auto``, plan all states on the host.

    Raises:
        PlanError: another library steps, whose kernels can't be traced.
    """
    if settings.back_end != "own":
        library = BACK_ENDS[settings.back_end]
        bits = "24" if library.correction_bytes else "16-stochastic"
        bits = bits if library.bf16_weights else "32 precision=32-true"
        raise PlanError(
            f"{SETTINGS}.back_end={settings.back_end}: a library's own kernels can't be traced; plan"
            f" {SETTINGS}.back_end=own with {SETTINGS}.master_bits={bits} {SETTINGS}.moment_bits={library.moment_bits},"
            f" whose states take about as much as its {library.state_bytes:.2f} bytes per parameter"
        )
    assumptions = ["the step of compact states is planned as a Triton kernel that reads and writes each tensor once"]
    attached = settings
    if settings.state_budget == "auto":
        attached = replace(settings, state_budget=0)
        assumptions.append("all compact states are planned on the host: in a run, what fits stays on the device")
    return tracing.assuming(*assumptions, attached=attached)


ONE_DEVICE = f"states on the host are for one device; write {SETTINGS}.state_budget=null"


def _under_ddp(settings: Settings, configuration: Configuration) -> str:
    """Return why settings are refused. Another library's random numbers are the process's, not the step's."""
    if settings.state_budget is not None:
        return ONE_DEVICE
    if settings.back_end != "own":
        return (
            "another library's optimizer draws random numbers in each process, whose weights then differ; write"
            f" {SETTINGS}.back_end=own"
        )
    return ROUNDING


def _under_fsdp(settings: Settings, configuration: Configuration) -> str:
    """Return why settings don't work on shards."""
    if settings.state_budget is not None:
        return ONE_DEVICE
    strategy = next((chosen.settings for chosen in configuration.techniques if chosen.card.engine == "fsdp"), None)
    if settings.back_end != "own":
        return f"another library's optimizer doesn't know shards; write {SETTINGS}.back_end=own"
    if getattr(strategy, "checkpoint", "file") == "folder":
        return "its states can't be saved as a folder of shards; write strategy.checkpoint=file"
    if configuration.precision == "bf16-mixed":
        return MIXED_SHARDS
    return ROUNDING


_WITHOUT_CUDA = " or ".join(name for name, known in BACK_ENDS.items() if not known.needs_cuda)


CARD = Card(
    name="compact_states",
    target="lightning_solo.techniques.compact_states.technique:CompactStates",
    phase=Phase.STATES,
    settings=Settings,
    saves="of AdamW's 16 bytes per parameter (weight 4, gradient 4, moments 8) all but 7.06: bf16 weight 2, correction"
    " 1, moments 1 + 1, scales 0.0625, gradient 2",
    costs="unpacking and packing in the step. States on the host (``state_budget``) pass through the device, 3 bytes"
    " per parameter each way, in every step",
    numerics="``master_bits=32, moment_bits=32``: fp32 AdamW with a bf16 forward, on a CPU bit for bit. 24 bits drop"
    " updates below 2**-17 of a weight; 8-bit moments move an update by some 4 % (`examples/measure_moments.py`)",
    conflicts="optimizers that are not torch's, LBFGS, SparseAdam, Muon; fp16; strategies with an engine of their own",
    reference="FlashOptim 2026, arXiv 2602.23349; Dettmers et al. 2021, arXiv 2110.02861",
    owns=frozenset({"optimizer_states", "weights"}),
    rules=(_refuse_precision,),
    requires=(
        Requirement(
            "cuda",
            f"{SETTINGS}.back_end={{back_end}} needs a CUDA device; without one use {SETTINGS}.back_end=own, or"
            f" {_WITHOUT_CUDA}",
            when=lambda settings: settings.needs_cuda,
        ),
    ),
    solved="state_budget",
    rung=Rung("compact", order=40, overrides=("solo.precision=bf16-true", "+solo/callback=gradient_release")),
    planned="lightning_solo.techniques.compact_states.card:planned",
    footprint="lightning_solo.techniques.compact_states.card:footprint",
    engines=answers(
        ddp=_under_ddp,
        fsdp=_under_fsdp,
        zero3="the engine stores the optimizer's states in its own way",
    ),
)
