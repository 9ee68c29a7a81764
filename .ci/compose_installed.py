"""Composes every preset from an installed package: `.ci/run` calls it outside the checkout, twice."""

import subprocess
import sys
from pathlib import Path

import lightning_solo as solo
from lightning_solo.presets.files import conf_folder

here = Path.cwd()
assert not (here / "lightning_solo").exists(), "run this outside the checkout"
presets = solo.list_presets()
assert len(presets) >= 7, presets
for name in presets:
    assert solo.show(name).startswith("# "), name
assert sorted(solo.trainer_kwargs("checkpointing")) == ["callbacks", "devices", "precision"]
for command in (["presets"], ["show", "checkpointing"], ["train", "--help"], ["train", "--cfg", "job"]):
    done = subprocess.run([Path(sys.executable).parent / "lightning-solo", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "byte_gpt" in done.stdout or command[0] != "train", done.stdout
print(f"{len(presets)} presets from {conf_folder()}")
