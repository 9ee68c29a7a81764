"""A technique's card: all that others need to know of it, in one torch-free object in the technique's own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings

if TYPE_CHECKING:
    from lightning_solo.cards.configuration import Configuration

Resources = frozenset[str] | Callable[[Any], frozenset[str]]
"""Names of resources, or a function that returns them for the technique's settings."""

RESOURCES = {
    "accumulation_factor": "how many micro-batches make an optimizer step",
    "batches": "what the loader yields",
    "device_peak": "the device's peak counters",
    "gradients": "`.grad` of the parameters, between backward and the step",
    "loss": "the loss that backward starts from",
    "micro_batches": "in which parts a batch goes through forward and backward",
    "micro_batch_weights": "by what each micro-batch counts in its optimizer step",
    "optimizer_states": "the optimizer's states",
    "repeated_backward": "a forward and backward that failed, and can be run again",
    "saved_tensors": "what forward keeps for backward",
    "sequences": "how long the sequences of a batch are",
    "trained_parameters": "which parameters are trained",
    "weights": "where and in which precision the weights are stored",
}
"""What a technique may own, read or free, and what it is. A technique may name others of its own."""


def _always(settings: Any) -> bool:
    return True


@dataclass(frozen=True)
class Requirement:
    """Something of the machine or of installed packages, without which a technique can't run.

    Attributes:
        kind: ``"cuda"`` for a CUDA device, ``"compiler"`` for a C++ compiler, ``"package"`` for an installed package,
            ``"check"`` for a function that returns in words what is missing, or None.
        remedy: what needs it, and what to write without it; ``{name}`` stands for the setting of that name.
        name: the package with its versions, as ``"torchao>=0.12"``, or the function as ``"module:function"``.
        when: whether it applies under the given settings.
    """

    kind: Literal["cuda", "compiler", "package", "check"]
    remedy: str
    name: str = ""
    when: Callable[[Any], bool] = _always

    def words(self, settings: Any) -> str:
        """Return the remedy for these settings."""
        return self.remedy.format(**vars(settings))


@dataclass(frozen=True)
class Rung:
    """A technique's place in the ladder.

    Attributes:
        name: as the ladder's table shows it.
        order: what costs least comes first.
        overrides: of `lightning-solo train` beside the choice of the technique itself.
    """

    name: str
    order: int
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Card:
    """What others know of a technique.

    Attributes:
        name: of its folder, its YAML, its test and its page.
        target: ``"module:Class"``.
        phase: when it acts, compared with others.
        settings: a frozen dataclass, whose fields are made by `setting`: the arguments of the class.
        saves, costs, numerics, conflicts, reference: a line or two each, from which documentation is made.
        group: of configuration files: ``"strategy"`` for one that decides how model states are stored.
        exact: whether it claims to change no bit of what a run without it gives.
        owns: resources that only one technique of a run may own; see `RESOURCES`.
        reads: resources that no other technique may free.
        frees: resources that are gone, or not to be trusted, under this technique.
        instead: resource -> what to write so that this technique gives it up.
        first_factor: for one that owns the accumulation factor; returns for its settings how many micro-batches make
            the first optimizer step.
        rules: each returns why the technique can't be part of a configuration and what to write, or None.
        caveat: returns for its settings why nobody should get it without asking for it by name, or None. `auto` leaves
            a preset with a caveat out, and plans of all presets list it last, unless its preset is named. A technique
            that owns ``trained_parameters`` has such a caveat already.
        requires: of the machine.
        on_cpu: settings under which it also runs on a CPU; None where it never does.
        rung: its place in the ladder.
        planned: ``"attached"``, ``"left out"``, or ``"module:function"``, which is called with settings and the
            `Tracing` so far and returns the one to come; see `lightning_solo.planner.rules`.
        footprint: ``"module:function"``, which is called with settings and a `cards.footprint.Request` and returns the
            bytes of the model states under this technique; for one that owns or frees a part of them.
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
    rules: tuple[Callable[[Any, Configuration], str | None], ...] = ()
    caveat: Callable[[Any], str | None] | None = None
    requires: tuple[Requirement, ...] = ()
    on_cpu: Mapping[str, Any] | None = field(default_factory=dict)
    rung: Rung | None = None
    planned: str = "attached"
    footprint: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.settings, type) and issubclass(self.settings, TechniqueSettings):
            self.settings.technique = self.name

    @property
    def class_name(self) -> str:
        """The name of its class."""
        return self.target.partition(":")[2]

    @property
    def defaults(self) -> dict[str, Any]:
        """The default of each setting."""
        return {each.name: each.default for each in fields(self.settings)}

    def check(self, values: Mapping[str, Any], option: str | None = None) -> Any:
        """Return the settings that plain values describe; see `TechniqueSettings.parse`."""
        return self.settings.parse(values, option or self.name)


def resources(of: Resources, settings: Any) -> frozenset[str]:
    """Return the names of resources for given settings."""
    return of(settings) if callable(of) else of
