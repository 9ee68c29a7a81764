"""Weight averaging: an exponential or equal average of the trained weights, for validation, export and the end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError, listed
from lightning_solo.memory.host_slabs import require_host_room
from lightning_solo.optim.averages import AVERAGE, MEMBERS, Average, Cycle, WeightSwap, averaged_weights
from lightning_solo.optim.split_optimizer import SplitOptimizer
from lightning_solo.seams import patches
from lightning_solo.seams.averaged_weights import AveragedWeights, averaging
from lightning_solo.seams.run import Run, optimizer_steps
from lightning_solo.seams.strategy import join
from lightning_solo.seams.technique import Checkpoint
from lightning_solo.techniques.weight_averaging.card import CARD, Settings
from lightning_solo.units import format_bytes

OPTION = "callback.weight_averaging"


class WeightAverage(AveragedWeights, Settings):
    """Averages the trained weights in fp32, and uses the average for validation and after the fit.

    Training, its schedule and its checkpoints' weights are those of a run without it: the average is among the
    callback's states in a checkpoint. `lightning-solo export` and `solo.export_weights` write the average.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self.average = self._new()
        self._steps = 0  # batches after which an optimizer has stepped
        self._seen: int | None = None  # `global_step` at the last of them; None before training starts
        self._parameters: dict[str, Tensor] = {}
        self._frozen: dict[str, Tensor] = {}
        self._names: dict[str, Tensor] = {}  # with those of tied weights
        self._swap = WeightSwap()
        self._split: list[SplitOptimizer] = []
        self._cycle = Cycle()
        self._is_training = self._is_ended = False

    def _new(self) -> Average:
        return Average(self.method, self.decay, on_host=self.device == "host")

    @property
    def averaged_weights(self) -> dict[str, Tensor]:
        """The average, by name; empty before its first update."""
        self.average.settle()
        return dict(self.average.values)

    # --- joining ---

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join the run of a fit, and of an evaluation, which may load a checkpoint."""
        if stage == "fit":
            self._init_state()
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            join(self, trainer)

    def transform(self, ctx: Run) -> None:
        """Check that nothing else averages."""
        if not ctx.training:
            return
        refuse_callbacks(OPTION, frozenset({"averaged_weights"}), ctx.trainer.callbacks)
        if any(isinstance(other, WeightAverage) and other is not self for other in ctx.techniques):
            raise ConflictError("two WeightAverage in one run: drop one")
        if "ParallelStrategy" in {cls.__name__ for cls in type(ctx.strategy).__mro__}:
            raise ConflictError(
                f"{OPTION} and {type(ctx.strategy).__name__}, which keeps weights in its own way: write"
                f" Trainer(strategy='auto', devices=1), or ~{OPTION}"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the trained parameters; a loaded average must be of them."""
        assert self.ctx is not None  # joined in setup
        if free := averaging(self.ctx):
            raise ConflictError(
                f"{OPTION} and {type(free[0]).__name__}, whose weights are an average already; write ~{OPTION}, or"
                " another optimizer, such as adamw"
            )
        floating = {name: p for name, p in pl_module.named_parameters() if p.is_floating_point()}
        self._parameters = {name: p for name, p in floating.items() if p.requires_grad}
        self._frozen = {name: p for name, p in floating.items() if not p.requires_grad}
        if not self._parameters:
            raise NothingToDoError(f"{OPTION}: no parameter of {type(pl_module).__name__} is trained; leave it out")
        for name in self.average.values.keys() & self._frozen.keys():  # which is trained from some step on
            self._parameters[name] = self._frozen.pop(name)
        self._note_names(pl_module)
        self._split = [each for each in trainer.optimizers if isinstance(each, SplitOptimizer)]
        for optimizer in self._split:  # which look for the weights that their corrections belong to
            optimizer.weights_aside = self._swap.aside
        self._place_loaded()
        self.ctx.undo.callback(self._leave)
        known = [p for p in self._parameters.values() if not is_lazy(p)]
        size = sum(max(4, p.element_size()) * p.numel() for p in known)
        if self.device == "host":
            sizes = [(p.numel(), torch.promote_types(p.dtype, torch.float32)) for p in known]
            require_host_room("the average of the weights", sizes, f"write {OPTION}.device=module")
        kind = f"ema with decay {self.decay}" if self.method == "ema" else "swa"
        count = sum(p.numel() for p in known)
        where = "the host" if self.device == "host" else str(self.ctx.device)
        self.ctx.info(
            f"weight_averaging: {kind} of {count:,} trained parameters in fp32, {format_bytes(size)} on {where}"
        )

    def _note_names(self, module: Any) -> None:
        averaged = set(self._parameters.values())
        every = module.named_parameters(remove_duplicate=False)
        self._names = {name: p for name, p in every if p in averaged}

    def _place_loaded(self) -> None:
        """Move the average of a checkpoint to its place."""
        values, ours = self.average.values, self._parameters
        if values and values.keys() != ours.keys():
            differ = sorted(values.keys() ^ ours.keys())
            raise CheckpointError(
                f"{OPTION}: the checkpoint's average and this run's trained parameters differ in {listed(differ)};"
                f" resume with the same trained parameters, or leave {OPTION} out to continue with the live weights"
            )
        for name, value in values.items():
            home = torch.device("cpu") if self.device == "host" else ours[name].device
            if value.shape != ours[name].shape:
                raise CheckpointError(
                    f"{OPTION}: the checkpoint's average of {name} has the shape {tuple(value.shape)}, the module's"
                    f" {name} {tuple(ours[name].shape)}; resume with the same module"
                )
            values[name] = torch.empty_like(ours[name], dtype=value.dtype, device=home, requires_grad=False).copy_(
                value
            )

    # --- updates ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count steps from now on."""
        assert self.ctx is not None
        if self._seen is None:
            self._seen = trainer.global_step
            self._steps = optimizer_steps(trainer)
            if self._steps:
                self.ctx.info(
                    f"weight_averaging: there is no average of earlier steps; it begins after step {self._steps}"
                )
        self._is_training = True
        if self.cycles and not trainer.lr_scheduler_configs:
            raise PresetError(
                f"{OPTION}.cycles=true, and {type(pl_module).__name__}.configure_optimizers returns no schedule of the"
                " learning rate; return one with cycles, such as CosineAnnealingWarmRestarts, or write"
                f" {OPTION}.cycles=false"
            )
        steps = trainer.estimated_stepping_batches if pl_module.automatic_optimization else math.inf
        if steps <= self.start_step and not trainer.fast_dev_run:
            raise PresetError(
                f"{OPTION}.start_step={self.start_step}: the run ends after {steps} optimizer steps, before the first"
                f" update; write {OPTION}.start_step={max(0, int(0.75 * steps))}"
            )
        updates = (steps - self.start_step) / self.every_n_steps
        if self.method == "ema" and not self.cycles and (first := self.decay ** max(0, updates - 1)) > 0.1:
            self.ctx.info(
                f"weight_averaging: after the run's {updates:.0f} updates {100 * first:.0f} % of the average will be"
                f" the weights of the first; write a smaller {OPTION}.decay, or {OPTION}.method=swa"
            )

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add the last step if the checkpoint was saved before it was added; average what is trained from now on."""
        self._follow(trainer)
        for name in [name for name, p in self._frozen.items() if p.requires_grad]:
            self._parameters[name] = self._frozen.pop(name)
            self.average.begin(name, self._parameters[name])
            self._note_names(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Add the weights after a step."""
        self._follow(trainer)

    def _follow(self, trainer: Any) -> None:
        """Update the average if an optimizer has stepped, or a cycle has ended, since the last call."""
        if self._seen is None or self._swap.aside:
            return
        is_due = has_stepped = trainer.global_step != self._seen
        self._seen, self._steps = trainer.global_step, self._steps + has_stepped
        after = self._steps - self.start_step
        if self.cycles:
            is_due = self._cycle.ends(float(trainer.optimizers[0].param_groups[0]["lr"]))
        elif (after - 1) % self.every_n_steps:
            is_due = False
        if after > 0 and is_due:
            with torch.inference_mode(False):  # tensors made in a validation are used in training
                self.average.update(self._parameters, self._corrections())
                if self.members:
                    self._keep_member()

    def _keep_member(self) -> None:
        """Add the weights of now to the average's members, of which the latest stay."""
        member = Average("swa", on_host=True)
        member.update(self._parameters, self._corrections())
        member.end()
        self.average.members = [*self.average.members, member.values][-self.members :]

    def _corrections(self) -> dict[Tensor, Tensor]:
        states = [item for optimizer in self._split for item in optimizer.state.items()]
        return {p: state["correction"] for p, state in states if "correction" in state}

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Let gradient release, which changes weights in backward, wait for the copies."""
        if self.ctx is not None and self.ctx.release is not None:
            self.average.wait_for_copies()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Let the step wait for the copies."""
        self.average.wait_for_copies()

    # --- the average in the place of the weights ---

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validate with the average, and the last step in it."""
        if self.ctx is not None and self.ctx.training:
            self._follow(trainer)
            super().on_validation_start(trainer, pl_module)

    def put_average(self) -> None:
        """Put the average into the module, unless there is none, or the live weights are to be there."""
        wanted = self.at_end if self._is_ended else self.evaluate
        if wanted == "average" and self.average.updates:
            self.average.settle()
            self.average.wait_for_copies()
            values = self.average.values
            self._swap.begin(((p, values[name]) for name, p in self._parameters.items()), on_host=self.average.on_host)

    def put_live(self) -> None:
        """Continue with the live weights, unless the fit has ended."""
        if not self._is_ended:
            self._swap.end()

    # --- the end ---

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Add the last step."""
        self._follow(trainer)
        self._is_ended = True
        if not self.average.updates:
            warnings.warn(
                f"{OPTION}: the run ended after {self._steps} optimizer steps, before the first update"
                f" ({OPTION}.start_step={self.start_step}, cycles={self.cycles}); the module has its live weights",
                stacklevel=2,
            )

    def leaving(self, ctx: Run, proceed: Callable[[], Any]) -> None:
        """Leave the average in the module, once that is on the host."""
        proceed()
        if not ctx.training:
            return
        self.average.end()
        if self._is_ended:
            self.put_average()
        if self._swap.aside:
            ctx.info(
                f"weight_averaging: the module has the average of {self.average.updates} updates; a checkpoint that is"
                " saved now has the live weights, to be resumed, and the average beside them"
            )

    def _leave(self) -> None:
        self._is_training = False
        self.put_live()  # after a failure, perhaps in a validation
        self.average.end()

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the counts."""
        return {
            "method": self.method,
            "updates": self.average.updates,
            "steps": self._steps,
            "seen": self._seen,
            AVERAGE: self.averaged_weights,
            MEMBERS: list(self.average.members),
            "cycle": dict(vars(self._cycle)),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the average of a checkpoint."""
        if missing := sorted({"method", "updates", "steps", "seen", AVERAGE} - state_dict.keys()):
            raise CheckpointError(
                f"{OPTION}: the checkpoint's state of {type(self).__name__} lacks {listed(missing)}: another class of"
                f" this name wrote it; rename that class, or leave {OPTION} out to continue with the live weights"
            )
        if state_dict["updates"] and state_dict["method"] != self.method:
            raise CheckpointError(
                f"{OPTION}: the checkpoint's average is of method {state_dict['method']}; write"
                f" {OPTION}.method={state_dict['method']}"
            )
        self.average = self._new()
        self.average.updates, self.average.values = state_dict["updates"], dict(state_dict["averaged_weights"])
        self.average.members = list(state_dict.get(MEMBERS, []))
        self._steps, self._seen = state_dict["steps"], state_dict["seen"]
        vars(self._cycle).update(state_dict.get("cycle", {}))

    def checkpoint(self, ctx: Run) -> AverageCheckpoint:
        """Return how the live weights are saved, and the average is loaded for an evaluation."""
        return AverageCheckpoint(ctx, self)

    def with_live(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return weights with the live ones where the average is in their place; later changes are kept."""
        result = dict(weights)
        for name in weights.keys() & self._names.keys():
            own = self._swap.own(self._names[name])
            if self._names[name] in self._swap.aside and weights[name].dtype == own.dtype:
                result[name] = own  # another type is that of a master weight, which is live
        return result

    def with_average(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Return weights with the average."""
        names = {p: name for name, p in self._parameters.items()}
        values = self.averaged_weights
        averaged = {name: values[names[p]] for name, p in self._names.items() if names[p] in values}
        return {name: averaged.get(name, value) for name, value in weights.items()}

    def reload(self, checkpoint: Mapping[str, Any]) -> None:
        """Go back to the average of a checkpoint, in a run that goes back to its weights."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if self._is_training and state is not None:
            self.average.end()
            self.load_state_dict(state)
            self._place_loaded()


class AverageCheckpoint(Checkpoint):
    """How the live weights are saved while the average is in their place, and the average is evaluated."""

    def __init__(self, ctx: Run, technique: WeightAverage) -> None:
        self._ctx = ctx
        self._technique = technique

    def saved_weights(self, weights: dict[str, Any]) -> dict[str, Any]:
        """Return the live weights."""
        return self._technique.with_live(weights)

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint; one of weights alone, from which no run is resumed, with the average."""
        if "optimizer_states" in checkpoint or self._technique.evaluate == "live":
            return checkpoint
        return {**checkpoint, "state_dict": self._technique.with_average(checkpoint["state_dict"])}

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states, and the average if the run goes back to a checkpoint."""
        proceed(checkpoint)
        self._technique.reload(checkpoint)

    @contextmanager
    def loading_weights(self) -> Iterator[None]:
        """Load the average for an evaluation, if the checkpoint has one."""
        yield
        if self._ctx.training or self._technique.evaluate == "live":
            return
        checkpoint = patches.loaded_checkpoint(self._ctx.trainer)
        average = averaged_weights(checkpoint)
        if not average:
            return
        parameters = dict(self._ctx.module.named_parameters())
        if unknown := sorted(average.keys() - parameters.keys()):
            raise CheckpointError(
                f"{OPTION}: the checkpoint's average has {listed(unknown)}, which the module lacks; write"
                f" {OPTION}.evaluate=live"
            )
        with torch.no_grad():
            for name, value in average.items():
                parameters[name].copy_(value)
        self._ctx.info(f"weight_averaging: evaluates the average of {len(average)} weights")
