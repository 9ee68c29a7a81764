"""Checkpoints and a run's folder of 0.2.0 resume, those of its strategy `compact` too, and end where it did.

The files in `saved_by_0_2_0` are 0.2.0's own: the checkpoints after five of eight batches, the folder after five steps.
`ends.json` has the first master weights of each parameter at the end of its undisturbed runs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

import lightning_solo as solo
from tests.messages import mentions
from tests.training import equal

ROOT = Path(__file__).parents[1]
SAVED = ROOT / "tests" / "saved_by_0_2_0"
ENDS: dict[str, dict[str, list[float]]] = json.loads((SAVED / "ends.json").read_text())
TOLERANCE = 1e-3  # without its window or moments a run ends 7e-3 and 2e-2 away; other processors round otherwise


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SAVED)
    from small_regression import SmallRegression  # type: ignore[import-not-found]

    return SmallRegression()


def trained(module: Any, preset: str, path: Path | None, make_trainer: Any, **options: Any) -> dict[str, Any]:
    """Return the master weights at the end of two epochs."""
    trainer = make_trainer(L, **solo.trainer_kwargs(preset), **options, max_epochs=2)
    trainer.fit(module, ckpt_path=path, weights_only=None if path is None else True)
    return {name: trainer.optimizers[0].master_weight(p) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("file", "preset", "options"),
    [
        ("compact_amid_a_window.ckpt", "compact", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}),
        ("compact_states.ckpt", "compact_states", {}),
    ],
)
def test_checkpoint_resumes_to_the_recorded_end(
    module: Any, make_trainer: Any, file: str, preset: str, options: dict[str, Any]
) -> None:
    end = trained(module, preset, SAVED / file, make_trainer, **options)
    for name, expected in ENDS[file].items():
        ours = end[name].flatten()[:4]
        torch.testing.assert_close(ours, torch.tensor(expected), rtol=0, atol=TOLERANCE)


def test_checkpoint_is_exported_after_it_was_saved_again(module: Any, make_trainer: Any, tmp_path: Path) -> None:
    """0.2.0 didn't save which weight a correction belongs to; the message says to resume once and save again."""
    file = SAVED / "compact_states.ckpt"
    with pytest.raises(solo.CheckpointError, match=mentions("resume it once", "trainer.save_checkpoint")):
        solo.export_weights(file)
    steps = torch.load(file, weights_only=True)["global_step"]
    trainer = make_trainer(L, **solo.trainer_kwargs("compact_states"), max_steps=steps)  # none is left
    trainer.fit(module, ckpt_path=file, weights_only=True)
    trainer.save_checkpoint(tmp_path / "again.ckpt", weights_only=False)
    masters = {name: trainer.optimizers[0].master_weight(p) for name, p in module.named_parameters()}
    assert equal(solo.export_weights(tmp_path / "again.ckpt"), masters)
    before = torch.load(file, weights_only=True)["state_dict"]
    assert equal({name: master.bfloat16() for name, master in masters.items()}, dict(before))


def test_run_folder_of_the_strategy_compact_resumes(tmp_path: Path) -> None:
    shutil.copytree(SAVED / "run_of_compact", tmp_path / "runs" / "run_of_compact")
    shutil.copy(SAVED / "small_regression.py", tmp_path)
    overrides = ["model=custom", "model._target_=small_regression.SmallRegression", "allow=[small_regression]"]
    overrides += [
        "data=none",
        "optimizer=none",
        "solo=compact",
        "run=run_of_compact",
        "trainer.val_check_interval=null",
    ]
    command = [sys.executable, "-m", "lightning_solo.cli", "train", *overrides, "resume=auto", "trainer.max_steps=16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def resume(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], cwd=tmp_path, env=environment, capture_output=True, text=True)

    changed = resume("solo.callback.compact_states.master_bits=32")
    assert changed.returncode != 0
    assert "solo.callback.compact_states.master_bits: 24 before, 32 now" in changed.stdout + changed.stderr
    done = resume()
    assert done.returncode == 0, done.stdout + done.stderr
    end = torch.load(tmp_path / "runs" / "run_of_compact" / "checkpoints" / "last.ckpt", weights_only=True)
    assert end["global_step"] == 16
    for name, expected in ENDS["compact_states.ckpt"].items():  # released one by one, the same numbers
        ours = end["state_dict"][name].flatten()[:4].float()
        torch.testing.assert_close(ours, torch.tensor(expected), rtol=2**-7, atol=TOLERANCE)
