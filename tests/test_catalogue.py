"""One technique, one word, five places: module, class, YAML, test, row in README; and YAML and code agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_solo.presets.registry import NAMES
from lightning_solo.presets.signature import REQUIRED, parameters

ROOT = Path(__file__).parents[1]
TECHNIQUES = [(kind, name) for kind in ("callback", "strategy") for name in NAMES[kind]]
FOLDERS = ROOT / "lightning_solo" / "techniques"
CARD = ("Saves:", "Costs:", "Numerics:", "Conflicts:", "Reference:")


def yaml_of(kind: str, name: str) -> Path:
    return ROOT / "conf" / "library" / "solo" / kind / f"{name}.yaml"


@pytest.mark.parametrize(("kind", "name"), TECHNIQUES)
def test_five_places(kind: str, name: str) -> None:
    module, _, cls = NAMES[kind][name].partition(":")
    assert module == f"lightning_solo.techniques.{name}.technique"
    suffix = "Strategy" if kind == "strategy" else ""  # as Lightning names its own
    assert cls == "".join(word.capitalize() for word in name.split("_")) + suffix
    assert yaml_of(kind, name).is_file()
    assert (ROOT / "tests" / "techniques" / f"test_{name}.py").is_file()
    assert re.search(rf"^\| `{name}`", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE), (
        "no row in README"
    )


def test_no_technique_is_unregistered() -> None:
    folders = {path.parent.name for path in FOLDERS.glob("*/technique.py")}
    yamls = {path.stem for kind in ("callback", "strategy") for path in yaml_of(kind, "x").parent.glob("*.yaml")}
    assert folders == yamls == {name for _, name in TECHNIQUES}


@pytest.mark.parametrize(("kind", "name"), TECHNIQUES)
def test_card(kind: str, name: str) -> None:
    text = (FOLDERS / name / "technique.py").read_text(encoding="utf-8")
    head = text.splitlines()[:16]
    found = [next((i for i, line in enumerate(head) if line.startswith(field)), None) for field in CARD]
    assert None not in found
    assert found == sorted(found)  # type: ignore[type-var]


@pytest.mark.parametrize(("kind", "name"), TECHNIQUES)
def test_four_proofs(kind: str, name: str) -> None:
    text = (ROOT / "tests" / "techniques" / f"test_{name}.py").read_text(encoding="utf-8").lower()
    places = [text.find(section) for section in ("acted", "parity", "memory", "trace")]
    assert -1 not in places, f"a section is missing: {places}"


@pytest.mark.parametrize(("kind", "name"), TECHNIQUES)
def test_yaml_and_signature_agree(kind: str, name: str) -> None:
    text = yaml_of(kind, name).read_text(encoding="utf-8")
    assert text.startswith("# ")
    node: Any = OmegaConf.to_container(OmegaConf.create(text))
    if kind == "callback":
        assert list(node) == [name]
        node = node[name]
    else:
        assert node.pop("name") == name
    assert plain(node) == plain({key: p.default for key, p in parameters(NAMES[kind][name]).items()})


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


APPLICATION = sorted((ROOT / "conf" / "app").glob("*/*.yaml"))


@pytest.mark.parametrize("path", APPLICATION, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_file_of_the_application_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert any(line.startswith("# ") and not line.startswith("# @") for line in lines[:2])


@pytest.mark.parametrize("path", APPLICATION, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_argument_is_in_the_applications_files(path: Path) -> None:
    kind = path.parent.name
    node: Any = OmegaConf.to_container(OmegaConf.load(path))
    if kind not in ("model", "data") or "name" not in node:
        return
    accepted = parameters(NAMES[kind][node.pop("name")])
    assert list(node) == list(accepted)
    assert not [name for name, p in accepted.items() if p.default is REQUIRED and node[name] is None]
