"""Fits on two processes: a script that Lightning runs again in the second process, and its start from a test.

``python -m tests.engines.processes NAME FOLDER ...`` calls the function NAME below in both processes, or FILE:NAME of
another file here; the first one saves what it returns to ``FOLDER/NAME.pt``.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import ConflictError
from lightning_solo.reference.byte_gpt import ByteGPT

ROOT = Path(__file__).parents[2]
LIMIT_S = 900  # of a test's processes, on a machine that is busy
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 1,
}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"name": "ddp"},
    "fsdp": {"name": "fsdp"},
    "zero2": {"name": "zero3", "stage": 2},
    "zero3": {"name": "zero3", "stage": 3},
}


def started(name: str, folder: Path, *arguments: str, limit_s: float = LIMIT_S) -> str:
    """Call a function of this file in two processes, and return their output once both have ended.

    Raises:
        subprocess.TimeoutExpired: one of them didn't end; both are killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.engines.processes", name, str(folder), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit_s)[0]  # the second process has the pipe too
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def run(name: str, folder: Path, *arguments: str, limit_s: float = LIMIT_S) -> Any:
    """Call a function of this file in two processes, and return what the first one returned.

    Raises:
        AssertionError: it failed; with the processes' output.
    """
    output = started(name, folder, *arguments, limit_s=limit_s)
    result = folder / f"{name}.pt"
    assert result.exists(), output[-9000:]  # DeepSpeed may abort at the end
    return torch.load(result, weights_only=True)


class Losses(L.Callback):
    """Collects the losses of batches, averaged over processes."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if "loss" in outputs:  # else its step was skipped
            self.values.append(float(trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")))


def texts(batch_size: int, rows: int = 32) -> DataLoader[Any]:
    """Return rows of bytes for `gpt`, in order."""
    generator = torch.Generator().manual_seed(5)
    return DataLoader(torch.randint(0, 256, (rows, 17), generator=generator), batch_size=batch_size)  # type: ignore[arg-type]


def gpt() -> ByteGPT:
    """Return a byte GPT with tied weights, the same in each process."""
    torch.manual_seed(3)
    return ByteGPT(width=32, depth=3, heads=2, context=16, warmup_steps=1)


def trained(
    preset: Any,
    folder: Path,
    *,
    devices: int = 2,
    module: Any = None,
    batches: Any = None,
    validation: Any = None,
    callbacks: Sequence[Any] = (),
    ckpt_path: Any = None,
    **arguments: Any,
) -> tuple[Any, list[float]]:
    """Train under a preset, with the whole batch on one device or half of it on each of two."""
    losses = Losses()
    ours = solo.trainer_kwargs(preset, callbacks=[*callbacks, losses])
    trainer = L.Trainer(**{**QUIET, "default_root_dir": str(folder), "devices": devices, **ours, **arguments})
    trainer.fit(
        module or gpt(),
        batches or texts(8 // devices),
        validation,
        ckpt_path=ckpt_path,
        weights_only=ckpt_path and True,
    )
    return trainer, losses.values


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """Return the whole weights in the first process; all processes must call it."""
    weights: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return {name: value.detach().clone() for name, value in weights.items()}


class AtEnd(L.Callback):
    """Saves a checkpoint and keeps the whole weights when training ends, while the engine is still there."""

    def __init__(self, path: Path) -> None:
        self.path, self.weights = path, dict[str, Tensor]()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)
        self.weights = whole_weights(trainer)


CLIPPED = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


def losses(folder: Path, *engines: str) -> dict[str, Any]:
    """Train under each engine, with clipping and accumulation, and save a checkpoint."""
    results = {}
    for engine in engines or ENGINES:
        end = AtEnd(folder / f"{engine}.ckpt")
        trainer, values = trained({"strategy": ENGINES[engine]}, folder, callbacks=[end], **CLIPPED)
        results[engine] = {"losses": values, "weights": end.weights, "steps": trainer.global_step}
    return results


def resumed(folder: Path, *sources: str) -> dict[str, Any]:
    """Resume each engine from the checkpoint of each source for a second epoch."""
    results = {}
    for engine, settings in ENGINES.items():
        for source in sources:
            path = folder / f"{source}.ckpt"
            _, values = trained({"strategy": settings}, folder, ckpt_path=path, max_epochs=2, **CLIPPED)
            results[f"{source}-{engine}"] = values
    return results


class Noisy(ByteGPT):
    """A byte GPT with buffers that are random in each process, one of them expanded, if it may be."""

    def __init__(self, expands: bool) -> None:
        torch.manual_seed(int(os.environ.get("LOCAL_RANK", "0")))
        super().__init__(width=32, depth=1, heads=2, context=16, warmup_steps=1)
        self.register_buffer("noise", torch.randn(2, 4).T)
        self.register_buffer("mask", torch.randn(16) > 0)
        if expands:
            self.register_buffer("count", torch.tensor(3).expand(2))


def buffers(folder: Path) -> dict[str, list[Any]]:
    """Return each process's buffers after a step under each engine, and those of a new module in each."""
    ends = {engine: BuffersAtEnd(engine == "fsdp") for engine in ENGINES}  # torch's DDP can't send an expanded one
    for engine, end in ends.items():
        trained({"strategy": ENGINES[engine]}, folder, module=Noisy(end.expands), callbacks=[end], max_steps=1)
    return {engine: end.each for engine, end in ends.items()}


class BuffersAtEnd(L.Callback):
    """Collects the buffers of all processes when training ends, and those that their modules were made with."""

    def __init__(self, expands: bool) -> None:
        self.expands = expands

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        now, before = (dict(module.named_buffers()) for module in (pl_module, Noisy(self.expands)))
        self.each: list[Any] = [None, None]
        torch.distributed.all_gather_object(self.each, [now, before])


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def uneven(folder: Path) -> dict[str, str]:
    """Return the refusals of four batches in the first process and six in the second, and of two parts and four.

    ``parts``: of two parts of a batch in the first process, and four in the second.
    """
    batches = [({"strategy": settings}, texts(4, rows=16 + 8 * rank())) for settings in ENGINES.values()]
    in_parts = {"strategy": ENGINES["ddp"], "callback": {"micro_batching": {"micro_batch": 2}}}
    parts = (in_parts, texts(4 + 4 * rank(), rows=16 + 16 * rank()))
    validation = [(preset, None, each) for preset, each in batches]
    runs = [*((preset, each, None) for preset, each in [*batches, parts]), *validation]
    messages = {}
    for name, (preset, each, other) in zip(
        [*ENGINES, "parts", *(f"{e}, validation" for e in ENGINES)], runs, strict=True
    ):
        try:
            trained(preset, folder, batches=each, validation=other, use_distributed_sampler=False)
            messages[name] = "trained"
        except ConflictError as error:
            messages[name] = str(error)
    return messages


class Ends(L.Callback):
    """Ends one process in its second batch, while the other one waits for it."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        if rank() != self.rank:
            time.sleep(2 * LIMIT_S if self.how == "leave" else 0)  # as in a collective that doesn't notice
            return
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "refuse":
            raise ConflictError("this batch and this process; write another batch")
        raise RuntimeError(f"rank {self.rank} can't go on")


def ending(folder: Path, engine: str, which: str, how: str) -> None:
    """Train until one process ends."""
    trained({"strategy": ENGINES[engine]}, folder, callbacks=[Ends(int(which), how)])


class Signals(L.Callback):
    """Sends one process SIGTERM in its second batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.current_epoch == 0 and rank() == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)

    def __init__(self, rank: int) -> None:
        self.rank = rank


def terminated(folder: Path, *engines: str) -> dict[str, Any]:
    """Return what comes of a SIGTERM for either process, and the losses of runs that resume, and of a whole one."""
    results = {}
    for engine in engines:
        preset = {"strategy": ENGINES[engine], "callback": {"safe_checkpoint": {}, "exact_resume": {}}}
        _, whole = trained(preset, folder / engine)
        for which in (0, 1):
            codes: list[Any] = [None, None]
            root = folder / f"{engine}-{which}"
            try:
                trained(preset, root, callbacks=[Signals(which)])
            except SystemExit as end:
                torch.distributed.all_gather_object(codes, end.code)
            torch.distributed.barrier()
            files = sorted(path.name for path in root.rglob("*.ckpt"))
            _, rest = trained(preset, root, ckpt_path=root / "checkpoints" / "last.ckpt")
            results[f"{engine}, signal to rank {which}"] = {
                "codes": codes,
                "files": files,
                "whole": whole,
                "rest": rest,
            }
    return results


def cards(folder: Path, engine: str, *names: str) -> dict[str, Any]:
    """Train under an engine and each technique that it allows."""
    from tests.engines.cards import under_engine

    return under_engine(folder, engine, *names)


def main() -> None:
    """Call the function that the command line names, and save what it returns."""
    warnings.simplefilter("ignore")
    name, folder, *arguments = sys.argv[1:]
    file, _, function = name.rpartition(":")
    source = importlib.import_module(f"tests.engines.{file}").__dict__ if file else globals()
    call: Callable[..., Any] = source[function]
    try:
        result = call(Path(folder), *arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # without waiting for the other process
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        torch.save(result, Path(folder) / f"{name}.part")
        os.replace(Path(folder) / f"{name}.part", Path(folder) / f"{name}.pt")


if __name__ == "__main__":
    main()
