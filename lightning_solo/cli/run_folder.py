"""The folder of one run: its files, and the check that a command may start or resume in it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_solo.atomic_files import link_outwards, write_json
from lightning_solo.checkpoint.damage import LAST
from lightning_solo.checkpoint.lock import lock
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.machine import VERSIONS, process_start, versions
from lightning_solo.presets import old_spellings
from lightning_solo.presets.files import leaves

FREE_TO_CHANGE = (
    "resume",
    "fault_tolerance",
    "root",
    "run",
    "allow",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.max_time",
)


def is_first_rank() -> bool:
    """Return whether this process is the first of its run, by the variables of Lightning, torchrun and SLURM."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def name_by_launcher() -> str | None:
    """Return a run's name that all processes of torchrun or SLURM know; None if neither has started this one.

    Raises:
        PresetError: torchrun on several machines, or on a Mac, has no ``--rdzv-id``.
    """
    given = os.environ
    if int(given.get("WORLD_SIZE", "1")) > 1 and (run_id := given.get("TORCHELASTIC_RUN_ID")):
        if run_id != "none":
            return re.sub(r"[^\w.-]", "_", f"torchrun-{run_id}")
        if given.get("LOCAL_WORLD_SIZE") != given["WORLD_SIZE"] or sys.platform != "linux":
            raise PresetError("run: torchrun gives its processes no common name; write run=<name>")
        started = process_start(os.getppid())  # of torchrun
        return time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(started))
    if int(given.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in given and (job := given.get("SLURM_JOB_ID")):
        return f"slurm-{job}.{given.get('SLURM_STEP_ID', '0')}"
    return None


class RunFolder:
    """``config.yaml``, ``versions.json``, ``checkpoints/last.ckpt`` and the logs of one run.

    As a context manager it is locked from `open` on, so that no second command writes there. Of a run on several
    devices the first process locks it and writes configuration and versions.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = path / LAST
        self.config = path / "config.yaml"
        self._lock = ExitStack()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def open(self, cfg: DictConfig) -> str | None:
        """Return the checkpoint to resume from; or write configuration and versions, and return None.

        Raises:
            PresetError: the folder can't be written, or has a link to elsewhere.
            CheckpointError: the folder has a run and ``resume=never``, or none of its checkpoints is valid; or another
                process trains there.
            ConflictError: the run to resume has another configuration; lists every difference.
        """
        if (link := link_outwards(self.path)) is not None:
            raise PresetError(
                f"run={cfg.run}: {link} is a link to {link.resolve()}, and a run writes into its own folder only; write"
                " root=<a folder there>, or copy the files"
            )
        try:
            if is_first_rank():
                self._lock.enter_context(lock(self.path, "run=... or root=..."))
        except OSError as error:
            raise PresetError(f"root={cfg.root}: {self.path} can't be written: {error.strerror}") from error
        checkpoint = self._checkpoint(cfg)
        if checkpoint is None and is_first_rank():
            self.write(cfg)
        return checkpoint

    def write(self, cfg: DictConfig) -> None:
        """Write configuration and versions.

        Raises:
            PresetError: the folder can't be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.config.write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")  # unresolved: no secret is written out
            write_json(self.path / VERSIONS, versions())
        except OSError as error:
            raise PresetError(f"root={cfg.root}: {self.path} can't be written: {error.strerror}") from error

    def _checkpoint(self, cfg: DictConfig) -> str | None:
        folder = self.last.parent
        if not any(folder.glob("*.ckpt")):
            if cfg.resume != "never":
                print(f"nothing to resume in {self.path}: starting at step 0")
            return None
        if cfg.resume == "never":
            raise CheckpointError(
                f"{self.path} has a run already; write resume=auto to resume it, or another name: run=..."
            )
        if cfg.resume == "auto":
            self._refuse_changes(cfg)
        from lightning_solo.checkpoint.manifest import latest_checkpoint

        return latest_checkpoint(folder)

    def _refuse_changes(self, cfg: DictConfig) -> None:
        if not self.config.exists():
            return
        try:
            saved = OmegaConf.create(self.config.read_text(encoding="utf-8"))
            if not OmegaConf.is_dict(saved):
                raise ValueError("it is no mapping")
            plain: list[Any] = [OmegaConf.to_container(each, resolve=False) for each in (saved, cfg)]
        except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
            raise CheckpointError(
                f"{self.config} can't be read ({str(error).partition(chr(10))[0]}), so changes can't be found; write"
                " resume=override to resume with the settings of this command"
            ) from error
        plain[0]["solo"] = old_spellings.updated(plain[0].get("solo") or {})
        before, now = (
            {key: value for key, value in leaves(each, of_lists=False) if value != "???"}  # a field that isn't set
            for each in plain
        )
        changed = [
            f"\n  {key}: {_value(before, key)} before, {_value(now, key)} now"
            for key in sorted({*before, *now})
            if before.get(key) != now.get(key) and not key.startswith(FREE_TO_CHANGE)
        ]
        if changed:
            raise ConflictError(
                f"resume=auto: {self.path} has another configuration:{''.join(changed)}\n"
                f"give the former values, or write resume=override to resume with the new ones"
            )


def _value(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
