"""The page in headless Chromium with the network off: no errors, all marks, both colour schemes, keyboard, tree.

LIGHTNING_SOLO_ARTIFACTS=folder keeps the screenshots and the figures of the long run there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_solo.report.pictures import size_of
from lightning_solo.report.write import write_report
from lightning_solo.units import MiB
from tests.report.browser import CHROMIUM, Page, chromium
from tests.report.folders import make_ladder, make_row, make_run, make_sweep

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH; apt-get install chromium"),
    pytest.mark.long,
]
MARKS = """[...document.querySelectorAll('[data-chart]')].map((place) => [place.dataset.chart,
  Object.fromEntries(['line', 'area', 'rect', 'symbol', 'text', 'rule'].map((kind) =>
    [kind, place.querySelectorAll(`svg g[class*="mark-${kind}"][class*="layer"] > *, ` +
      `svg g[class*="mark-${kind}"].marks > *, svg g.mark-${kind}.role-mark > *`).length]))])"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all tests of this file."""
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A written report of each kind."""
    root = tmp_path_factory.mktemp("reports")
    folders = {
        "run": make_run(root / "run"),
        "sweep": make_sweep(root / "sweep", [make_row(n) for n in range(4)]),
        "ladder": make_ladder(root / "ladder"),
    }
    return {kind: write_report(folder).page for kind, folder in folders.items()}


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """Where screenshots are kept."""
    folder = Path(os.environ.get("LIGHTNING_SOLO_ARTIFACTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def marks(browser: Page) -> dict[str, dict[str, int]]:
    return {name: {kind: n for kind, n in found.items() if n} for name, found in browser.evaluate(MARKS)}


def test_the_harness_notices_errors_and_requests(browser: Page, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<script src='http://example.com/x.js'></script><script>console.error('x'); throw Error('y')</script>"
    )
    browser.open(bad)
    said = " ".join(browser.errors())
    assert "ERR_NAME_NOT_RESOLVED" in said
    assert "'y'" in said or "Error: y" in said
    assert "http://example.com/x.js" in browser.requests()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "sweep", "ladder"])
def test_it_opens_without_errors_or_requests(
    browser: Page, reports: dict[str, Path], artifacts: Path, kind: str, scheme: str
) -> None:
    browser.dark(scheme == "dark")
    browser.open(reports[kind])
    shot = browser.screenshot(artifacts / f"report-{kind}-{scheme}.png")
    assert browser.errors() == []
    assert browser.requests() == [reports[kind].as_uri()]
    assert browser.evaluate("typeof hacked") == "undefined"
    assert size_of(shot)[1] > 1000
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_charts_have_their_marks(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["run"])
    found = marks(browser)
    assert found["loss"]["line"] == 2  # training and validation
    assert found["loss"]["symbol"] == 10  # the validation's 10 points; training has too many to be marked
    assert found["memory_by_category"]["area"] >= 5
    browser.open(reports["sweep"])
    found = marks(browser)
    assert found["pareto_memory"]["symbol"] == 4
    assert found["pareto_memory"]["text"] == 4  # the later, the better and the dearer: all on the front
    assert found["pareto_time"]["symbol"] == 4
    assert found["loss_curves"]["line"] == 4
    browser.open(reports["ladder"])
    found = marks(browser)
    assert found["ladder_memory"] == {"rect": 3, "text": 3, "rule": 1}


def test_charts_and_page_turn_dark_with_the_system(browser: Page, reports: dict[str, Path]) -> None:
    look = """[getComputedStyle(document.documentElement).backgroundColor,
      getComputedStyle(document.querySelector('svg .role-axis-label text')).fill,
      getComputedStyle(document.querySelector('svg .mark-line path[stroke-width]')).stroke]"""
    browser.dark(False)
    browser.open(reports["run"])
    light = browser.evaluate(look)
    browser.dark(True)
    dark = browser.evaluate(look)  # without loading the page again
    assert light == ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(11, 92, 173)"]
    assert dark == ["rgb(20, 24, 29)", "rgb(232, 237, 242)", "rgb(108, 182, 255)"]


def press(browser: Page, key: str) -> None:
    codes = {"Tab": 9, "Enter": 13}
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)


def test_the_keyboard_reaches_content_data_and_sorting(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["sweep"])
    press(browser, "Tab")
    assert browser.evaluate("document.activeElement.className") == "skip"
    assert browser.evaluate("document.activeElement.getBoundingClientRect().left >= 0")  # it shows when it has focus
    press(browser, "Enter")
    assert browser.evaluate("document.activeElement.id") == "main"
    browser.evaluate("document.querySelector('#pareto_memory summary').focus()")
    press(browser, "Enter")
    assert browser.evaluate("document.querySelector('#pareto_memory details').open")
    browser.evaluate("document.querySelectorAll('#tables thead button')[3].focus()")
    jobs = "[...document.querySelectorAll('#tables tbody th')].map((cell) => cell.textContent).join()"
    order = "document.querySelectorAll('#tables thead th')[3].ariaSort"
    press(browser, "Enter")
    assert (browser.evaluate(jobs), browser.evaluate(order)) == ("#3,#2,#1,#0", "ascending")  # by loss
    press(browser, "Enter")
    assert (browser.evaluate(jobs), browser.evaluate(order)) == ("#0,#1,#2,#3", "descending")


def test_a_screen_reader_finds_each_chart_with_its_words(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["sweep"])
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
    images = [name for role, name in named if role in ("image", "img")]
    assert len(images) == 3
    assert "Pareto front" in images[0]
    assert {"main", "navigation", "banner", "table", "columnheader", "rowheader"} <= {role for role, _ in named}
    assert not any(role.startswith("graphics") or role == "SvgRoot" for role, _ in named)


def test_a_script_in_the_page_could_not_reach_the_network(browser: Page, reports: dict[str, Path]) -> None:
    browser.open(reports["ladder"])
    assert browser.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert "Content Security Policy" in " ".join(browser.errors())


@pytest.mark.long
def test_a_run_of_100_000_steps_is_small_and_keeps_its_peak(browser: Page, tmp_path: Path, artifacts: Path) -> None:
    path = write_report(make_run(tmp_path / "long", steps=100_000, spike=99.0)).page
    browser.dark(False)
    browser.open(path)
    assert browser.errors() == []
    size = path.stat().st_size
    assert size <= 5 * MiB
    assert "greatest 99" in browser.evaluate("document.querySelector('#loss .chart').ariaLabel")
    drawn = browser.evaluate("performance.getEntriesByName('charts-drawn')[0].startTime") / 1000
    figures = {"steps": 100_000, "bytes": size, "seconds_until_charts_are_drawn": round(drawn, 3)}
    (artifacts / "report-100000-steps.json").write_text(json.dumps(figures), encoding="utf-8")
    browser.screenshot(artifacts / "report-100000-steps.png")
