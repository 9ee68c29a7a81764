"""`lightning-solo plan`: predicts memory and time under each preset, also for a GPU that this machine lacks."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from lightning_solo.cards.configuration import Configuration
from lightning_solo.cli.command_line import CheckedConfig
from lightning_solo.cli.plan_display import Progress, print_plans, print_readings, what_to_write
from lightning_solo.cli.plan_largest import conclusion, largest, line, setting_of, thriftiest
from lightning_solo.cli.plan_line import PlanOptions, compose, parse
from lightning_solo.cli.train import first_batch, model_of
from lightning_solo.errors import SoloError
from lightning_solo.machine import host_memory
from lightning_solo.planner.bases import SOLVED, Bases, bases_among, configuration_of, file_of, save, solved_lines
from lightning_solo.planner.device import CPU, Device, this_device
from lightning_solo.planner.plan import Plan, ranked, with_host_memory
from lightning_solo.planner.worker import WORKER, PlanRequest
from lightning_solo.presets.devices import budget_on
from lightning_solo.report.plan_chart import write_pictures
from lightning_solo.units import format_bytes

TIMEOUT_S = 3600.0
NEEDED: dict[str, int | None] = {}
"""Device memory of the runs that this process has planned, by their configuration."""


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
    path = None if options.save_preset is None else file_of(options.save_preset, "--save-preset ")
    WORKER.start()  # it imports torch while presets are composed here
    if options.largest:
        return search(options, arguments)
    checked, request, refused = request_of(options)
    if options.solves:
        bases = Bases(bases_among(request.presets), whole_batch=options.whole_batch)
        request = replace(request, presets={**request.presets, SOLVED: bases})
    plans, failed = planned(request, host_of(options), checked.allow, caveats_last=options.all_presets)
    solved = next((plan for plan in plans if plan.configuration is not None and plan.fits), None)
    written = ""
    if path is not None and solved is not None:
        written = f"{solved.preset} is written to {path}, for solo={options.save_preset}{save(solved, path)}"
    elif path is not None:
        written = f"{options.save_preset} isn't written: {failed.get(SOLVED, 'no solved plan fits')}"
        if plans and plans[0].fits:
            written += f"; write {shlex.quote(f'solo={plans[0].preset}')}"
    return show(options, arguments, checked, request, plans, {**refused, **failed}, written=written)


def request_of(options: PlanOptions) -> tuple[CheckedConfig, PlanRequest, dict[str, SoloError]]:
    """Return the application, what to plan, and the errors of presets that refuse the overrides."""
    checked, presets, refused = compose(options)
    request = request_for(checked, presets, options.device, options.budget, options.micro_batch)
    return checked, replace(request, host_memory=host_of(options)), refused


def request_for(
    checked: CheckedConfig,
    presets: Mapping[str, Configuration],
    device: Device | None = None,
    budget: int | None = None,
    micro_batch: int | None = None,
) -> PlanRequest:
    """Return what to plan, by default on this machine's device."""
    of_device: Any = budget if device else Deferred(partial(budget_here, budget))
    return PlanRequest(
        make=partial(model_of, checked),
        batch=partial(first_batch, checked),
        trainer=checked.trainer,
        device=device or Deferred(this_device),
        budget=of_device,
        micro_batch=micro_batch,
        presets=presets,
        host_memory=host_memory()[1] if device is None else None,
    )


def needed_bytes(checked: CheckedConfig) -> int | None:
    """Return the device memory that a run needs by its plan; None if it can't be planned, as with `auto`."""
    presets = {} if checked.solo.auto else {"job": checked.solo}
    if (key := repr(checked)) not in NEEDED:  # jobs that differ in their seed have one plan
        plan = dict(WORKER.answers(request_for(checked, presets), TIMEOUT_S)).get("job")
        NEEDED[key] = plan.needed_bytes if isinstance(plan, Plan) else None
    return NEEDED[key]


def host_of(options: PlanOptions) -> int | None:
    """Return the bytes of host memory; None if they are unknown."""
    local = options.device is None or options.device.name == CPU
    return host_memory()[1] if options.host_memory is None and local else options.host_memory


def show(
    options: PlanOptions,
    arguments: Sequence[str],
    checked: CheckedConfig,
    request: PlanRequest,
    plans: list[Plan],
    failed: Mapping[str, SoloError],
    found: Mapping[str, Any] | None = None,
    written: str = "",
) -> int:
    """Print plans, the largest value of a setting if one was searched, and pictures; return 0 if a preset fits."""
    advice = what_to_write(plans, options.overrides, checked, options.save_preset)
    advice = f"{written}\n{advice}" if written else advice
    pictures = write_pictures(plans, options.picture) if options.picture is not None and plans else []
    if options.as_json:
        plain = as_plain(plans, failed, arguments, advice)
        print(json.dumps(plain if found is None else {**plain, "largest": found}, indent=2))
    else:
        if found is not None:
            print(found["conclusion"])
        print_plans(plans, failed, notes(plans, request.presets, checked.allow), advice)
        for picture in pictures:
            print(f"picture: {picture}")
    return 0 if any(plan.fits for plan in plans) else 1


def search(options: PlanOptions, arguments: Sequence[str]) -> int:
    """Find the largest value of a setting, and print its plan; return 0 if one fits.

    Of several presets, the one that takes least with the first value is planned with all others.

    Raises:
        SoloError: the setting has no number, or a value can't be planned before one has fit.
    """
    setting = setting_of(options)
    tried: dict[int, tuple[Plan, CheckedConfig, PlanRequest]] = {}
    refusals: dict[int, str] = {}
    names = options.presets

    def plan_of(value: int) -> tuple[Plan, CheckedConfig, PlanRequest]:
        checked, request, refused = request_of(replace(setting.options(options, value), presets=names))
        if len(names) > 1 and options.all_presets:
            chosen = {name: preset for name, preset in request.presets.items() if not preset.caveats}
            request = replace(request, presets=chosen or request.presets)
        plans, failed = planned(
            request, host_of(options), checked.allow, caveats_last=options.all_presets, quiet=len(names) == 1
        )
        if not plans:
            raise next(iter({**failed, **refused}.values()))
        return thriftiest(plans), checked, request

    def fits(value: int) -> bool:
        nonlocal names
        try:
            tried[value] = plan, _, _ = plan_of(value)
        except SoloError as error:
            if not any(plan.verdict == "fits" for plan, _, _ in tried.values()):
                raise
            refusals[value] = str(error)
            print(f"{setting.key}={value}: {error}", file=sys.stderr)
            return False
        names = (plan.preset,)
        print(line(setting, value, plan), file=sys.stderr)
        return plan.verdict == "fits"

    value, too_large = largest(fits, setting.value, setting.multiple_of)
    best = value or min(tried)
    plan, checked, request = tried[best]
    found = {
        "setting": setting.key,
        "value": value,
        "too_large": too_large,
        "multiple_of": setting.multiple_of,
        "preset": plan.preset,
        "conclusion": conclusion(setting, value, too_large, plan.preset, refusals.get(too_large or 0, "")),
        "tried": {str(number): tried[number][0].needed_bytes for number in sorted(tried)},
    }
    return show(setting.options(options, best), arguments, checked, request, [plan], {}, found)


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
    request: PlanRequest, host_memory: int | None, allow: Sequence[str], *, caveats_last: bool, quiet: bool = False
) -> tuple[list[Plan], dict[str, SoloError]]:
    """Return the plans, best first, and the errors of the other presets; ``quiet`` omits the progress.

    Raises:
        SoloError: no preset can be planned, for example because the module has no data, or the planning process ended.
    """
    plans: list[Plan] = []
    failed: dict[str, SoloError] = {}
    presets = dict(request.presets)
    progress = Progress(list(request.presets))
    with progress.shown():
        for name, answer in WORKER.answers(request, TIMEOUT_S):
            if isinstance(answer, Plan):
                answer = with_host_memory(answer, host_memory)
                plans.append(answer)
                if answer.configuration is not None:
                    presets[name] = configuration_of(answer, allow)
            else:
                failed[name] = answer
            if name and not quiet:
                progress.tell(name, answer)
    if "" in failed:
        raise failed[""]
    return ranked(plans, presets, caveats_last=caveats_last), failed


def notes(plans: Sequence[Plan], presets: Mapping[str, Configuration], allow: Sequence[str] = ()) -> list[str]:
    """Return lines on presets with several micro-batches per step, on caveats, and on what a solved plan chooses."""
    planned = {
        plan.preset: configuration_of(plan, allow) if plan.configuration else presets[plan.preset] for plan in plans
    }
    factors = {name: configuration.first_factor for name, configuration in planned.items()}
    steps = [f"{name}: an optimizer step takes {count} micro-batches" for name, count in factors.items() if count > 1]
    solved = [
        f"{plan.preset}: {line}" for plan in plans if plan.configuration for line in solved_lines(planned[plan.preset])
    ]
    caveats = [f"{name}: {caveat}" for name, parts in planned.items() for caveat in parts.without_engine.caveats]
    return steps + caveats + solved  # an assumption says of how many processes an engine's plan is


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
