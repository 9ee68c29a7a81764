"""Files of observers are below the run's directory, or not written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_solo.errors import PresetError
from lightning_solo.memory.log_files import path_below_logs
from lightning_solo.techniques.memory_logger.technique import MemoryLogger
from lightning_solo.techniques.memory_snapshot.technique import MemorySnapshot
from tests.messages import mentions


def trainer_in(folder: object, log_dir: object = None, is_first: bool = True) -> Any:
    return SimpleNamespace(default_root_dir=folder, log_dir=log_dir, is_global_zero=is_first)


@pytest.mark.parametrize("path", ["../memory.csv", "/tmp/memory.csv", "", "a\0b", "~/m.csv", "x/", "a" * 300])
@pytest.mark.parametrize(("technique", "option"), [(MemoryLogger, "file"), (MemorySnapshot, "folder")])
def test_path_that_is_not_below_the_directory_is_refused(technique: Any, option: str, path: str) -> None:
    with pytest.raises(PresetError, match=rf"{option}=.*allowed"):
        technique(**{option: path})


@pytest.mark.row(85)
def test_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    with pytest.raises(PresetError, match=mentions("an.option='link/memory.csv'", "leads outside")):
        path_below_logs(trainer_in(root), "link/memory.csv", "an.option", "")
    assert path_below_logs(trainer_in(root), "a/memory.csv", "an.option", "") == root.resolve() / "a" / "memory.csv"
    assert path_below_logs(trainer_in(root, is_first=False), "a/memory.csv", "an.option", "") is None


def test_remote_directory_has_no_file() -> None:
    with pytest.warns(UserWarning, match=mentions("an.option", "memory://runs is remote", "the loggers get it")):
        assert path_below_logs(trainer_in("x", "memory://runs"), "m.csv", "an.option", "the loggers get it") is None
