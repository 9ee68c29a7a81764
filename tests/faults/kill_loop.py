"""A training that saves after each step is killed again and again, and what it leaves is read."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves

import lightning_solo as solo
from lightning_solo.checkpoint.folders import BESIDE, refuse_changed
from lightning_solo.machine import versions
from tests.faults import rows
from tests.faults.kills import FAILPOINTS, Child, Kill, at_random, counted, trial
from tests.modules import Stack, loader, regression

STEPS = 24
"""Steps of the undisturbed run; a process is killed well before."""
SAVES = 4
"""Saves that a process begins before it is killed, at most and about."""
POINTS = FAILPOINTS - {"write"}
"""Functions at which a process is killed; random moments are mostly within a write."""


@dataclass(frozen=True)
class Way:
    """A way to save.

    Attributes:
        presets: of the run; none under stock Lightning.
        overrides: of their settings.
        share: of the trials of other ways.
        forks_early: whether each process trains from the beginning, since threads of its engine don't survive a fork.
    """

    presets: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    share: float = 1.0
    forks_early: bool = False


ZERO = "strategy.allow_cpu=true", "strategy.pin_memory=false", "precision=32-true"
STOCK = rows.STOCK_WAY
WAYS = {
    "plain": Way(("baseline",)),
    "compact": Way(("compact",)),
    "asynchronous": Way(("baseline",), ("callback.safe_checkpoint.asynchronous=true",)),
    "ZeRO": Way(("zero_offload",), ZERO, 0.06, True),
    "ZeRO with its engine's folder": Way(("zero_offload",), (*ZERO, "strategy.save_engine_directory=true"), 0.06, True),
    STOCK: Way(),
}


@dataclass
class Killed:
    """The results of killed saves.

    Attributes:
        way: how they saved; a key of `WAYS`.
        folder: where.
        moments: when they were killed: "failpoints" or "random".
        trials: processes that were killed.
        saves: number of saves that returned -> trials.
        unreadable: trials after which the newest file couldn't be read, though a save had returned.
        changed: trials after which it had another content than the undisturbed run has at its step.
        lost: trials after which it was older than the last save that returned.
        seconds: that all trials took.
    """

    way: str
    folder: str
    moments: str
    trials: int = 0
    saves: dict[int, int] = field(default_factory=dict)
    unreadable: int = 0
    changed: int = 0
    lost: int = 0
    seconds: float = 0.0


@dataclass
class Undisturbed:
    """The run that isn't killed.

    Attributes:
        hashes: step -> hash of its checkpoint.
        calls: calls and returns of `POINTS` in each save.
        seconds: of each save.
    """

    hashes: dict[int, str] = field(default_factory=dict)
    calls: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def content_hash(checkpoint: dict[str, Any]) -> str:
    """Return a hash of the weights and optimizer states of a checkpoint."""
    found = hashlib.sha256()
    for leaf in tree_leaves([checkpoint["state_dict"], checkpoint.get("optimizer_states"), checkpoint["global_step"]]):
        value = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8) if isinstance(leaf, Tensor) else leaf
        found.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return found.hexdigest()


class Kills(Callback):
    """Saves after each step in forked processes until they are killed."""

    def __init__(self, path: Path, kills: list[Kill], report: Killed, expected: dict[int, str]) -> None:
        self.path, self.kills, self.report, self.expected = path, kills, report, expected
        self.trial = 0
        self.child: Child | None = None
        self.asynchronous = report.way == "asynchronous"

    def state_dict(self) -> dict[str, int]:
        return {"trial": self.trial}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.child is None:
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
        report.saves[len(saved)] = report.saves.get(len(saved), 0) + 1
        try:
            path = newest(self.path, report.way)
            found = None if path is None else load(path)
            refuse_changed(Path(f"{self.path}{BESIDE}"))
        except Exception as error:
            print(f"{report.way}, after {len(saved)} saves: {type(error).__name__}: {error}", file=sys.stderr)
            report.unreadable += 1
            self.path.unlink(missing_ok=True)  # the following trials begin anew
            return
        if found is None:
            report.lost += bool(saved)
            return
        of_trial = next(state["trial"] for name, state in found["callbacks"].items() if name.startswith("Kills"))
        report.changed += content_hash(found) != self.expected[found["global_step"]]
        report.lost += bool(saved) and (of_trial, found["global_step"]) < (self.trial, saved[-1])


class Noting(Callback):
    """Saves after each step, and notes the content, the calls and the time of each save."""

    child = None

    def __init__(self, path: Path, notes: Undisturbed) -> None:
        self.path, self.notes = path, notes

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        started = time.monotonic()
        with counted(POINTS) as number:
            trainer.save_checkpoint(self.path)
            getattr(trainer.strategy.checkpoint_io, "wait", int)()
        self.notes.seconds.append(time.monotonic() - started)
        self.notes.calls += number
        self.notes.hashes[trainer.global_step] = content_hash(load(self.path))


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


def moments(kind: str, trials: int, notes: Undisturbed, seed: int) -> list[Kill]:
    """Return when to kill: numbers of failpoints, or after times, drawn from the first `SAVES` saves."""
    rng = random.Random(seed)
    if kind == "failpoints":
        return [rng.randrange(sum(notes.calls[:SAVES])) for _ in range(trials)]
    return [at_random(rng, sum(notes.seconds[:SAVES])) for _ in range(trials)]


def fit(name: str, callback: Kills | Noting) -> None:
    """Train; processes that were forked end here."""
    way = WAYS[name]
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if name != STOCK:
        quiet |= solo.trainer_kwargs([*way.presets, "fault_tolerance"], overrides=way.overrides)
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


def undisturbed(way: str, path: Path) -> Undisturbed:
    """Return the notes of a run that isn't killed, in a process of its own, which leaves nothing in this one."""
    file = path.with_suffix(".json")
    process = os.fork()
    if process == 0:
        status = 1
        try:
            notes = Undisturbed()
            fit(way, Noting(path, notes))
            file.write_text(json.dumps(asdict(notes)))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if os.waitpid(process, 0)[1]:
        raise RuntimeError(f"the undisturbed run of {way!r} failed")
    notes = Undisturbed(**json.loads(file.read_text()))
    notes.hashes = {int(step): text for step, text in notes.hashes.items()}
    return notes


def run(way: str, place: Path, trials: int, seed: int = 0) -> list[Killed]:
    """Kill ``trials`` processes at failpoints and as many at random moments, which save in a folder of ``place``."""
    reports = []
    versions()  # read once, not in each process
    before, folder = tempfile.tempdir, Path(tempfile.mkdtemp(dir=place))
    tempfile.tempdir = tempfile.mkdtemp()  # of stock Lightning, which leaves files there
    try:
        (folder / "whole").mkdir()
        notes = undisturbed(way, folder / "whole" / "last.ckpt")
        for kind in ("failpoints", "random"):
            report = Killed(way, str(place), kind)
            path = folder / kind / "last.ckpt"
            path.parent.mkdir()
            drawn = moments(kind, round(trials * WAYS[way].share), notes, seed)
            kills = Kills(path, drawn, report, notes.hashes)
            if not WAYS[way].forks_early or kills.try_all():
                fit(way, kills)
            reports.append(report)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(tempfile.tempdir)
        tempfile.tempdir = before
    return reports
