"""Vega-Lite specifications, written with Altair: lines, stacked areas, bars and scatters with a front or diagonal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_solo.errors import CapabilityError
from lightning_solo.report.palette import DASHES, Palette
from lightning_solo.report.series import Series

PIP = "pip install 'lightning-solo[report]'"
FEW = 40
"""Points of a series up to which each is marked; a line alone would not show a series of one."""
LONG_NAME = 31
"""Letters of a name from which a legend has 2 columns of 340 pixels instead of 3 of 200."""
SHAPES = ("circle", "diamond", "square", "triangle-up", "cross", "triangle-down", "triangle-right")
ON_FRONT, BEHIND = "on the Pareto front", "another beats it"
FORMAT = ".6~g"
"""Up to six digits, as D3 writes numbers."""


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
    names, rows = _names(series), _points(series)
    base = _over_steps(names, x, y, palette).encode(y=alt.Y("y:Q", title=y, scale={"zero": False}))
    dash = alt.StrokeDash("series:N", scale=_scale(names, DASHES), legend=_legend(names))
    chart = base.mark_line(strokeWidth=1.6, clip=True).encode(strokeDash=dash, detail="part:N")
    if any(row["few"] for row in rows):
        chart += base.transform_filter("datum.few").mark_point(size=45, filled=True, opacity=1)
    return _finished(chart, {"data": rows}, palette, height=260)


def areas(series: Sequence[Series], x: str, y: str, palette: Palette) -> dict[str, Any]:
    """Return a chart of series stacked in their order, each with an outline; all series have the same steps."""
    alt = altair()
    names = _names(series)
    rows = [{**row, "order": names.index(row["series"])} for row in _points(series)]
    base = _over_steps(names, x, y, palette).encode(y=alt.Y("y:Q", title=y, stack="zero"), order="order:Q")
    chart = base.mark_area(line={"color": palette.ink, "strokeWidth": 0.8}, fillOpacity=0.75)
    return _finished(chart, {"data": rows}, palette, height=260)


def bars(rows: Sequence[dict[str, Any]], x: str, palette: Palette) -> dict[str, Any]:
    """Return a chart with a bar per row, from the top; rows have ``name``, ``value``, ``label`` and ``first``."""
    alt = altair()
    drawn = [{**row, "end": row["value"] or 0.0} for row in rows]
    most = max((row["end"] for row in drawn), default=0.0) or 1.0
    length = alt.X("end:Q", title=x, scale={"domain": [0, most * 1.35], "nice": False})  # room for the labels
    base = _over("data").encode(y=_rows("name"), x=length, tooltip=["name:N", alt.Tooltip("label:N", title=x)])
    colour = alt.condition("datum.first", alt.value(palette.marks[-1]), alt.value(palette.marks[0]))
    chart = base.mark_bar(stroke=palette.ink, strokeWidth=0.6).encode(color=colour)
    chart += base.mark_text(align="left", dx=6, color=palette.ink).encode(text="label:N")
    data = {"data": drawn}
    before = [{"end": row["end"]} for row in drawn if row["first"] and row["value"] is not None][:1]
    if before:
        data["before"] = before
        chart += _over("before").mark_rule(color=palette.ink, strokeDash=[4, 3]).encode(x="end:Q")
    return _finished(chart, data, palette, height=max(90, 30 * len(drawn)))


def stacks(
    rows: Sequence[dict[str, Any]], signs: Mapping[str, str], x: str, mark: tuple[float, str] | None, palette: Palette
) -> dict[str, Any]:
    """Return a chart with a bar per row, stacked from its parts, and a rule across the bars.

    Each part shows its sign if there is room.

    Args:
        rows: ``name``, ``parts`` by name, ``label``.
        signs: part -> a letter, in stacking order.
        x: title of the horizontal axis.
        mark: position and label of the rule; None for no rule.
        palette: colours.
    """
    alt = altair()
    names = [name for name in signs if any(row["parts"][name] for row in rows)]
    end = max([mark[0] if mark else 0.0, *(sum(row["parts"].values()) for row in rows)]) * 1.4  # room for the labels
    drawn = [
        {"name": row["name"], "part": f"{signs[name]} {name}", "size": size, "order": order,
         "sign": signs[name] if size > end / 50 else ""}
        for row in rows for order, name in enumerate(names) for size in [row["parts"][name]]
    ]  # fmt: skip
    data = {"data": drawn, "ends": [{"name": row["name"], "end": end, "label": row["label"]} for row in rows]}
    axis = {"title": x, "scale": {"domain": [0, end], "nice": False}}
    colour = alt.Color("part:N", scale=_scale([f"{signs[n]} {n}" for n in names], palette.marks), legend=_squares())
    base = _over("data").encode(y=_rows("name"), order="order:Q", detail="part:N")
    chart = base.mark_bar(stroke=palette.ground, strokeWidth=1).encode(
        x=alt.X("size:Q", stack="zero", **axis),
        color=colour,
        tooltip=["name:N", "part:N", alt.Tooltip("size:Q", title=x, format=FORMAT)],
    )
    chart += base.mark_text(color=palette.ground, fontWeight="bold").encode(
        x=alt.X("size:Q", stack="zero", bandPosition=0.5, **axis), text="sign:N"
    )
    label = _over("ends").mark_text(align="right", dx=-6, color=palette.ink)
    chart += label.encode(y=_rows("name"), x=alt.X("end:Q", **axis), text="label:N")
    if mark is not None:
        data["mark"] = [{"end": mark[0], "label": mark[1]}]
        line = _over("mark").encode(x=alt.X("end:Q", **axis))
        chart += line.mark_rule(color=palette.ink, strokeWidth=2, strokeDash=[5, 3])
        words = line.mark_text(baseline="bottom", dy=-4, color=palette.ink)
        chart += words.encode(y=alt.value(0), text="label:N")
    return _finished(chart, data, palette, height=max(90, 30 * len(rows)))


def spans(rows: Sequence[dict[str, Any]], x: str, palette: Palette) -> dict[str, Any]:
    """Return a row per lane with a bar for each span of time, coloured by its part.

    Args:
        rows: ``lane``, ``begin``, ``end``, ``part``, and ``share`` of the time, the bar's opacity; lanes keep
            their order.
        x: title of the horizontal axis.
        palette: colours.
    """
    alt = altair()
    parts, lanes = (list(dict.fromkeys(row[name] for row in rows)) for name in ("part", "lane"))
    numbers = [alt.Tooltip(f"{name}:Q", format=FORMAT) for name in ("begin", "end", "share")]
    chart = _over("data").mark_bar().encode(
        y=_rows("lane", sort=lanes, width=300),
        x=alt.X("begin:Q", title=x, scale={"nice": False}),
        x2="end:Q",
        color=alt.Color("part:N", scale=_scale(parts, palette.marks), legend=_squares()),
        opacity=alt.Opacity("share:Q", scale={"domain": [0, 1], "range": [0, 1]}, legend=None),
        tooltip=["lane:N", "part:N", *numbers],
    )  # fmt: skip
    return _finished(chart, {"data": list(rows)}, palette, height=max(90, 26 * len(lanes)))


def scatter(rows: Sequence[dict[str, Any]], x: str, y: str, palette: Palette) -> dict[str, Any]:
    """Return a chart with a point per job; jobs on the front are numbered filled diamonds, joined by a line.

    Args:
        rows: ``x``, ``y``, ``job``, ``overrides``, ``front``.
        x: title of the horizontal axis.
        y: title of the vertical axis.
        palette: colours.
    """
    alt = altair()
    drawn = [{**row, "which": ON_FRONT if row["front"] else BEHIND} for row in rows]
    which, legend = [ON_FRONT, BEHIND], {"title": None, "orient": "top", "labelLimit": 400}
    colours = {"scale": _scale(which, [palette.marks[1], palette.marks[0]]), "legend": legend}
    base = _over("data").encode(
        x=alt.X("x:Q", title=x, scale=_around([row["x"] for row in rows])),
        y=alt.Y("y:Q", title=y, scale=_around([row["y"] for row in rows])),
    )
    numbers = [alt.Tooltip("x:Q", title=x, format=FORMAT), alt.Tooltip("y:Q", title=y, format=FORMAT)]
    points = base.mark_point(size=90, strokeWidth=1.8, opacity=1).encode(
        color=alt.Color("which:N", **colours),
        fill=alt.Fill("which:N", **colours),
        fillOpacity=alt.condition("datum.front", alt.value(1), alt.value(0)),
        shape=alt.Shape("which:N", scale=_scale(which, ["diamond", "circle"]), legend=legend),
        tooltip=["job:N", "overrides:N", *numbers],
    )
    front = base.transform_filter("datum.front")
    line = front.mark_line(interpolate="step-after", strokeDash=[4, 3], color=palette.marks[1], strokeWidth=1.2)
    jobs = front.mark_text(align="left", dx=8, dy=-8, color=palette.ink).encode(text="job:N")
    return _finished(line + points + jobs, {"data": drawn}, palette, height=320)


def agreement(rows: Sequence[dict[str, Any]], x: str, y: str, palette: Palette) -> dict[str, Any]:
    """Return a chart with a point per row on two logarithmic axes, and the line on which both values are equal.

    Args:
        rows: ``x`` and ``y`` above 0, ``name``, ``label`` above the point, and ``kind``, which has a colour and a
            shape; later rows are on top.
        x: title of the horizontal axis.
        y: title of the vertical axis.
        palette: colours.
    """
    alt = altair()
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    legend = {"title": None, "orient": "top", "columns": len(kinds), "columnPadding": 28, "labelLimit": 200}
    values = [row[key] for row in rows for key in "xy"]
    ends = [min(values) / 1.3, max(values) * 1.3]
    axis = {"scale": {"type": "log", "domain": ends, "nice": False}, "axis": {"tickCount": 5, "format": "~g"}}
    places = {"x": alt.X("x:Q", title=x, **axis), "y": alt.Y("y:Q", title=y, **axis)}
    numbers = [alt.Tooltip("x:Q", title=x, format=FORMAT), alt.Tooltip("y:Q", title=y, format=FORMAT)]
    base = _over("data").encode(**places)
    points = base.mark_point(size=60, strokeWidth=1.6, opacity=1).encode(
        color=alt.Color("kind:N", scale=_scale(kinds, palette.marks), legend=legend),
        shape=alt.Shape("kind:N", scale=_scale(kinds, SHAPES), legend=legend),
        tooltip=["name:N", "kind:N", *numbers],
    )  # fmt: skip
    labels = base.mark_text(dy=-18, color=palette.ink).encode(text="label:N")
    line = _over("equal").mark_line(color=palette.ink, strokeDash=[4, 3], strokeWidth=1).encode(**places)
    data = {"data": list(rows), "equal": [{"x": end, "y": end} for end in ends]}
    return _finished(line + points + labels, data, palette, height=320)


def _around(values: Sequence[float]) -> dict[str, Any]:
    """Return a scale around values, with a margin if all are equal; else Vega would label the axis with integers."""
    if min(values) == max(values):
        margin = 0.1 * abs(values[0]) or 1.0
        return {"domain": [values[0] - margin, values[0] + margin], "nice": False}
    return {"zero": False, "padding": 18}


def _points(series: Sequence[Series]) -> list[dict[str, Any]]:
    """Return the rows of series, rounded to 7 digits: a change of a few bytes would stretch the axis."""
    return [
        {"x": step, "y": float(f"{value:.7g}"), "series": one.name, "part": one.part, "few": len(one.values) <= FEW}
        for one in series
        for step, value in zip(one.steps, one.values, strict=True)
    ]


def _over(data: str) -> Any:
    """Return a chart of a named data set; `_finished` adds the data."""
    alt = altair()
    return alt.Chart(alt.NamedData(data))


def _over_steps(names: Sequence[str], x: str, y: str, palette: Palette) -> Any:
    """Return a chart of `_points` over steps, with a colour per series and without a vertical axis."""
    alt = altair()
    return _over("data").encode(
        x=alt.X("x:Q", title=x, scale={"nice": False}, axis={"tickMinStep": 1, "tickCount": 10}),
        color=alt.Color("series:N", scale=_scale(names, palette.marks), legend=_legend(names)),
        tooltip=["series:N", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y, format=FORMAT)],
    )


def _rows(field: str, sort: Sequence[str] | None = None, width: int = 260) -> Any:
    """Return a vertical axis with a name per row, in the order of the data or of ``sort``."""
    axis = {"labelLimit": width, "ticks": False, "domain": False}
    return altair().Y(f"{field}:N", title=None, sort=sort, axis=axis)


def _names(series: Sequence[Series]) -> list[str]:
    return list(dict.fromkeys(one.name for one in series))


def _scale(names: Sequence[str], values: Sequence[Any]) -> dict[str, Any]:
    return {"domain": list(names), "range": list(values[: len(names)])}  # Vega begins again after the last value


def _squares() -> dict[str, Any]:
    return {
        "title": None,
        "orient": "top",
        "columns": 4,
        "labelLimit": 200,
        "symbolType": "square",
        "symbolSize": 160,
        "columnPadding": 24,
    }


def _legend(names: Sequence[str]) -> dict[str, Any] | None:
    if len(names) < 2:
        return None
    columns, width = (2, 340) if any(len(name) >= LONG_NAME for name in names) else (3, 200)
    shape = {"columns": columns, "labelLimit": width, "symbolType": "stroke", "symbolSize": 500}
    return {"title": None, "orient": "top", **shape}


def _finished(chart: Any, data: dict[str, Any], palette: Palette, height: int) -> dict[str, Any]:
    """Return the specification; the data is added last, since Altair would check each row against a schema."""
    axis = {"domainColor": palette.muted, "tickColor": palette.muted, "gridColor": palette.line}
    text = {"labelColor": palette.ink, "labelFontSize": 12}
    chart = chart.properties(
        width="container", height=height, background="transparent", autosize={"type": "fit-x", "contains": "padding"}
    ).configure(
        font="system-ui, sans-serif",
        view={"stroke": palette.line},
        axis={**axis, **text, "titleColor": palette.ink, "titleFontSize": 12, "titleFontWeight": "normal"},
        legend=text,
        text={"fontSize": 12},
    )
    spec: dict[str, Any] = chart.to_dict()
    return {**spec, "datasets": data}
