"""The HTML page: one self-contained file, whose policy forbids every request."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

from lightning_solo.errors import CapabilityError
from lightning_solo.report.charts import PIP, altair
from lightning_solo.report.model import Report
from lightning_solo.report.palette import DARK, LIGHT, SCREEN, Palette

HERE = Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
"""Allows no request. Vega compiles the expressions of a chart, which needs 'unsafe-eval'."""


def page(report: Report) -> str:
    """Return the page; the template escapes all text, in HTML and in the charts' JSON.

    Raises:
        CapabilityError: Altair or vl-convert is not installed.
    """
    bundle = javascript()  # before Jinja, which comes with Altair
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    # only our own style and script, and Vega's bundle, are marked as markup
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    return environment.get_template("page.html").render(
        report=report,
        charts={figure.name: figure.draw(SCREEN) for figure in report.figures},
        table_first=bool(report.tables) and report.tables[0].caption in ("All jobs", "Ladder"),
        policy=POLICY,
        light=LIGHT,
        dark=DARK,
        variables=lambda palette: Markup(variables(palette)),
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        bundle=Markup(bundle),
        written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def variables(palette: Palette) -> str:
    """Return a palette as CSS variables."""
    named = {name: getattr(palette, name) for name in ("ink", "muted", "ground", "line", "link")}
    named |= {f"mark-{i}": colour for i, colour in enumerate(palette.marks)}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


def vl_convert() -> Any:
    """Return the module that holds Vega's JavaScript and draws PNG.

    Raises:
        CapabilityError: it is not installed, or lacks the Vega-Lite version that this Altair writes.
    """
    try:
        import vl_convert
    except ImportError as error:
        raise CapabilityError(f"report needs vl-convert, which is not installed ({error}); write: {PIP}") from error
    known = vl_convert.get_vegalite_versions()
    if vega_lite() not in known:
        raise CapabilityError(
            f"the installed Altair writes Vega-Lite {vega_lite()}, the installed vl-convert knows {', '.join(known)}; "
            f"write: pip install --upgrade altair vl-convert-python"
        )
    return vl_convert


def vega_lite() -> str:
    """Return the version of Vega-Lite that the installed Altair writes, such as ``6.4``."""
    return ".".join(altair().SCHEMA_VERSION.lstrip("v").split(".")[:2])


@functools.cache
def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; it takes about two seconds to bundle."""
    bundle = str(vl_convert().javascript_bundle(vl_version=vega_lite()))
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")
