"""Plans of several presets for one module and device: the public `plan`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import PlanError, PresetError, SoloError
from lightning_solo.machine import host_memory as memory_here
from lightning_solo.planner.bases import SOLVED, Bases
from lightning_solo.planner.batches import examples
from lightning_solo.planner.device import CPU, Device, this_device
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.fake_modules import stripped
from lightning_solo.planner.plan import Plan, ranked, with_host_memory
from lightning_solo.planner.worker import WORKER, PlanRequest
from lightning_solo.presets.compose import compose, compose_all
from lightning_solo.presets.devices import budget_bytes, budget_on


def plan(
    module: Any,
    batch: Any = None,
    *,
    preset: str | Sequence[str] | Mapping[str, Any] | None = None,
    presets: Sequence[str] | Mapping[str, Configuration] | str = "all",
    overrides: Sequence[str] = (),
    device: str | Device | None = None,
    budget: str | int | None = None,
    host_memory: str | int | None = None,
    micro_batch: int | None = None,
    trainer: Mapping[str, Any] | None = None,
    allow: Sequence[str] = (),
    timeout_s: float = 600.0,
    tell: Callable[[str, Plan | SoloError], None] | None = None,
    bases: Bases | None = None,
) -> Plan | list[Plan]:
    """Predict memory and time of training, without training.

    The real ``Trainer.fit`` runs for two optimizer steps in another process, with the preset's techniques attached, on
    fake tensors, which have no data and take no memory. The module isn't changed.

    Args:
        module: a LightningModule, or a function without arguments that returns one; then no weights are allocated.
        batch: one micro-batch, as ``training_step`` receives it, a function that returns one, or a data module, whose
            first batch is taken; by default the first of the module's own ``train_dataloader``.
        preset: the name of one preset, names to combine, or its fields; the result is then one `Plan`.
        presets: several names, ``"all"``, or checked presets by name; the result is then a list of plans, in the order
            in which to try them.
        overrides: Hydra overrides of each preset: ``["precision=32-true"]``.
        device: a name of ``lightning_solo.planner.device.devices()``, such as ``"rtx-4090"``, or ``"cpu"``; by default
            this machine's GPU, else its CPU.
        budget: the allowed device memory: ``"16GiB"``, or bytes; by default all of it.
        host_memory: memory of the host, likewise; by default the available memory of this machine, for plans of this
            machine's device or a CPU. Plans of other devices don't judge host memory then.
        micro_batch: examples per forward; by default as many as in ``batch``.
        trainer: your arguments of the Trainer: ``{"gradient_clip_val": 1.0}``.
        allow: prefixes of ``_target_`` that you trust.
        timeout_s: seconds after which the process is ended.
        tell: called with the name and the plan, or the error, of each preset when it is done.
        bases: presets from which a plan is solved in addition; the preset `auto` gives them.

    Raises:
        PresetError: an unknown preset or device, an invalid budget or one above the device's memory, a batch without
            tensors, no module.
        PlanError: the module can't be planned, or not under any of the presets.
    """
    configs = _configs(preset, presets, overrides, allow)
    if batch is not None and not callable(batch) and not hasattr(batch, "train_dataloader"):
        examples(batch)
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise PresetError(f"micro_batch={micro_batch!r}: write a whole number of at least 1")
    target = this_device() if device is None else device if isinstance(device, Device) else device_of(device)
    host = budget_bytes(host_memory, "host_memory")
    if host is None and (device is None or target.name == CPU):
        host = memory_here()[1]
    request = PlanRequest(
        make=_factory(module),
        batch=batch,
        trainer=dict(trainer or {}),
        device=target,
        budget=budget_on(target, budget_bytes(budget), f"budget={budget!r}"),
        micro_batch=micro_batch,
        presets={**configs, **({} if bases is None else {SOLVED: bases})},
        host_memory=host,
    )
    plans: list[Plan] = []
    errors: dict[str, SoloError] = {}
    try:
        for name, answer in WORKER.answers(request, timeout_s):
            result = with_host_memory(answer, host) if isinstance(answer, Plan) else answer
            if tell is not None and name:
                tell(name, result)
            if isinstance(result, Plan):
                plans.append(result)
                if result.configuration is not None:
                    configs = {**configs, name: compose(result.configuration, allow=allow)}
            else:
                errors[name] = result
    except PlanError:
        # the presets are planned, and only the solved plan took too long
        if bases is None or len(plans) + len(errors) < len(request.presets) - 1:
            raise
    if not plans:
        raise errors.get("") or next(iter(errors.values()))  # "" is an error of the module itself
    return ranked(plans, configs, caveats_last=presets == "all") if preset is None else plans[0]


def _configs(
    preset: str | Sequence[str] | Mapping[str, Any] | None,
    presets: Sequence[str] | Mapping[str, Configuration] | str,
    overrides: Sequence[str],
    allow: Sequence[str],
) -> Mapping[str, Configuration]:
    """Return the presets to plan, by name; arguments as in `plan`."""
    if preset is not None:
        name = preset if isinstance(preset, str) else "given" if isinstance(preset, Mapping) else " + ".join(preset)
        configs: Mapping[str, Configuration] = {name: compose(preset, overrides, allow=allow)}
    elif isinstance(presets, Mapping):
        configs = presets
    elif presets == "all":
        configs = compose_all(overrides, allow=allow)
    else:
        names = [presets] if isinstance(presets, str) else presets
        configs = {name: compose(name, overrides, allow=allow) for name in names}
    if not configs:
        raise PresetError("presets=[]: none to plan; name some, or write presets='all'")
    for name, config in configs.items():
        if config.auto is not None:
            raise PresetError(f"preset {name}: it chooses among the other presets by their plans; leave it out")
    return configs


def _factory(module: Any) -> Callable[[], Any]:
    # by name, which serves both packages of Lightning
    if any(cls.__name__ == "LightningModule" for cls in type(module).__mro__):
        return functools.partial(copy.deepcopy, stripped(module))
    if callable(module):
        return module  # type: ignore[no-any-return]
    raise PresetError(
        f"module={type(module).__name__}: neither a LightningModule nor a function that returns one; write"
        " plan(lambda: MyModule(width=1024), batch)"
    )
