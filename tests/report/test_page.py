"""The page as text: what a screen reader finds, that nothing from a file becomes markup, colours that can be read."""

from __future__ import annotations

import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightning_solo.errors import CapabilityError, CheckpointError, NothingToDoError, PresetError
from lightning_solo.report.model import Report
from lightning_solo.report.page import page
from lightning_solo.report.palette import DARK, DASHES, LIGHT, SCREEN, Palette
from lightning_solo.report.pictures import size_of
from lightning_solo.report.sweep_folder import MOST_CURVES
from lightning_solo.report.write import read, write_report
from lightning_solo.tables import Cell, Table
from tests.messages import mentions, nearest
from tests.report.folders import HOSTILE, make_ladder, make_row, make_run, make_sweep

VOID = {"meta", "br", "img", "link", "input"}


class Structure(HTMLParser):
    """Start tags with their attributes, and whether all of them were closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another"

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The pages of a run, a sweep and a ladder, each with names that would be markup."""
    root = tmp_path_factory.mktemp("pages")
    run = make_run(root / HOSTILE.replace("/", "-"))
    sweep = make_sweep(root / "sweep", [make_row(0), make_row(1), make_row(2, overrides=(HOSTILE,), detail=HOSTILE)])
    return {"run": page(read(run)), "sweep": page(read(sweep)), "ladder": page(read(make_ladder(root / "ladder")))}


@pytest.mark.parametrize("kind", ["run", "sweep", "ladder"])
def test_structure_is_what_a_screen_reader_needs(pages: dict[str, str], kind: str) -> None:
    found = Structure(pages[kind])
    assert found.all("html") == [{"lang": "en"}]
    assert len(found.all("title")) == len(found.all("h1")) == len(found.all("main")) == 1
    assert next(a for tag, a in found.tags if tag == "a") == {"class": "skip", "href": "#main"}
    headings = [int(tag[1]) for tag, _ in found.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(headings))
    charts = [a for a in found.all("div") if a.get("class") == "chart"]
    assert len(charts) == len(found.all("figure")) == len(found.all("details")) >= 2
    assert len(charts) == len([a for a in found.all("div") if "data-chart" in a])
    assert all(a["role"] == "img" and len(a["aria-label"]) > 40 for a in charts)
    assert len(found.all("caption")) == len(found.all("table")) >= len(charts)
    assert all("scope" in a for a in found.all("th"))
    identifiers = [a["id"] for _, a in found.tags if "id" in a]
    assert len(identifiers) == len(set(identifiers))
    links = {a["href"].removeprefix("#") for a in found.all("a")}
    assert links <= set(identifiers)


@pytest.mark.parametrize("kind", ["run", "sweep", "ladder"])
def test_nothing_from_a_file_is_markup_and_nothing_is_loaded(pages: dict[str, str], kind: str) -> None:
    html = pages[kind]
    found = Structure(html)
    assert "hacked=1" in html
    assert found.all("img") == found.all("link") == found.all("iframe") == []
    assert [set(a) for a in found.all("script")] == [{"type", "id"}, set(), set()]  # the charts' data, Vega, ours
    assert not any(name in a for _, a in found.tags for name in ("src", "onerror", "style"))
    policy = next(a["content"] for a in found.all("meta") if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")
    assert (
        "url(" not in (Path(sys.modules["lightning_solo.report.page"].__file__ or "").parent / "page.css").read_text()
    )


def test_charts_are_json_without_markup(pages: dict[str, str]) -> None:
    text = re.search(r'<script type="application/json" id="charts">(.*?)</script>', pages["ladder"], re.DOTALL)
    assert text is not None
    assert "<" not in text[1]
    charts = json.loads(text[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert charts["ladder_memory"]["datasets"]["data"][2]["name"] == HOSTILE
    assert "http" not in json.dumps({**charts["ladder_memory"], "$schema": ""})


def test_lone_surrogates_become_question_marks(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path / "s", [make_row(0), make_row(1, overrides=("x=\ud800",), detail="\udfff")])
    assert "x=?" in write_report(sweep).page.read_text(encoding="utf-8")


def test_a_report_is_a_page_pictures_and_images_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = make_run(tmp_path / "first")
    for _ in range(2):  # the second takes the place of the first
        written = write_report(run)
    assert written.page == run / "report.html"
    names = ["loss", "memory", "memory_by_category", "step_time", "throughput"]
    assert sorted(path.name for path in (run / "report").iterdir()) == [f"{name}.png" for name in names]
    for path in written.pngs:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert size_of(path.read_bytes())[0] >= 1500
    assert written.tensorboard == run / "tensorboard" / "report"
    assert len(list(written.tensorboard.iterdir())) == 1
    events = EventAccumulator(str(written.tensorboard)).Reload()
    assert sorted(events.Tags()["images"]) == [f"report/{name}" for name in names]
    assert events.Images("report/loss")[0].encoded_image_string == (run / "report" / "loss.png").read_bytes()
    assert not list(run.rglob(".new-*"))


def test_the_pictures_differ_with_their_data(tmp_path: Path) -> None:
    flat, spiked = (write_report(make_run(tmp_path / name, spike=s)).pngs[0] for name, s in (("a", 4.0), ("b", 99.0)))
    assert flat.read_bytes() != spiked.read_bytes()


def test_folders_without_a_report_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PresetError, match=mentions(str(tmp_path / "gone"))):
        read(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NothingToDoError, match=mentions(str(tmp_path / "empty"), "results.jsonl")):
        read(tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").write_text("x")
    with pytest.raises(NothingToDoError, match=mentions("notes.txt")):
        read(tmp_path / "empty")
    with pytest.raises(PresetError, match=mentions("notes.txt")):
        read(tmp_path / "empty" / "notes.txt")
    (tmp_path / "empty" / "ladder.json").write_text("{")
    with pytest.raises(CheckpointError, match=mentions("ladder.json")):
        read(tmp_path / "empty")
    make_run(tmp_path / "runs" / "first")
    with monkeypatch.context() as context:
        context.chdir(tmp_path)
        with pytest.raises(PresetError, match=nearest("runs/first")):
            read(Path("first"))


def test_a_folder_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "report").write_text("a file in the way")
    with pytest.raises(PresetError, match=mentions(str(run / "report"))):
        write_report(run)


@pytest.mark.parametrize("module", ["altair", "vl_convert"])
def test_a_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    from lightning_solo.report.page import javascript

    javascript.cache_clear()
    report = read(make_run(tmp_path))
    with monkeypatch.context() as context:
        context.setitem(sys.modules, module, None)
        with pytest.raises(CapabilityError, match=mentions("pip install 'lightning-solo[report]'")):
            page(report)


def test_versions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import altair

    from lightning_solo.report.page import vl_convert

    with monkeypatch.context() as context:
        context.setattr(altair, "SCHEMA_VERSION", "v77.1.0")
        with pytest.raises(
            CapabilityError, match=mentions("Vega-Lite 77.1", "pip install --upgrade altair vl-convert-python")
        ):
            vl_convert()


def luminance(colour: str) -> float:
    """Return the relative luminance by WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio by WCAG 2.2.

    >>> contrast("#000000", "#ffffff")
    21.0
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(palette: Palette) -> None:
    assert all(contrast(colour, palette.ground) >= 4.5 for colour in (palette.ink, palette.muted, palette.link))
    assert all(contrast(colour, palette.ground) >= 3.0 for colour in palette.marks)
    assert len(palette.marks) == len(SCREEN.marks)


def test_colour_is_not_the_only_mark() -> None:
    pairs = {(LIGHT.marks[i % len(LIGHT.marks)], str(DASHES[i % len(DASHES)])) for i in range(MOST_CURVES)}
    assert len(pairs) == MOST_CURVES


def test_a_report_without_figures_is_a_page_too() -> None:
    html = page(Report("x", tables=[Table("All jobs", ("job",), [[Cell("#0", 0)]], sortable=True)], notes=[HOSTILE]))
    assert Structure(html).all("figure") == []
    assert "Left out" in html
