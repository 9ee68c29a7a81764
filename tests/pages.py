"""The pages of the documentation, and README, as tests read them: blocks, commands, the files that they show."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(?:\{([\w-]+)\} ?)?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def load_file(path: Path) -> Any:
    """Return the module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = load_file(DOCS / "tables.py")


@dataclass
class Block:
    """A fenced block: its language, its text, the file that its caption names, and the output that follows it."""

    language: str
    text: str
    file: str = ""
    output: str = ""


@dataclass
class Page:
    """A page of the documentation, or README."""

    path: Path
    text: str = field(init=False)
    blocks: list[Block] = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.path.read_text(encoding="utf-8")
        self.blocks = list(self._blocks())

    def __str__(self) -> str:
        return str(self.path.relative_to(DOCS if DOCS in self.path.parents else ROOT))

    def _blocks(self) -> Iterator[Block]:
        fences = list(FENCE.finditer(self.text))
        for match, following in zip(fences, [*fences[1:], None], strict=False):
            directive, argument, body = match.groups()
            caption = re.match(r":caption: (.*)\n\n?", body)
            output = ""
            if (
                following is not None
                and following[2] == "text"
                and not self.text[match.end() : following.start()].strip()
            ):
                output = following[3]
            if directive in (None, "code-block"):
                file = caption[1] if caption else ""
                yield Block(argument.strip(), body[caption.end() :] if caption else body, file, output)

    def of(self, language: str) -> list[Block]:
        """Return the blocks of a language."""
        return [block for block in self.blocks if block.language == language]

    def commands(self) -> list[tuple[str, str]]:
        """Return the commands of the page, each with the output that is shown below it."""
        found = []
        for block in self.of("console"):
            for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((command.partition("   #")[0].strip(), output))
        return found


PAGES = [Page(ROOT / "README.md"), *(Page(path) for path in sorted(DOCS.glob("**/*.md")) if "_build" not in path.parts)]
FILES = {
    block.file: block.text
    for name in ("start.md", "guides/hydra.md")
    for block in Page(DOCS / name).blocks
    if block.file
}
"""Files that pages refer to: the module of `start`, the application of the guide on Hydra."""
