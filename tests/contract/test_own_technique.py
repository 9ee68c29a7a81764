"""A technique of another package: installed, and then known everywhere; a broken one is named and left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import lines_with, nearest
from tests.pages import DOCS, Page

ROOT = Path(__file__).parents[2]
CARD = """
from dataclasses import dataclass
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.cards.card import Card
from lightning_solo.cards.phase import Phase
from frozen_embeddings.card import CARD as OTHER

@dataclass(frozen=True)
class Settings(TechniqueSettings):
    size: int = {default}

CARD = Card(
    name={name!r}, target={target!r}, phase={phase}, settings=Settings, owns=frozenset({{"trained_parameters"}}),
    saves="", costs="", numerics="", conflicts="", reference="",
)
"""
GOOD = {
    "default": 'setting(1, "rows")',
    "name": "adapter",
    "target": "frozen_embeddings.technique:FrozenEmbeddings",
    "phase": "Phase.ADAPT",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's package as pip installs it."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", folder, ROOT / "examples" / "own_technique"], check=True)
    return folder


def run(code: str, *folders: Path, cwd: Path) -> str:
    path = os.pathsep.join([*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_composed_combined_laddered_planned_and_trained(installed: Path, tmp_path: Path) -> None:
    code = """
import json, sys
import lightning as L, torch
import lightning_solo as solo
from lightning_solo.cards.catalogue import catalogue
from lightning_solo.presets.compose import compose
from lightning_solo.ladder.rungs import techniques

assert catalogue().broken == {}
class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(2000, 16), torch.nn.Linear(16, 2000)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.head(self.embedding(batch)), batch)
    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])

module = Module()
before = module.embedding.weight.detach().clone(), module.head.weight.detach().clone()
loader = torch.utils.data.DataLoader(torch.arange(64), batch_size=8)
quiet = dict(max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = L.Trainer(**solo.trainer_kwargs(["fine_tuning", "accumulation"]), **quiet)
trainer.fit(module, loader)
batch = torch.arange(8)
plan, whole = (solo.plan(Module, batch, preset=preset, device="rtx-4090") for preset in ("fine_tuning", "bf16"))
from lightning_solo.planner import auto
asked = compose("auto"), lambda config: None
print(json.dumps({
    "candidates": list(auto.candidates(*asked, None, ())),
    "named": list(auto.candidates(*asked, ["fine_tuning"], ())),
    "presets": solo.list_presets(),
    "shown": solo.show("fine_tuning"),
    "rungs": list(techniques()),
    "frozen": bool(torch.equal(module.embedding.weight, before[0])),
    "trained": not torch.equal(module.head.weight, before[1]),
    "undone": module.embedding.weight.requires_grad,
    "saved": whole.breakdown["optimizer_states"] - plan.breakdown["optimizer_states"],
}))
"""
    shown = json.loads(run(code, installed, cwd=tmp_path).splitlines()[-1])
    assert "fine_tuning" in shown["presets"]
    assert "min_rows: 256" in shown["shown"]
    names = shown["rungs"]
    assert names.index("checkpointing") < names.index("frozen embeddings") < names.index("accumulation")
    assert "bf16" in shown["candidates"]
    assert "fine_tuning" not in shown["candidates"], "a preset that trains other parameters must be chosen by name"
    assert shown["named"] == ["fine_tuning"]
    assert shown["frozen"]
    assert shown["trained"]
    assert shown["undone"]
    assert 8 * 2000 * 16 <= shown["saved"] <= 8 * 2000 * 16 + 1024  # two states in fp32, and a step count


@pytest.mark.long
def test_the_command_line_and_a_hydra_application_know_it(installed: Path, tmp_path: Path) -> None:
    command = "import sys; from lightning_solo.cli import main; sys.exit(main({arguments!r}))"
    assert "fine_tuning" in run(command.format(arguments=["presets"]), installed, cwd=tmp_path)
    assert "fine_tuning" in run(command.format(arguments=["doctor"]), installed, cwd=tmp_path)
    application = """
from hydra import compose, initialize_config_dir
import os
open("app.yaml", "w").write("defaults: [{solo: [checkpointing, fine_tuning]}, _self_]")
with initialize_config_dir(os.getcwd(), version_base=None):
    print(compose("app", ["solo.callback.frozen_embeddings.min_rows=7"]).solo.callback)
"""
    assert "{'min_rows': 7}" in run(application, installed, cwd=tmp_path)


@pytest.mark.long
def test_the_page_on_adding_a_technique_attaches_it_as_it_says(installed: Path, tmp_path: Path) -> None:
    page = Page(DOCS / "adding_a_technique.md")
    (python,) = page.of("pycon")
    code = """
from lightning.pytorch import Trainer
from frozen_embeddings.technique import FrozenEmbeddings
from lightning_solo import trainer_kwargs
from tests.test_docs import check
for line in {lines}:
    trainer = eval(line.removeprefix(">>> "))
    print([c.min_rows for c in trainer.callbacks if isinstance(c, FrozenEmbeddings)])
for command in {commands}:
    check(command)
"""
    commands = [command for command, _ in page.commands()]
    printed = run(code.format(lines=python.text.splitlines(), commands=commands), installed, cwd=tmp_path)
    assert re.findall(r"^\[\d*\]$", printed, re.MULTILINE) == ["[100]", "[256]", "[100]"]
    assert "solo/callback=frozen_embeddings" in " ".join(commands)


def package(folder: Path, name: str, card: str) -> None:
    """Write a package as pip would have installed it, with an entry point of its name."""
    home = folder / name
    home.mkdir()
    (home / "__init__.py").write_text("")
    (home / "card.py").write_text(card)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lightning_solo.techniques]\n{name} = {name}.card:CARD\n")


def test_it_is_refused_beside_its_rival(installed: Path, tmp_path: Path) -> None:
    package(tmp_path, "adapters", CARD.format(**GOOD))
    code = """
import lightning_solo as solo
try:
    solo.show("fine_tuning"), solo.trainer_kwargs("fine_tuning", ["+callback=adapter"])
except solo.ConflictError as error:
    print(error)
"""
    message = run(code, installed, tmp_path, cwd=tmp_path)
    assert "callback.frozen_embeddings and callback.adapter" in message
    assert "trained_parameters" in message
    assert "~callback.adapter" in message
    assert "~callback.frozen_embeddings" in message


BROKEN = {
    "raises": ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
    "no_card": ("CARD = 3", "CARD is a int; write a lightning_solo.cards.card.Card"),
    "no_class": (CARD.format(**{**GOOD, "target": "frozen_embeddings.technique:Missing"}), "has no 'Missing'"),
    "no_module": (CARD.format(**{**GOOD, "target": "frozen_embeddings.missing:A"}), "there is no module"),
    "no_init": (CARD.format(**{**GOOD, "target": "no_init.card:CARD"}), "or its package has no __init__.py"),
    "same_name": (CARD.format(**{**GOOD, "name": "memory_logger"}), "the name 'memory_logger' is taken"),
    "no_default": (CARD.format(**{**GOOD, "default": "field()"}).replace("import dataclass", "import dataclass, field"),
                   "the setting 'size' has no default"),
    "wrong_default": (CARD.format(**{**GOOD, "default": 'setting(0, "rows", at_least=1)'}), "size=0: expected"),
    "wrong_check": (CARD.format(**{**GOOD, "default": 'setting(1, "rows", check=lambda size: size > 0)'}),
                    "its check returns True"),
    "no_base": (CARD.format(**GOOD).replace("(TechniqueSettings)", ""), "with the base TechniqueSettings"),
    "no_phase": (CARD.format(**{**GOOD, "phase": "7.5"}), "phase=7.5 is none of Phase's: ITEMS, BATCHES"),
    "no_need": (CARD.format(**GOOD).replace('reference=""', 'reference="", requires=(1,)'), "a tuple of Requirement"),
    "no_plan": (CARD.format(**GOOD).replace('reference=""', 'reference="", planned="left-out"'), "write 'attached'"),
    "no_caveat": (CARD.format(**GOOD).replace('reference=""', 'reference="", caveat="late"'), "caveat='late'"),
    "typo": (CARD.format(**GOOD).replace("trained_parameters", "saved_tensor"), nearest("saved_tensors")),
}  # fmt: skip


def test_broken_ones_are_named_and_left_out(installed: Path, tmp_path: Path) -> None:
    for name, (card, _) in BROKEN.items():
        package(tmp_path, name, card)
    (tmp_path / "no_init" / "__init__.py").unlink()
    code = """
import json, warnings
import lightning_solo as solo
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert "precision: bf16-mixed" in solo.show("bf16")
    solo.show("checkpointing")
print(json.dumps([str(warning.message) for warning in caught if "left out" in str(warning.message)]))
"""
    messages = json.loads(run(code, installed, tmp_path, cwd=tmp_path))
    assert len(messages) == len(BROKEN)
    for name, (_, reason) in BROKEN.items():
        (message,) = [message for message in messages if f"'{name} = {name}.card:CARD'" in message]
        assert reason in message


@pytest.mark.long
def test_a_constructor_that_lacks_a_setting_of_its_card_is_named(installed: Path, tmp_path: Path) -> None:
    package(tmp_path, "adapters", CARD.format(**GOOD))  # whose class takes min_rows, and no size
    code = """
import lightning_solo as solo
try:
    solo.trainer_kwargs("bf16", ["+callback=adapter"])
except solo.PresetError as error:
    print(error)
"""
    message = run(code, installed, tmp_path, cwd=tmp_path)
    assert lines_with(message, "frozen_embeddings.technique:FrozenEmbeddings", "size")
    assert "from the settings" in message


def test_a_preset_named_as_one_of_ours_is_named_and_left_out(installed: Path, tmp_path: Path) -> None:
    package(tmp_path, "adapters", CARD.format(**GOOD))
    theirs = tmp_path / "adapters" / "conf" / "solo" / "bf16.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("# theirs\nprecision: 32-true\n")
    code = """
import warnings
import lightning_solo as solo
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert "bf16-mixed" in solo.show("bf16")
print([str(warning.message) for warning in caught])
"""
    message = run(code, installed, tmp_path, cwd=tmp_path)
    assert message.count(str(theirs)) == 1
