"""Vega-Lite specifications, written with Altair: lines, stacked areas, bars and a scatter with its Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning_solo.errors import CapabilityError
from lightning_solo.report.palette import DASHES, Palette
from lightning_solo.report.series import Series

PIP = "pip install 'lightning-solo[report]'"
FEW = 40
"""Points of a series up to which each is marked; a line alone would not show a series of one."""
LONG_NAME = 31
"""Letters of a name from which a legend has 2 columns of 340 pixels instead of 3 of 200."""
ON_FRONT, BEHIND = "on the Pareto front", "another beats it"


def altair() -> Any:
    """Return the module.

    Raises:
        CapabilityError: it is not installed.
    """
    try:
        import altair
    except ImportError as error:
        raise CapabilityError(f"report draws with Altair, which is not installed ({error}); write: {PIP}") from error
    return altair


def lines(series: Sequence[Series], x: str, y: str, palette: Palette) -> dict[str, Any]:
    """Return a line per series, told apart by colour and dash; few points are marked too."""
    alt = altair()
    names = _names(series)
    rows = _points(series)
    legend = _legend(alt, names)
    base = _over_steps(alt, names, x, y, palette).encode(y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=False)))
    dash = alt.StrokeDash("series:N", scale=_scale(alt, names, DASHES), legend=legend)
    line = base.mark_line(strokeWidth=1.6, clip=True).encode(strokeDash=dash, detail=alt.Detail("part:N"))
    points = base.transform_filter("datum.few").mark_point(size=45, filled=True, opacity=1)
    chart = line + points if any(row["few"] for row in rows) else line
    return _finished(alt, chart, {"data": rows}, palette, height=260)


def areas(series: Sequence[Series], x: str, y: str, palette: Palette) -> dict[str, Any]:
    """Return series stacked on one another in their order, each with an outline; they share their steps."""
    alt = altair()
    names = _names(series)
    rows = [{**row, "order": names.index(row["series"])} for row in _points(series)]
    base = _over_steps(alt, names, x, y, palette).encode(
        y=alt.Y("y:Q", title=y, stack="zero"), order=alt.Order("order:Q")
    )
    chart = base.mark_area(line={"color": palette.ink, "strokeWidth": 0.8}, fillOpacity=0.75)
    return _finished(alt, chart, {"data": rows}, palette, height=260)


def bars(rows: Sequence[dict[str, Any]], x: str, palette: Palette) -> dict[str, Any]:
    """Return a bar per row, from the top in their order; rows are ``name``, ``value`` or None, ``label``, ``first``."""
    alt = altair()
    drawn = [{**row, "value": short(row["value"]), "end": short(row["value"] or 0.0)} for row in rows]
    base = alt.Chart(alt.NamedData("data")).encode(
        y=_rows(alt, "name"),
        tooltip=[alt.Tooltip("name:N"), alt.Tooltip("label:N", title=x)],
    )
    most = max((row["end"] for row in drawn), default=0.0) or 1.0
    length = alt.X("end:Q", title=x, scale=alt.Scale(domain=[0, most * 1.35], nice=False))  # room for the labels
    colour = alt.condition("datum.first", alt.value(palette.marks[-1]), alt.value(palette.marks[0]))
    bar = base.mark_bar(stroke=palette.ink, strokeWidth=0.6).encode(x=length, color=colour)
    label = base.mark_text(align="left", dx=6, color=palette.ink).encode(x=length, text="label:N")
    chart, data = bar + label, {"data": drawn}
    before = next((row["end"] for row in drawn if row["first"] and row["value"] is not None), None)
    if before is not None:
        mark = alt.Chart(alt.NamedData("before"))
        data["before"] = [{"end": before}]
        chart += mark.mark_rule(color=palette.ink, strokeDash=[4, 3]).encode(x=alt.X("end:Q"))
    return _finished(alt, chart, data, palette, height=max(90, 30 * len(drawn)))


def stacks(
    rows: Sequence[dict[str, Any]],
    signs: Mapping[str, str],
    x: str,
    mark: tuple[float, str] | None,
    palette: Palette,
) -> dict[str, Any]:
    """Return a bar per row, stacked of its parts, each with its sign where there is room, and a rule across them.

    Args:
        rows: ``name``, ``parts`` by name, ``label``.
        signs: part -> a letter, in the order in which they are stacked.
        x: what the horizontal axis shows.
        mark: position and label of the rule; None for no rule.
        palette: colours.
    """
    alt = altair()
    names = [name for name in signs if any(row["parts"][name] for row in rows)]
    most = max([mark[0] if mark else 0.0, *(sum(row["parts"].values()) for row in rows)]) * 1.4  # room for the labels
    drawn, ends = [], []
    for row in rows:
        end = 0.0
        for name in names:
            begin, end = end, end + row["parts"][name]
            sign = signs[name] if end - begin > most / 50 else ""
            part = f"{signs[name]} {name}"
            drawn.append({"name": row["name"], "part": part, "begin": short(begin), "end": short(end), "sign": sign,
                          "middle": short((begin + end) / 2)})  # fmt: skip
        ends.append({"name": row["name"], "end": short(most), "label": row["label"]})  # behind every bar and the rule
    y = _rows(alt, "name")
    at = partial(alt.X, title=x, scale=alt.Scale(domain=[0, most], nice=False))
    domain = [f"{signs[name]} {name}" for name in names]
    legend = _squares(alt)
    base = alt.Chart(alt.NamedData("data")).encode(y=y)
    bar = base.mark_bar(stroke=palette.ground, strokeWidth=1).encode(
        x=at("begin:Q"),
        x2="end:Q",
        color=alt.Color("part:N", scale=_scale(alt, domain, palette.marks), legend=legend),
        tooltip=[alt.Tooltip("name:N"), alt.Tooltip("part:N"), alt.Tooltip("begin:Q"), alt.Tooltip("end:Q")],
    )
    letter = base.mark_text(color=palette.ground, fontWeight="bold").encode(x=at("middle:Q"), text="sign:N")
    label = alt.Chart(alt.NamedData("ends")).mark_text(align="right", dx=-6, color=palette.ink)
    label = label.encode(y=y, x=at("end:Q"), text="label:N")
    chart, data = bar + letter + label, {"data": drawn, "ends": ends}
    if mark is not None:
        data["mark"] = [{"end": short(mark[0]), "label": mark[1]}]
        line = alt.Chart(alt.NamedData("mark")).encode(x=at("end:Q"))
        chart += line.mark_rule(color=palette.ink, strokeWidth=2, strokeDash=[5, 3])
        words = line.mark_text(baseline="bottom", dy=-4, color=palette.ink)
        chart += words.encode(y=alt.value(0), text="label:N")
    return _finished(alt, chart, data, palette, height=max(90, 30 * len(rows)))


def spans(rows: Sequence[dict[str, Any]], x: str, palette: Palette) -> dict[str, Any]:
    """Return a row per lane with a bar for each span of time, coloured by its part.

    Args:
        rows: ``lane``, ``begin``, ``end``, ``part``, and ``share`` of the time, the bar's opacity; lanes keep
            their order.
        x: what the horizontal axis shows.
        palette: colours.
    """
    alt = altair()
    drawn = [{**row, "begin": short(row["begin"]), "end": short(row["end"])} for row in rows]
    parts = list(dict.fromkeys(row["part"] for row in rows))
    lanes = list(dict.fromkeys(row["lane"] for row in rows))
    base = alt.Chart(alt.NamedData("data")).encode(
        y=_rows(alt, "lane", sort=lanes, width=300),
        x=alt.X("begin:Q", title=x, scale=alt.Scale(nice=False)),
        x2="end:Q",
        color=alt.Color("part:N", scale=_scale(alt, parts, palette.marks), legend=_squares(alt)),
        opacity=alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0, 1]), legend=None),
        tooltip=[alt.Tooltip(f"{name}:N") for name in ("lane", "part", "begin", "end", "share")],
    )
    chart = base.mark_bar()
    return _finished(alt, chart, {"data": drawn}, palette, height=max(90, 26 * len(lanes)))


def scatter(rows: Sequence[dict[str, Any]], x: str, y: str, palette: Palette) -> dict[str, Any]:
    """Return a point per job; those on the front are filled diamonds with their number, joined by a line.

    Args:
        rows: ``x``, ``y``, ``job``, ``overrides``, ``front``.
        x: what the horizontal axis shows.
        y: what the vertical axis shows.
        palette: colours.
    """
    alt = altair()
    drawn = [
        {**row, "x": short(row["x"]), "y": short(row["y"]), "which": ON_FRONT if row["front"] else BEHIND}
        for row in rows
    ]
    which, colours = [ON_FRONT, BEHIND], [palette.marks[1], palette.marks[0]]
    legend = alt.Legend(title=None, orient="top", labelLimit=400)
    base = alt.Chart(alt.NamedData("data")).encode(
        x=alt.X("x:Q", title=x, scale=_around(alt, [row["x"] for row in drawn])),
        y=alt.Y("y:Q", title=y, scale=_around(alt, [row["y"] for row in drawn])),
    )
    points = base.mark_point(size=90, strokeWidth=1.8, opacity=1).encode(
        color=alt.Color("which:N", scale=alt.Scale(domain=which, range=colours), legend=legend),
        shape=alt.Shape("which:N", scale=alt.Scale(domain=which, range=["diamond", "circle"]), legend=legend),
        fillOpacity=alt.condition("datum.front", alt.value(1), alt.value(0)),
        fill=alt.Fill("which:N", scale=alt.Scale(domain=which, range=colours), legend=legend),
        tooltip=[alt.Tooltip("job:N"), alt.Tooltip("overrides:N"), alt.Tooltip("x:Q", title=x),
                 alt.Tooltip("y:Q", title=y)],
    )  # fmt: skip
    front = base.transform_filter("datum.front")
    line = front.mark_line(interpolate="step-after", strokeDash=[4, 3], color=palette.marks[1], strokeWidth=1.2)
    numbers = front.mark_text(align="left", dx=8, dy=-8, color=palette.ink).encode(text="job:N")
    return _finished(alt, line + points + numbers, {"data": drawn}, palette, height=320)


def _around(alt: Any, values: Sequence[float | None]) -> Any:
    """Return a scale around values; of a single one Vega would round the axis' numbers to whole ones."""
    known = [value for value in values if value is not None]
    if known and min(known) == max(known):
        margin = 0.1 * abs(known[0]) or 1.0
        return alt.Scale(domain=[known[0] - margin, known[0] + margin], nice=False)
    return alt.Scale(zero=False, padding=18)


def short(value: float | None) -> float | None:
    """Return a number in as many digits as a chart can show: 7."""
    return None if value is None else float(f"{value:.7g}")


def _points(series: Sequence[Series]) -> list[dict[str, Any]]:
    return [
        {"x": step, "y": short(value), "series": one.name, "part": one.part, "few": len(one.values) <= FEW}
        for one in series
        for step, value in zip(one.steps, one.values, strict=True)
    ]


def _over_steps(alt: Any, names: Sequence[str], x: str, y: str, palette: Palette) -> Any:
    """Return a chart of `_points` over steps, a colour per series; its vertical axis is still missing."""
    return alt.Chart(alt.NamedData("data")).encode(
        x=alt.X("x:Q", title=x, scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1, tickCount=10)),
        color=alt.Color("series:N", scale=_scale(alt, names, palette.marks), legend=_legend(alt, names)),
        tooltip=[alt.Tooltip("series:N"), alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y, format=".6~g")],
    )


def _rows(alt: Any, field: str, sort: Sequence[str] | None = None, width: int = 260) -> Any:
    """Return a vertical axis with a name per row, in the order of the data unless ``sort`` has another."""
    axis = alt.Axis(labelLimit=width, ticks=False, domain=False)
    return alt.Y(f"{field}:N", title=None, sort=sort, axis=axis)


def _squares(alt: Any) -> Any:
    return alt.Legend(title=None, orient="top", columns=4, labelLimit=200, symbolType="square", symbolSize=160)


def _names(series: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(one.name for one in series))


def _scale(alt: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    return alt.Scale(domain=list(names), range=[values[i % len(values)] for i in range(len(names))])


def _legend(alt: Any, names: Sequence[str]) -> Any:
    if len(names) < 2:
        return None
    columns, width = (2, 340) if any(len(name) >= LONG_NAME for name in names) else (3, 200)
    return alt.Legend(title=None, orient="top", columns=columns, labelLimit=width, symbolType="stroke", symbolSize=500)


def _finished(alt: Any, chart: Any, data: dict[str, Any], palette: Palette, height: int) -> dict[str, Any]:
    """Return the specification; the data is added last, since Altair would check each row against a schema."""
    axis = {
        "labelColor": palette.ink,
        "titleColor": palette.ink,
        "domainColor": palette.muted,
        "tickColor": palette.muted,
        "gridColor": palette.line,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
    }
    chart = chart.properties(width="container", height=height, background="transparent")
    spec: dict[str, Any] = chart.to_dict()
    spec["datasets"] = data
    spec["config"] = {
        "font": "system-ui, sans-serif",
        "view": {"stroke": palette.line},
        "axis": axis,
        "legend": {"labelColor": palette.ink, "labelFontSize": 12},
        "text": {"fontSize": 12},
    }
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec
