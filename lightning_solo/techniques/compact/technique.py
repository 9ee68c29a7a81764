"""Model states of 5 bytes per parameter instead of 16: split master weights, 8-bit moments, gradients released.

Saves:      of AdamW's 16 bytes per parameter (weight 4, gradient 4, moments 8) all but 5.06: bf16 weight 2, correction
            1, moments 1 + 1, scales 0.0625; with ``master_bits="16-stochastic"`` and ``moment_bits=4`` all but 3.06
Costs:      unpacking and packing in the step. With accumulation the gradients' sum is kept, 4 bytes per parameter; with
            clipping by norm alone the gradients, 2; on the host with ``gradient_buffer="host"``. States on the host
            (``state_budget``) pass through the device, 3 bytes per parameter each way, in every step
Numerics:   ``master_bits=32, moment_bits=32``: fp32 AdamW with a bf16 forward, on a CPU bit for bit, accumulation
            and clipping included. 24 bits drop updates below 2**-17 of a weight; 8-bit moments move an update by some
            4 % (`examples/measure_moments.py`)
Conflicts:  optimizers that are not torch's, LBFGS, SparseAdam, Muon; fp16; release with manual optimization, and with
            hooks that read ``.grad`` after backward
Reference:  FlashOptim 2026, arXiv 2602.23349; Dettmers et al. 2021, arXiv 2110.02861; Lv et al. 2023, arXiv 2306.09782
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_solo.errors import BudgetError, ConflictError, PresetError
from lightning_solo.machine import host_memory
from lightning_solo.memory.reading import free_device_bytes
from lightning_solo.optim import back_ends
from lightning_solo.optim.adamw_states import bytes_of, state_layout
from lightning_solo.optim.back_end_facts import BACK_ENDS
from lightning_solo.optim.building import Building
from lightning_solo.optim.compact_adamw import CompactAdamW
from lightning_solo.optim.compressed_moments import MOMENT_BITS
from lightning_solo.optim.conversion import compacted
from lightning_solo.optim.gradient_release import BUFFERS, GradientRelease
from lightning_solo.optim.host_slabs import host_room, is_planned
from lightning_solo.optim.master_weights import MasterWeights
from lightning_solo.optim.split_weights import MASTER_BITS, STOCHASTIC, join_parameters, split_parameters
from lightning_solo.optim.state_placement import require_state_budget
from lightning_solo.optim.torch_optimizers import SERVED, state_bytes
from lightning_solo.presets.conflicts import compact_precision
from lightning_solo.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from lightning.pytorch.strategies import SingleDeviceStrategy as Base
else:
    Base = object

BF16 = ("bf16-true", "bf16-mixed")
CHECKPOINT_WEIGHTS = ("bf16", "fp32")
OWN = (CompactAdamW, MasterWeights)


class CompactStrategy(Base):
    """Train on one device with compact model states, whatever AdamW or Adam ``configure_optimizers`` returns.

    Of torch's other optimizers that step each parameter by itself the weights are as compact, the states in fp32.

    ``CompactStrategy(...)`` is for the Trainer of ``lightning``; :func:`compact_class` gives that of
    ``pytorch_lightning``.

    Args:
        master_bits: Of the weights that are stepped: 32, 24, or "16-stochastic" for bf16 rounded stochastically.
        moment_bits: Of each of Adam's moments: 32, 8, or 4, which needs torchao.
        release_gradients: Use and free each gradient in backward.
        gradient_buffer: Where gradients are kept when accumulation or clipping by norm needs them: "device" or "host".
        state_budget: Bytes of optimizer states that stay on the device, or a text such as "8GiB"; the others lie in
            pinned memory of the host. "auto": as many as the first step leaves room for; None: all.
        checkpoint_weights: What a checkpoint has: "bf16" weights, with the corrections among the optimizer's states,
            or "fp32" master weights.
        back_end: Whose optimizer steps: "own", or another library's, which has its own bits: "torchao_8bit",
            "torchao_4bit", "bitsandbytes_8bit", "bitsandbytes_paged_8bit", "flashoptim".

    Raises:
        PresetError: a value that is none of those allowed.
    """

    home: str
    parallel_devices: Any = None  # Lightning sets it to what it chose, where there is such an attribute

    def __new__(cls, *args: Any, **kwargs: Any) -> CompactStrategy:
        """Make a strategy for the Trainer of ``lightning``; another home's class makes its own."""
        made: CompactStrategy = object.__new__(compact_class() if cls is CompactStrategy else cls)
        return made

    def __init__(
        self,
        master_bits: int | str = 24,
        moment_bits: int = 8,
        release_gradients: bool = True,
        gradient_buffer: str = "device",
        state_budget: int | str | None = None,
        checkpoint_weights: str = "bf16",
        back_end: str = "own",
    ) -> None:
        allowed = {
            "master_bits": (master_bits, MASTER_BITS),
            "moment_bits": (moment_bits, MOMENT_BITS),
            "gradient_buffer": (gradient_buffer, BUFFERS),
            "checkpoint_weights": (checkpoint_weights, CHECKPOINT_WEIGHTS),
            "back_end": (back_end, ("own", *BACK_ENDS)),
        }
        for name, (given, choices) in allowed.items():
            if given not in choices:
                raise PresetError(f"strategy.{name}={given!r}: write {', '.join(map(repr, choices))}")
        if back_end != "own" and (master_bits, moment_bits, state_budget, checkpoint_weights) != (24, 8, None, "bf16"):
            raise ConflictError(
                f"strategy.back_end={back_end} has its own bits, on the device, and no masters to join: drop"
                " master_bits, moment_bits, state_budget and checkpoint_weights, or write strategy.back_end=own"
            )
        self._budget = _parsed_budget(state_budget)
        super().__init__()
        self.master_bits = master_bits
        self.moment_bits = moment_bits
        self.release_gradients = release_gradients
        self.gradient_buffer = gradient_buffer
        self.state_budget = state_budget
        self.checkpoint_weights = checkpoint_weights
        self.back_end = back_end
        self.accumulation_varies = False  # AccumulationSchedule says so when it is set up
        self.loss_factor = 1.0  # and by this lets a short window count by what it holds
        self._release: GradientRelease | None = None
        self._settles = False  # whether it isn't known yet what of the states stays on the device
        self._clips_by_hand = self._clipped = False  # whether clip_gradients was called since the last step
        self._warned: set[str] = set()
        self._corrections: dict[Tensor, Tensor] = {}
        self._building: Building | None = None  # what configure_model built, until it is set up

    def __repr__(self) -> str:
        names = (
            *("master_bits", "moment_bits", "release_gradients", "gradient_buffer", "state_budget"),
            *("checkpoint_weights", "back_end"),
        )
        return f"CompactStrategy({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def root_device(self) -> torch.device:
        """The device that the Trainer chose."""
        return self.parallel_devices[0] if self.parallel_devices else torch.device("cpu")

    # --- set-up ---

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Have ``configure_model`` initialise fp32 weights, on a real device, and split each as soon as others come.

        Lightning's own context, inside this one, would have it initialise bf16 weights, with other random numbers.
        """
        precision = str(self.precision_plugin.precision)
        module = self.lightning_module
        if module is None or module.trainer.state.stage is None or precision not in (*BF16, "32-true"):
            yield  # for Trainer.init_module, or a precision in which nothing is split
            return
        training = module.trainer.training

        def splits(p: Tensor) -> bool:
            # bf16-true leaves nothing in fp32; what is frozen, often later, has no use for its correction
            return precision == "bf16-true" or (training and self._is_split(p, precision))

        bits = self.master_bits if training and not isinstance(self.master_bits, str) else 24
        keep = None if self._budget is None else torch.device("cpu")  # from where the optimizer takes them
        vars(self.precision_plugin)["module_init_context"] = nullcontext
        try:
            with self._building or Building(bits, splits=splits, corrections_on=keep) as building:
                yield
        finally:
            del vars(self.precision_plugin)["module_init_context"]
        self._building = building

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights; into those that have been split, one by one, in fp32."""
        with self._building or nullcontext():
            super().load_model_state_dict(checkpoint, strict=strict)

    def _built(self, precision: str) -> dict[Tensor, Tensor]:
        """Return the corrections of what ``configure_model`` built; without those that nothing will step."""
        building, self._building = self._building, None
        made = building.corrections if building is not None else {}
        for p in [p for p in made if not p.requires_grad]:
            join_parameters([p], {p: made.pop(p)})
            if precision == "bf16-true":  # as Lightning will: here one by one
                p.data = p.data.to(torch.bfloat16)
        return made

    def setup(self, trainer: Any) -> None:
        """Split the weights, one by one, before Lightning's own conversion would drop their lower bits.

        Raises:
            ConflictError: a precision, an optimizer or a loop that this strategy can't serve; names what to write.
            BudgetError: the device has less memory than the states need; before they are allocated.
        """
        self._leave()
        if not trainer.training:
            self._building = None
            super().setup(trainer)
            return
        precision = str(self.precision_plugin.precision)
        if message := compact_precision(self.master_bits, precision, self.back_end):
            raise ConflictError(message)
        module = self._module
        if self.release_gradients and not module.automatic_optimization:
            raise ConflictError(
                "strategy.release_gradients with manual optimization: two backward calls may come before a step;"
                " write strategy.release_gradients=false"
            )
        built = self._built(precision)
        whole = [p for p in module.parameters() if self._is_split(p, precision)]
        bits = self.master_bits if self.back_end == "own" else STOCHASTIC  # without corrections of ours
        self._corrections = split_parameters(whole, bits)
        if not isinstance(bits, str):
            self._corrections |= built
        parts = {*built, *whole}
        del built
        try:
            super().setup(trainer)
            self._set_up_states(trainer)  # behind it, for it moves all states of optimizers to the device
        except BaseException:
            self._join(parts)
            raise

    def _join(self, parts: Iterable[Tensor]) -> None:
        """Make parameters fp32 again, on the host, for the device may have no room for that."""
        states = [item for optimizer in self.optimizers for item in optimizer.state.items()]
        corrections = self._corrections | {p: state["correction"] for p, state in states if "correction" in state}
        self._corrections = {}
        for p in parts:
            p.data = p.data.cpu()
            join_parameters([p], corrections)

    def _is_split(self, p: Tensor, precision: str) -> bool:
        if not p.requires_grad or p.dtype != torch.float32 or precision not in BF16:
            return False
        if self.back_end != "own" and not BACK_ENDS[self.back_end].bf16_weights:
            return False
        # under autocast a norm takes fp32 numbers, and refuses bf16 weights; vectors take nothing
        return precision == "bf16-true" or p.dim() > 1

    def _set_up_states(self, trainer: Any) -> None:
        """Convert the optimizers, and have gradients released."""
        self._require_room()
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        optimizers, left = list(self.optimizers), self._budget
        owned = [{p for group in optimizer.param_groups for p in group["params"]} for optimizer in optimizers]
        for number, own in enumerate(owned):
            others = set().union(*owned) - own  # what is nobody's yet may be added to this one
            given = {p: lower for p, lower in self._corrections.items() if p not in others}
            if self._budget is None:  # else the optimizer takes them where they belong
                given = {p: lower.to(p.device) for p, lower in given.items()}
            made = self._converted(optimizers[number], schedulers, given, left)
            optimizers[number], self.optimizers = made, optimizers
            for p in own:
                self._corrections.pop(p, None)
            del given
            if isinstance(made, CompactAdamW):
                made.place_states()
                if isinstance(left, int):
                    left = max(0, left - made.state_bytes + made.host_bytes)
            # for messages; names in the groups would refuse groups that come without
            vars(made)["parameter_names"] = {p: name for name, p in self._module.named_parameters()}
        self._corrections = {}
        if self.release_gradients:
            self._start_release(trainer)
        self._settles = any(not optimizer.is_settled for optimizer in self._compact_optimizers())
        self._say()

    def _converted(
        self,
        optimizer: Optimizer,
        schedulers: list[Any],
        corrections: Mapping[Tensor, Tensor],
        budget: int | str | None,
    ) -> Any:
        if self.back_end != "own":
            return back_ends.converted(optimizer, schedulers, back_end=self.back_end)
        # nothing to compress: any optimizer will do, as far as gradients can be released to it
        if self._is_plain(corrections) and self._budget is None:
            return optimizer
        return compacted(
            optimizer,
            schedulers,
            master_bits=self.master_bits,
            moment_bits=self.moment_bits,
            corrections=corrections,
            state_budget=budget,
        )

    def _is_plain(self, corrections: Mapping[Tensor, Tensor]) -> bool:
        return self.master_bits == 32 and self.moment_bits == 32 and not corrections

    def _compact_optimizers(self) -> list[CompactAdamW]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, CompactAdamW)]

    def _start_release(self, trainer: Any) -> None:
        if len(self.optimizers) != 1:
            raise ConflictError(
                f"strategy.release_gradients with {len(self.optimizers)} optimizers: write one, or"
                " strategy.release_gradients=false"
            )
        overridden = importlib.import_module(f"{self.home}.utilities.model_helpers").is_overridden
        by_hand = overridden("configure_gradient_clipping", self._module)
        self._clips_by_hand = by_hand
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            if overridden(hook, self._module):
                self._warn_once(
                    f"{type(self._module).__name__}.{hook} finds no .grad: gradients are released in backward; where it"
                    " reads or changes them, write strategy.release_gradients=false"
                )
        value = trainer.gradient_clip_val or None
        by_value = _is_value(trainer.gradient_clip_algorithm)
        self._release = GradientRelease(
            self.optimizers[0],
            accumulation=self._window(),
            max_norm=math.inf if by_hand or (value and not by_value) else None,
            max_value=float(value) if value and by_value and not by_hand else None,
            buffer=self.gradient_buffer,
        )
        if self.gradient_buffer == "host" and not self._release.immediate:
            self._release.allocate()
        self.precision_plugin.clip_gradients = self.clip_gradients  # type: ignore[method-assign]

    def _window(self) -> int:
        return 2 if self._module.trainer.accumulate_grad_batches > 1 or self.accumulation_varies else 1

    def teardown(self) -> None:
        """Take the hooks off the module."""
        try:
            building, self._building = self._building, None
            if building is not None:  # never set up; before Lightning moves weights, whose lower bits were then lost
                building.join(torch.device("cpu"))
            if self._can_leave():
                super().teardown()
            else:
                self._warn_once(
                    "the host has no room for what is on the device: weights and optimizer states stay there"
                )
                self.precision_plugin.teardown()
                if self.accelerator is not None:
                    self.accelerator.teardown()
                self.checkpoint_io.teardown()
        finally:
            self._leave()

    def _can_leave(self) -> bool:
        """Tell whether the host has room for what Lightning brings there at the end."""
        if self._budget is None or self.lightning_module is None:
            return True
        every: list[Tensor] = list(self._module.parameters())
        for optimizer in self._compact_optimizers():
            every += [tensor for state in optimizer.state.values() for tensor in state.values()]
        leaving: int = sum(tensor.nbytes for tensor in every if tensor.is_cuda)
        return leaving <= host_room()

    def _leave(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release.remove()
            vars(self.precision_plugin).pop("clip_gradients", None)
        self._corrections = {}

    # --- the step ---

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward; a short window's loss counts by what the window holds."""
        if self._release is not None:
            self._release.watch()  # what has been unfrozen meanwhile, too
            if not self._release.has_kept:  # a window begins: others' callbacks change its length
                self._release.accumulation = self._window()
        loss = closure_loss if self.loss_factor == 1 else closure_loss * self.loss_factor
        made: Tensor = super().backward(loss, optimizer, *args, **kwargs)
        return made

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip in the step that follows; what ``LightningModule.clip_gradients`` ends in.

        Raises:
            ConflictError: gradients have been used already.
        """
        release = self._release
        assert release is not None  # put in place of Lightning's with it
        if not clip_val or clip_val <= 0:
            return
        name = "max_value" if _is_value(gradient_clip_algorithm) else "max_norm"
        if release.immediate and getattr(release, name) != clip_val:
            raise ConflictError(
                f"self.clip_gradients(..., {clip_val}): gradients are released in backward; write"
                f" Trainer(gradient_clip_val={clip_val}), or override configure_gradient_clipping and call it there"
            )
        setattr(release, name, float(clip_val))
        self._clipped = True

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step; with released gradients the closure's backward has done it, or what was kept is stepped behind it."""
        result = self._step(optimizer, closure, model, **kwargs)
        if self._settles and all(optimizer.is_settled for optimizer in self._compact_optimizers()):
            self._settles = False
            self._say_states()
        return result

    def _step(self, optimizer: Any, closure: Any, model: Any, **kwargs: Any) -> Any:
        release = self._release
        if release is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = self.precision_plugin._wrap_closure(model or self._module, optimizer, closure)
        if self._clips_by_hand and not self._clipped:
            self._warn_once(
                "configure_gradient_clipping didn't call self.clip_gradients(...), and clipped nothing: gradients are"
                " kept by the strategy, and parameters have no .grad"
            )
        release.step()
        self._clipped = False
        if not release.immediate and release.max_norm is not None:
            release.max_norm, release.max_value = math.inf, None  # until the next call of clip_gradients
        optimizer.step(**kwargs)  # no parameter has a gradient: for its hooks, and for schedulers
        return result

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)

    # --- checkpoints ---

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict: as it is in bf16, or with fp32 master weights."""
        state: dict[str, Any] = self._module.state_dict()
        if self.checkpoint_weights == "bf16":
            return state
        own = [optimizer for optimizer in self.optimizers if isinstance(optimizer, OWN)]
        held = {p: optimizer for optimizer in own for group in optimizer.param_groups for p in group["params"]}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            if name in state and p in held:
                state[name] = held[p].master_weight(p).cpu()  # on the device all at once might not fit
        return state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's states; beside fp32 weights without corrections, which those hold."""
        made: dict[str, Any] = optimizer.state_dict()
        if self.checkpoint_weights == "fp32":
            for key, state in made["state"].items():
                made["state"][key] = {name: value for name, value in state.items() if name != "correction"}
        return made

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; masters from fp32 weights beside them."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)  # to where it belongs; Lightning's would move all of it to the device
        weights = checkpoint["state_dict"]
        for optimizer in self.optimizers:
            if isinstance(optimizer, OWN):
                for name, p in self._module.named_parameters():
                    if name in weights and weights[name].dtype == torch.float32:
                        optimizer.set_master_weight(p, weights[name])

    # --- what it needs, and says ---

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None  # Lightning connects it before it calls anything here
        return self.lightning_module

    def _require_room(self) -> None:
        if is_planned() or (self._is_plain(self._corrections) and self._budget is None):
            return  # or any optimizer, whose states aren't known
        needed = sum(self._state_bytes(optimizer) for optimizer in self.optimizers)
        if self._budget == "auto":
            needed = max(0, needed - host_room())
        elif self._budget is not None:
            needed = min(needed, int(self._budget))
        on_device = self.root_device.type != "cpu"
        here = [lower for lower in self._corrections.values() if lower.device.type == self.root_device.type]
        needed -= sum(lower.nbytes for lower in here)  # there already
        there = free_device_bytes(self._module) if on_device else host_memory()[1]
        if needed > there:
            less = "strategy.moment_bits=4 strategy.master_bits=16-stochastic"
            raise BudgetError(
                f"strategy=compact: optimizer states of {format_bytes(needed)} in {format_bytes(there)} that are free"
                f" on {'the device' if on_device else 'the host'}; write"
                f" {less if self.back_end == 'own' else f'strategy.back_end=own {less}'}, or take a smaller model",
                needed,
                there,
            )

    def _state_bytes(self, optimizer: Optimizer) -> int:
        every = {p for group in optimizer.param_groups for p in group["params"]}
        if self.back_end != "own":
            return sum(back_ends.device_bytes(p, self.back_end) for p in every)
        layouts = [state_layout(p, self.master_bits, self.moment_bits) for p in every]
        if type(optimizer) in SERVED and type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
            corrections = [{name: kept for name, kept in layout.items() if name == "correction"} for layout in layouts]
            return sum(map(bytes_of, corrections)) + state_bytes(optimizer)
        return sum(map(bytes_of, layouts))

    def _say(self) -> None:
        """Say per category what is kept, and where."""
        parameters = list(self._module.parameters())
        weights, count = sum(p.nbytes for p in parameters), max(1, sum(p.numel() for p in parameters))
        self._tell(f"weights, {weights / count:.2f} bytes per parameter: {format_bytes(weights)} on the device")
        self._say_states()
        self._tell(f"gradients, {self._words_of_gradients()}")

    def _say_states(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, OWN):
                self._tell(f"optimizer states, {optimizer.summary()}")
            elif self.back_end != "own":
                self._tell(f"optimizer states, {back_ends.summary(optimizer)}")

    def _tell(self, words: str) -> None:
        importlib.import_module(f"{self.home}.utilities").rank_zero_info(f"compact: {words}")

    def _words_of_gradients(self) -> str:
        trained = sum(p.numel() for p in self._module.parameters() if p.requires_grad)
        if self._release is None:
            kept = sum(p.nbytes for p in self._module.parameters() if p.requires_grad)
            return f"kept on the device until the step: {format_bytes(kept)}"
        if self._release.immediate:
            return "released in backward, one by one"
        each = self._release.bytes_per_parameter
        return f"kept on the {self.gradient_buffer} until the step, {each} bytes each: {format_bytes(each * trained)}"


def _parsed_budget(given: int | str | None) -> int | str | None:
    """Return a budget of states in bytes, "auto" or None.

    Raises:
        PresetError: it is none of these.
    """
    budget = given
    if isinstance(given, str) and given != "auto":
        try:
            budget = parse_bytes(given)
        except ValueError as error:
            raise PresetError(f"strategy.state_budget={error}; 0 for none, auto for what fits, null for all") from error
    require_state_budget(budget, "strategy.state_budget")
    return budget


def _is_value(algorithm: Any) -> bool:
    """Tell whether it is by value that gradients are clipped: Lightning's word for it, or a string."""
    return str(getattr(algorithm, "value", algorithm)) == "value"


@cache
def compact_class(lightning: str | None = None) -> type:
    """Return ``CompactStrategy`` for the Trainer of ``lightning.pytorch`` or of ``pytorch_lightning``."""
    if lightning is None:
        other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
        lightning = "pytorch_lightning" if other else "lightning.pytorch"
    base = importlib.import_module(f"{lightning}.strategies").SingleDeviceStrategy
    attributes = {"__doc__": CompactStrategy.__doc__, "__module__": __name__, "home": lightning}
    return type("CompactStrategy", (CompactStrategy, base), attributes)
