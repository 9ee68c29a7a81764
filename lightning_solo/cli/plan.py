"""`lightning-solo plan`: predicts memory and time under each preset, also for a GPU that this machine lacks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lightning_solo.cards.configuration import Configuration
from lightning_solo.cli.plan_display import Progress, print_plans, print_readings, what_to_write
from lightning_solo.cli.plan_line import compose, parse
from lightning_solo.cli.train import first_batch, model_of
from lightning_solo.errors import SoloError
from lightning_solo.machine import host_memory
from lightning_solo.planner.device import CPU, this_device
from lightning_solo.planner.plan import Plan, ranked, with_host_memory
from lightning_solo.planner.worker import WORKER, PlanRequest
from lightning_solo.presets.devices import budget_on
from lightning_solo.report.plan_chart import write_pictures
from lightning_solo.units import format_bytes

TIMEOUT_S = 3600.0


class Deferred:
    """Calls a module-level function when it is unpickled in another process, because this process has no torch."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        return self.function, ()


def budget_here(budget: int | None) -> int:
    """Return the budget on this machine's device; None stands for all of its memory.

    Raises:
        PresetError: the device has less memory than the budget.
    """
    return budget_on(this_device(), budget, f"--budget {'' if budget is None else format_bytes(budget)}")


def run(arguments: Sequence[str]) -> int:
    """Plan, and print the plans; return 0 if a preset fits."""
    options = parse(arguments)
    if options.calibrate:
        return measure(as_json=options.as_json)
    WORKER.start()  # it imports torch while presets are composed here
    checked, presets, refused = compose(options)
    budget: Any = options.budget if options.device else Deferred(partial(budget_here, options.budget))
    local = options.device is None or options.device.name == CPU
    host = host_memory()[1] if options.host_memory is None and local else options.host_memory
    request = PlanRequest(
        make=partial(model_of, checked),
        batch=partial(first_batch, checked),
        trainer=checked.trainer,
        device=options.device or Deferred(this_device),
        budget=budget,
        micro_batch=options.micro_batch,
        presets=presets,
    )
    plans, failed = planned(request, host, caveats_last=options.all_presets)
    failed = {**refused, **failed}
    advice = what_to_write(plans, options.overrides, checked)
    pictures = write_pictures(plans, options.picture) if options.picture is not None and plans else []
    if options.as_json:
        print(json.dumps(as_plain(plans, failed, arguments, advice), indent=2))
    else:
        print_plans(plans, failed, notes(plans, presets), advice)
        for picture in pictures:
            print(f"picture: {picture}")
    return 0 if any(plan.fits for plan in plans) else 1


def measure(*, as_json: bool) -> int:
    """Measure this machine's device; print the readings and their file.

    Raises:
        CapabilityError: the device can't be measured, or the readings can't be stored.
    """
    from lightning_solo.planner.calibrate import calibrate

    device, readings, path = calibrate()
    if as_json:
        print(json.dumps({"device": device.label, **asdict(readings), "file": str(path)}, indent=2))
    else:
        print_readings(device, readings, path)
    return 0


def planned(
    request: PlanRequest, host_memory: int | None, *, caveats_last: bool
) -> tuple[list[Plan], dict[str, SoloError]]:
    """Return the plans, best first, and the errors of the other presets.

    Raises:
        SoloError: no preset can be planned, for example because the module has no data, or the planning process ended.
    """
    plans: list[Plan] = []
    failed: dict[str, SoloError] = {}
    progress = Progress(list(request.presets))
    with progress.shown():
        for name, answer in WORKER.answers(request, TIMEOUT_S):
            if isinstance(answer, Plan):
                answer = with_host_memory(answer, host_memory)
                plans.append(answer)
            else:
                failed[name] = answer
            if name:
                progress.tell(name, answer)
    if "" in failed:
        raise failed[""]
    return ranked(plans, request.presets, caveats_last=caveats_last), failed


def notes(plans: Sequence[Plan], presets: Mapping[str, Configuration]) -> list[str]:
    """Return a line for each preset with several micro-batches per optimizer step, and for each caveat."""
    planned = {plan.preset: presets[plan.preset] for plan in plans}
    factors = {name: configuration.first_factor for name, configuration in planned.items()}
    steps = [f"{name}: an optimizer step takes {count} micro-batches" for name, count in factors.items() if count > 1]
    return steps + [f"{name}: {caveat}" for name, parts in planned.items() for caveat in parts.caveats]


def as_plain(
    plans: Sequence[Plan], failed: Mapping[str, SoloError], arguments: Sequence[str], advice: str
) -> dict[str, Any]:
    """Return the mapping that `--json` prints."""
    return {
        "command": shlex.join(["lightning-solo", "plan", *arguments]),
        "plans": [plan.as_dict() for plan in plans],
        "not_planned": {name: str(error) for name, error in failed.items()},
        "advice": advice,
    }
