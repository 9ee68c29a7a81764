"""Checkpoints that are never lost, saved also when the process is asked to end."""

from __future__ import annotations

import hashlib
import os
import shlex
import signal
import subprocess
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_solo.checkpoint.folders import local
from lightning_solo.errors import ConflictError
from lightning_solo.seams import patches, resuming
from lightning_solo.seams.technique import Technique
from lightning_solo.signals import STOPS, caught_signals, end_at_once, status
from lightning_solo.techniques.safe_checkpoint.card import CARD, Settings
from lightning_solo.techniques.safe_checkpoint.io import SafeIO, replaced_io

NOTICE_S = 5.0
"""Seconds between two runs of the command ``notice``."""


class SafeCheckpoint(Technique, Settings):
    """Writes checkpoints so that the newest one is whole after a kill, a full disk or a power failure.

    A file is written beside the former one and read back before it takes its place. Its hash is recorded in
    ``manifest.jsonl`` in its folder, and only a file that is as it was written is resumed. This holds for every
    `ModelCheckpoint` of the Trainer and for ``trainer.save_checkpoint``, during the fit and after it.

    SIGTERM and SIGINT save ``last.ckpt`` before the next batch and end the process with the status 143 or 130; SIGUSR1
    saves, and training goes on. A second SIGTERM or SIGINT ends the process at once. SIGHUP is ignored.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._io: SafeIO | None = None
        self._signals: list[int] | None = None  # that have arrived; None while they aren't recorded
        self._listening = ExitStack()
        self._stepping_from: int | None = None  # the number of steps before the last one that began
        self._saved_at = 0.0  # by the clock that never goes back

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replace Lightning's reader and writer of checkpoints."""
        if sum(isinstance(each, SafeCheckpoint) for each in trainer.callbacks) > 1:
            raise ConflictError("two SafeCheckpoint in one run: drop one")
        super().setup(trainer, pl_module, stage)
        self._io = replaced_io(
            trainer.strategy, lambda before: SafeIO(before, asynchronous=self.asynchronous, durable=self.durable)
        )
        self._io.removes = stage == "fit"
        if self.ctx is not None:
            self.ctx.undo.callback(self._io.release)  # a failed set-up has no teardown

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Lock the folders of the Trainer's checkpoints."""
        assert self._io is not None
        self._io.holds_locks = True
        self._stepping_from = None
        self._saved_at = time.monotonic()
        self._io.configuration = configuration_hash(pl_module, self.ctx.techniques if self.ctx else ())
        for folder in patches.checkpoint_folders(trainer) if trainer.is_global_zero else ():  # which alone writes
            self._io.claim(local(folder))

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._listen(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._listen(trainer)
        if self.ctx is not None:
            self.ctx.undo.enter_context(patches.fetches(trainer, partial(self._before_fetch, trainer), lambda: None))

    def _before_fetch(self, trainer: Any, with_epoch: bool = False) -> None:
        if not with_epoch and not resuming.fetches_first(trainer):
            self._look(trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.world_size == 1:  # processes may validate different numbers of batches
            self._look(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._look(trainer)

    # --- steps, and the time since the last checkpoint ---

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        if self.ctx is not None and self.ctx.release is not None and self.ctx.window.is_last:
            self._stepping_from = trainer.global_step  # this backward updates weights

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._stepping_from = trainer.global_step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.every_minutes is None:
            return
        if trainer.strategy.broadcast(time.monotonic() - self._saved_at >= 60 * self.every_minutes):
            trainer.save_checkpoint(self._last(trainer))

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._saved_at = time.monotonic()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save nothing from now on if the error came in the middle of an optimizer step."""
        super().on_exception(trainer, pl_module, exception)
        if self._io is not None:
            self._io.failure = f"{type(exception).__name__}: {exception}".partition("\n")[0][:200]
            self._io.is_half_stepped = self._stepping_from == trainer.global_step

    # --- signals ---

    def _listen(self, trainer: Any) -> None:
        """Record signals from now on; Lightning has installed its own handlers by now."""
        if not self.signals or self.ctx is None or self._signals is not None:
            return
        numbers = (*STOPS, signal.SIGUSR1, signal.SIGHUP)
        self._signals = self._listening.enter_context(caught_signals(numbers, repeated=end_at_once))
        self.ctx.undo.callback(setattr, self, "_signals", None)
        self.ctx.undo.callback(self._listening.close)
        if self.notice is not None:
            ended = threading.Event()
            self._listening.callback(ended.set)
            threading.Thread(target=_watch, args=(shlex.split(self.notice), ended), daemon=True).start()

    def _look(self, trainer: Any) -> None:
        """Save and end if a signal has asked for it."""
        if self._signals is not None and trainer.strategy.reduce_boolean_decision(bool(self._signals), all=False):
            self._signals[:] = of_all_processes(self._signals)
        if not self._signals:
            return
        asked, stop = set(self._signals), next((each for each in self._signals if each in STOPS), None)
        self._signals[:] = [stop] if stop is not None else []
        if asked <= {signal.SIGHUP} or self.ctx is None:
            return
        if trainer.sanity_checking:
            if stop is not None:
                raise SystemExit(status(stop))
            return
        requeue = patches.requeue_path(trainer) if signal.SIGUSR1 in asked else None
        path = requeue or self._last(trainer)
        trainer.save_checkpoint(path)
        assert self._io is not None
        self._io.wait()
        name = signal.Signals(stop or signal.SIGUSR1).name
        self.ctx.info(f"safe_checkpoint: {name} at step {trainer.global_step}: saved {path}")
        if requeue is not None:
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        if stop is not None:
            raise SystemExit(status(stop))

    def _last(self, trainer: Any) -> Path:
        folders = patches.checkpoint_folders(trainer)
        folder = local(folders[0]) if folders else Path(trainer.default_root_dir, "checkpoints")
        return folder / "last.ckpt"


def of_all_processes(numbers: list[int]) -> list[int]:
    """Return the signals that have arrived in any process; all must call it."""
    if not torch.distributed.is_initialized():
        return numbers
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, numbers)
    return [number for each in gathered for number in each]


def configuration_hash(module: Any, techniques: Any) -> str:
    """Return a hash of what trains: the class and the parameters of a module with their shapes, and the techniques."""
    text = [f"{type(module).__module__}.{type(module).__qualname__}"]
    text += [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters()]
    text += sorted(map(repr, techniques))
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _watch(command: list[str], ended: threading.Event) -> None:
    """Send this process SIGTERM once a command succeeds."""
    while not ended.wait(NOTICE_S):
        if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            return
