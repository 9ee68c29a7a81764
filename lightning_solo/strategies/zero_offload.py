"""Optimizer states and the optimizer's arithmetic on the host, by DeepSpeed's ZeRO stage 2.

Saves:      on the device AdamW's two states (8 bytes per parameter), under bf16 also the fp32 master (4), and the
            gradients (4, under bf16 2) but for two buckets: weights and a few buckets are what stays
Costs:      16 bytes of host memory per parameter (master 4, gradient 4, states 4 + 4); the step runs on the CPU, and
            gradients and weights cross the bus once per optimizer step
Numerics:   bit-exact in fp32; with clipping within rounding (the norm is summed in another order).
            `bf16-mixed` here means bf16 weights with an fp32 master, not autocast
Conflicts:  whatever changes the accumulation, steps inside backward or compiles the module; clipping by value
Reference:  Ren et al. 2021, ZeRO-Offload, https://arxiv.org/abs/2101.06840
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from lightning_solo.errors import CapabilityError, CheckpointError
from lightning_solo.machine import is_installed

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DeepSpeedStrategy as Base
else:
    Base = object

# What DeepSpeed's engine asks the environment for; a launcher's values would make it wait for other processes.
ONE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
FABRIC = {
    "lightning.pytorch": "lightning.fabric.plugins.environments",
    "pytorch_lightning": "lightning_fabric.plugins.environments",
}
# By DeepSpeed's import; it changes how torch looks for CUDA in child processes
SET_BY_IMPORTS = ("PYTORCH_NVML_BASED_CUDA_CHECK",)
# Plain values that DeepSpeed leaves on parameters, and the method that Lightning's redirection leaves on a module
LEFT_BEHIND = frozenset(
    {"_dp_group", "_hp_mapping", "_index_in_param_group", "forward", "grad_accum", "param_idx_in_group"}
)
MODULE_HOOKS = (
    "_backward_hooks",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def zero_config(pin_memory: bool, bucket_elements: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration; Lightning adds accumulation, clipping and precision."""
    return {
        # Only for DeepSpeed's own throughput log. Lightning's guess fails on loaders without a batch sampler.
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        # Without it any optimizer but DeepSpeedCPUAdam is refused, which Lightning has no argument for.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": pin_memory},
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_bucket_size": bucket_elements,
            "allgather_bucket_size": bucket_elements,
        },
    }


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, and leave them, and those that imports set, as they were."""
    before = {name: os.environ.get(name) for name in (*variables, *SET_BY_IMPORTS)}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def require_deepspeed() -> None:
    """Raise a CapabilityError that names the package and the command, where DeepSpeed is not installed."""
    if not is_installed("deepspeed"):
        raise CapabilityError(
            "zero_offload needs the package deepspeed, which is not installed here; write: "
            "pip install 'deepspeed>=0.16'"
        )
    with environment({}):
        importlib.import_module("deepspeed")


def open_process_group(backend: str) -> bool:
    """Make a process group of this process alone, and DeepSpeed's handle on it; return False where there is a group.

    It needs no address, no port and no launcher: the store is a dictionary in this process.
    """
    import deepspeed

    opened = not torch.distributed.is_initialized()
    if opened:
        torch.distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif torch.distributed.get_world_size() > 1:
        raise CapabilityError(
            f"zero_offload runs in one process, but a group of {torch.distributed.get_world_size()} is open;"
            " start it without a launcher such as torchrun"
        )
    # On the CPU, DeepSpeed compiles an operator for sums across the processes of one machine: here there is one.
    # (The attribute deepspeed.comm.torch is torch itself, so the module goes by name.)
    operators: Any = importlib.import_module("deepspeed.comm.torch")
    build_shm_op = operators.build_shm_op
    try:
        operators.build_shm_op = lambda: None
        with environment(ONE_PROCESS):
            deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    except BaseException:
        if opened:
            close_process_group()
        raise
    finally:
        operators.build_shm_op = build_shm_op
    return opened


def close_process_group() -> None:
    """Destroy the process group, and DeepSpeed's handles on it, so that the next fit can open its own."""
    import deepspeed

    if torch.distributed.is_initialized():
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        else:
            torch.distributed.destroy_process_group()
    # Otherwise the next init_distributed believes that it is done.
    deepspeed.comm.comm.cdb = None


def one_process(environment_class: type) -> Any:
    """Return Lightning's description of a cluster that is this process, whatever a launcher's variables say."""
    alone = {
        "creates_processes_externally": property(lambda self: True),
        "local_rank": lambda self: 0,
        "node_rank": lambda self: 0,
        # The parent's removes WORLD_SIZE from the environment.
        "teardown": lambda self: None,
    }
    return type("OneProcess", (environment_class,), alone)()


class ModuleAsFound:
    """What DeepSpeed changes on a module: remembered before, undone by :meth:`restore`.

    It registers hooks, leaves methods on each parameter (which pickling would follow into the engine), and under
    mixed precision casts the weights; :meth:`restore` brings back the dtype with the values of the fp32 master.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        parts: list[Any] = [*module.parameters(), *module.modules()]
        self.attributes = {part: set(vars(part)) for part in parts}
        self.dtypes: dict[Tensor, torch.dtype] = {
            tensor: tensor.dtype for tensor in (*module.parameters(), *module.buffers())
        }

    def restore(self, engine: Any) -> None:
        from deepspeed.utils import safe_get_full_fp32_param

        masters: dict[Tensor, Tensor] = {
            p: safe_get_full_fp32_param(p) for p in self.module.parameters() if p.dtype != self.dtypes.get(p)
        }
        engine.destroy()
        for part in self.module.modules():
            for name in MODULE_HOOKS:
                hooks = vars(part)[name]
                for key in [key for key, hook in hooks.items() if is_deepspeeds(hook)]:
                    del hooks[key]
        for tensor, dtype in self.dtypes.items():
            master = masters.get(tensor)  # None for those that kept their dtype
            with torch.no_grad():
                tensor.data = (tensor if master is None else master).detach().to(tensor.device, dtype, copy=True)
        for part, names in self.attributes.items():
            for name in set(vars(part)) - names:
                if name in LEFT_BEHIND or is_deepspeeds(vars(part)[name]):
                    delattr(part, name)


def is_deepspeeds(value: Any) -> bool:
    """Return whether a function or an object was made by DeepSpeed."""
    owner = getattr(value, "__self__", value)
    return any(
        (getattr(thing, "__module__", None) or "").partition(".")[0] == "deepspeed"
        for thing in (value, type(owner), getattr(value, "__func__", None))
    )


class ZeroOffload(Base):
    """Train with the optimizer on the host: what to add to a ``DeepSpeedStrategy``; see :func:`zero_offload_class`.

    Args:
        pin_memory: Keep the host's copies in page-locked memory, which is what makes the transfers fast.
        bucket_elements: Elements of gradients that are gathered on the device before they go to the host.
        allow_cpu: Run the engine on the CPU, for tests and for trying: it saves nothing there.

    Raises:
        CapabilityError: DeepSpeed is not installed, or, when a run starts, there is no CUDA device.
    """

    environment_class: type

    def __init__(self, pin_memory: bool = True, bucket_elements: int = 50_000_000, allow_cpu: bool = False) -> None:
        require_deepspeed()
        self.pin_memory = pin_memory
        self.bucket_elements = bucket_elements
        self.allow_cpu = allow_cpu
        self._opened_group = False
        self._found: ModuleAsFound | None = None
        # A config given outright also keeps PL_DEEPSPEED_CONFIG_PATH out.
        super().__init__(
            config=zero_config(pin_memory, bucket_elements), cluster_environment=one_process(self.environment_class)
        )

    def __repr__(self) -> str:
        arguments = f"pin_memory={self.pin_memory}, bucket_elements={self.bucket_elements}, allow_cpu={self.allow_cpu}"
        return f"{type(self).__name__}({arguments})"

    @property
    def root_device(self) -> torch.device:
        device: torch.device = super().root_device
        # DeepSpeed asks for the index, which "cpu" has not.
        return torch.device("cpu", 0) if device.type == "cpu" else device

    @property
    def handles_gradient_accumulation(self) -> bool:
        # Each micro-batch goes through the engine. The last of an epoch is a step whatever the count says, as with
        # every other strategy; stock Lightning lets the engine count across epochs, and its global_step drifts.
        return not self._trainer.fit_loop.epoch_loop._num_ready_batches_reached()

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None  # Lightning connects it before it calls anything here
        return self.lightning_module.trainer

    def _configure_launcher(self) -> None:
        # The parent's would write the variables of a cluster into the environment, and refuse notebooks.
        self._launcher = None

    def setup_environment(self) -> None:
        self._require_device()
        # Lightning would put a shuffling sampler for several processes into every training loader.
        self._trainer._accelerator_connector.use_distributed_sampler = False
        self._trainer.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        self._opened_group = open_process_group(self._process_group_backend) or self._opened_group

    def setup(self, trainer: Any) -> None:
        # Anew for each run: the same Trainer may have another accumulation or clipping than last time.
        self.config = zero_config(self.pin_memory, self.bucket_elements)
        self._config_initialized = False
        self._found = ModuleAsFound(trainer.lightning_module)
        with environment(ONE_PROCESS):
            super().setup(trainer)

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        # The parent empties each module's hooks, for the sake of an engine's that ours has removed already.
        kept = [(part, name, vars(part)[name]) for part in model.modules() for name in MODULE_HOOKS]
        super()._initialize_deepspeed_inference(model)
        for part, name, hooks in kept:
            if isinstance(hooks, dict):
                hooks.update(vars(part)[name])
            setattr(part, name, hooks)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # The engine's own count of micro-batches doesn't know where an epoch ends.
        boundary = not self._trainer.fit_loop.epoch_loop._should_accumulate()
        self.deepspeed_engine.set_gradient_accumulation_boundary(boundary)
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        # Lightning has divided the loss by the accumulation already; DeepSpeed would divide it once more.
        return super().backward(closure_loss, optimizer, *args, scale_wrt_gas=False, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self.model is self.lightning_module:
            raise CheckpointError(
                f"cannot save {filepath} now: the optimizer is gone with the engine, which ends with the fit;"
                " save while it runs, e.g. with ModelCheckpoint(save_last=True)"
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Take the engine off the module and close the process group; a second call does nothing."""
        engine, module = self.model, self.lightning_module
        if self._found is not None and engine is not module:
            self._found.restore(engine)
            self.model = module
        self._found = None
        if self._opened_group:
            close_process_group()
        self._opened_group = False

    def _require_device(self) -> None:
        from deepspeed.accelerator import get_accelerator

        device = self.root_device
        if device.type != "cuda" and not self.allow_cpu:
            raise CapabilityError(
                f"zero_offload needs a CUDA device, and this run is on {device.type!r}; write solo=bf16 or another"
                " preset without ZeRO, or, for trying it where it saves nothing, strategy.allow_cpu=true"
            )
        if device.type not in ("cuda", "cpu"):
            raise CapabilityError(f"zero_offload runs on 'cuda', or with allow_cpu on 'cpu'; not on {device.type!r}")
        if device.index != 0:
            raise CapabilityError(
                f"zero_offload runs on the first device it sees, not on {device};"
                f" write CUDA_VISIBLE_DEVICES={device.index} and devices=1"
            )
        if get_accelerator().device_name() != device.type:
            raise CapabilityError(
                f"DeepSpeed has chosen {get_accelerator().device_name()!r} for this process, and the run is on"
                f" {device.type!r}; start it with DS_ACCELERATOR={device.type}"
            )
        if device.type == "cpu":
            warnings.warn(
                "zero_offload runs on the CPU (allow_cpu=True): for tests and for trying only, it saves no memory here",
                stacklevel=2,
            )


@cache
def zero_offload_class(lightning: str = "lightning.pytorch") -> type:
    """Return ``ZeroOffload`` as a strategy for the Trainer of ``lightning.pytorch`` or of ``pytorch_lightning``."""
    strategies = importlib.import_module(f"{lightning}.strategies")
    # Each home has a Fabric of its own.
    fabric = importlib.import_module(FABRIC[lightning])
    attributes = {
        "__doc__": ZeroOffload.__doc__,
        "__module__": __name__,
        "environment_class": fabric.LightningEnvironment,
    }
    return type("ZeroOffload", (ZeroOffload, strategies.DeepSpeedStrategy), attributes)
