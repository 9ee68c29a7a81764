"""Optimizer replacement: the optimizer of any module is replaced by one with fewer states, or gets another schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError, nearest
from lightning_solo.nn.parameter_groups import hidden_matrices, without_decay
from lightning_solo.optim.group_division import RATES, divide_groups, scale_rates
from lightning_solo.optim.param_groups import parameters_of
from lightning_solo.optim.replacement import replace_optimizer
from lightning_solo.optim.schedules import continued_rates, scheduled
from lightning_solo.presets.registry import NAMES, target_of
from lightning_solo.presets.signature import parameters
from lightning_solo.seams.averaged_weights import AveragedCheckpoint, AveragedWeights
from lightning_solo.seams.homes import part
from lightning_solo.seams.run import Run
from lightning_solo.techniques.optimizer_replacement.card import CARD, OPTION, Settings

LIKE_ADAMW = (
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "CompactAdamW",
    "AdamW8bit",
    "AdamW4bit",
    "MuonAdamW",
    "ScheduleFreeAdamW",
)
"""Optimizers with learning rates as AdamW's."""
SHARED = ("betas", "eps")
"""Options that one of these takes over from another."""
DEFAULTS = {"sgd": {"momentum": 0.9}}
"""Name of an optimizer -> options other than its class' defaults."""


class OptimizerReplacement(AveragedWeights, Settings):
    """Replaces the optimizer of ``configure_optimizers``, its weight decay or its schedulers, each only if it is set.

    The module's groups stay: their parameters, and the ratios of their learning rates. Hooks of the optimizer move to
    the new one.

    Raises:
        ConflictError: the schedule of a schedule-free optimizer would lower its rate.
    """

    phase = CARD.phase

    def _init_state(self) -> None:
        self._name = ""  # of the optimizer's class in this run
        self._is_same = False  # whether it is of the class of the module's own

    def transform(self, ctx: Run) -> None:
        """Refuse manual optimization."""
        if ctx.training and not ctx.module.automatic_optimization:
            raise ConflictError(
                f"{OPTION} with manual optimization: the module steps its optimizers itself; write ~{OPTION}, and"
                " return the optimizers that you want from configure_optimizers"
            )

    def optimizers(self, ctx: Run, optimizers: list[Optimizer], schedulers: Sequence[Any]) -> list[Optimizer]:
        """Return the new optimizer."""
        old = _the_optimizer(optimizers)
        if self.schedule is not None:
            _drop_schedule(old)
            schedulers = ()
        self._set_rates(old, schedulers)
        self._divide(ctx, old, schedulers)
        new = old if self.optimizer is None else self._replacement(old)
        if new is not old:
            self._require_schedulers(new, schedulers)
            replace_optimizer(old, new, schedulers)
        self._name, self._is_same = type(new).__name__, type(new) is type(old)
        if self.schedule is not None:
            ctx.strategy.lr_scheduler_configs = [self._config(ctx, new)]
        ctx.info(self._words(old, new))
        return [new]

    def _set_rates(self, old: Optimizer, schedulers: Sequence[Any]) -> None:
        """Scale the groups' learning rates to `lr`; refuse to keep rates of another kind."""
        if self.lr is not None:
            # OneCycleLR has put rates of its own into the groups
            rates = {float(group.get("initial_lr", group["lr"])) for group in old.param_groups if "max_lr" not in group}
            own = rates.pop() if len(rates) == 1 else float(old.defaults["lr"])
            factor = self.lr / own if own else math.inf
            if math.isinf(factor):
                raise ConflictError(
                    f"{OPTION}.lr={self.lr}: the module's {type(old).__name__} has a learning rate of 0, so that its"
                    " groups have no ratio to it; write another one in configure_optimizers"
                )
            scale_rates(old, schedulers, [factor] * len(old.param_groups))
        elif self.optimizer is not None:
            name, kind = self._class.__name__, type(old).__name__
            if name != kind and not {name, kind} <= set(LIKE_ADAMW):
                raise ConflictError(
                    f"{OPTION}.optimizer={self.optimizer}: learning rates of {kind} don't suit it; write"
                    f" {OPTION}.lr={parameters(self._target)['lr'].default:g}, its default, or another"
                )

    def _divide(self, ctx: Run, old: Optimizer, schedulers: Sequence[Any]) -> None:
        """Divide the groups by weight decay if it is set, and by Muon's matrices."""
        has_matrices = self.optimizer is not None and getattr(self._class, "takes_matrices", False)
        matrices = hidden_matrices(ctx.module, self.blocks, f"{OPTION}.blocks") if has_matrices else set()
        still: set[Tensor] = set()
        if self.weight_decay is not None:
            still = without_decay(ctx.module, decay_embeddings=self.decay_embeddings)
        for group, (is_matrix, is_still) in divide_groups(old, schedulers, lambda p: (p in matrices, p in still)):
            if has_matrices:
                group["matrices"] = is_matrix
            if self.weight_decay is not None:
                group["weight_decay"] = 0.0 if is_still else self.weight_decay

    @property
    def _target(self) -> str:
        return target_of("optimizer", self.optimizer, f"{OPTION}.optimizer")

    @property
    def _class(self) -> Any:
        return resolve_name(self._target)

    def _replacement(self, old: Optimizer) -> Optimizer:
        """Return an optimizer of the chosen class, with the groups of the old one."""
        cls, given = self._class, dict(self.options or {})
        kept = {*RATES, "weight_decay"}
        if {cls.__name__, type(old).__name__} <= set(LIKE_ADAMW):
            kept |= {name for name in SHARED if name not in given}
        groups = []
        for group in old.param_groups:
            options = {name: value for name, value in group.items() if name in kept or name not in old.defaults}
            options |= {name: float(options[name]) for name in RATES if name in options}
            if group.get("matrices"):
                options.pop("eps", None)  # AdamW's; Muon's is another
            groups.append(options)
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
        defaults = {"lr": self.lr or float(old.defaults["lr"]), **DEFAULTS.get(str(self.optimizer), {})}
        known = [name for name in inspect.signature(cls).parameters if name not in {"params", "lr", "weight_decay"}]
        for name in given.keys() - known:
            raise PresetError(
                f"{OPTION}.options={given}: {cls.__name__} has no argument {name!r}{nearest(name, known)}there are"
                f" {', '.join(known)}"
            )
        try:
            new: Optimizer = cls(groups, **{**defaults, **given})
        except (TypeError, ValueError) as error:
            raise PresetError(f"{OPTION}.options={given}: {error}") from error
        old.state.clear()
        return new

    def _require_schedulers(self, new: Optimizer, schedulers: Sequence[Any]) -> None:
        """Refuse the module's schedulers where the new optimizer can't follow them."""
        for scheduler in schedulers:
            name = type(scheduler).__name__
            if self.optimizer == "schedule_free_adamw":
                why = "its average takes the place of a falling rate"
            elif getattr(scheduler, "cycle_momentum", False):
                why = "it also sets momentum or betas of the optimizer that it was made for"
            else:
                continue
            raise ConflictError(
                f"{OPTION}.optimizer={self.optimizer} and the module's {name}: {why}; write {OPTION}.schedule=constant"
                " or another, which replaces it"
            )

    def _config(self, ctx: Run, optimizer: Optimizer) -> Any:
        """Return Lightning's record of the schedule."""
        steps = ctx.trainer.estimated_stepping_batches
        if math.isinf(steps) and self.schedule != "constant":
            raise ConflictError(
                f"{OPTION}.schedule={self.schedule} and a run without an end; write Trainer(max_steps=...), or"
                f" {OPTION}.schedule=constant"
            )
        if steps <= self.warmup_steps and self.warmup_steps:
            raise PresetError(
                f"{OPTION}.warmup_steps={self.warmup_steps}: the run has {steps:.0f} steps, so that its rate never"
                f" reaches lr; write at most {max(0, round(steps) - 1)}"
            )
        made = scheduled(
            optimizer,
            str(self.schedule),
            warmup_steps=self.warmup_steps,
            total_steps=steps,
            decay_share=self.decay_share,
        )
        return part(ctx.home, "utilities.types").LRSchedulerConfig(**made["lr_scheduler"])

    def _words(self, old: Optimizer, new: Optimizer) -> str:
        rates = sorted({float(group.get("initial_lr", group["lr"])) for group in new.param_groups})
        decayed = sum(p.numel() for group in new.param_groups if group.get("weight_decay") for p in group["params"])
        every = sum(p.numel() for p in parameters_of(new))
        words = f"{type(new).__name__}" + ("" if new is old else f" in place of {type(old).__name__}")
        words += (
            f", rates {', '.join(f'{rate:g}' for rate in rates)}, weight decay on {decayed:,} of {every:,} parameters"
        )
        if any(group.get("matrices") for group in new.param_groups):
            matrices = sum(p.numel() for group in new.param_groups if group["matrices"] for p in group["params"])
            words += f", Muon on {matrices:,}"
        return f"optimizer_replacement: {words}" + (f", schedule {self.schedule}" if self.schedule else "")

    # --- checkpoints ---

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue a resumed run at the rate of the schedule to its new end."""
        super().on_train_start(trainer, pl_module)
        if self.schedule is not None and trainer.global_step:
            continued_rates(trainer.lr_scheduler_configs[0].scheduler)

    def state_dict(self) -> dict[str, Any]:
        """Return the name of the optimizer's class, and of the schedule."""
        return {"optimizer": self._name, "schedule": self.schedule}

    def checkpoint(self, ctx: Run) -> AveragedCheckpoint:
        """Return how states are saved and loaded."""
        return ReplacedCheckpoint(ctx, self)

    def refuse_states_of(self, checkpoint: Mapping[str, Any]) -> None:
        """Refuse a checkpoint with states of another optimizer, or of schedulers of the module's instead of ours."""
        record = checkpoint.get("callbacks", {}).get(self.state_key, {})
        saved, schedule = record.get("optimizer"), record.get("schedule")
        if saved == self._name or (not saved and self._is_same):
            if (schedule is None) != (self.schedule is None):
                raise CheckpointError(
                    f"the checkpoint's schedule is {schedule or 'of the module'}, and this run's"
                    f" {self.schedule or 'of the module'}; write {OPTION}.schedule={schedule or 'null'}, or start from"
                    " the weights alone: MyModule.load_from_checkpoint(path), and fit without ckpt_path"
                )
            return
        whose = f"states of {saved}" if saved else "states of the module's own optimizer"
        names = {resolve_name(target).__name__: name for name, target in NAMES["optimizer"].items()}
        remedy = f"{OPTION}.optimizer={names.get(saved, 'null')}" if saved else f"~{OPTION}"
        raise CheckpointError(
            f"the checkpoint has {whose}, and this run trains by {self._name}; write {remedy}, or start from the"
            " weights alone: MyModule.load_from_checkpoint(path), and fit without ckpt_path"
        )


class ReplacedCheckpoint(AveragedCheckpoint):
    """As of averages; states of another optimizer are refused by name."""

    def __init__(self, ctx: Run, technique: OptimizerReplacement) -> None:
        super().__init__(ctx)
        self._technique = technique

    def load_states(self, proceed: Callable[..., Any], checkpoint: Mapping[str, Any]) -> None:
        """Load states of the same optimizer."""
        self._technique.refuse_states_of(checkpoint)
        super().load_states(proceed, checkpoint)


def _the_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer:
    if len(optimizers) != 1:
        raise ConflictError(
            f"{OPTION} replaces one optimizer, and configure_optimizers returned {len(optimizers)}; write one with"
            f" several groups, or ~{OPTION}"
        )
    if not any(p.requires_grad for p in parameters_of(optimizers[0])):
        raise NothingToDoError(
            f"{OPTION}: the module's optimizer has no trained parameter; return one of parameters with requires_grad"
            f" from configure_optimizers, or write ~{OPTION}"
        )
    return optimizers[0]


def _drop_schedule(optimizer: Optimizer) -> None:
    """Set the learning rates as they were before a scheduler's first factor.

    One that overwrites them, as `OneCycleLR` does, leaves the ratios of its own, and the optimizer's default.
    """
    own, highest = float(optimizer.defaults["lr"]), max(group.get("max_lr", 0.0) for group in optimizer.param_groups)
    for group in optimizer.param_groups:
        before = group.get("initial_lr", group["lr"])
        group["lr"] = own * group["max_lr"] / highest if highest and "max_lr" in group else before
        if "max_momentum" in group:
            group |= {name: optimizer.defaults[name] for name in ("betas", "momentum") if name in group}
        for name in RATES[1:]:
            group.pop(name, None)
    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        vars(optimizer).pop("step", None)
