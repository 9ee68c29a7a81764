"""Shard weights, gradients and optimizer states over several devices by FSDP2, on Lightning's ModelParallelStrategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_solo.cards.settings import TechniqueSettings
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.sharded_tensors import gathered
from lightning_solo.nn.blocks import named_blocks
from lightning_solo.nn.sharding import load_weights, require_sharded, shard
from lightning_solo.optim.schedule_free import ScheduleFreeAdamW
from lightning_solo.optim.sharded_states import gathered_states, load_states, restore_optimizer
from lightning_solo.seams import patches
from lightning_solo.seams.engines import SeveralDevices
from lightning_solo.seams.homes import part
from lightning_solo.seams.same_modules import SameModules
from lightning_solo.techniques.fsdp.card import Settings

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Base(SeveralDevices, ModelParallelStrategy): ...

else:
    Base = SeveralDevices

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Methods of a LightningModule that Lightning calls, in place of forward."""


class ShardedStrategy(Base, Settings):
    """Train on several devices with FSDP2; the module needs no ``configure_model``.

    Attributes:
        settings: the arguments.

    Raises:
        ConflictError: a parameter of the module can't be sharded, or the module optimizes manually.
    """

    base = "ModelParallelStrategy"
    __setattr__ = object.__setattr__  # Lightning's strategy sets attributes
    __delattr__ = object.__delattr__

    def _init_state(self) -> None:
        self.settings = Settings.from_settings(self)
        self._restore: Callable[[], Any] | None = None
        self._same: SameModules | None = None
        self._from_shards = False  # whether the last checkpoint that was read is a folder
        super(TechniqueSettings, self).__init__(  # type: ignore[call-arg]
            save_distributed_checkpoint=self.checkpoint == "folder",
            timeout=timedelta(seconds=self.timeout_s),
        )

    def __repr__(self) -> str:
        return repr(self.settings).replace("Settings", type(self).__name__, 1)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without a sharded module, which torch can't copy."""
        state = super().__getstate__()
        if self._restore is not None:
            state |= {"_lightning_module": None, "_model": None, "_optimizers": [], "lr_scheduler_configs": []}
        return state | {"_restore": None, "_device_mesh": None, "_same": None}

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None  # Lightning connects it before it calls anything here
        return self.lightning_module

    def _setup_distributed(self) -> None:
        """Open the process group, over which all devices share the data."""
        if self.is_alone:
            self.set_world_ranks()
            self.open_alone(self._get_process_group_backend())
        else:
            super()._setup_distributed()
        self._data_parallel_size, self._tensor_parallel_size = self.world_size, 1

    def setup(self, trainer: Any) -> None:
        """Shard the module, which is complete and changed by the techniques; its weights are on the host so far."""
        module = self._module
        self._refuse_manual(trainer)
        self._restore = shard(
            module,
            self.device_mesh["data_parallel"],
            self._blocks().values(),
            forward_methods=[name for name in STEPS if callable(getattr(module, name, None))],
            reshard_after_forward=self.reshard_after_forward,
            find_unused_parameters=self.find_unused_parameters,
            converts=self.precision_plugin.precision in ("bf16-true", "16-true", "64-true"),
        )
        with patches.configures_its_model(module):
            super().setup(trainer)
        require_sharded(module)  # optimizers may have made others
        for optimizer in self.optimizers:
            if isinstance(optimizer, (torch.optim.Adafactor, ScheduleFreeAdamW)):
                raise ConflictError(
                    f"strategy=fsdp gives {type(optimizer).__name__} shards of weights, and it needs whole ones; write"
                    " another optimizer, such as torch.optim.AdamW, or the preset ddp"
                )
        if trainer.training and not self.is_alone and not self.find_unused_parameters:
            assert self._stack is not None
            assert self.peers is not None  # of setup_environment, both
            advice = "write strategy.find_unused_parameters=true"
            self._same = self._stack.enter_context(SameModules(module, trainer, advice, self.peers))

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward, once all processes have run the same modules."""
        if self._same is not None:
            self._same.compare()
        return super().backward(*args, **kwargs)

    def before_processes(self, trainer: Any) -> None:
        """Refuse a fit for what Trainer and module tell before the other processes start.

        Raises:
            ConflictError: the module optimizes manually, or a technique doesn't run with an argument of the Trainer.
            NothingToDoError: the module has no such blocks, and makes no others later.
        """
        super().before_processes(trainer)
        self._refuse_manual(trainer)
        overridden = part(self.home, "utilities.model_helpers").is_overridden
        if not (overridden("configure_model", self._module) or overridden("setup", self._module)):
            self._blocks()

    def _refuse_manual(self, trainer: Any) -> None:
        module = self._module
        if trainer.training and not module.automatic_optimization:
            raise ConflictError(
                f"strategy=fsdp and {type(module).__name__}.automatic_optimization=False: training_step gathers the"
                " weights, and a backward before its end doesn't reach their shards; write automatic_optimization=True,"
                " or the preset ddp or zero3 in its place"
            )

    def _blocks(self) -> Mapping[str, nn.Module]:
        try:
            return named_blocks(self._module, self.blocks, "strategy.blocks")
        except NothingToDoError:
            if self.blocks != "auto":
                raise
            return {}  # one group

    def make_whole(self) -> None:
        """Make the module plain again, unless the run failed, after which other processes may have gone."""
        restore, self._restore = self._restore, None
        if restore is not None and (self.is_alone or self._module.trainer.state.status != "interrupted"):
            whole = restore()
            for optimizer in self.optimizers:
                restore_optimizer(optimizer, whole, keep=self.is_global_zero)

    def teardown(self) -> None:
        """Make the module plain again."""
        self.make_whole()
        self._same = None
        self._device_mesh = self._module._device_mesh = None  # Lightning's, for `configure_model`
        super().teardown()

    # --- checkpoints of one file ---

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning loads optimizer states, as it does from one file."""
        return not self._from_shards

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: whole ones in the first process, or each process's shards."""
        if self.checkpoint == "folder":
            return super().lightning_module_state_dict()
        state = gathered(self._module.state_dict(), self.is_global_zero)
        return state if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the states of an optimizer: whole ones in the first process, or each process's shards."""
        if self.checkpoint == "folder":
            return super().optimizer_state(optimizer)
        return gathered_states(getattr(optimizer, "_optimizer", optimizer), self.is_global_zero)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint: one file of any strategy, or a folder of shards; ``weights_only`` is True by default."""
        safely = True if weights_only is None else weights_only
        self._from_shards = Path(checkpoint_path).is_dir()
        if self._from_shards:
            return super().load_checkpoint(checkpoint_path, safely)
        checkpoint: dict[str, Any] = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=safely)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this process's shards of whole weights; those of a folder are loaded already."""
        if not self._from_shards:
            load_weights(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this process's shards of whole states."""
        if not self._from_shards:
            for optimizer, states in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                load_states(optimizer, states)
