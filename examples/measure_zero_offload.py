"""Measures ZeRO-Offload against its targets, through our own strategy, each case in a fresh process.

parity         50 optimizer steps beside a plain run: fp32 beside Lightning's own, bf16 weights with an fp32 master
               beside the same written by hand in plain torch
start_up       seconds until the first optimizer step is done, beside the preset `bf16`
host_bytes     peak of the host's memory while the engine is made, trains and ends, beside what the strategy foretells
device_states  weights, gradients and buckets on the device, beside the model states of the preset `bf16`
speed          tokens per second of 8b-shaped blocks, beside the loop of DeepSpeed's own tutorial; on CUDA only

    python examples/measure_zero_offload.py                             # what runs here, to examples/results/
    python examples/measure_zero_offload.py --only parity,start_up      # the other parts of the file stay
    python examples/measure_zero_offload.py --smoke                     # tiny, to see that every part runs
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.nn.functional as F
from measure_callbacks import processor
from measure_zero_host import forget_peak, status
from rich.console import Console
from rich.table import Table
from this_machine import machine, versions
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.machine import host_memory
from lightning_solo.memory.ledger import Ledger
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.reference.stdlib_text import StdlibText
from lightning_solo.techniques.zero_offload import technique as zero_offload
from lightning_solo.units import GiB, format_bytes
from lightning_solo.zero.budget import layout_of
from lightning_solo.zero.config import BUCKET_ELEMENTS
from lightning_solo.zero.extension import load_extension, what_is_missing
from lightning_solo.zero.layout import ZeroLayout, ZeroSettings, zero_layout

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
TARGETS = {"parity": 1e-3, "start_up": 10.0, "host_bytes": 0.10, "device_states": 0.35, "speed": 1.0}

# What is offloaded -> preset, and what is written behind it
LAYOUTS: dict[str, tuple[str, list[str]]] = {
    "stage 2": ("zero_offload", []),
    "stage 3": ("zero_offload", ["strategy.stage=3"]),
    "stage 3, parameters": ("zero_offload_parameters", []),
    "stage 3, NVMe": ("zero_offload_nvme", []),
}
SMALL = {"width": 128, "depth": 2, "heads": 4, "context": 64, "batch_size": 8}
FEW_ACTIVATIONS = {"width": 768, "heads": 12, "context": 8, "batch_size": 1}
SIZES: dict[str, dict[str, Any]] = {
    "parity": {**SMALL, "steps": 50, "clip": 0.5},
    "start_up": {**SMALL, "runs": 3},
    "host_bytes": {**FEW_ACTIVATIONS, "depth": 12, "steps": 3},  # 85 M parameters
    "device_states": {**FEW_ACTIVATIONS, "depth": 17, "steps": 2},  # 121 M
    # Llama 3 8B's block
    "speed": {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "context": 2048, "batch_size": 1, "steps": 8},
}
TINY = {"width": 32, "depth": 2, "heads": 2, "context": 16, "batch_size": 2}
SMOKE: dict[str, dict[str, Any]] = {
    "parity": {**TINY, "steps": 4, "clip": 0.5},
    "start_up": {**TINY, "runs": 1},
    "host_bytes": {**TINY, "steps": 2},
    "device_states": {**TINY, "steps": 2},
    "speed": {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "context": 32, "batch_size": 1, "steps": 2},
}
# Byte GPTs that are only counted: 1 B and 7 B parameters
LARGER = ({"width": 2048, "depth": 20, "heads": 16}, {"width": 4096, "depth": 35, "heads": 32})
# Blocks of more than 1 MiB go back to the system when they are freed, as in examples/measure_zero_host.py. Otherwise
# glibc keeps holes in its heap where autograd's gradients were, at random up to a fifth of the peak; with CUDA they
# lie on the device.
NO_HOLES = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
SPEED_LAYOUTS = ("stage 2", "stage 3, parameters")
SPEED_WARM_UP = 2
BLOCKS = 32  # of Llama 3 8B
# DeepSpeed's own default, which its tutorial leaves as it is, and ours
BUCKETS = {"5e8": 500_000_000, "5e7": BUCKET_ELEMENTS}
# bf16 tensors that autograd keeps of a block, in widths: two norms in and out, query, attention out and in, residual;
# the MLP's four are counted in its hidden width.
SAVED_WIDTHS, SAVED_HIDDEN = 10, 4

Run = Callable[[dict[str, Any]], dict[str, Any]]
Row = dict[str, Any]


# --- in the child: a model, data and a Trainer ---


class Watch(L.Callback):
    """Losses of the micro-batches, norms of the gradients where they are to be seen, and when each step was done."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.done: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if gradients:  # DeepSpeed has taken them
            self.norms.append(float(get_total_norm(gradients)))

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if CUDA:
            torch.cuda.synchronize()
        self.done.append(time.perf_counter())
        self.losses.append(float(trainer.callback_metrics["train/loss"]))


def text(case: Row) -> StdlibText:
    """Return batches in an order that is the same each time."""
    data = StdlibText(context=case["context"], batch_size=case["batch_size"], max_bytes=1_000_000)
    data.setup("fit")
    return data


def byte_gpt(case: Row) -> ByteGPT:
    """Return a model on the host with the same weights each time."""
    torch.manual_seed(0)
    return ByteGPT(**{key: case[key] for key in ("width", "depth", "heads", "context")}, warmup_steps=5)


def trainer_of(preset: str, overrides: Sequence[str] = (), *, callbacks: Sequence[Any] = (), **given: Any) -> L.Trainer:
    """Return a quiet Trainer under a preset; where it is a ZeRO-Offload one, a CPU will do."""
    on_cpu = ["strategy.allow_cpu=true"] if preset.startswith("zero_offload") and not CUDA else []
    return L.Trainer(
        **solo.trainer_kwargs(preset, [*overrides, *on_cpu], callbacks=callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **given,
    )


def trainer_in(case: Row, **given: Any) -> L.Trainer:
    """Return a Trainer for the case's layout, precision and accumulation."""
    preset, overrides = LAYOUTS[case["layout"]]
    if "nvme_path" in case:
        overrides = [*overrides, f"strategy.nvme_path={case['nvme_path']}"]
    overrides = [*overrides, f"precision={case['precision']}"]
    return trainer_of(preset, overrides, accumulate_grad_batches=case["accumulation"], **given)


def bytes_of(tensors: Any) -> int:
    """Return the bytes of tensors, a storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


# --- parity ---


@dataclass
class Trained:
    """What a run ended with: losses of its micro-batches, norms before clipping, weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters on the host."""
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters()}


def train_under(trainer: L.Trainer, watch: Watch, case: Row) -> Trained:
    """Train under a Trainer."""
    module = byte_gpt(case)
    trainer.fit(module, text(case))
    return Trained(watch.losses, watch.norms, weights_of(module))


def train_by_hand(case: Row) -> Trained:
    """Train with bf16 weights and an fp32 master in plain torch.

    Gradients are what autograd gives, and are summed over micro-batches in bf16, as DeepSpeed does (its
    ``grad_accum_dtype`` is the weights'); then fp32: clipping, AdamW on the masters, and the copy back.
    """
    master, weights = byte_gpt(case).to(DEVICE), byte_gpt(case).to(DEVICE, torch.bfloat16)
    steps, accumulation = case["steps"], case["accumulation"]
    trainer = trainer_of("baseline", max_steps=steps)  # only tells the schedule how long it is
    master.trainer = trainer
    configured = master.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    trained = Trained([], [], {})
    batches = iter(text(case).train_dataloader())
    for _ in range(steps):
        weights.zero_grad()
        for batch in islice(batches, accumulation):
            loss = weights.loss(batch.to(DEVICE))
            (loss / accumulation).backward()
            trained.losses.append(loss.item())
        for mine, low in zip(master.parameters(), weights.parameters(), strict=True):
            assert low.grad is not None
            mine.grad = low.grad.float()
        trained.norms.append(float(clip_grad_norm_(master.parameters(), case["clip"] or float("inf"))))
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for mine, low in zip(master.parameters(), weights.parameters(), strict=True):
                low.copy_(mine)
    trained.weights = weights_of(master)
    return trained


def measure_parity(case: Row) -> Row:
    """Train every layout at one precision, and beside each accumulation and clipping one plain run."""
    rows = []
    for accumulation in (1, 4):
        for clip in (None, case["clip"]):
            one = {**case, "accumulation": accumulation, "clip": clip}
            given = {"max_steps": case["steps"], "gradient_clip_val": clip}
            if case["precision"] == "bf16-mixed":
                plain = train_by_hand(one)
            else:
                watch = Watch()
                trainer = trainer_of("baseline", callbacks=[watch], accumulate_grad_batches=accumulation, **given)
                plain = train_under(trainer, watch, one)
            for layout in case["layouts"]:
                watch = Watch()
                trainer = trainer_in({**one, "layout": layout}, callbacks=[watch], **given)
                found = train_under(trainer, watch, one)
                rows.append(
                    {"layout": layout, "accumulation": accumulation, "clip": clip, **compare(found, plain, one)}
                )
    return {"rows": rows}


def compare(found: Trained, plain: Trained, case: Row) -> Row:
    """Return how far a run is from a plain one; a step's loss is the mean over its micro-batches."""
    steps = zip(*(means(run.losses, case["accumulation"]) for run in (found, plain)), strict=True)
    differences = [(ours, theirs, abs(ours / theirs - 1)) for ours, theirs in steps]
    final, plain_final, difference = differences[-1]
    # Of a parameter's largest value: single elements may be as near to zero as one likes. The keys' biases differ the
    # most: softmax takes no notice of them, so their gradients are rounding errors, to which AdamW gives a full step.
    apart = {
        name: float((found.weights[name] - value).abs().max() / value.abs().max())
        for name, value in plain.weights.items()
    }
    worst = max(apart, key=apart.__getitem__)
    ours, theirs = (torch.cat([run.weights[name].flatten() for name in apart]) for run in (found, plain))
    return {
        "loss_at_first": differences[0][1],
        "loss": final,
        "plain_loss": plain_final,
        "relative_difference": difference,
        "largest_relative_difference_of_a_step": max(d for _, _, d in differences),
        "largest_relative_difference_of_weights": apart[worst],
        "of_parameter": worst,
        "relative_difference_of_all_weights": float((ours - theirs).norm() / theirs.norm()),
        "steps_clipped": sum(norm > case["clip"] for norm in plain.norms) if case["clip"] else 0,
    }


def means(values: Sequence[float], size: int) -> list[float]:
    """Return the means of ``size`` values each."""
    return [statistics.fmean(values[i : i + size]) for i in range(0, len(values), size)]


def parity(run: Run, size: Row) -> list[Row]:
    """Return a row for each layout, precision, accumulation and clipping; a process for each precision."""
    rows = []
    for precision in ("32-true", "bf16-mixed"):
        case = {"part": "parity", "precision": precision, "layouts": list(LAYOUTS)[:3], **size}
        done = run(case)
        beside = "by hand in torch" if precision == "bf16-mixed" else "plain Lightning"
        for row in done.get("rows", [done]):
            met = row.get("relative_difference", 1.0) <= TARGETS["parity"]
            rows.append({"precision": precision, "beside": beside, **row, "met": met})
    return rows


# --- start-up ---


def measure_start_up(case: Row) -> Row:
    """Return the seconds from `Trainer.fit` to the end of the first optimizer step."""
    watch = Watch()
    if case["layout"] == "plain":
        trainer = trainer_of("bf16", callbacks=[watch], max_steps=1)
    else:
        trainer = trainer_in(case, callbacks=[watch], max_steps=1)
    module, data = byte_gpt(case), text(case)
    started = time.perf_counter()
    trainer.fit(module, data)
    return {"fit_s": watch.done[0] - started}


def start_up(run: Run, size: Row) -> list[Row]:
    """Return for each layout the medians of the seconds that it takes above the preset `bf16`."""
    case = {"part": "start_up", "precision": "bf16-mixed", "accumulation": 1, **size}
    run({**case, "layout": "stage 2"})  # builds the extension where it is not yet there
    found: dict[str, list[Row]] = {layout: [] for layout in ("plain", "stage 2", "stage 3")}
    for _ in range(size["runs"]):  # in turns, so that what else the machine does hits all of them
        for layout, runs in found.items():
            runs.append(run({**case, "layout": layout}))
    failed = [one for runs in found.values() for one in runs if "failed" in one]
    if failed:
        return [{**failed[0], "met": False}]
    rows = []
    for layout in ("stage 2", "stage 3"):
        row: Row = {"layout": layout}
        for what in ("fit_s", "process_s"):
            ours, plain = ([one[what] for one in found[name]] for name in (layout, "plain"))
            row |= {what: statistics.median(ours), f"plain_{what}": statistics.median(plain), f"{what}_of_runs": ours}
            row[f"above_{what}"] = row[what] - row[f"plain_{what}"]
        # The process counts too: DeepSpeed is imported before `fit`.
        rows.append({**row, "met": max(row["above_fit_s"], row["above_process_s"]) <= TARGETS["start_up"]})
    return rows


# --- bytes on the host ---


class HostPeaks(L.Callback):
    """The host's peak in bytes while the engine was made, while it trained, and while it was taken away."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.files = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.take("start")

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.take("training")
        path: Any = getattr(trainer.strategy, "nvme_path", None)
        if path is not None:
            self.files = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())

    def take(self, moment: str) -> None:
        """Note the peak since the last one."""
        self.peaks[moment] = status("VmHWM")
        forget_peak()


class PinnedHostPeaks(HostPeaks):
    """As `HostPeaks`, where page-locked memory is not part of the resident set: both are read together, each 5 ms."""

    def __init__(self) -> None:
        super().__init__()
        self.highest = 0
        threading.Thread(target=self.sample, daemon=True).start()

    def sample(self) -> None:
        """Look again and again."""
        while True:
            self.highest = max(self.highest, resident())
            time.sleep(0.005)

    def take(self, moment: str) -> None:
        """Note the peak since the last one."""
        self.peaks[moment], self.highest = max(self.highest, resident()), 0


def pinned_bytes() -> int:
    """Return what torch has page-locked, in use or kept for later."""
    stats: Any = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0))


def resident() -> int:
    """Return the bytes of this process on the host, page-locked ones included."""
    return status("VmRSS") + (pinned_bytes() if CUDA and not pinned_is_resident() else 0)


@cache
def pinned_is_resident() -> bool:
    """Tell whether page-locked memory counts in the resident set here, which depends on CUDA's driver: by trying."""
    before = status("VmRSS")
    probe = torch.ones(2**26, dtype=torch.uint8).pin_memory()  # 64 MiB; what it is copied from is given back at once
    grown = status("VmRSS") - before
    del probe
    return grown >= 2**25


@contextmanager
def layouts_seen() -> Iterator[list[ZeroLayout]]:
    """Yield a list into which the layouts come that the strategy foretells."""
    seen: list[ZeroLayout] = []

    def foretold(*args: Any, **kwargs: Any) -> ZeroLayout:
        seen.append(layout_of(*args, **kwargs))
        return seen[-1]

    with patch.object(zero_offload, "layout_of", foretold):
        yield seen


def measure_host_bytes(case: Row) -> Row:
    """Return the growth of the host's memory, from a module that lies there, beside what the strategy foretold."""

    def fit(one: Row, callbacks: list[Any]) -> tuple[L.LightningModule, ZeroLayout, int]:
        module = byte_gpt(one)
        if one["frozen"]:
            module.blocks[: len(module.blocks) // 2].requires_grad_(False)
        own = bytes_of([*module.parameters(), *module.buffers()])
        trainer = trainer_in(one, callbacks=callbacks, max_steps=one["steps"])
        data = text(one)
        gc.collect()
        forget_peak()
        # The module's own bytes are in what is foretold: the engine's weights take their place.
        before = resident() - own
        with layouts_seen() as seen:
            trainer.fit(module, data)
        return module, seen[0], before

    if "nvme_path" in case and (missing := what_is_missing("async_io")):
        return {"not_run": missing}
    # What the libraries load when first used is not the engine's.
    fit({**case, "width": 32, "depth": 2, "heads": 2}, [])
    watch = PinnedHostPeaks() if CUDA and not pinned_is_resident() else HostPeaks()
    _module, layout, before = fit(case, [watch])  # held, or its weights are gone
    watch.take("end")
    peaks = {moment: peak - before for moment, peak in watch.peaks.items()}
    start = max(host + (0 if CUDA else device) for device, host in layout.start.values())
    return {
        "measured_bytes": max(peaks.values()),
        "predicted_bytes": layout.host_bytes if CUDA else layout.one_memory_bytes,
        **{f"{moment}_bytes": peak for moment, peak in peaks.items()},
        "predicted_start_bytes": start,
        "predicted_training_bytes": training_bytes(layout),
        "disk_bytes": watch.files,
        "predicted_disk_bytes": layout.disk_bytes - layout.disk.get("copies", 0),  # it saves no checkpoint
        "parts": {"device": dict(layout.device), "host": dict(layout.host), "disk": dict(layout.disk)},
    }


def training_bytes(layout: ZeroLayout) -> int:
    """Return what is foretold for the host once the engine is there."""
    if CUDA:
        return sum(layout.host.values())
    return layout.kept_bytes + max(layout.in_backward_bytes, layout.in_step_bytes)


def host_bytes(run: Run, size: Row) -> list[Row]:
    """Return a row for each layout, precision and accumulation; then half frozen, glibc left as it is, and on disk."""
    case = {"part": "host_bytes", "accumulation": 1, "frozen": False, "precision": "bf16-mixed", **size}
    case |= {"environment": NO_HOLES, "special": ""}
    cases = [
        {**case, "layout": layout, "precision": precision, "accumulation": accumulation}
        for layout in list(LAYOUTS)[:3]
        for precision in ("32-true", "bf16-mixed")
        for accumulation in (1, 4)
    ]
    cases.append({**case, "layout": "stage 2", "frozen": True, "special": "half frozen"})
    cases.append(
        {
            **case,
            "layout": "stage 2",
            "precision": "32-true",
            "environment": {},
            "special": "glibc with its moving mmap threshold",
        }
    )
    rows = []
    with folder_on_disk() as folder:
        for one in [*cases, {**case, "layout": "stage 3, NVMe", "nvme_path": str(folder)}]:
            done = run(one)
            row = {key: one[key] for key in ("layout", "precision", "accumulation", "special", "environment")} | done
            if "measured_bytes" in done:
                row["relative_error"] = done["predicted_bytes"] / done["measured_bytes"] - 1
            if "not_run" not in done:
                row["met"] = abs(row.get("relative_error", 1.0)) <= TARGETS["host_bytes"]
            rows.append(row)
    return rows


@contextmanager
def folder_on_disk() -> Iterator[Path]:
    """Make a folder in the checkout, which is rarely in memory as /tmp may be, and remove it."""
    made = not (ROOT / "runs").exists()
    (ROOT / "runs").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=ROOT / "runs"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if made and not any((ROOT / "runs").iterdir()):
            (ROOT / "runs").rmdir()


# --- model states on the device ---


class DeviceStates(L.Callback):
    """The most bytes that lay on the device; on a CPU of what would lie there, looked up by the engine's names."""

    def __init__(self) -> None:
        self.most = 0
        self.parts: dict[str, int] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx != 1:  # the first step makes what is made late
            return
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        elif not is_plain(trainer):
            for p in pl_module.parameters():
                p.register_hook(partial(self.look, pl_module, trainer.strategy))

    def look(self, module: nn.Module, strategy: Any, gradient: Tensor) -> None:
        """Count while a gradient is there that the engine has not taken yet."""
        self.note(engines_parts(module, strategy.deepspeed_engine.optimizer, strategy.offload_parameters, gradient))

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_plain(trainer):
            live = Ledger(pl_module, trainer.optimizers).live()
            self.note({name: live[name] for name in ("weights", "gradients", "optimizer_states")})
        elif CUDA and batch_idx == 1:  # with activations, of which a short sequence has few
            self.note({"allocated": torch.cuda.max_memory_allocated()})

    def note(self, parts: dict[str, int]) -> None:
        """Keep the parts that sum up to the most."""
        if sum(parts.values()) > self.most:
            self.most, self.parts = sum(parts.values()), parts


def is_plain(trainer: L.Trainer) -> bool:
    """Tell whether a Trainer is one without ZeRO."""
    return isinstance(trainer.strategy, L.pytorch.strategies.SingleDeviceStrategy)


def engines_parts(module: nn.Module, zero: Any, offloaded: bool, gradient: Tensor) -> dict[str, int]:
    """Return the bytes that ZeRO's optimizer has for the device, a storage counted once, in the first part it is in."""
    parameters: list[Any] = list(module.parameters())
    partitions = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    buckets = [bucket.buffer for bucket in zero.ipg_buckets.values()]
    scratch = getattr(zero, "temp_grad_buffer_for_gpu_offload", None)
    parts: dict[str, list[Tensor]] = {
        "on the host": partitions if offloaded else [],
        "weights": [*partitions, *(p.data for p in parameters), *module.buffers()],
        "buckets": [t for buffer in buckets for t in (buffer if isinstance(buffer, list) else [buffer])],
        "scratch": [] if scratch is None else [scratch],
        "gradients": [gradient, *(p.grad for p in parameters if p.grad is not None)],
    }
    seen: set[int] = set()
    counted = {}
    for name, tensors in parts.items():
        new = [t for t in tensors if t.untyped_storage().data_ptr() not in seen]
        counted[name] = bytes_of(new)
        seen |= {t.untyped_storage().data_ptr() for t in new}
    del counted["on the host"]
    return counted


def measure_device_states(case: Row) -> Row:
    """Return the model states on the device, and the module's parameters."""
    module, data, watch = byte_gpt(case), text(case), DeviceStates()
    given = {"callbacks": [watch], "max_steps": case["steps"]}
    trainer = trainer_of("bf16", **given) if case["layout"] == "plain" else trainer_in(case, **given)
    parameters = sum(p.numel() for p in module.parameters())
    trainer.fit(module, data)
    return {"counted_bytes": watch.most, "parameters": parameters, "parts": watch.parts}


def layout_on_cuda(layout: str, groups: Sequence[Sequence[int]], bucket: int = BUCKET_ELEMENTS) -> ZeroLayout:
    """Return what is foretold for a CUDA device, for elements of parameters in groups, under AdamW and bf16-mixed."""
    settings = ZeroSettings(
        stage=2 if layout == "stage 2" else 3,
        precision="bf16-mixed",
        step_temporaries=0,
        offload_parameters=layout == "stage 3, parameters",
        keeps_weights=True,
        reduce_bucket=bucket,
    )
    return zero_layout(groups, settings)


def groups_of(case: Row) -> list[list[int]]:
    """Return the elements of a byte GPT's parameters in the groups of its optimizer."""
    with torch.device("meta"):
        parameters = list(byte_gpt(case).parameters())
    return [[p.numel() for p in parameters if (p.dim() >= 2) == matrices] for matrices in (True, False)]


def device_states(run: Run, size: Row) -> list[Row]:
    """Return the ratio to the preset `bf16` for each layout: at a model that is trained, and two that are counted."""
    case = {"part": "device_states", "accumulation": 1, "precision": "bf16-mixed", **size}
    plain = run({**case, "layout": "plain"})
    rows = []
    for layout in list(LAYOUTS)[:3]:
        done = run({**case, "layout": layout})
        if failed := plain.get("failed") or done.get("failed"):
            rows.append({"layout": layout, "failed": failed, "met": False})
            continue
        parts = layout_on_cuda(layout, groups_of(case)).device
        # On a CPU what is fetched, and what is reduced, lies in no storage that the engine has a name for.
        ours = max(done["counted_bytes"], 0 if CUDA else sum(parts.values()))
        rows.append(
            {
                "layout": layout,
                "parameters": done["parameters"],
                "bf16_bytes": plain["counted_bytes"],
                "bf16_parts": plain["parts"],
                "counted_bytes": done["counted_bytes"],
                "counted_parts": done["parts"],
                "predicted_bytes": sum(parts.values()),
                "predicted_parts": dict(parts),
                "ratio": ours / plain["counted_bytes"],
                "met": ours / plain["counted_bytes"] <= TARGETS["device_states"],
            }
        )
        for larger in LARGER:
            groups = groups_of({**case, **larger})
            count = sum(map(sum, groups))
            predicted = sum(layout_on_cuda(layout, groups).device.values())
            row: Row = {"layout": layout, "parameters": count, "bf16_bytes": 16 * count, "predicted_bytes": predicted}
            ratio = predicted / row["bf16_bytes"]
            rows.append({**row, "ratio": ratio, "met": ratio <= TARGETS["device_states"]})
    return rows


# --- speed ---


class DecoderBlock(nn.Module):
    """Llama 3's block without its rotation, which costs next to nothing: (batch, sequence, width) -> the same."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        query, key_value = (
            y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in (self.query(h), self.key_value(h))
        )
        key, value = key_value.chunk(2, dim=1)
        h = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(L.LightningModule):
    """A stack of blocks between bytes and the loss on the next bytes."""

    def __init__(self, blocks: int, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, kv_heads, hidden) for _ in range(blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch: (batch, context + 1) bytes."""
        x = self.embedding(batch[:, :-1].long())
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), batch[:, 1:].flatten().long())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self(batch)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def decoder(case: Row) -> Decoder:
    """Return a decoder whose weights are a small random tile, repeated: billions of draws would take minutes."""
    with torch.device("meta"):
        module = Decoder(**{key: case[key] for key in ("blocks", "width", "heads", "kv_heads", "hidden")})
    module.to_empty(device="cpu")
    tile = 0.02 * torch.randn(2**20 + 1, generator=torch.Generator().manual_seed(0))
    for p in module.parameters():
        flat = p.data.view(-1)
        if p.dim() == 1:
            flat.fill_(1.0)
        for start in range(0, flat.numel() if p.dim() > 1 else 0, len(tile)):
            flat[start : start + len(tile)] = tile[: flat.numel() - start]
    return module


def measure_speed(case: Row) -> Row:
    """Return the median seconds of a step, of our preset or of the raw loop, from the same bytes."""
    steps, data = SPEED_WARM_UP + case["steps"], text(case).train_dataloader()
    done, losses = (train_raw if "bucket" in case else train_ours)(case, data, steps)
    seconds = [after - before for before, after in pairwise(done)][SPEED_WARM_UP - 1 :]
    step = statistics.median(seconds)
    return {
        "step_s": step,
        "tokens_per_s": case["context"] * case["batch_size"] / step,
        "loss": losses[-1],
        "steps_s": seconds,
        **({"peak_device_bytes": torch.cuda.max_memory_allocated()} if CUDA else {}),
    }


def train_ours(case: Row, data: DataLoader[Tensor], steps: int) -> tuple[list[float], list[float]]:
    """Return when each step was done, and its loss, under our preset."""
    watch = Watch()
    trainer_in(case, callbacks=[watch], max_steps=steps).fit(decoder(case), data)
    return watch.done, watch.losses


def train_raw(case: Row, data: DataLoader[Tensor], steps: int) -> tuple[list[float], list[float]]:
    """As `train_ours` by the loop of DeepSpeed's tutorial, https://www.deepspeed.ai/tutorials/zero-offload."""
    import deepspeed

    from lightning_solo.zero.process import ONE_PROCESS, open_process_group

    load_extension("cpu_adam")
    os.environ.update(ONE_PROCESS)
    open_process_group("nccl" if CUDA else "gloo")
    zero: Row = {
        "stage": 2 if case["layout"] == "stage 2" else 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": case["bucket"],
    }
    if zero["stage"] == 2:
        zero["allgather_bucket_size"] = case["bucket"]
    else:
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}, "stage3_prefetch_bucket_size": case["bucket"]}
    config = {
        "train_micro_batch_size_per_gpu": case["batch_size"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.01}},  # with offloading its CPU Adam
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }
    module = decoder(case)
    engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    done, losses = [], []
    for batch in islice(data, steps):
        loss = engine(batch.to(DEVICE))
        engine.backward(loss)
        engine.step()
        if CUDA:
            torch.cuda.synchronize()
        losses.append(loss.item())
        done.append(time.perf_counter())
    return done, losses


def blocks_that_fit(size: Row) -> int:
    """Return how many blocks device and host have room for, in every run that is compared; at the most the 8B's."""
    if not CUDA:
        return 2
    host, device = host_memory()[1], torch.cuda.mem_get_info()[0]
    with torch.device("meta"):
        one = Decoder(1, **{key: size[key] for key in ("width", "heads", "kv_heads", "hidden")})
    block, rest = (
        [p.numel() for p in m.parameters()] for m in (one.blocks[0], nn.ModuleList([one.embedding, one.head]))
    )
    tokens = size["context"] * size["batch_size"]
    saved = 2 * tokens * (SAVED_WIDTHS * size["width"] + SAVED_HIDDEN * size["hidden"])
    for count in range(BLOCKS, 0, -1):
        groups, bucket = [[*rest, *(count * block)]], max(BUCKETS.values())
        layouts = [layout_on_cuda(layout, groups, bucket) for layout in SPEED_LAYOUTS]
        fits = max(layout.host_bytes for layout in layouts) * 1.1 <= host
        if fits and max(layout.device_bytes for layout in layouts) + 1.5 * count * saved <= 0.9 * device:
            return count
    raise SystemExit(f"no block fits: {format_bytes(host)} on the host, {format_bytes(device)} on the device")


def speed(run: Run, size: Row) -> list[Row]:
    """Return tokens per second of two presets, beside the raw loop's best; each runs in a process of its own."""
    blocks = size.get("blocks") or blocks_that_fit(size)
    case = {"part": "speed", "accumulation": 1, "precision": "bf16-mixed", **size, "blocks": blocks}
    rows = []
    for layout in SPEED_LAYOUTS:
        ours = run({**case, "layout": layout})
        raw = {name: run({**case, "layout": layout, "bucket": elements}) for name, elements in BUCKETS.items()}
        best = max(one.get("tokens_per_s", 0.0) for one in raw.values())
        ratio = ours.get("tokens_per_s", 0.0) / best if best else 0.0
        row = {"layout": layout, "preset": LAYOUTS[layout][0], "blocks": blocks, **ours, "raw": raw}
        rows.append({**row, "raw_tokens_per_s": best, "ratio": ratio, "met": ratio >= TARGETS["speed"]})
    return rows


# --- the parts, and what is shown of them ---


@dataclass(frozen=True)
class Part:
    """One target.

    Attributes:
        rows: runs the cases in fresh processes; has a field ``met`` in each row that was judged.
        measure: what a fresh process does.
        columns: header -> how a row is shown; a field in bytes is also there in GiB.
    """

    title: str
    rows: Callable[[Run, Row], list[Row]]
    measure: Callable[[Row], Row]
    columns: dict[str, str]


PARTS = {
    "parity": Part(
        "Loss after the same steps as a plain run, relative difference <= 1e-3",
        parity,
        measure_parity,
        {
            "layout": "{layout}",
            "precision": "{precision}",
            "accumulation": "{accumulation}",
            "clip": "{clip}",
            "steps clipped": "{steps_clipped}",
            "loss at first": "{loss_at_first:.4f}",
            "loss": "{loss:.6f}",
            "plain": "{plain_loss:.6f}",
            "difference": "{relative_difference:.1e}",
            "of any step": "{largest_relative_difference_of_a_step:.1e}",
            "of all weights": "{relative_difference_of_all_weights:.1e}",
            "of any weight": "{largest_relative_difference_of_weights:.1e}",
        },
    ),
    "start_up": Part(
        "Seconds above the preset bf16, <= 10",
        start_up,
        measure_start_up,
        {
            "layout": "{layout}",
            "fit to first step": "{fit_s:.2f}",
            "with bf16": "{plain_fit_s:.2f}",
            "above": "{above_fit_s:+.2f}",
            "whole process": "{process_s:.2f}",
            "of bf16": "{plain_process_s:.2f}",
            "process above": "{above_process_s:+.2f}",
        },
    ),
    "host_bytes": Part(
        "GiB of the host, measured and foretold, within 10 %",
        host_bytes,
        measure_host_bytes,
        {
            "layout": "{layout}",
            "": "{special}",
            "precision": "{precision}",
            "accumulation": "{accumulation}",
            "start": "{start_gib:.3f}",
            "start foretold": "{predicted_start_gib:.3f}",
            "training": "{training_gib:.3f}",
            "training foretold": "{predicted_training_gib:.3f}",
            "end": "{end_gib:.3f}",
            "peak": "{measured_gib:.3f}",
            "peak foretold": "{predicted_gib:.3f}",
            "error": "{relative_error:+.1%}",
        },
    ),
    "device_states": Part(
        "GiB of model states on the device, beside the preset bf16, <= 0.35 x",
        device_states,
        measure_device_states,
        {
            "layout": "{layout}",
            "parameters": "{parameters:,}",
            "bf16": "{bf16_gib:.3f}",
            "counted": "{counted_gib:.3f}",
            "foretold": "{predicted_gib:.3f}",
            "ratio": "{ratio:.3f}",
        },
    ),
    "speed": Part(
        "Tokens per second, beside DeepSpeed's own loop at its best, >= 1.0 x",
        speed,
        measure_speed,
        {
            "layout": "{layout}",
            "preset": "{preset}",
            "blocks": "{blocks}",
            "tokens/s": "{tokens_per_s:,.0f}",
            **{f"raw, buckets of {name}": f"{{raw[{name}][tokens_per_s]:,.0f}}" for name in BUCKETS},
            "ratio": "{ratio:.3f}",
        },
    ),
}


def cell(template: str, row: Row) -> str:
    """Return one figure of a row, or nothing where the row has it not."""
    in_gib = {f"{key.removesuffix('bytes')}gib": row[key] / GiB for key in row if key.endswith("_bytes")}
    try:
        return template.format_map({**row, **in_gib})
    except KeyError:
        return ""


def print_table(part: Part, rows: list[Row]) -> None:
    """Print the rows of a part."""
    table = Table(*part.columns, "met", title=part.title)
    for row in rows:
        table.add_row(*(cell(template, row) for template in part.columns.values()), str(row.get("met", "not run")))
    console = Console(width=160)
    console.print(table)
    for row in rows:
        if why := row.get("failed") or row.get("not_run"):
            console.print(f"{row.get('layout', '')}: {why}", markup=False)


def in_fresh_process(case: Row) -> Row:
    """Return what a child process found, and its seconds from beginning to end."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--case", json.dumps(case), "--out", str(result)]
        started = time.perf_counter()
        variables = {**os.environ, **case.get("environment", {})}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        about = (case.get(key) for key in ("part", "layout", "precision", "accumulation", "special", "bucket"))
        print(*(word for word in about if word), f"{seconds:.0f} s", flush=True)
        if done.returncode != 0 or not result.is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            return {"failed": f"exit {done.returncode}: {said[-1][-300:] if said else 'it said nothing'}"}
        return {**json.loads(result.read_text(encoding="utf-8")), "process_s": seconds}


def hardware() -> str:
    """Return device, processor and memory in words."""
    memory = f"{host_memory()[0] / GiB:.0f} GiB"
    return f"{machine()}; {os.cpu_count()} cores of {processor()}, {torch.get_num_threads()} threads, {memory}"


def earlier(path: Path, report: Row) -> Row:
    """Return the parts that a file holds, where they were measured on the same hardware with the same versions."""
    if not path.is_file():
        return {}
    found: Row = json.loads(path.read_text(encoding="utf-8"))
    same = all(found.get(key) == report[key] for key in ("hardware", "versions", "smoke"))
    return dict(found["parts"]) if same else {}


def main() -> None:
    """Measure, print the tables, write the JSON after each part."""
    name = "cuda" if CUDA else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda names: names.split(","), default=list(PARTS), help="parts, by commas")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; the result goes to runs/")
    parser.add_argument("--blocks", type=int, help="of the part speed; without it as many as fit")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        warnings.simplefilter("ignore")
        given.out.write_text(json.dumps(PARTS[given.case["part"]].measure(given.case)), encoding="utf-8")
        return
    if unknown := set(given.only) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    default = ROOT / "runs" / "zero_offload_smoke.json" if given.smoke else ROOT / "examples" / "results"
    out = given.out or (default if given.smoke else default / f"zero_offload_{name}.json")
    report: Row = {
        "what": "ZeRO-Offload against its targets",
        "hardware": hardware(),
        "versions": versions(),
        "smoke": given.smoke,
        "targets": TARGETS,
    }
    parts, command = earlier(out, report), " ".join(["python", "examples/measure_zero_offload.py", *sys.argv[1:]])
    for part in given.only:
        size = {**(SMOKE if given.smoke else SIZES)[part], **({"blocks": given.blocks} if given.blocks else {})}
        if part == "speed" and not CUDA and not given.smoke:
            rows = [{"not_run": "needs a CUDA device"}]
        else:
            rows = PARTS[part].rows(in_fresh_process, size)
        print_table(PARTS[part], rows)
        parts[part] = {"command": command, "size": size, "rows": rows}
        report["parts"] = {key: parts[key] for key in PARTS if key in parts}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")


if __name__ == "__main__":
    main()
