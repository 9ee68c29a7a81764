"""Sphinx directives for tables that are made when the documentation is built: of cards, presets and measurements.

{card} compact              the top of a technique's page
{techniques}                all techniques with what they save
{engines}                   how each technique runs under the engines for several devices
{presets}                   all presets with what they are for
{resources}                 all resources that a card may own, read or free
{formats}                   which devices multiply in which formats of low precision
{messages}                  the beginnings of all messages of errors, with links to their sections
{results} ladder_cpu.json   a table of measurements from examples/results, with its command
{chart} ladder_cpu.json     the same measurements as a picture
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES, PICTURES, MESSAGES = _module("tables"), _module("pictures"), _module("messages")


class Table(SphinxDirective):
    """Parses what a function of tables.py returns as Markdown."""

    optional_arguments = 1
    final_argument_whitespace = False

    def run(self) -> list[nodes.Node]:
        """Return the parsed table."""
        functions = {
            "card": TABLES.card,
            "techniques": TABLES.techniques,
            "engines": TABLES.engines,
            "presets": TABLES.presets,
            "messages": lambda: TABLES.messages(MESSAGES.index()),
            "resources": TABLES.resources,
            "results": TABLES.results,
            "formats": TABLES.formats,
        }
        text = functions[self.name](*self.arguments)
        container = nodes.container(classes=["made", self.name])
        self.state.nested_parse(StringList(text.splitlines(), source=self.name), self.content_offset, container)
        return [container]


class Chart(SphinxDirective):
    """Draws what `pictures.py` returns for a file of results."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the drawn charts, for light and dark pages."""
        return [nodes.raw("", PICTURES.html(*self.arguments), format="html")]


def fences_to_blocks(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn code between triple backquotes, as docstrings have it, into the blocks of reStructuredText."""
    fenced = False
    converted: list[str] = []
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = not fenced
            converted += ["", ".. code-block:: text", ""] if fenced else [""]
        else:
            converted.append(f"   {line}" if fenced else line)
    lines[:] = converted


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives."""
    app.connect("autodoc-process-docstring", fences_to_blocks, priority=100)  # before napoleon's
    for name in ("card", "techniques", "engines", "presets", "messages", "resources", "results", "formats"):
        app.add_directive(name, Table)
    app.add_directive("chart", Chart)
    return {"parallel_read_safe": True}
