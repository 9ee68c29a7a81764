"""A ladder: `baseline`, each technique alone, then one technique after another added, each time in a fresh process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.ladder.figures import NOT_RUN, REFUSED, Figures, compare, measured
from lightning_solo.ladder.rungs import LadderTechnique, folder_name, name_of
from lightning_solo.sweeps import results
from lightning_solo.sweeps.application import Application
from lightning_solo.sweeps.files import SweepFolder
from lightning_solo.sweeps.jobs import Job, Settings
from lightning_solo.sweeps.outcome import FINISHED
from lightning_solo.sweeps.sweep import Sweep

WILL_FAIL_AGAIN = ("failed", NOT_RUN)
"""Statuses of a technique alone that exclude it from all combinations; out of memory doesn't."""


@dataclass(frozen=True)
class Prepared:
    """A combination, prepared for its process."""

    overrides: tuple[str, ...]  # the overrides of `lightning-solo train`
    argument: Any  # the pickled argument of the task function
    config_hash: str  # hash of the configuration; of combinations with equal hashes only one runs


@dataclass(frozen=True)
class Combination:
    """A combination of techniques. If it is refused, ``refusal`` is the reason and ``prepared`` is None."""

    number: int
    techniques: tuple[LadderTechnique, ...]
    prepared: Prepared | None
    refusal: str = ""

    @property
    def name(self) -> str:
        """``baseline``, or the techniques' names, joined by plus signs."""
        return name_of(self.techniques)


class Ladder:
    """Runs the combinations and compares them.

    Args:
        folder: for all output; rungs that an earlier ladder measured there are not measured again.
        application: the task function, which returns what `measurement.measure` does.
        settings: of the processes.
        techniques: in the order in which they are added to one another.
        prepare: prepares a combination for its process; raises ConflictError for one that is refused.
        steps: optimizer steps of each.
        until: bytes; the ladder ends at the first combination whose peak is at most this.
        tell: as in `Sweep`.
        look: as in `Sweep`.
        names: job's number -> name; filled as rungs become known.
    """

    def __init__(
        self,
        folder: SweepFolder,
        application: Application,
        settings: Settings,
        techniques: Sequence[LadderTechnique],
        prepare: Callable[[tuple[LadderTechnique, ...]], Prepared],
        *,
        steps: int,
        until: int | None = None,
        tell: Callable[[str, int | None, str], None] = lambda *_: None,
        look: Callable[[Sequence[int]], None] = lambda _: None,
        names: dict[int, str] | None = None,
    ) -> None:
        for name in ("parallel", "gpus"):
            if (value := getattr(settings, name)) not in (None, 1):
                raise ConflictError(
                    f"hydra.launcher.{name}={value}: rungs run one at a time, because they would slow one another; drop"
                    " it, and set CUDA_VISIBLE_DEVICES for another GPU"
                )
        if any(row.number == 0 and row.status == "failed" for row in results.read(folder.results)):
            settings = replace(settings, rerun="failed")  # rungs are compared with it; its fault may be fixed
        self.folder = folder
        self.techniques = tuple(techniques)
        self.prepare = prepare
        self.steps = steps
        self.until = until
        self.names = {} if names is None else names
        self.rungs: list[Combination] = []
        self._prepared: dict[tuple[LadderTechnique, ...], Combination] = {}
        self._sweep = Sweep(folder, application, settings, tell=tell, look=look, wanted=self._wanted)

    def run(self) -> list[Figures]:
        """Run the rungs that have no result yet, and return the rows, `baseline` first.

        Raises:
            PresetError: the baseline is refused.
            CheckpointError: another command works on this folder.
            KeyboardInterrupt: after the running rung has ended; `figures` returns the rows so far.
        """
        self.plan()
        with self._sweep.opened():  # one process starts them all, and imports torch once
            self._climb(self.rungs[: 1 + len(self.techniques)])
            base = self.figures()[0]
            if base.detail.startswith("PresetError: "):
                raise PresetError(base.detail.removeprefix("PresetError: "))
            if self.fitting() is None:
                ended = [f for f in self.figures() if f.status in WILL_FAIL_AGAIN and "BudgetError" not in f.detail]
                self._climb(self.plan(without=[figures.name for figures in ended])[1 + len(self.techniques) :])
        return self.figures()

    def plan(self, without: Collection[str] = ()) -> list[Combination]:
        """Prepare ``baseline``, each technique alone, and combinations that add one technique after another.

        Nothing runs yet. A technique that is refused with earlier ones is left out of later combinations.
        """
        alone = [self._rung(()), *(self._rung((technique,)) for technique in self.techniques)]
        combinations: list[Combination] = []
        kept: tuple[LadderTechnique, ...] = ()
        for rung in alone[1:]:
            if rung.prepared is None or rung.name in without:
                continue
            if kept:
                combinations.append(self._rung((*kept, *rung.techniques)))
                if combinations[-1].prepared is None:
                    continue
            kept = (*kept, *rung.techniques)
        self.rungs = [*alone, *combinations]
        return self.rungs

    def figures(self) -> list[Figures]:
        """Return a row for each rung that was run or refused."""
        rows = self._sweep.rows
        base = measured(rows.get(0))
        figures = []
        for rung in self.rungs:
            row = rows.get(rung.number)
            if rung.prepared is None:
                figures.append(Figures(rung.name, REFUSED, rung.refusal))
            elif row is not None:
                result = self.folder.job(rung.number).result_of(row.attempt) or {}
                error = None if row.status == FINISHED else result.get("error")  # a row has only its first line
                same = (other.number for other in self.rungs if other.techniques == rung.techniques[:-1])
                without = measured(rows.get(next(same, -1)))
                figures.append(compare(rung.techniques, row, error, base, without, self.steps))
        return figures

    def fitting(self) -> Figures | None:
        """Return the first row whose peak is within `until`."""
        if self.until is None:
            return None
        return next((f for f in self.figures() if f.peak_bytes is not None and f.peak_bytes <= self.until), None)

    def _wanted(self, job: Job) -> bool:
        refused = any(f.detail.startswith("PresetError: ") for f in self.figures()[:1])
        return not refused and self.fitting() is None

    def _rung(self, techniques: tuple[LadderTechnique, ...]) -> Combination:
        """Return the rung of a combination; it keeps its number when the ladder is planned again."""
        if techniques not in self._prepared:
            prepared, refusal = None, ""
            try:
                prepared = self.prepare(techniques)
            except ConflictError as error:
                if not techniques:
                    raise
                refusal = str(error)
            self._prepared[techniques] = Combination(len(self._prepared), techniques, prepared, refusal)
        return self._prepared[techniques]

    def _climb(self, rungs: Sequence[Combination]) -> None:
        jobs = []
        for rung in rungs:
            if rung.prepared is None:
                continue
            self.names[rung.number] = rung.name
            folder, prepared = self.folder.path / folder_name(rung.techniques), rung.prepared
            argument = partial(self._sweep.application.dumps, prepared.argument)
            jobs.append(Job(rung.number, prepared.overrides, folder, prepared.config_hash, argument))
        self._sweep.run(jobs)
