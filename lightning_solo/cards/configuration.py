"""A parsed preset: its techniques with their settings, and the conflicts and requirements that their cards declare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from typing import Any

from lightning_solo.cards.card import RESOURCES, Card, Requirement, resources
from lightning_solo.cards.engines import ENGINES, refusal_under
from lightning_solo.errors import ConflictError

Rule = Callable[[Any, "Configuration"], str | None]
CUDA_PRECISIONS = ("16-mixed", "16-true", "transformer-engine", "transformer-engine-float16")


@dataclass(frozen=True)
class Chosen:
    """A technique in a configuration."""

    card: Card  # of the technique
    settings: Any  # an instance of ``card.settings``
    option: str  # path of the settings, such as ``"callback.memory_logger"``

    @property
    def choice(self) -> str:
        """Its name in messages: ``strategy=zero_offload``, or ``callback.memory_logger``."""
        return f"strategy={self.card.name}" if self.card.group == "strategy" else self.option

    @property
    def removal(self) -> str:
        """The override that removes it."""
        return f"~{self.option}"

    def owned(self) -> frozenset[str]:
        """Return the resources that it owns with these settings."""
        return resources(self.card.owns, self.settings)


@dataclass(frozen=True)
class Target:
    """A callback or strategy that the user names by ``_target_``."""

    option: str  # its path, such as ``"callback.mine"`` or ``"strategy"``
    node: Mapping[str, Any]  # ``_target_`` and its arguments, in plain containers
    allow: tuple[str, ...]  # prefixes of ``_target_`` that the user trusts


@dataclass(frozen=True)
class AutoSettings:
    """The settings of the preset `auto`."""

    device: str | None = None  # name of the device to plan for; None for this machine's
    budget: int | str | None = None  # usable device memory, in bytes or as "16GiB"; None for all
    accept_tight: bool = False  # whether a plan may leave less than 5 % of the memory
    # candidates; None for all presets that train as the module does, and for the solved plan, whose name among
    # candidates is ``solved``
    presets: tuple[str, ...] | None = None
    # name of the file in ``conf/solo`` to which a chosen solved plan is written; None for none
    save_preset: str | None = None
    whole_batch: bool = False  # whether the solved plan runs each batch as a whole, in no micro-batches


@dataclass(frozen=True)
class Configuration:
    """A parsed and checked preset. None stands for a Trainer argument that the preset doesn't set."""

    precision: str | None = None  # Lightning's long name, or None
    accumulate_grad_batches: int | None = None  # micro-batches per optimizer step, or None
    devices: int | None = None  # number of devices; None for the Trainer's under an engine, else for one
    techniques: tuple[Chosen, ...] = ()  # in the order of the preset
    foreign: tuple[Target, ...] = ()  # callbacks and strategy that the user names by ``_target_``
    auto: AutoSettings | None = None  # settings of `auto`; None for any other preset
    # the name that the user chose, or several as ``"[compact,checkpointing]"``; empty if it is unknown
    preset: str = field(default="", compare=False)

    @property
    def summary(self) -> str:
        """The preset's name with its fields and techniques, for the log."""
        fields = {name: getattr(self, name) for name in ("precision", "accumulate_grad_batches", "devices")}
        words = [f"{name}={value}" for name, value in fields.items() if value is not None]
        words += [part.card.name if isinstance(part, Chosen) else part.option for part in self.parts]
        return f"preset {self.preset or 'of your own'}: {', '.join(words) or 'nothing changed'}"

    @property
    def strategy(self) -> Chosen | Target | None:
        """The strategy, or None."""
        return next((part for part in self.parts if part.option == "strategy"), None)

    @property
    def engine(self) -> str:
        """The engine for several devices; empty without one."""
        return next((chosen.card.engine for chosen in self.techniques if chosen.card.engine), "")

    @property
    def without_engine(self) -> Configuration:
        """A copy without the engine's strategy."""
        return replace(self, techniques=tuple(chosen for chosen in self.techniques if not chosen.card.engine))

    def one_device(self, given: str) -> str:
        """Return the message for several devices that are ``given`` to a preset for one."""
        what = f"strategy={self.strategy.card.name}" if isinstance(self.strategy, Chosen) else "a preset without engine"
        drop = "" if self.strategy is None else " in place of its strategy"
        combines = (
            self.preset and self.auto is None and self.strategy is None and not any(self.under_engine(ENGINES[0]))
        )
        names = [ENGINES[0], *(self.preset.strip("[]").split(",") if combines else ["bf16"])]
        return (
            f"{given}: {what} trains on one device; write devices=1, or for several devices add the preset ddp, fsdp or"
            f" zero3{drop}, such as {names}"
        )

    @property
    def parts(self) -> tuple[Chosen | Target, ...]:
        """Techniques, then targets."""
        return (*self.techniques, *self.foreign)

    def with_techniques_of(self, other: Configuration) -> Configuration:
        """Return a copy with the other's techniques and targets added; they replace ours of the same option."""

        def joined(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple({part.option: part for part in (*ours, *theirs)}.values())

        return replace(
            self,
            techniques=joined(self.techniques, other.techniques),
            foreign=joined(self.foreign, other.foreign),
        )

    @property
    def accumulates(self) -> bool:
        """Whether an optimizer step may take several micro-batches."""
        return self.accumulate_grad_batches not in (None, 1) or bool(self.accumulating)

    @property
    def accumulating(self) -> tuple[Chosen, ...]:
        """The techniques that give an optimizer step several micro-batches."""
        return tuple(chosen for chosen in self.techniques if chosen.owned() & {"accumulation_factor", "micro_batches"})

    @property
    def makes_batches(self) -> bool:
        """Whether a technique replaces the loader's batches; a plan doesn't know the new ones."""
        return any(chosen.owned() & {"batches", "sequences"} for chosen in self.techniques)

    @property
    def caveats(self) -> tuple[str, ...]:
        """Reasons why this preset must be chosen by name."""
        words = [
            (chosen, "chooses which parameters are trained")
            for chosen in self.techniques
            if "trained_parameters" in chosen.owned()
        ]
        words += [
            (chosen, text)
            for chosen in self.techniques
            if chosen.card.caveat is not None and (text := chosen.card.caveat(chosen.settings))
        ]
        return tuple(f"{chosen.choice} {text}" for chosen, text in words)

    @property
    def first_factor(self) -> int:
        """Micro-batches of the first optimizer step."""
        for chosen in self.techniques:
            if chosen.card.first_factor is not None:
                return chosen.card.first_factor(chosen.settings)
        return self.accumulate_grad_batches or 1

    def has(self, name: str) -> bool:
        """Return whether a technique is chosen, under any key."""
        return any(chosen.card.name == name for chosen in self.techniques)

    def check(self) -> None:
        """Refuse choices that cannot be combined, all conflicts in one error."""
        refuse(self._conflicts())

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether a field of the Trainer may have another value; the field "strategy" may only be removed."""
        if name == "strategy":
            kept = replace(
                self,
                techniques=tuple(part for part in self.techniques if part.option != name),
                foreign=tuple(part for part in self.foreign if part.option != name),
            )
        else:
            kept = replace(self, **{name: value})
        return not any(kept._conflicts())

    def _conflicts(self) -> Iterator[str]:
        for one, other in combinations(self.techniques, 2):
            if one.card.name == other.card.name:
                yield f"{one.card.group} {one.card.name!r} is chosen twice; write {other.removal}"
        yield from self._two_factors()
        if self.devices not in (None, 1) and not self.engine:
            yield self.one_device(f"devices={self.devices}")
        yield from self.rivalries()
        yield from (message for _, message, _ in self._broken_rules())

    def rivalries(self) -> Iterator[str]:
        """Yield a message for each pair of techniques whose resources or rules forbid the combination.

        A rule that refuses a technique even without the others yields no message here.
        """
        yield from self.under_engine(self.engine)
        for one, other in combinations(self.techniques, 2):
            with_engine = one.card.engine or other.card.engine  # of which under_engine may have said it
            if not (with_engine and any(self._refused_under(each, self.engine) for each in (one, other))):
                yield from islice(_rivalries_of(one, other), 1)
        for chosen, message, rule in self._broken_rules():
            if not rule(chosen.settings, replace(self, techniques=(chosen,))):
                yield message

    def _broken_rules(self) -> Iterator[tuple[Chosen, str, Rule]]:
        """Yield each rule that a technique breaks, with its message, unless its card refuses the engine already."""
        for chosen in self.techniques:
            for rule in chosen.card.rules:
                if message := rule(chosen.settings, self):
                    names_engine = self.engine and f"strategy={self.engine}" in message
                    if not (names_engine and self._refused_under(chosen, self.engine)):
                        yield chosen, message, rule

    def under_engine(self, engine: str) -> Iterator[str]:
        """Yield a message for each technique that an engine doesn't run, by the technique's card."""
        yield from filter(None, (self._refused_under(chosen, engine) for chosen in self.techniques))

    def _refused_under(self, chosen: Chosen, engine: str) -> str | None:
        return refusal_under(chosen, engine, self) if engine and chosen.card.group != "strategy" else None

    def _two_factors(self) -> Iterator[str]:
        factor = self.accumulate_grad_batches
        for chosen in self.techniques:
            if factor not in (None, 1) and "accumulation_factor" in chosen.owned():
                removal = f"{chosen.removal}, or drop accumulate_grad_batches"
                remedy = chosen.card.instead.get("accumulation_factor", removal)
                yield (
                    f"{chosen.choice} sets the factor itself, and accumulate_grad_batches={factor} sets it too;"
                    f" write {remedy.format(factor=factor)}"
                )

    def requirements(self) -> Iterator[tuple[Requirement, str]]:
        """Yield each requirement that applies, and its remedy."""
        for chosen in self.techniques:
            for requirement in chosen.card.requires:
                if requirement.when(chosen.settings):
                    yield requirement, requirement.words(chosen.settings)
        if self.precision in CUDA_PRECISIONS:
            words = f"precision={self.precision} needs a CUDA device; without one use bf16-mixed (preset 'bf16')"
            yield Requirement("cuda", words), words

    def needs_cuda(self) -> str | None:
        """Return the choice that needs a CUDA device, and the remedy; None if the preset runs anywhere."""
        return next((words for need, words in self.requirements() if need.kind == "cuda"), None)


def refuse(conflicts: Iterable[str]) -> None:
    """Raise an error with all conflicts, if there are any.

    Raises:
        ConflictError: each conflict once, on a line of its own.
    """
    messages = list(dict.fromkeys(conflicts))
    if messages:
        raise ConflictError("\n".join(messages))


def _rivalries_of(one: Chosen, other: Chosen) -> Iterator[str]:
    for resource in sorted(one.owned() & other.owned()):
        start = f"{one.choice} and {other.choice}: only one technique of a run can own"
        yield _refusal(start, one, other, resource)
    for reader, freer in ((one, other), (other, one)):
        freed = resources(freer.card.frees, freer.settings)
        for resource in sorted(freed & resources(reader.card.reads, reader.settings)):
            start = f"{reader.choice} and {freer.choice}: the first reads and the second frees or resets"
            yield _refusal(start, reader, freer, resource)


def _refusal(start: str, one: Chosen, other: Chosen, resource: str) -> str:
    """Return the message for two techniques that need the same resource; ``start`` names them."""
    remedies = [
        chosen.card.instead.get(resource, f"{chosen.removal} (removes {chosen.card.name})").format(
            **{"factor": "<N>", **vars(chosen.settings)}  # a remedy may name the Trainer's factor: there is none here
        )
        for chosen in (other, one)
        if chosen.card.group == "callback" or resource in chosen.card.instead
    ]
    named = f"{resource} ({RESOURCES[resource]})" if resource in RESOURCES else resource
    return f"{start} {named}; write {' or '.join(remedies)}"
