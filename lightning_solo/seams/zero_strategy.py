"""The strategy of DeepSpeed's ZeRO engine, over Lightning's, for one process or several."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_solo.cards.lightning_callbacks import refuse_callbacks
from lightning_solo.cards.settings import TechniqueSettings
from lightning_solo.errors import CheckpointError, ConflictError
from lightning_solo.nn.sharding import share_buffers
from lightning_solo.processes import environment
from lightning_solo.seams import patches
from lightning_solo.seams.engines import Peers, share_of_host
from lightning_solo.seams.homes import OfEitherHome
from lightning_solo.seams.run import Run
from lightning_solo.seams.same_modules import SameModules
from lightning_solo.seams.strategy import begin, run_of
from lightning_solo.zero.checkpoint import Group, frozen_names, groups_of, load_weights
from lightning_solo.zero.deepspeed_internals import forget_process_group
from lightning_solo.zero.deepspeed_patches import nothing_compiled_for_communication
from lightning_solo.zero.host_optimizer import HostOptimizer
from lightning_solo.zero.process import (
    ONE_PROCESS,
    close_process_group,
    open_process_group,
    require_deepspeed,
    without_deprecations,
)
from lightning_solo.zero.refusals import (
    one_optimizer,
    refuse_clipping_by_value,
    refuse_empty_groups,
    refuse_module,
    refuse_trainer,
    the_optimizer,
)
from lightning_solo.zero.run import EngineRun

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Base(DeepSpeedStrategy, OfEitherHome): ...

else:
    Base = OfEitherHome


class ZeroStrategy(Base):
    """Train under DeepSpeed's ZeRO; checkpoints are those of a plain run."""

    base = "DeepSpeedStrategy"
    name: ClassVar[str]
    """The name of the technique, for messages."""
    stage: int
    exclude_frozen_parameters: bool
    config: Any
    __setattr__ = object.__setattr__  # Lightning's strategy sets `config`
    __delattr__ = object.__delattr__

    def start(self, **arguments: Any) -> None:
        """Call the constructor of Lightning's strategy."""
        require_deepspeed()
        # Without a config Lightning would read PL_DEEPSPEED_CONFIG_PATH.
        super(TechniqueSettings, self).__init__(  # type: ignore[misc]
            config=self.new_config(), exclude_frozen_parameters=self.exclude_frozen_parameters, **arguments
        )
        self.peers: Peers | None = None  # the processes of the current run
        self._same: SameModules | None = None
        self._opened_group: bool | None = None  # False: the user opened the process group
        self._stack = ExitStack()
        self._run: EngineRun | None = None
        self._fitted: EngineRun | None = None  # the last training run after its end
        self._clipped = False  # whether clip_gradients was called since the last step

    @property
    def is_alone(self) -> bool:
        """Whether there is one device in all."""
        return bool(self.num_processes * self.num_nodes == 1)

    def new_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration for a new engine."""
        raise NotImplementedError

    def stepping_optimizer(self, optimizer: Optimizer, schedulers: list[Any], groups: Sequence[Group]) -> HostOptimizer:
        """Return the optimizer that the engine steps, for the user's one with its ``groups`` and ``schedulers``."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without the engine."""
        state = super().__getstate__()
        if self._run is not None:
            state |= {"_lightning_module": None, "_model": None, "_optimizers": [], "lr_scheduler_configs": []}
        return state | {
            "_run": None,
            "_fitted": None,
            "_opened_group": None,
            "_clipped": False,
            "_stack": ExitStack(),
            "peers": None,
            "_same": None,
        }

    # --- the processes ---

    @property
    def root_device(self) -> torch.device:
        """The device with an index, which DeepSpeed requires."""
        device: torch.device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning counts the micro-batches, and also steps after a short last window."""
        return False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """False: Lightning loads the weights into the module before the engine is made."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning loads the optimizer's states from its file, after the engine is made."""
        return True

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None  # Lightning connects it before it calls anything here
        return self.lightning_module

    @property
    def _trainer(self) -> Any:
        return self._module.trainer

    @property
    def _active(self) -> Run:
        run = run_of(self)
        assert run is not None  # begun in setup_environment
        return run

    @property
    def _training(self) -> EngineRun:
        assert self._run is not None  # made in setup, before anything steps or saves
        return self._run

    def _configure_launcher(self) -> None:
        if self.is_alone:  # the parent's launcher would set a cluster's environment variables, and refuse notebooks
            self._launcher = None
        else:
            super()._configure_launcher()

    def prepare(self, owned: frozenset[str]) -> None:
        """Begin a run and open the process group, after checks of the Trainer; ``owned`` are the card's resources.

        Raises:
            ConflictError: the engine doesn't support an argument or a callback of the Trainer.
        """
        refuse_trainer(self._trainer, self.name)
        # Lightning's scheduler of accumulation refuses every DeepSpeedStrategy; this error has a remedy.
        refuse_callbacks(f"strategy={self.name}", owned | {"accumulation_factor"}, self._trainer.callbacks)
        run = begin(self, self._trainer)
        run.window.gradients_stay = run.window.gradients_saved = False  # the engine takes them in backward
        run.window.repeats = False  # a backward that fails leaves its buckets half full
        # Lightning would give every training loader a shuffling sampler for several processes.
        sampler = patches.without_distributed_sampler if self.is_alone else patches.samplers_kept_in_order
        run.undo.enter_context(sampler(self._trainer))
        self._trainer.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        """Open a process group, of this process alone if there is one device."""
        self._stack.enter_context(without_deprecations())
        self.set_world_ranks()
        if self.is_alone:
            self._stack.enter_context(environment(ONE_PROCESS))  # stage 3 asks for LOCAL_RANK in every forward
            self._process_group_backend = self._get_process_group_backend()
            self._opened_group = open_process_group(self._process_group_backend) or bool(self._opened_group)
        else:
            self.peers = self._stack.enter_context(Peers(self._launcher))
            self._stack.enter_context(share_of_host(self.num_processes))
            with nothing_compiled_for_communication():
                self._init_deepspeed_distributed()

    def teardown(self) -> None:
        """Restore module, environment and process."""
        try:
            super().teardown()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Destroy the engine and close the process group. A second call does nothing."""
        run, self._run, self._same = self._run, None, None
        try:
            if run is not None:
                self.model = self.lightning_module
                if run.host is not None:
                    self.optimizers = []
                has_failed = not self.is_alone and self._trainer.state.status == "interrupted"
                with suppress(RuntimeError) if has_failed else nullcontext():  # which would hide the failure
                    run.end()  # asks the others, which may have ended
                if run.host is not None:  # for a save after the fit
                    self._fitted, self.optimizers = run, [run.host.original]
        finally:
            opened, self._opened_group, self._clipped = self._opened_group, None, False
            try:
                if opened:
                    close_process_group()
                elif opened is False:
                    forget_process_group()
            finally:
                self._stack.close()

    # --- the engine ---

    def model_sharded_context(self) -> Any:
        """Do nothing: ``configure_model`` builds the whole module on the host, and the engine partitions it."""
        return nullcontext()

    def setup(self, trainer: Any) -> None:
        """Make a new engine for each run, since the Trainer's accumulation or clipping may have changed.

        Raises:
            BudgetError: the engine needs more host memory, device memory or disk space than is available.
            ConflictError: ZeRO can't step the optimizers.
        """
        run = self._active
        self.config = self.new_config()
        self._config_initialized = False
        if trainer.training:
            self._fitted, self.optimizers = None, []  # frees the states of the last run before the new ones
        precision: Any = self.precision_plugin
        refuse_module(trainer.lightning_module, self.stage, self.name)
        if not self.is_alone:  # the engine shares weights alone
            share_buffers(trainer.lightning_module, torch.distributed.group.WORLD, self.root_device)
        self._run = EngineRun(trainer.lightning_module, patches.weights_dtype(precision), self.root_device)
        # Under DeepSpeed Lightning's clipping silently does nothing.
        run.undo.enter_context(patches.clipping(precision, lambda _: self.clip_gradients))
        super().setup(trainer)
        if trainer.training and self.peers is not None:
            advice = "write the preset fsdp in its place, with strategy.find_unused_parameters=true"
            self._same = self._stack.enter_context(SameModules(trainer.lightning_module, trainer, advice, self.peers))

    def init_deepspeed(self) -> None:
        """Make the engine, without the parent's warning that it can't clip gradients."""
        if self._trainer.training:
            self._initialize_deepspeed_train(self._module)
        else:
            self._training.evaluate(self.config)
        self.model = self._training.engine

    def _initialize_deepspeed_train(self, model: nn.Module) -> None:
        optimizer, configs = self._configured_optimizer()
        groups = groups_of(optimizer)
        host = self.stepping_optimizer(optimizer, [config.scheduler for config in configs], groups)
        self._training.train(self.config, host, groups, accumulates=self._accumulates())
        self.optimizers = [self._training.zero]
        self.lr_scheduler_configs = configs

    def _accumulates(self) -> bool:
        return self._active.window.accumulates or not self._module.automatic_optimization

    def _configured_optimizer(self) -> tuple[Any, list[Any]]:
        try:
            optimizers, configs = patches.new_optimizers(self.lightning_module, self.home)
        except RuntimeError as error:
            # Lightning advises to optimize manually, which is refused too.
            if "multiple optimizers" not in str(error):
                raise
            raise ConflictError(
                f"strategy={self.name} steps one optimizer, not several; {one_optimizer(self.name)}"
            ) from None
        optimizer = the_optimizer(optimizers, self.name)
        refuse_empty_groups(optimizer, self.stage, self.name, has_schedule=bool(configs))
        return optimizer, configs

    # --- the step ---

    def block_backward_sync(self) -> Any:
        """Do nothing: the engine reduces each micro-batch's gradients, and refuses its own context."""
        return nullcontext()

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the engine's backward. Lightning has already divided the loss by the accumulation factor."""
        if self._same is not None:
            self._same.compare()
        kwargs["scale_wrt_gas"] = False
        loss: Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
        self._training.after_backward()
        return loss

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip by the global norm in the next step; ``LightningModule.clip_gradients`` calls this.

        Raises:
            ConflictError: clipping by value.
        """
        refuse_clipping_by_value(clip_val, gradient_clip_algorithm, self.name)
        self._training.clip_next_step(clip_val)
        self._clipped = True

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step once for the window's micro-batches, unless every ``training_step`` returned None."""
        module = model or self._module
        result = closure()
        patches.after_closure(self.precision_plugin, module, optimizer)
        if module.automatic_optimization and not self._clipped:
            warnings.warn(
                "configure_gradient_clipping clipped nothing, since it didn't call self.clip_gradients(...): under"
                f" {self.name} the engine stores the gradients, and parameters have no .grad",
                stacklevel=2,
            )
        self._clipped = False
        self._training.step()
        return result

    def on_exception(self, exception: BaseException) -> None:
        """Say that there is no autocast where types of numbers differ."""
        super().on_exception(exception)
        dtype = patches.weights_dtype(self.precision_plugin)
        if dtype.itemsize == 2 and re.search(
            r"same dtype|expected scalar type|type .*should be the same", str(exception)
        ):
            exception.args = (
                f"{exception}\nstrategy={self.name} has weights in {dtype} and no autocast; write x.to(self.dtype)"
                " where the module makes a tensor x itself, or precision=32-true",
            )

    # --- checkpoints ---

    @property
    def _saved(self) -> EngineRun | None:
        """The run whose weights are saved: the current one, or the last training run."""
        return self._run or self._fitted

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state dict with the fp32 masters, as a plain run would have it."""
        state = self._module.state_dict() if self._saved is None else self._saved.state_dict()
        left_out = frozen_names(self._module) if self.exclude_frozen_parameters else ()
        return {key: value for key, value in state.items() if key not in left_out}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state dict that the user's optimizer would have."""
        run = self._run if self._fitted is None else self._fitted
        assert run is not None  # by which there is an optimizer
        return run.optimizer_state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint as one file."""
        left_out = frozen_names(self._module) if self.exclude_frozen_parameters else []
        checkpoint["zero_offload"] = {"left_out": left_out, **(self._saved.counters() if self._saved else {})}
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of one file, saved under any strategy; ``weights_only`` is True by default.

        Raises:
            CheckpointError: the path is a directory of DeepSpeed's engine.
        """
        if Path(checkpoint_path).is_dir():
            raise CheckpointError(
                f"{checkpoint_path} is a directory of DeepSpeed's engine, which holds pickled objects; load the plain"
                f" file next to it, or start from its weights: lightning-solo export {checkpoint_path} --output"
                " weights.pt"
            )
        safely = True if weights_only is None else weights_only
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=safely)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights into the module before the engine is made."""
        assert self.lightning_module is not None
        left_out = checkpoint.get("zero_offload", {}).get("left_out", ())
        load_weights(self.lightning_module, checkpoint["state_dict"], left_out=left_out, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of a plain run or one with ZeRO into the engine, and the masters in full precision."""
        self._training.load_optimizer_state_dict(checkpoint["optimizer_states"][0], checkpoint["state_dict"])
        self._training.set_counters(checkpoint.get("zero_offload", {}))
