"""A trace of chosen optimizer steps with what took longest, and the times of forward, backward and optimizer step."""

from __future__ import annotations

import io
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_solo.atomic_files import write_whole
from lightning_solo.errors import ConflictError
from lightning_solo.memory.log_files import path_below_logs
from lightning_solo.seams import patches
from lightning_solo.seams.run import Run
from lightning_solo.seams.technique import Technique
from lightning_solo.tables import terminal
from lightning_solo.techniques.profile.breakdown import Breakdown
from lightning_solo.techniques.profile.card import CARD, Settings
from lightning_solo.techniques.profile.labels import labelled
from lightning_solo.techniques.profile.phase_times import PhaseTimes


class Profile(Technique, Settings):
    """Traces ``steps`` optimizer steps with ``torch.profiler``, and logs the times of phases in all others.

    ``steps-<first>-<last>.json.gz`` opens in https://ui.perfetto.dev; operators, modules and techniques are named. The
    ``.txt`` next to it has the tables that are printed: the time of modules and techniques, each without the time of
    those inside, and on a GPU the share of the time in which the device waited for the host.

    Attributes:
        path: of the last fit's trace; None before it is written.
        breakdown: of the last fit's trace; None before.

    Raises:
        PresetError: an argument is out of range, or ``folder`` does not stay inside the directory.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self.path: Path | None = None
        self.breakdown: Breakdown | None = None
        self._tracing = ExitStack()
        self._profiler: Any = None
        self._times: PhaseTimes | None = None
        self._root: Path | None = None
        self._begun = False  # whether the profiler was started in this fit
        self._first = self._step = self._logged = 0  # optimizer steps: before the fit, the last one, the last logged
        self._traced_from = 0  # first optimizer step of the trace; 0 while the profiler warms up

    # --- when ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join a fit."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        if self.steps and type(trainer.profiler).__name__ == "PyTorchProfiler":
            raise ConflictError(
                "profile and Trainer(profiler=PyTorchProfiler): torch has one profiler at a time; leave one of them out"
                " (callback.profile.steps=0 keeps the logged times)"
            )
        self.path, self.breakdown, self._begun, self._traced_from = None, None, False, 0
        self._root = path_below_logs(trainer, self.folder, "profile.folder", "the tables are in the log")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock."""
        assert self.ctx is not None
        self._first = self._step = self._logged = trainer.global_step
        self._times = times = PhaseTimes(self.ctx.device)
        for optimizer in trainer.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                handle = optimizer.register_step_post_hook(lambda *_: times.end("optimizer_step"))
                self.ctx.undo.callback(handle.remove)
        self.ctx.undo.callback(self._stop)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the profiler a step before the first traced one."""
        done = trainer.global_step - self._first
        if self.steps and done >= self.skip_steps - 1 and not self._begun:
            self._start(trainer, pl_module)

    def training_step(self, ctx: Run, proceed: Any, *args: Any, **kwargs: Any) -> Any:
        """Time forward."""
        if self._times is None:
            return proceed(*args, **kwargs)
        with self._times.phase("forward"):
            return proceed(*args, **kwargs)

    def backward(self, ctx: Run, proceed: Any, loss: torch.Tensor) -> Any:
        """Time backward."""
        if self._times is None:
            return proceed(loss)
        with self._times.phase("backward"):
            return proceed(loss)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the optimizer step's phase, with clipping."""
        if self._times is not None:
            self._times.begin("optimizer_step")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the phases, and log if this optimizer step is due."""
        if self._times is None:
            return
        steps, self._step = trainer.global_step - self._step, trainer.global_step
        self._times.end_batch(steps=steps, keep=self._profiler is None)
        # not a multiple: under manual optimization a batch may have several optimizer steps
        if self._step - self._logged >= self.every_n_steps:
            self._log(trainer, self._times)
        if steps and self._profiler is not None:
            self._traced_from = self._traced_from or self._step + 1
            self._profiler.step()
            if self.breakdown is not None:
                self._stop()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the last steps, and write a trace that has fewer steps than asked for."""
        if self._times is None or self.ctx is None:
            return
        self._stop()
        if self._logged != self._step:
            self._log(trainer, self._times)
        if self.steps and not self._begun:
            self.ctx.info(
                f"profile: no trace, since the fit had {self._step - self._first} optimizer steps; write"
                f" callback.profile.skip_steps={max(self._step - self._first - self.steps, 1)}, or train longer"
            )

    # --- what ---

    def _start(self, trainer: Any, pl_module: Any) -> None:
        self._begun = True
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            warnings.warn("profile: another torch profiler is running, so there is no trace", stacklevel=2)
            return
        activities = [ProfilerActivity.CPU]
        if trainer.strategy.root_device.type == "cuda":
            supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
            activities += {ProfilerActivity.CUDA} & set(supported)
        self._tracing.enter_context(labelled(pl_module, [each for each in trainer.callbacks if each is not self]))
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=self._keep,
        )
        self._profiler.start()

    def _keep(self, profiler: Any) -> None:
        """Write the trace and its tables."""
        self.breakdown = breakdown = Breakdown.of(profiler.events())
        first, last = self._traced_from, max(self._step, self._traced_from)
        text = f"profile: optimizer steps {first} to {last}"
        if breakdown.idle is not None:
            text += f"; the device waited for the host {breakdown.idle:.1%} of the time"
        shown = io.StringIO()
        for table in breakdown.tables():
            Console(file=shown, width=100).print(terminal(table))
            shown.write("\n")
        text = f"{text}\n\n{shown.getvalue()}".rstrip()
        if self._root is not None:
            path = self._root / f"steps-{first}-{last}.json.gz"
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                profiler.export_chrome_trace(str(path))
                write_whole(path.with_suffix("").with_suffix(".txt"), f"{text}\n".encode())
                self.path = path
                text += f"\n{path}: open it in https://ui.perfetto.dev"
            except OSError as error:
                warnings.warn(f"profile: {path} cannot be written ({error})", stacklevel=2)
        if self.ctx is not None:
            self.ctx.info(text)

    def _stop(self) -> None:
        """Stop the profiler, which writes what it has; a second call does nothing."""
        profiler, self._profiler = self._profiler, None
        try:
            if profiler is not None:
                profiler.stop()
        finally:
            self._tracing.close()

    def _log(self, trainer: Any, times: PhaseTimes) -> None:
        self._logged = self._step
        figures = {f"profile/{phase}_s": seconds for phase, seconds in times.take().items()}
        if figures:
            patches.log_metrics(trainer, figures)
