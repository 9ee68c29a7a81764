"""The card of `safe_checkpoint`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from lightning_solo.cards.card import Card
from lightning_solo.cards.engines import EVERYWHERE
from lightning_solo.cards.phase import Phase
from lightning_solo.cards.settings import TechniqueSettings, setting
from lightning_solo.errors import PresetError


@dataclass(frozen=True)
class Settings(TechniqueSettings):
    """Arguments of SafeCheckpoint."""

    asynchronous: bool = setting(False, "copy a checkpoint to host memory, and write it in a thread during training")
    durable: bool = setting(True, "wait until a file is on the disk, so that it survives a power failure")
    every_minutes: float | None = setting(
        None,
        "also save ``last.ckpt`` after a batch, this many minutes after the last checkpoint",
        check=lambda value: None if value is None or value > 0 else "must be above 0, or null",
    )
    signals: bool = setting(True, "save when the process is asked to end (SIGTERM, SIGINT), and at SIGUSR1")
    notice: str | None = setting(
        None, "a command that is run every 5 seconds, and whose success means that this machine will be taken away"
    )

    def _check_values(self, option: str) -> None:
        super()._check_values(option)
        try:
            words = shlex.split(self.notice or "x")
        except ValueError as error:
            raise PresetError(f"{option}.notice={self.notice!r}: no command ({error})") from error
        if not words:
            raise PresetError(f"{option}.notice={self.notice!r}: must be a command, such as 'test -e /run/preempted'")


CARD = Card(
    name="safe_checkpoint",
    target="lightning_solo.techniques.safe_checkpoint.technique:SafeCheckpoint",
    phase=Phase.OBSERVE,
    settings=Settings,
    saves="no memory but work: after a kill, a full disk or a power failure the newest checkpoint is whole",
    costs="a hash and a second reading of each file; with ``asynchronous`` a copy of the checkpoint in host memory",
    numerics="bit-exact",
    conflicts="a ``CheckpointIO`` of another package, remote folders such as ``s3://`` (refused)",
    reference="Pillai et al. 2014, All File Systems Are Not Created Equal, OSDI (what a kill may leave of a file)",
    exact=True,
    planned="left out",
    engines=EVERYWHERE,
)
