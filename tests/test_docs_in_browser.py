"""The built documentation: no warning, no dead link, and each page in Chromium without network, at two widths.

LIGHTNING_SOLO_ARTIFACTS=folder keeps the screenshots there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import DOCS, ROOT, load_file
from tests.report.browser import CHROMIUM, Page, chromium

pytestmark = pytest.mark.long
PHONE, DESKTOP = (390, 844), (1280, 900)
LOADED = "document.readyState === 'complete'"
WIDER = """[...document.querySelectorAll('body *')].filter((element) => {
  const box = element.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !element.closest('.table-wrapper, .chart, pre, .sidebar-drawer,'
    + ' .toc-drawer, .skip-to-content');
}).map((element) => element.outerHTML.slice(0, 120))"""

SCROLLED = """[...document.querySelectorAll('.table-wrapper')].filter((box) => box.scrollWidth > box.clientWidth + 1)
  .map((box) => box.innerText.slice(0, 120))"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages, built as `make docs` builds them."""
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q", "-b", "html"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(DOCS), str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_the_network(built: Path) -> None:
    assert load_file(DOCS / "check_links.py").faults(built) == []


def test_a_dead_link_and_a_foreign_script_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("<p id='place'></p>")
    (tmp_path / "page.html").write_text(
        "<a href='there.html#place'></a><a href='there.html#nowhere'></a><a href='gone.html'></a>"
        "<a href='https://example.com'></a><script src='https://example.com/x.js'></script>"
    )
    faults = load_file(DOCS / "check_links.py").faults(tmp_path)
    assert len(faults) == 3
    for words in ("#nowhere", "gone.html", "x.js"):
        assert any(words in fault for fault in faults)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """One browser for all pages."""
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH; apt-get install chromium")
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as page:
        yield page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_pages_fit_the_screen_and_ask_for_nothing(
    browser: Page, built: Path, tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    kept = Path(os.environ.get("LIGHTNING_SOLO_ARTIFACTS") or tmp_path)
    kept.mkdir(parents=True, exist_ok=True)
    pages = [path for path in sorted(built.glob("**/*.html")) if path.stem not in ("genindex", "py-modindex", "search")]
    assert len(pages) >= 30
    browser.dark(dark)
    browser.size(*size)
    for path in pages:
        browser.open(path, LOADED)
        name = "-".join(path.relative_to(built).with_suffix("").parts)
        browser.screenshot(kept / f"{name}-{size[0]}-{'dark' if dark else 'light'}.png")
        assert browser.errors() == [], path
        assert all(url.startswith(("file:", "data:")) for url in browser.requests()), path
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (path, browser.evaluate(WIDER))
        assert browser.evaluate(WIDER) == [], path
        if size == DESKTOP:
            assert browser.evaluate(SCROLLED) == [], path
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, background[4:-1].split(","))) < 200) == dark, background
