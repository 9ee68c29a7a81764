"""`lightning-solo train`: trains a module under a preset, as a Hydra application, and prints a summary."""

from __future__ import annotations

import csv
import inspect
import os
import shlex
import sys
import textwrap
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra._internal import utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_solo.atomic_files import read_json, write_json
from lightning_solo.attributes import replaced
from lightning_solo.build import make, trainer_arguments
from lightning_solo.cards.catalogue import built_in_cards, load_class
from lightning_solo.cards.configuration import Configuration
from lightning_solo.checkpoint.damage import LAST
from lightning_solo.cli import INTERRUPTED, TERMINATED, refuse
from lightning_solo.cli.application import search_path_override
from lightning_solo.cli.command_line import (
    CheckedConfig,
    check_command_line,
    check_config,
    chosen_batch,
    composed_once,
    split,
)
from lightning_solo.cli.run_folder import RunFolder, is_first_rank, name_by_launcher
from lightning_solo.errors import CheckpointError, PresetError, SoloError, nearest
from lightning_solo.presets.compose import VERSION_BASE, explained
from lightning_solo.presets.files import conf_folder
from lightning_solo.presets.spelling import on_command_line
from lightning_solo.requirements import check_machine
from lightning_solo.secret_values import without_secrets
from lightning_solo.sweeps.job_process import RESUMES
from lightning_solo.sweeps.results import is_validation_loss
from lightning_solo.tables import Cell, Table, size, terminal

AUTO_FILE = "auto.json"
"""File in a run's folder with the plan of the preset that `auto` chose."""
DATA_FILE = "data.txt"
"""File in a run's folder with the whole report on its data, if the data makes one."""
FILE_WIDTH = 120
# Modules that the process which forks a sweep's jobs imports once for all of them
PRELOAD = ("lightning.pytorch", "lightning_solo.reference.byte_gpt", "lightning_solo.reference.stdlib_text")


def run(arguments: Sequence[str]) -> int:
    """Train once, or let Hydra run a command line with its flags, such as ``-m`` for a sweep."""
    arguments = as_given(arguments)
    flags, overrides = split(arguments)
    if not flags and not any(text.startswith("hydra.mode=") for text in overrides):
        with composed_once(overrides) as (cfg, checked, context):
            if cfg.hydra.mode == RunMode.RUN:  # else an experiment is a search
                job = run_job(partial(_job, checked=checked), cfg, "hydra.run.dir", None, context)
                _ = job.return_value  # raises the job's exception
                return 0
    check_command_line(arguments)
    sys.argv = ["lightning-solo train", *flags, *search_path_override(overrides), *overrides]
    application = hydra.main(config_path=str(conf_folder() / "app"), config_name="train", **VERSION_BASE)(_job)
    try:
        # Hydra's own would print a hint about its traces, and exit with 1 also where a sweep is refused
        with replaced(hydra_utils, "run_and_report", lambda function: function()):
            application()
    except CompactHydraException as error:
        if isinstance(error.__context__, SoloError):
            refuse(str(error))
        print(without_secrets(explained(error)), file=sys.stderr)
        return 1
    return 0


def as_given(arguments: Sequence[str]) -> list[str]:
    """Return the user's arguments, with the name of the run if its processes wouldn't choose the same one.

    Lightning starts it with the command of the first process and three overrides: ``hydra.run.dir`` of the first,
    ``hydra.job.name=train_ddp_process_1`` and ``hydra.output_subdir=null``.
    """
    if not any(text.startswith("run=") for text in arguments) and (name := name_by_launcher()) is not None:
        return [*arguments, f"run={name}"]
    if is_first_rank() or not any(text.startswith("hydra.job.name=train_ddp_process_") for text in arguments):
        return list(arguments)
    *given, folder = arguments[:-2]
    if not any(text.startswith("run=") for text in given):  # the default is the time
        given.append(f"run={Path(folder.partition('=')[2].strip(chr(34))).name}")
    return given


def planned_bytes(cfg: DictConfig) -> int | None:
    """Return the device memory that a sweep's job needs by its plan, to pack jobs by it; None if it has no plan."""
    from lightning_solo.cli.plan import needed_bytes  # which imports this module

    with suppress(SoloError):  # the job itself says what is wrong
        return needed_bytes(check_config(cfg))
    return None


def _job(cfg: DictConfig, checked: CheckedConfig | None = None) -> float | None:
    if RESUMES in os.environ:  # a job of a sweep that is attempted again
        cfg.resume = "auto"
    try:
        return train(cfg, Path(HydraConfig.get().runtime.output_dir), checked)
    except SoloError as error:
        if HydraConfig.get().mode == RunMode.RUN:
            refuse(str(error))
        raise CompactHydraException(
            on_command_line(str(error))
        ) from None  # the sweep continues; Hydra prints this kind without a trace


def train(cfg: DictConfig, folder: Path, checked: CheckedConfig | None = None) -> float | None:
    """Train in ``folder`` and return the metric that a search monitors, or None if it was not logged.

    ``checked`` are the checked parts of ``cfg``; by default they are checked here.

    Raises:
        SoloError: a refused choice, machine or run to resume.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, with the last checkpoint saved.
    """
    checked = checked or check_config(cfg)
    if cfg.get("optimizer") and not checked.optimizer:
        cfg.optimizer = {}  # the model doesn't use the default
    with RunFolder(folder) as run_folder:
        return _train(cfg, checked, run_folder)


def _train(cfg: DictConfig, checked: CheckedConfig, run_folder: RunFolder) -> float | None:
    folder, checkpoint = run_folder.path, run_folder.open(cfg)
    plan_checks: list[Any] = []
    if checked.solo.auto is not None:
        resumes = checkpoint is not None and cfg.resume != "override"
        solo, plan_checks = chosen(checked, folder / AUTO_FILE, resumes=resumes)
        if resumes:
            from lightning_solo.planner.auto import check_room

            check_room(plan_checks[0].plan, checked.solo.auto)
        checked = replace(checked, solo=solo)
    often = checked.trainer.get("log_every_n_steps") or 50  # like other logs; 0 means never
    watch = [] if checked.solo.has("throughput") else [load_class(built_in_cards()["throughput"])(every_n_steps=often)]
    safe = []
    for card in (built_in_cards()[name] for name in fault_tolerance() if cfg.fault_tolerance):
        if checked.solo.has(card.name):
            continue
        safe.append(card.name)
        if is_first_rank():
            print(f"{card.name}: costs {card.costs}".replace("``", ""))
    if safe and is_first_rank():
        print("fault_tolerance=false leaves these techniques out")
    check_machine(checked.solo)
    import lightning as L
    from lightning.pytorch.callbacks import LambdaCallback

    from lightning_solo.seams import patches
    from lightning_solo.seams.homes import fabric_part, home_of, part

    quieten()
    L.seed_everything(cfg.seed, workers=True, verbose=False)
    model, data = build_parts(checked)
    for each in (model, data):
        patches.change_logged_hyperparameters(each, without_secrets)
    home = home_of(model)  # its Trainer accepts the module
    misconfigured = fabric_part(home, "utilities.exceptions").MisconfigurationException
    callbacks = [*watch, *plan_checks, *(load_class(built_in_cards()[name])() for name in safe)]
    callbacks += [*averaging(checked), *checkpoint_callbacks(cfg, checked, run_folder, plan_checks, home)]
    callbacks.append(data_report(folder))
    began: list[int] = []  # at which step
    callbacks.append(LambdaCallback(on_train_start=lambda trainer, _: began.append(trainer.global_step)))
    kwargs = trainer_arguments(checked.solo, callbacks=callbacks, lightning=home)
    own = own_arguments(folder, home, resumes=checkpoint is not None)
    try:
        trainer = part(home, "trainer").Trainer(**{**own, **checked.trainer, **kwargs})
    except (ImportError, misconfigured, TypeError, ValueError) as error:
        raise PresetError(f"trainer: {error}") from error
    started = time.monotonic()
    try:
        trainer.fit(model, data, ckpt_path=checkpoint, weights_only=True)
    except SoloError as error:
        for name in safe:  # which no override has added
            error.args = (str(error).replace(f"~callback.{name}", "fault_tolerance=false"),)
        raise
    except misconfigured as error:
        raise PresetError(_unlogged(cfg.monitor, trainer.callback_metrics) or str(error)) from error
    except RuntimeError as error:
        if checkpoint is not None and str(error).startswith("Error(s) in loading state_dict"):
            raise CheckpointError(_of_another_model(checkpoint, str(error))) from error
        if not str(error).startswith("Error while merging hparams"):
            raise
        raise PresetError(
            f"{type(model).__name__} and {type(data).__name__}: {error} Write the same value for both, or"
            " self.save_hyperparameters(logger=False) in one"
        ) from error
    except SystemExit as exit_:
        sigterm = part(home, "utilities.exceptions").SIGTERMException  # Lightning's, whose status would be 0
        terminated = isinstance(exit_, sigterm)
        interrupted = isinstance(exit_.__context__, KeyboardInterrupt)
        if not terminated and not interrupted and exit_.code not in (TERMINATED, INTERRUPTED):
            raise
        _say_interrupted(trainer, run_folder)
        raise SystemExit(TERMINATED if terminated or exit_.code == TERMINATED else INTERRUPTED) from None
    metrics: Mapping[str, Any] = trainer.callback_metrics
    if checkpoint is not None and not began:
        print(
            f"nothing was trained: the run had finished, after {trainer.global_step} steps; to go on, write a larger"
            " trainer.max_steps or trainer.max_epochs"
        )
        from lightning_solo.sweeps.observer import job_metrics

        metrics = job_metrics() or metrics  # of the interrupted attempt
    peaks = largest_peaks(trainer)
    if trainer.is_global_zero:
        print_summary(trainer, data, folder, time.monotonic() - started, peaks, resumed_at=began[0] if began else 0)
    return objective(metrics, HydraConfig.get().sweeper.get("monitor"))


def averaging(checked: CheckedConfig) -> list[Any]:
    """Return the callback that validates and saves the average of an optimizer that has one."""
    if checked.optimizer.get("name") != "schedule_free_adamw":
        return []
    from lightning_solo.seams.averaged_weights import AveragedWeights

    return [AveragedWeights()]


def fault_tolerance() -> list[str]:
    """Return the names of the techniques of the preset `fault_tolerance`, without composing it."""
    defaults = OmegaConf.load(conf_folder() / "library" / "solo" / "fault_tolerance.yaml").defaults
    return [name for entry in defaults if OmegaConf.is_dict(entry) for name in entry.get("callback", ())]


def chosen(checked: CheckedConfig, file: Path, *, resumes: bool) -> tuple[Configuration, list[Any]]:
    """Return the preset that `auto` chooses, and the callbacks that check its plan. A resumed run keeps its preset.

    Raises:
        BudgetError: no preset fits.
        PlanError: the model can't be planned.
    """
    from lightning_solo.planner.auto import candidates, choose
    from lightning_solo.planner.bases import configuration_of
    from lightning_solo.planner.plan import Plan
    from lightning_solo.planner.plan_check import PlanCheck

    before = read_json(file) if resumes else None
    if before is not None:
        plan = Plan.from_dict(before)
        if plan.configuration is not None:
            return configuration_of(plan, checked.allow), [PlanCheck(plan)]
        return candidates(checked.solo, check_machine, [plan.preset], checked.allow)[plan.preset], [PlanCheck(plan)]
    _, config, plan = choose(
        checked.solo,
        partial(model_of, checked),
        partial(first_batch, checked),
        check=check_machine,
        trainer=checked.trainer,
        allow=checked.allow,
    )
    return config, [PlanCheck(plan)]


def objective(metrics: Mapping[str, Any], monitor: str | None) -> float | None:
    """Return the last value of the metric that a search monitors, by default that of a validation loss.

    >>> objective({"train_loss": 1.0, "val_loss": 2.0, "val_accuracy": 0.5}, None)
    2.0
    """
    names = (name for name in metrics if name == monitor or (monitor is None and is_validation_loss(name)))
    return next((float(metrics[name]) for name in names), None)


def _of_another_model(path: str, error: str) -> str:
    """Return the message for a checkpoint of other weights: the first keys and shapes that differ."""
    differences = [line.strip() for line in error.splitlines()[1:] if line.strip()]
    shown = [textwrap.shorten(line, 300, placeholder=" ...") for line in differences[:10]]
    left = f"\n  and {len(differences) - 10} more" if len(differences) > 10 else ""
    return (
        f"{path} is of another model:\n  " + "\n  ".join(shown) + f"{left}\nwrite the former model's settings, or train"
        " this one in another folder: run=..."
    )


def _unlogged(monitor: str, metrics: Mapping[str, Any]) -> str | None:
    """Return the message for a metric that is monitored but not logged; None for one that is."""
    if monitor == "auto" or monitor in metrics or not metrics:
        return None
    return f"monitor={monitor}: the module doesn't log that{nearest(monitor, metrics)}it logs {', '.join(metrics)}"


def quieten() -> None:
    """Silence warnings that a user can't act on."""
    warnings.filterwarnings("ignore", message="Precision .* is not supported by the model summary")
    warnings.filterwarnings("ignore", message=".*LeafSpec.* is deprecated")  # Lightning 2.6 on torch 2.13


def build_parts(checked: CheckedConfig, *, announces: bool = True) -> tuple[Any, Any]:
    """Return (module, data module); the data module is None if the module has its own loaders.

    Where it could be either, a line says which, unless this isn't announced.
    """
    arguments = dict(checked.model)
    if "optimizer" in arguments:
        optimizer = checked.optimizer
        arguments["optimizer"] = make("optimizer", optimizer, allow=checked.allow, partial=True) if optimizer else None
    if not arguments:
        raise PresetError("model: none chosen; write model=byte_gpt_tiny, or model=custom model._target_=...")
    model = make("model", arguments, allow=checked.allow)
    if "_target_" in arguments and checked.data.get("name") == "stdlib_text":
        if brings_data(model):
            _refuse_unused_batch(checked, type(model).__name__)
            if announces:
                print(f"data: {type(model).__name__}'s train_dataloader, which sets the batch size")
            return model, None
        if announces:
            print(
                f"data: batches of bytes of the embedded text, because {type(model).__name__} has no train_dataloader;"
                " for your own data write data=custom data._target_=my_project.MyData"
            )
    data = make("data", checked.data, allow=checked.allow) if checked.data else None
    if data is None and not brings_data(model):
        raise PresetError(
            f"data=none: {type(model).__name__} has no train_dataloader; write data=custom"
            " data._target_=my_project.MyData"
        )
    return model, data


def _refuse_unused_batch(checked: CheckedConfig, module: str) -> None:
    """Refuse ``data.batch_size`` if the module has its own loader, so that the default text data isn't used."""
    batch = chosen_batch(checked)
    if batch is not None:
        arguments = inspect.signature(get_object(checked.model["_target_"])).parameters
        near = [f"{'' if name in checked.model else '+'}model.{name}={batch}" for name in arguments if "batch" in name]
        raise PresetError(
            f"data.batch_size={batch}: the train_dataloader of {module} sets the batch size; drop data.batch_size and"
            f" use an argument of {module}: {' or '.join(near) or ', '.join(arguments)}"
        )


def model_of(checked: CheckedConfig) -> Any:
    """Return the module."""
    return build_parts(checked)[0]


def first_batch(checked: CheckedConfig) -> Any:
    """Return the first training batch; a model that has its own data is built with empty parameters."""
    from lightning_solo.planner.fake_modules import empty_parameters

    with empty_parameters():
        model, data = build_parts(checked)
    source = model if data is None else data
    if not hasattr(source, "train_dataloader"):  # a loader
        return next(iter(source))
    source.prepare_data()
    source.setup("fit")
    return next(iter(source.train_dataloader()))


def brings_data(model: Any) -> bool:
    """Return whether a module has a `train_dataloader`, which a data module would silently replace."""
    from lightning_solo.seams.homes import home_of, part

    return bool(part(home_of(model), "utilities.model_helpers").is_overridden("train_dataloader", model))


def own_arguments(folder: Path, home: str = "lightning.pytorch", *, resumes: bool = False) -> dict[str, Any]:
    """Return the Trainer's folder and loggers."""
    from lightning_solo.seams.homes import part

    tensorboard = part(home, "loggers").TensorBoardLogger(str(folder), name="tensorboard", version="")
    return {"default_root_dir": str(folder), "logger": [csv_logger(folder, home, resumes=resumes), tensorboard]}


def csv_logger(folder: Path, home: str = "lightning.pytorch", *, resumes: bool) -> Any:
    """Return the logger of ``csv/metrics.csv``; a resumed run continues the file, which Lightning would delete."""
    from lightning_solo.seams.homes import part

    logger = part(home, "loggers").CSVLogger(str(folder), name="csv", version="")
    file = folder / "csv" / "metrics.csv"
    if not resumes or not file.exists():
        return logger
    kept = file.replace(file.with_suffix(".before_resume"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Experiment logs directory")  # about deleted files
        writer: Any = logger.experiment
    text = kept.read_text(encoding="utf-8")
    kept.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")  # an interrupted run may end in half a line
    kept.replace(file)
    writer.metrics_keys = next(csv.reader([text.partition("\n")[0]]))
    return logger


def checkpoint_callbacks(
    cfg: DictConfig, checked: CheckedConfig, run_folder: RunFolder, plan_checks: Sequence[Any], home: str
) -> list[Any]:
    """Return the callbacks that save the best and the last checkpoint, the last one also after Ctrl-C and errors.

    They save after each validation; without one as often as it would come, or after each epoch. When training starts,
    they write the run's configuration, and the plan of the preset that `auto` chose.
    """
    from lightning.pytorch.callbacks import LambdaCallback

    from lightning_solo.seams.homes import part
    from lightning_solo.seams.patches import correct_logged_steps

    ours = "name" in checked.model  # all of which log it
    monitor = ("validation/loss" if ours else None) if cfg.monitor == "auto" else cfg.monitor
    best = part(home, "callbacks").ModelCheckpoint(
        dirpath=str(run_folder.last.parent),
        filename="{step}",
        monitor=monitor,
        save_last=True,
        enable_version_counter=False,
    )

    def save_without_validation(trainer: Any, _: Any, stage: str) -> None:
        """Save as often as validation would come; before a checkpoint is read, whose key has the interval."""
        if trainer.enable_validation:  # there is data for it, and a step
            return
        batches = getattr(trainer, "val_check_interval", None)  # unset for an interval of time
        if isinstance(batches, int):
            best._every_n_train_steps = max(1, batches // trainer.accumulate_grad_batches)
        else:
            best._save_on_train_epoch_end = True

    def begun(*_: Any) -> None:
        run_folder.write(cfg)  # a resumed run has read its checkpoint only now
        for check in plan_checks:
            write_json(run_folder.path / AUTO_FILE, check.plan.as_dict())

    def save_on_exception(*_: Any) -> None:
        # Before the first batch there is nothing to save, and a refused resume has other states than the file
        best.save_on_exception = True

    # ModelCheckpoint saves after each validation; on_train_end saves the steps after the last one
    end = LambdaCallback(
        setup=save_without_validation,
        on_train_start=begun,
        on_train_batch_start=correct_logged_steps,
        on_train_batch_end=save_on_exception,
        on_train_end=lambda trainer, _: trainer.save_checkpoint(run_folder.last, weights_only=False),
    )
    return [best, end]


def data_report(folder: Path) -> Any:
    """Return a callback that prints the data's report before training, and writes the whole of it to `DATA_FILE`."""
    from lightning.pytorch.callbacks import LambdaCallback

    def show(trainer: Any, _: Any) -> None:
        report = getattr(trainer.datamodule, "report", None)
        if report is None:
            return
        for table in report.tables():
            Console(markup=False).print(terminal(table))
        with (folder / DATA_FILE).open("w", encoding="utf-8") as file:
            for table in report.tables(tokens=None):
                Console(file=file, markup=False, width=FILE_WIDTH).print(terminal(table))

    return LambdaCallback(on_fit_start=show)


def _say_interrupted(trainer: Any, run_folder: RunFolder) -> None:
    console = Console(stderr=True, markup=False)  # names and overrides may have brackets
    saved = run_folder.last
    if not saved.exists():
        console.print(f"interrupted before the first step; nothing to save in {run_folder.path}")
        return
    console.print(f"interrupted at step {trainer.global_step}; saved {saved}", soft_wrap=True, highlight=False)
    if HydraConfig.get().mode == RunMode.RUN:
        written: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        overrides = [text for text in written if not text.startswith(("run=", "resume="))]
        again = shlex.join([*overrides, f"run={run_folder.path.name}", "resume=auto"])
        console.print(f"resume with: lightning-solo train {again}", style="bold", soft_wrap=True, highlight=False)


def largest_peaks(trainer: Any) -> dict[str, int | None]:
    """Return the peaks of device and host memory, in bytes, of the process that took most; all must call it."""
    from lightning_solo.memory.reading import read
    from lightning_solo.seams.engines import largest

    reading = read(trainer.strategy.root_device)
    peaks = {"device": reading.peak_allocated, "this process": reading.peak_resident}
    return largest(trainer, peaks)


def print_summary(
    trainer: Any, data: Any, folder: Path, seconds: float, peaks: Mapping[str, int | None], resumed_at: int = 0
) -> None:
    """Print the final table of metrics and costs, and the paths of the written files.

    ``peaks`` are of memory; the ``seconds`` are those since the step ``resumed_at``.
    """
    from lightning_solo.sweeps.observer import figures

    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    cells = [
        (Cell(name), Cell(f"{value:.3g}" if 0 < abs(value) < 1e-3 else f"{value:.4f}", value))
        for name, value in sorted(metrics.items())
    ]
    unigram = getattr(data, "unigram_perplexity", None)
    if unigram is not None:
        cells.append((Cell("perplexity of byte frequencies alone"), Cell(f"{unigram:.4f}", unigram)))
    where = "device" if peaks["device"] else "this process"
    peak = peaks[where]
    cells.append((Cell(f"peak memory, {where}"), size(peak or 0)))
    cells += [(Cell(name), Cell(f"{value:,.2f}", value)) for name, value in figures(trainer).items()]
    before = f" after the {resumed_at} of its checkpoint" if resumed_at else ""
    title = f"{folder.name}: {trainer.global_step - resumed_at} optimizer steps in {seconds:.0f} s{before}"
    console = Console(markup=False)
    console.print(terminal(Table(title, ("what", "value"), cells)))
    for what, path in written(trainer, folder).items():
        console.print(f"{what}: {path}", soft_wrap=True, highlight=False)


def written(trainer: Any, folder: Path) -> dict[str, Path]:
    """Return description -> path of each written file."""
    callback = trainer.checkpoint_callback
    paths = {
        "best checkpoint": Path(callback.best_model_path) if callback and callback.best_model_path else None,
        "last checkpoint": folder / LAST,
        "metrics": folder / "csv" / "metrics.csv",
        "TensorBoard": folder / "tensorboard",
        "memory": folder / "csv" / "memory.csv",
        "data": folder / DATA_FILE,
        "configuration": folder / "config.yaml",
    }
    return {what: path for what, path in paths.items() if path is not None and path.exists()}
