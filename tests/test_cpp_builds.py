"""Libraries are built once, by one process at a time, and stored where no other user writes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_solo import cpp_builds
from lightning_solo.cpp_builds import build_folder, load_or_build, stored_library
from lightning_solo.machine import NotPrivateError
from tests.messages import lines_with

ROOT = Path(__file__).parents[1]
BLOCKED = """
import sys
from pathlib import Path
from lightning_solo.cpp_builds import build_folder, load_or_build

def build(folder):
    (folder / "half.so").write_text("ha")
    print(folder, flush=True)
    sys.stdin.read()

load_or_build(build_folder("half"), "the library", Path.read_text, build)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache for this test."""
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lightning_solo" / "extensions"


class Builds:
    """Writes a text as a library, and counts how often."""

    def __init__(self, text: str = "library") -> None:
        self.text = text
        self.count = 0

    def __call__(self, folder: Path) -> str:
        assert list(folder.iterdir()) == []
        self.count += 1
        (folder / "objects").mkdir()
        (folder / "objects" / "text.so").write_text(self.text)
        return self.text

    def load(self, name: str = "text") -> str:
        return load_or_build(build_folder(name), "the library", load, self)


def load(file: Path) -> str:
    if "damaged" in (text := file.read_text()):
        raise ImportError(text)
    return text


# --- built once ---


def test_library_is_built_once_into_private_files(cache: Path) -> None:
    builds = Builds()
    assert [builds.load(), builds.load()] == ["library"] * 2
    assert builds.count == 1
    folder = build_folder("text")
    assert folder.parent == cache
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "text.so"]
    private = [cache.parent, cache, folder, folder / "text.so"]
    assert [path.stat().st_mode & 0o777 for path in private] == [0o700] * 4


def test_everything_that_determines_the_code_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {build_folder("text"), build_folder("other"), build_folder("text", "flag"), build_folder("text", b"code")}
    monkeypatch.setattr(cpp_builds, "processor_flags", lambda: "flags : sse2")
    folders.add(build_folder("text"))
    monkeypatch.setattr("torch.__version__", "1.0")
    folders.add(build_folder("text"))
    assert len(folders) == 6


@pytest.mark.parametrize("damage", ["does not load", "others may write"])
def test_library_that_cannot_be_trusted_is_built_again(damage: str) -> None:
    library = build_folder("text") / "older.so"
    library.write_text("damaged" if damage == "does not load" else "library of somebody else")
    library.chmod(0o700 if damage == "does not load" else 0o777)
    builds = Builds()
    assert [builds.load(), builds.load()] == ["library"] * 2
    assert builds.count == 1
    assert not library.exists()


def test_failed_build_leaves_only_the_lock() -> None:
    class Fails(Builds):
        def __call__(self, folder: Path) -> str:
            super().__call__(folder)
            raise ArithmeticError("on purpose")

    for _ in range(2):  # the lock is free again
        with pytest.raises(ArithmeticError, match="on purpose"):
            Fails().load()
    assert [path.name for path in build_folder("text").iterdir()] == ["lock"]
    assert Builds().load() == "library"


# --- one builder at a time ---


@pytest.fixture
def blocked() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that is in the middle of a build, and the build's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


@pytest.mark.row(87)
def test_files_of_a_killed_build_are_removed_with_a_warning(blocked: tuple[subprocess.Popen[str], Path]) -> None:
    process, left = blocked
    process.kill()
    process.wait()
    assert (left / "half.so").exists()
    builds = Builds()
    with pytest.warns(UserWarning, match=f"the library .*{left}"):
        assert builds.load("half") == "library"
    assert not left.exists()
    assert builds.count == 1


@pytest.mark.row(87)
def test_second_process_waits_and_builds_nothing(
    blocked: tuple[subprocess.Popen[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, _ = blocked
    said = threading.Event()
    lines = []

    def say(text: str) -> None:
        lines.append(text)
        said.set()

    monkeypatch.setattr(cpp_builds, "say", say)
    builds, loaded = Builds(), []
    waiting = threading.Thread(target=lambda: loaded.append(builds.load("half")))
    waiting.start()
    assert said.wait(60)
    assert loaded == []
    process.communicate("")  # the end of its input ends the build
    waiting.join(60)
    assert (loaded, builds.count) == (["ha"], 0)
    assert lines_with("\n".join(lines), "waiting", "the library", str(build_folder("half")))


# --- the folder ---


@pytest.mark.row(86)
def test_folder_that_others_may_write_into_is_refused(cache: Path) -> None:
    build_folder("text")
    cache.chmod(0o770)
    with pytest.raises(NotPrivateError, match=f"{cache}.*chmod"):
        build_folder("text")


@pytest.mark.row(86)
def test_folder_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build_folder("text")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(NotPrivateError):
        build_folder("text")


def test_torchs_variable_chooses_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "chosen"))
    assert Builds().load() == "library"
    assert build_folder("text").parent == tmp_path / "chosen"
    assert stored_library(build_folder("text")) == build_folder("text") / "text.so"


@pytest.mark.parametrize(("home", "message"), [("~", "no home folder"), ("/dev/null", "/dev/null")])
def test_user_without_a_home_folder_gets_an_error(home: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda _: home)
    with pytest.raises(OSError, match=message):
        build_folder("text")
