"""Objects from nodes: only registered names and what the user allowed, defined where it says it is."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

import lightning_solo as solo
from lightning_solo import build
from lightning_solo.presets.compose import compose
from lightning_solo.requirements import check_machine, lacks, outdated
from lightning_solo.zero import extension
from tests.messages import mentions, nearest

MINE = """
import os
from torch.optim import AdamW
from lightning.pytorch import Callback

class Mine(Callback):
    def __init__(self, level: int = 1, inner: object = None, names: tuple = ()):
        self.level, self.inner, self.names = level, inner, names

class Inner:
    def __init__(self, size: int = 0):
        self.size = size
"""


@pytest.fixture
def my_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_solo_project.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_solo_project"


def built(node: dict[str, Any], *allow: str) -> Any:
    (part,) = compose({"callback": {"mine": node}}, allow=allow).parts
    return build.built(part)


def test_users_callback_with_nested_targets(my_project: str) -> None:
    node = {"_target_": f"{my_project}.Mine", "level": 3, "inner": {"_target_": f"{my_project}.Inner", "size": 5}}
    mine = built({**node, "names": ["a", "b"]}, my_project)
    assert (mine.level, mine.inner.size) == (3, 5)
    assert type(mine.names) is list


def test_misspelt_argument_of_a_users_callback(my_project: str) -> None:
    with pytest.raises(solo.PresetError, match=mentions("callback.mine.levle=3: ", nearest("level"))):
        built({"_target_": f"{my_project}.Mine", "levle": 3}, my_project)


def test_a_word_for_a_number_of_a_users_class_is_refused_with_what_is_expected(my_project: str) -> None:
    with pytest.raises(solo.PresetError, match=mentions("level='four'", "an integer")):
        built({"_target_": f"{my_project}.Mine", "level": "four"}, my_project)
    inner = {"_target_": f"{my_project}.Inner", "size": "big"}
    with pytest.raises(solo.PresetError, match=mentions("inner.size='big'", "an integer")):
        built({"_target_": f"{my_project}.Mine", "inner": inner}, my_project)


@pytest.mark.parametrize("alias", ["os.system", "os.path.exists", "AdamW", "os"])
def test_object_of_another_module_below_an_allowed_prefix_is_refused(my_project: str, alias: str) -> None:
    foreign = {"_target_": f"{my_project}.{alias}"}
    for node in (foreign, {"_target_": f"{my_project}.Mine", "inner": [foreign]}):
        with pytest.raises(solo.PresetError, match="outside"):
            built(node, my_project)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_escaped_interpolation_makes_no_target(my_project: str, tmp_path: Path, depth: int) -> None:
    marker = tmp_path / "made"
    text = "\\" * (2**depth - 1) + "${oc.create:{_target_:logging.FileHandler,filename:'" + str(marker) + "'}}"
    with pytest.raises(solo.PresetError):
        built({"_target_": f"{my_project}.Mine", "inner": text}, my_project)
    assert not marker.exists()


@pytest.mark.parametrize("wrong", [{"_partial_": True}, {"_recursive_": False}])
def test_target_that_is_no_callback_is_refused(my_project: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(solo.PresetError, match=r"Callback|_recursive_"):
        built({"_target_": f"{my_project}.Mine", **wrong}, my_project)
    with pytest.raises(solo.PresetError, match=mentions("Callback", "Inner")):
        built({"_target_": f"{my_project}.Inner"}, my_project)


@pytest.mark.row(81)
def test_positional_arguments_and_partials_below_a_target(my_project: str) -> None:
    inner = {"_target_": f"{my_project}.Inner", "_partial_": True, "_args_": [4]}
    assert built({"_target_": f"{my_project}.Mine", "_args_": [2], "inner": inner}, my_project).inner().size == 4


@pytest.mark.parametrize(
    ("target", "message"),
    [("nowhere.X", "no module 'nowhere'"), ("Mime", mentions("has no 'Mime'", nearest("Mine"), "Inner"))],
)
def test_target_that_is_not_there(my_project: str, target: str, message: str) -> None:
    path = target if target.startswith("nowhere") else f"{my_project}.{target}"
    with pytest.raises(solo.PresetError, match=message):
        built({"_target_": path}, my_project, "nowhere")


def test_an_import_error_inside_the_users_module_is_shown_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_project.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        built({"_target_": "my_broken_project.X"}, "my_broken_project")


@pytest.mark.parametrize(("package", "version"), [("lightning", "2.6.3"), ("torch", "2.9.1"), ("hydra-core", "1.3.2")])
def test_dependency_that_is_too_old_or_compromised_is_refused(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    declared = ["torch>=2.10", "lightning>=2.6.6,<3", "hydra-core>=1.3.8,<1.5", "pytest; extra == 'test'"]
    true_version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: declared)
    assert outdated() == []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else true_version(name))
    with pytest.raises(solo.CapabilityError, match=f"{package} {version} is installed.*pip install"):
        check_machine(compose("baseline"))


def test_all_that_a_preset_lacks_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what `doctor` shows."""
    monkeypatch.setattr("lightning_solo.requirements.installed", lambda package: "0.1" if package == "torch" else None)
    monkeypatch.setattr("lightning_solo.requirements.cxx_compiler", lambda: None)
    lines = lacks(
        compose(
            {"precision": "bf16-mixed", "callback": {"regional_compilation": {}}, "strategy": {"name": "zero_offload"}}
        )
    )
    assert [line.split(" is ")[0] for line in lines[:1]] == ["torch 0.1"]
    assert any("C++ compiler" in line for line in lines)
    assert any(line.startswith("no CUDA device") for line in lines)
    with pytest.raises(solo.CapabilityError) as refused:
        check_machine(compose("zero_offload"))
    assert str(refused.value).count("\n") >= 1


def test_nvme_without_libaio_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is what `doctor` shows."""
    pytest.importorskip("deepspeed", reason="listed on Linux only")
    monkeypatch.setattr(extension, "what_is_missing", lambda name: f"no library for {name}")
    for preset, expected in (("zero_offload_nvme", "no library for async_io"), ("zero_offload_parameters", "CUDA")):
        with pytest.raises(solo.CapabilityError, match=expected):
            check_machine(compose(preset))
