"""Settings of a technique: a frozen dataclass that gives it constructor, documentation and configuration."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from lightning_solo.cards.arguments import Check, check_arguments, parameters_of

AnySettings = TypeVar("AnySettings", bound="TechniqueSettings")


def setting(
    default: Any, text: str, *, allowed: Sequence[Any] = (), at_least: float | None = None, check: Check | None = None
) -> Any:
    """Return a field of settings. ``text`` documents it, with its unit; see `Parameter` for the checks."""
    return field(
        default=default, metadata={"text": text, "allowed": tuple(allowed), "at_least": at_least, "check": check}
    )


def names_or(word: str, names: str, example: str) -> Check:
    """Return a check of a setting that is a word, such as "auto", or a list of names."""
    return partial(_wrong_names, word, names, example)


def _wrong_names(word: str, names: str, example: str, value: str | Sequence[str]) -> str | None:
    given = [value] if isinstance(value, str) else value
    if not given or not all(name.strip() for name in given):
        return f"write '{word}' or {names}, as {example}"
    return f"write '{word}' alone, or {names} only" if not isinstance(value, str) and word in value else None


@dataclass(frozen=True)
class TechniqueSettings:
    """Base of the frozen dataclasses that hold a technique's settings, and so of the techniques' classes.

    A technique's class has the dataclass as its last base: ``class Mine(Technique, Settings)``. The dataclass gives
    it a constructor and a repr. The fields' texts become the section ``Args:`` of its docstring. A technique is equal
    only to itself. Values are checked once, in the constructor.

    Raises:
        PresetError: an invalid value; names ``technique.setting``.
        ConflictError: two settings that contradict each other.
    """

    technique: ClassVar[str] = "settings"
    """The technique's name, for messages; its card sets it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if any(not issubclass(base, TechniqueSettings) for base in cls.__bases__):  # a technique, not its settings
            cls.__eq__ = object.__eq__  # type: ignore[method-assign]
            cls.__hash__ = object.__hash__  # type: ignore[method-assign]
            cls.__dataclass_fields__ = _NoFields()  # type: ignore[assignment]
            if "__init__" not in vars(cls):  # evaluated, since LightningCLI reads only types that its module can name
                cls.__init__.__annotations__ = get_type_hints(cls.__init__)
                cls.__init__.__qualname__ = f"{cls.__name__}.__init__"  # for Python's message about a wrong argument
            doc = cls.__doc__ or cls.__bases__[-1].__doc__ or ""
            if "    Args:" not in doc:
                cls.__doc__ = documented(doc, cls.settings_class())

    def __post_init__(self) -> None:
        self._check_values(self.technique)
        self._init_state()

    @classmethod
    def settings_class(cls) -> type[TechniqueSettings]:
        """Return the dataclass of these settings, also for a technique's class."""
        return next(each for each in cls.__mro__ if isinstance(vars(each).get("__dataclass_fields__"), dict))

    @classmethod
    def parse(cls: type[AnySettings], values: Mapping[str, Any], option: str) -> AnySettings:
        """Return settings from plain values and, for missing ones, defaults.

        Raises:
            PresetError: an unknown setting or an invalid value.
            ConflictError: two settings that contradict each other.
        """
        defaults = {each.name: each.default for each in fields(cls) if each.default is not MISSING}
        settings = cls._with({**defaults, **values})
        settings._check_values(option)
        return settings

    @classmethod
    def from_settings(cls: type[AnySettings], settings: TechniqueSettings) -> AnySettings:
        """Return a technique with settings that were checked before."""
        technique = cls._with(vars(settings))
        technique._init_state()
        return technique

    @classmethod
    def _with(cls: type[AnySettings], values: Mapping[str, Any]) -> AnySettings:
        created = cls.__new__(cls)
        vars(created).update(values)
        return created

    def _check_values(self, option: str) -> None:
        vars(self).update({name: _copied(value) for name, value in vars(self).items()})
        check_arguments(vars(self), parameters_of(self.settings_class()), option)  # type: ignore[arg-type]
        self._check_together()

    def _check_together(self) -> None:
        """Refuse settings that contradict each other."""

    def _init_state(self) -> None:
        """Set the attributes that are not settings; called once per object."""


class _NoFields:
    """Makes a technique's class no dataclass for others: Hydra would turn its objects into configurations."""

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError("a technique is no dataclass; its settings_class() is one")


def _copied(value: Any) -> Any:
    """Return a value with copies of its containers, so that the caller's containers are neither kept nor changed."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_copied(item) for item in value]
    return value


def documented(doc: str, settings: type[TechniqueSettings]) -> str:
    """Return a docstring with a section ``Args:`` made from the fields' texts, and the error for wrong arguments."""
    lines = []
    for name, parameter in parameters_of(settings).items():  # type: ignore[arg-type]
        text = f"{name}: {settings.__dataclass_fields__[name].metadata['text']}"
        if allowed := parameter.allowed or (get_origin(parameter.kind) is Literal and get_args(parameter.kind)):
            text += f"; one of {', '.join(map(str, allowed))}"
        lines += textwrap.wrap(f"{text}.", 112, initial_indent=" " * 8, subsequent_indent=" " * 12)
    if not lines:
        return doc
    if "PresetError:" not in doc:
        raised = "    Raises:\n        PresetError: an argument is ill-formed.\n"
        doc = doc.replace("    Raises:\n", raised, 1) if "    Raises:\n" in doc else f"{doc.rstrip()}\n\n{raised}"
    section = "\n".join(["    Args:", *lines, "", ""])
    for head in ("    Attributes:", "    Raises:"):
        if head in doc:
            return doc.replace(head, f"{section}{head}", 1)
    return f"{doc.rstrip()}\n\n{section}".rstrip() + "\n"
