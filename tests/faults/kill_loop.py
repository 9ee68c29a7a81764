"""A training that saves after each step is killed again and again, and what it leaves is read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lightning_solo as solo
from lightning_solo.machine import versions
from tests.faults.kills import FAILPOINTS, Child, Kill, at_random, trial
from tests.modules import Stack, loader, regression

STEPS = 24
"""Steps of the undisturbed run; a process is killed well before."""
POINTS = FAILPOINTS - {"write"}
"""Functions at which a process is killed; random moments are mostly within a write."""
CALLS = 900
"""Calls and returns of these in some three saves, those of threads that hash and read back among them."""
STOCK_CALLS = 120
"""The same of stock Lightning."""
LONGEST_S = 0.6
"""Seconds of some four saves on a busy machine, after which the last process is killed."""
WAYS: dict[str, tuple[list[str], list[str]]] = {
    "plain": (["baseline"], []),
    "compact": (["compact"], []),
    "asynchronous": (["baseline"], ["callback.safe_checkpoint.asynchronous=true"]),
    "stock Lightning": ([], []),
}
"""Way to save -> presets and overrides."""
STOCK = "stock Lightning"


@dataclass
class Killed:
    """What came of killed saves.

    Attributes:
        way: how they saved; a key of `WAYS`.
        folder: where.
        moments: when they were killed: "failpoints" or "random".
        trials: processes that were killed.
        saves: saves that returned, in all trials.
        unreadable: trials after which the newest file couldn't be read, though a save had returned.
        changed: trials after which it had another content than the undisturbed run has at its step.
        lost: trials after which it was older than the last save that returned.
        seconds: that all trials took.
    """

    way: str
    folder: str
    moments: str
    trials: int = 0
    saves: int = 0
    unreadable: int = 0
    changed: int = 0
    lost: int = 0
    seconds: float = 0.0


def content_hash(checkpoint: dict[str, Any]) -> str:
    """Return a hash of the weights and optimizer states of a checkpoint."""
    found = hashlib.sha256()
    for leaf in tree_leaves([checkpoint["state_dict"], checkpoint.get("optimizer_states"), checkpoint["global_step"]]):
        value = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8) if isinstance(leaf, Tensor) else leaf
        found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()


class Kills(Callback):
    """Saves after each step in forked processes until they are killed; in the undisturbed run notes what it saves.

    Processes are forked after the first step.
    """

    def __init__(self, path: Path, kills: list[Kill], report: Killed, expected: dict[int, str]) -> None:
        self.path, self.kills, self.report, self.expected = path, kills, report, expected
        self.trial = 0
        self.child: Child | None = None
        self.asynchronous = report.way == "asynchronous"

    def state_dict(self) -> dict[str, int]:
        return {"trial": self.trial}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not self.kills:
            trainer.save_checkpoint(self.path)
            if self.asynchronous:
                trainer.strategy.checkpoint_io.wait()
            self.expected[trainer.global_step] = content_hash(load(self.path))
            return
        if trainer.global_step == 1 and self.child is None:
            trainer.should_stop = not self.try_all()
        if self.child is not None:
            if trainer.global_step == 1:
                self.child.begin()
            trainer.save_checkpoint(self.path)
            # an asynchronous save is on the disk when the next one returns
            self.child.report(trainer.global_step - self.asynchronous)
            if trainer.global_step == STEPS:
                os.kill(os.getpid(), signal.SIGKILL)  # after its failpoint

    def try_all(self) -> bool:
        """Return whether this is a forked process; in the first one return when all others are dead."""
        started = time.monotonic()
        for kill in self.kills:
            self.trial += 1
            outcome = trial(kill, POINTS)
            if isinstance(outcome, Child):
                self.child = outcome
                return True
            self._look([step for step in outcome if step > 0])
        self.report.seconds = time.monotonic() - started
        return False

    def _look(self, saved: list[int]) -> None:
        report = self.report
        report.trials += 1
        report.saves += len(saved)
        try:
            path = newest(self.path, report.way)
            found = None if path is None else load(path)
        except Exception:
            report.unreadable += 1
            self.path.unlink(missing_ok=True)  # the following trials begin anew
            return
        if found is None:
            report.lost += bool(saved)
            return
        of_trial = next(state["trial"] for name, state in found["callbacks"].items() if name.startswith("Kills"))
        report.changed += content_hash(found) != self.expected[found["global_step"]]
        report.lost += bool(saved) and (of_trial, found["global_step"]) < (self.trial, saved[-1])


def newest(path: Path, way: str) -> Path | None:
    """Return the newest checkpoint beside a path."""
    if way == STOCK:
        return path if path.exists() else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a file that is passed over was lost
        found = solo.latest_checkpoint(path.parent)
    return None if found is None else Path(found)


def load(path: Path) -> dict[str, Any]:
    """Return a checkpoint."""
    found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return found


def moments(way: str, kind: str, trials: int, longest_s: float, seed: int) -> list[Kill]:
    """Return when to kill: numbers of failpoints, or after times, both drawn."""
    rng = random.Random(seed)
    if kind == "failpoints":
        return [rng.randrange(STOCK_CALLS if way == STOCK else CALLS) for _ in range(trials)]
    return [at_random(rng, longest_s) for _ in range(trials)]


def fit(way: str, callback: Kills) -> None:
    """Train; processes that were forked end here."""
    presets, overrides = WAYS[way]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if way != STOCK:
        quiet |= solo.trainer_kwargs([*presets, "fault_tolerance"], overrides=overrides)
    torch.manual_seed(0)
    module = regression(lightning.pytorch, Stack(blocks=2, width=64))
    try:
        trainer = lightning.pytorch.Trainer(
            **{**quiet, "callbacks": [*quiet.get("callbacks", ()), callback], "accelerator": "cpu", "devices": 1},
            max_epochs=1,
            enable_checkpointing=False,
        )
        trainer.fit(module, loader(STEPS, width=64))
    except BaseException:
        if callback.child is None:
            raise
        traceback.print_exc()
    finally:
        if callback.child is not None:
            os._exit(1)


def undisturbed(way: str, path: Path) -> dict[int, str]:
    """Return the hash of each step's checkpoint; the run is in a process of its own, and leaves nothing in this one."""
    hashes = path.with_suffix(".json")
    process = os.fork()
    if process == 0:
        status = 1
        try:
            expected: dict[int, str] = {}
            fit(way, Kills(path, [], Killed(way, "", ""), expected))
            hashes.write_text(json.dumps(expected))
            status = 0
        finally:
            os._exit(status)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError(f"the undisturbed run of {way!r} failed")
    return {int(step): text for step, text in json.loads(hashes.read_text()).items()}


def run(way: str, place: Path, trials: int, seed: int = 0) -> list[Killed]:
    """Kill ``trials`` processes at failpoints and as many at random moments, which save in a folder of ``place``."""
    reports = []
    versions()  # read once, not in each process
    before, folder = tempfile.tempdir, Path(tempfile.mkdtemp(dir=place))
    tempfile.tempdir = tempfile.mkdtemp()  # of stock Lightning, which leaves files there
    try:
        (folder / "whole").mkdir()
        expected = undisturbed(way, folder / "whole" / "last.ckpt")
        for kind in ("failpoints", "random"):
            report = Killed(way, str(place), kind)
            path = folder / kind / "last.ckpt"
            path.parent.mkdir()
            kills = Kills(path, moments(way, kind, trials, LONGEST_S, seed), report, expected)
            fit(way, kills)
            reports.append(report)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(tempfile.tempdir)
        tempfile.tempdir = before
    return reports
