"""Keep optimizer states on the host and step there with DeepSpeed's ZeRO; at stage 3 keep the weights there too."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_solo.cards.card import resources
from lightning_solo.checkpoint.folders import BESIDE, whole_folder
from lightning_solo.machine import host_memory
from lightning_solo.memory.reading import free_device_bytes
from lightning_solo.memory.sizes import host_bytes_of
from lightning_solo.seams.homes import fabric_part
from lightning_solo.seams.zero_strategy import ZeroStrategy
from lightning_solo.techniques.zero_offload.card import CARD, Settings
from lightning_solo.units import format_bytes
from lightning_solo.zero.budget import (
    check_device_budget,
    check_disk_budget,
    check_host_budget,
    disk_budget,
    layout_of,
    states_of,
)
from lightning_solo.zero.checkpoint import Group
from lightning_solo.zero.config import check_zero_section
from lightning_solo.zero.disk import parameter_buffers, run_folder
from lightning_solo.zero.extension import load_extension
from lightning_solo.zero.host_optimizer import HostOptimizer
from lightning_solo.zero.host_optimizer import host_optimizer as make_host_optimizer
from lightning_solo.zero.layout import ZeroLayout, ZeroSettings
from lightning_solo.zero.process import one_process, require_device


class ZeroOffloadStrategy(ZeroStrategy, Settings):
    """Train with the optimizer on the host, and at stage 3 with the weights there too.

    ``ZeroOffloadStrategy(...)`` is for the Trainer of ``lightning``; :func:`lightning_solo.seams.homes.for_home` gives
    that of ``pytorch_lightning``.

    Attributes:
        settings: the arguments; ``config`` is DeepSpeed's whole configuration.

    Raises:
        CapabilityError: DeepSpeed is missing or too old, or a run starts without a CUDA device.
        ConflictError: ``config`` contradicts the Trainer or the other arguments.
        PresetError: a value is impossible.
    """

    name = "zero_offload"

    def _init_state(self) -> None:
        self.settings = Settings.from_settings(self)
        self._folder: Path | None = None  # of a run, below nvme_path
        environment = fabric_part(self.home, "plugins.environments").LightningEnvironment
        self.start(cluster_environment=one_process(environment))

    def __repr__(self) -> str:
        return repr(self.settings).replace("Settings", "ZeroOffloadStrategy", 1)

    def new_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with the run's folder below ``nvme_path`` if that is set."""
        merged: dict[str, Any] = self.settings.engine_config()
        check_zero_section(merged)
        for place in ("offload_optimizer", "offload_param"):
            if self._folder is not None and place in merged["zero_optimization"]:
                merged["zero_optimization"][place]["nvme_path"] = str(self._folder)
        return merged

    @property
    def is_alone(self) -> bool:
        """True: its Trainer has one device."""
        return True

    def setup_environment(self) -> None:
        """Open the process group, after checks of device and Trainer.

        Raises:
            CapabilityError: this machine or its device can't run the engine.
            ConflictError: the engine doesn't support an argument or a callback of the Trainer.
        """
        require_device(self.root_device, allow_cpu=self.allow_cpu)
        self.prepare(resources(CARD.owns, self.settings))
        if self.nvme_path is not None:
            disk_budget(self.nvme_path)
            load_extension("async_io")

    def setup(self, trainer: Any) -> None:
        """Make a new engine, whose files have a folder of their own."""
        if self.nvme_path is not None:
            self._folder = self._stack.enter_context(run_folder(self.nvme_path))
        super().setup(trainer)

    def init_deepspeed(self) -> None:
        """Make the engine, with buffers for weights that are on disk."""
        if self.nvme_path is not None and self.offload_parameters:
            weights = self.config["zero_optimization"]["offload_param"]
            for name, value in parameter_buffers(self._module, self._training.dtype.itemsize).items():
                weights.setdefault(name, value)  # the user's come first
        super().init_deepspeed()

    def stepping_optimizer(self, optimizer: Optimizer, schedulers: list[Any], groups: Sequence[Group]) -> HostOptimizer:
        """Return the optimizer that steps on the host, if its states have room there."""
        host = make_host_optimizer(optimizer, schedulers, self.host_optimizer)
        if self.nvme_path is not None:
            # A step needs a buffer for master, gradient and each state of a group; DeepSpeed's 4 suffice for AdamW.
            place = self.config["zero_optimization"]["offload_optimizer"]
            place.setdefault("buffer_count", max(4, 2 + states_of(host.optimizer)))
        self._require_room(self._module, groups, host.optimizer)
        return host

    def _require_room(self, model: nn.Module, groups: Sequence[Group], optimizer: Optimizer) -> None:
        layout = layout_of(
            model,
            groups,
            optimizer,
            self.config,
            precision=self.precision_plugin.precision,
            accumulates=self._accumulates(),
            cuda=self.root_device.type == "cuda",
        )
        on_host = self.root_device.type == "cpu"
        check_host_budget(layout, host_memory()[1], resident=host_bytes_of(model), one_memory=on_host)
        if not on_host:
            check_device_budget(layout, free_device_bytes(model))
        if self.nvme_path is not None:
            check_disk_budget(layout, self.nvme_path)
        self._say(layout, optimizer)

    def _say(self, layout: ZeroLayout, optimizer: Optimizer) -> None:
        """Log the types and places of the model states, and the bytes on host and device."""
        weights = str(self._training.dtype).removeprefix("torch.")
        where = "the disk" if self.nvme_path else "the host"
        fetched = ""
        if self.offload_parameters:
            kept = self.config["zero_optimization"]["offload_param"].get("max_in_cpu", ZeroSettings.max_in_cpu)
            fetched = f" on {where}{f' after the first {kept:.0e}' if self.nvme_path else ''}, fetched"
        self._active.info(
            f"zero_offload, stage {self.stage}, precision {self.precision_plugin.precision}: {weights} weights"
            f"{fetched} for {self.root_device}, without"
            f" autocast; fp32 master, gradients and states on {where}, stepped by"
            f" {type(optimizer).__name__}; {format_bytes(layout.host_bytes)} of host"
            f" memory, {format_bytes(layout.device_bytes)} on the device before activations"
        )

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write the checkpoint as one file; with ``save_engine_directory`` write DeepSpeed's directory next to it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if not self.save_engine_directory:
            return
        if self._run is None or self._run.host is None:
            warnings.warn(
                f"{filepath} gets no directory of DeepSpeed's engine, since the engine has ended with the fit; save"
                " during the fit, as ModelCheckpoint(save_last=True) does",
                stacklevel=2,
            )
            return
        with whole_folder(Path(f"{filepath}{BESIDE}")) as folder:
            self._run.engine.save_checkpoint(
                str(folder), tag="checkpoint", exclude_frozen_parameters=self.exclude_frozen_parameters
            )

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file and DeepSpeed's directory next to it."""
        super().remove_checkpoint(filepath)
        if not Path(filepath).exists():  # else it is kept
            shutil.rmtree(f"{filepath}{BESIDE}", ignore_errors=True)
