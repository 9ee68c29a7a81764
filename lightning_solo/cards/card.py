"""A technique's card: everything that the rest of the package knows about the technique, without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from lightning_solo.cards.engines import Answer
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings

if TYPE_CHECKING:
    from lightning_solo.cards.configuration import Configuration

Resources = frozenset[str] | Callable[[Any], frozenset[str]]
"""Names of resources, or a function from the technique's settings to names."""

RESOURCES = {
    "accumulation_factor": "the number of micro-batches per optimizer step",
    "averaged_weights": "the average of the weights, and its use in validation and at the end",
    "batches": "the batches that the loader yields",
    "device_peak": "the device's peak counters",
    "gradients": "`.grad` of the parameters, between backward and the step",
    "layers": "the layers of the module",
    "loss": "the loss that backward starts from",
    "micro_batches": "the parts in which a batch runs through forward and backward",
    "micro_batch_weights": "the weight of each micro-batch in its optimizer step",
    "optimizer": "the choice of the optimizer",
    "optimizer_states": "the optimizer's states",
    "products": "the products of linear layers, and the form of the weights in them",
    "repeated_backward": "running a failed forward and backward again",
    "saved_tensors": "the tensors that forward keeps for backward",
    "sequences": "the lengths of a batch's sequences",
    "trained_parameters": "the choice of parameters to train",
    "weights": "the place and precision of the stored weights",
}
"""Resource that a technique may own, read or free -> its meaning. A card may also use names that are not listed."""


@dataclass(frozen=True)
class Requirement:
    """A device, compiler or package that a technique needs.

    Attributes:
        kind: ``"cuda"`` for a CUDA device, ``"compiler"`` for a C++ compiler, ``"package"`` for an installed package,
            ``"check"`` for a function that returns a description of what is missing, or None.
        remedy: message that says which choice needs it, and what to write if it is missing. ``{name}`` stands for the
            setting of that name.
        name: the package with its versions, as ``"torchao>=0.12"``, or the function as ``"module:function"``.
        when: function of the settings that returns whether they need it.
    """

    kind: Literal["cuda", "compiler", "package", "check"]
    remedy: str
    name: str = ""
    when: Callable[[Any], bool] = lambda settings: True

    def words(self, settings: Any) -> str:
        """Return the remedy for these settings."""
        return self.remedy.format(**vars(settings))


@dataclass(frozen=True)
class Rung:
    """A technique's place in the ladder.

    Attributes:
        name: its name in the ladder's table.
        order: its position; the technique that costs least comes first.
        overrides: for `lightning-solo train`, in addition to the override that chooses the technique.
    """

    name: str
    order: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Card:
    """The description of a technique.

    Attributes:
        name: name of the technique, and so of its folder, its option, its test and its page.
        target: its class, as ``"module:Class"``.
        phase: its place in the order in which techniques act.
        settings: a frozen dataclass with the arguments of the class; `setting` makes its fields.
        saves, costs, numerics, conflicts, reference: one or two lines each for the documentation.
        group: ``"strategy"`` if it decides how model states are stored, else ``"callback"``.
        exact: whether results are bitwise equal to those of a run without it.
        owns: resources that only one technique of a run may own; see `RESOURCES`.
        reads: resources that no other technique may free.
        frees: resources that don't exist, or can't be trusted, under this technique.
        instead: resource -> setting or override with which this technique doesn't own it.
        first_factor: returns the micro-batches of the first optimizer step; only for a technique that owns
            ``accumulation_factor``.
        zeroes_until: returns the optimizer step before which the technique sets weights to zero for the last time that
            were trained before; None if it sets none.
        rules: each returns why the technique doesn't fit a configuration and what to write, or None if it fits.
        caveat: returns the reason why the technique must be chosen by name, or None. `auto` doesn't choose a preset
            with a caveat, and plans of all presets list it last. Owning ``trained_parameters`` implies a caveat.
        requires: the devices, compilers and packages that it needs.
        on_cpu: settings with which it runs on a CPU; None if it never does.
        rung: its place in the ladder.
        planned: ``"attached"``, ``"left out"``, or ``"module:function"``, a function from settings and a `Tracing` to
            the changed `Tracing`; see `lightning_solo.planner.rules`.
        footprint: ``"module:function"``, a function that returns the bytes of the model states from settings, a
            `cards.footprint.Request` and the `Footprint` without this technique.
        solved: its part in a solved plan: the setting that the solver decides, ``"modes"`` of blocks,
            ``"micro_batch"``, ``"micro_batches"`` within blocks, ``"state_budget"`` or ``"weight_budget"``;
            ``"moving"`` if it moves the tensors of modes to the host; empty for none.
        engine: the engine for several devices that a strategy is, one of `ENGINES`; empty for one device.
        engines: engine -> what the technique's results are under it, or why it is refused; see `Answer`.
    """

    name: str
    target: str
    phase: Phase
    settings: type[TechniqueSettings]
    saves: str
    costs: str
    numerics: str
    conflicts: str
    reference: str
    group: Literal["callback", "strategy"] = "callback"
    exact: bool = False
    owns: Resources = frozenset()
    reads: Resources = frozenset()
    frees: Resources = frozenset()
    instead: Mapping[str, str] = field(default_factory=dict)
    first_factor: Callable[[Any], int] | None = None
    zeroes_until: Callable[[Any], int] | None = None
    rules: tuple[Callable[[Any, Configuration], str | None], ...] = ()
    caveat: Callable[[Any], str | None] | None = None
    requires: tuple[Requirement, ...] = ()
    on_cpu: Mapping[str, Any] | None = field(default_factory=dict)
    rung: Rung | None = None
    planned: str = "attached"
    footprint: str | None = None
    solved: Literal["", "modes", "moving", "micro_batch", "micro_batches", "state_budget", "weight_budget"] = ""
    engine: str = ""
    engines: Mapping[str, Answer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.settings, type) and issubclass(self.settings, TechniqueSettings):
            self.settings.technique = self.name

    @property
    def class_name(self) -> str:
        """The name of the technique's class."""
        return self.target.partition(":")[2]

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each setting."""
        return {each.name: each.default for each in fields(self.settings)}

    def check(self, values: Mapping[str, Any], option: str | None = None) -> Any:
        """Return settings from plain values; see `TechniqueSettings.parse`."""
        return self.settings.parse(values, option or self.name)


def resources(of: Resources, settings: Any) -> frozenset[str]:
    """Return the names of a technique's resources."""
    return of(settings) if callable(of) else of
