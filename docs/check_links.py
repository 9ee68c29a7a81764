"""Checks the built pages: every link inside the documentation leads somewhere, and nothing is loaded from the network.

python docs/check_links.py docs/_build/html
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Links(HTMLParser):
    """Collects what a page links to, what it loads, and the names that a link can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.names: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Sort the addresses of a tag."""
        values = {name: value or "" for name, value in attributes}
        self.names |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.targets.append(values["href"])
        elif tag == "link" and values.get("rel") != "canonical":
            self.loaded.append(values.get("href", ""))
        elif "src" in values:
            self.loaded.append(values["src"])


def faults(folder: Path) -> list[str]:
    """Return a line for each link that leads nowhere, and each file that is missing or comes from the network."""
    pages = {path.resolve(): Links(path) for path in sorted(folder.glob("**/*.html"))}
    found = []
    for page, links in pages.items():
        for address in [*links.targets, *links.loaded]:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https", "mailto") or parts.netloc:
                if address in links.loaded:
                    found.append(f"{page.name}: loads {address} from the network")
                continue
            if parts.scheme == "data":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            if not target.is_file():
                found.append(f"{page.name}: {address} leads to no file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                found.append(f"{page.name}: {address} leads to no place on that page")
    return found


if __name__ == "__main__":
    lines = faults(Path(sys.argv[1]))
    print("\n".join(lines) or "every link leads somewhere")
    sys.exit(bool(lines))
