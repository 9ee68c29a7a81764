"""The presets of ZeRO-Offload as programs: fresh processes train, save, resume, and read the file without DeepSpeed."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_solo.seams.homes import for_home
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from lightning_solo.zero.extension import what_is_missing
from tests.modules import Stack, loader, regression

pytest.importorskip("deepspeed", reason="listed on Linux only")
pytestmark = pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
ROOT = Path(__file__).parents[2]

# A user's own file: plain Lightning. Two matrices of 1 MiB in bf16, which is the least that DeepSpeed puts on disk;
# vectors that stay where they are, the first of which puts all that follows off the alignment of a disk.
NET = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from HOME import LightningModule

class Net(LightningModule):
    def __init__(self, width=512):
        super().__init__()
        self.save_hyperparameters()
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("batches", torch.zeros(()))
        self.losses = []

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x)))) * self.scale.mean()

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.batches += 1
        loss = nn.functional.mse_loss(self(x).float(), y.float())
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

def batches():
    x = torch.randn(80, 512, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=8)

QUIET = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
"""
MATRICES = ["down.weight", "up.weight"]
# the scale, the norm, up, down
COUNT = 3 + 2 * 512 + (512 * 1024 + 1024) + (1024 * 512 + 512)
BLOCK = 1024 // 4  # fp32 elements: DeepSpeed's alignment of 1024 bytes

# What each program begins with; it is judged by the report it writes, and by how it exits.
BEGIN = """
import importlib, json, os, sys, threading, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
job = json.loads(sys.argv[1])
if job.get("notebook"):
    sys.ps1 = "In [1]: "  # before Lightning is imported, which knows an interactive session by it
home = importlib.import_module(job["home"])
before = dict(os.environ)

def trace():
    after = {**before, **os.environ}
    return {
        "threads": [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
        "group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "environment": sorted(k for k in after if before.get(k) != os.environ.get(k)),
        "folder": sorted(path.name for path in Path(job["nvme_path"]).rglob("*")) or Path(job["nvme_path"]).exists(),
    }

def finish(**report):
    Path(job["report"]).write_text(json.dumps({**report, "trace": trace()}))
"""
NO_TRACE = {"threads": [], "group": False, "environment": [], "folder": False}

FIT = """
import lightning_solo as solo
from net import Net, QUIET, batches

class Look(home.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        engine = trainer.strategy.deepspeed_engine
        zero = engine.optimizer
        offloaded = engine.zero_offload_param()
        parameters = dict(module.named_parameters())
        files = {}
        for path in Path(job["nvme_path"]).rglob("*.swp"):
            kind = path.parts[-3] + (" gradient" if "gradient" in path.name else "")
            files.setdefault(kind, []).append(path.stat().st_size)
        self.seen = {
            "stage": engine.zero_optimization_stage(),
            "optimizer on": str(engine.zero_offload_optimizer().device),
            "parameters on": offloaded and str(offloaded.device),
            "zero": type(zero).__name__,
            "host": type(zero.optimizer).__name__,
            "dtypes": sorted({str(p.dtype) for p in parameters.values()}),
            "released": sorted(name for name, p in parameters.items() if p.numel() == 0),
            "files": {kind: sorted(sizes) for kind, sizes in sorted(files.items())},
            "steps": engine.global_steps,
            "adam": max((int(state["step"]) for state in zero.optimizer.state.values() if state), default=None),
        }

def fit(epochs, *callbacks, ckpt_path=None, preset=job.get("preset"), overrides=job.get("overrides")):
    torch.manual_seed(0)
    module, look = Net(), Look()
    arguments = solo.trainer_kwargs(
        preset, overrides, callbacks=[look, *callbacks], lightning=job["home"]
    )
    trainer = home.Trainer(**arguments, **QUIET, max_epochs=epochs, enable_checkpointing=bool(callbacks))
    trainer.fit(module, batches(), ckpt_path=ckpt_path)
    return module, {
        "seen": look.seen, "losses": module.losses, "step": trainer.global_step, "epoch": trainer.current_epoch
    }
"""

TRAIN = """
undisturbed, two = fit(2)
torch.save(undisturbed.state_dict(), "undisturbed.pt")
keep = home.callbacks.ModelCheckpoint(dirpath=".", filename="first")
_, one = fit(1, keep)
beside = None
if job["beside"]:
    _, beside = fit(1, preset=job["beside"], overrides=["strategy.allow_cpu=true"])
finish(undisturbed=two, first=one, beside=beside)
"""

RESUME = """
module, resumed = fit(2, ckpt_path="first.ckpt")
expected = torch.load("undisturbed.pt", weights_only=True)
found = module.state_dict()
unequal = [name for name in expected if not torch.equal(found[name], expected[name])]
finish(resumed=resumed, unequal=unequal, names=list(found))
"""

# An environment in which neither can be imported; the plain Trainer's fp32 weights are the file's.
PLAIN = """
sys.modules["deepspeed"] = sys.modules["lightning_solo"] = None
from net import Net, QUIET, batches
saved = torch.load("first.ckpt", map_location="cpu", weights_only=True)
state, (optimizer,) = saved["state_dict"], saved["optimizer_states"]
loaded = Net.load_from_checkpoint("first.ckpt", map_location="cpu", weights_only=True)
found = loaded.state_dict()

class Start(home.Callback):
    def on_train_start(self, trainer, module):
        self.at = (trainer.global_step, trainer.current_epoch)
        self.same = all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
        moments = trainer.optimizers[0].state_dict()["state"]
        self.moments = all(
            torch.equal(value, optimizer["state"][number][key])
            for number, states in moments.items() for key, value in states.items()
        ) and len(moments)

start = Start()
torch.manual_seed(1)
module = Net()
trainer = home.Trainer(**QUIET, max_epochs=2, enable_checkpointing=False, callbacks=[start])
trainer.fit(module, batches(), ckpt_path="first.ckpt", weights_only=True)
finish(
    keys=sorted(saved), callbacks=sorted(saved["callbacks"]), dtypes=sorted({str(v.dtype) for v in state.values()}),
    loaded=sorted(name for name in state if torch.equal(found[name], state[name])), names=sorted(found),
    exact=any(not torch.equal(value, value.bfloat16().float()) for value in state.values()),
    step=sorted({float(states["step"]) for states in optimizer["state"].values()}),
    start=[*start.at, start.same, start.moments], end=[trainer.global_step, trainer.current_epoch],
    losses=module.losses, imported=sorted(name for name in sys.modules if name.startswith("deepspeed."))
)
"""


def job_of(folder: Path, home: str, name: str, **values: Any) -> dict[str, Any]:
    """Return what one of the programs above is told, and put the user's file where it will find it."""
    (folder / "net.py").write_text(NET.replace("HOME", home))
    told = {"home": home, "nvme_path": str(folder / "nvme"), "report": str(folder / f"{name}.json")}
    overrides = ["strategy.allow_cpu=true"]
    if values.get("preset") == "zero_offload_nvme":
        overrides.append(f"strategy.nvme_path={told['nvme_path']}")
    return {**told, "overrides": overrides, **values}


def start(folder: Path, code: str, job: dict[str, Any], **variables: str) -> subprocess.Popen[str]:
    environment = variables or {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + code, json.dumps(job)],
        cwd=folder,
        env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def report(process: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, Any]:
    """Wait for a program's end, which is to be a clean one, and return what it reported."""
    try:
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    for word in ("terminate called", "Abort", "Traceback", "Exception ignored"):
        assert word not in errors, errors[-3000:]
    found: dict[str, Any] = json.loads(Path(job["report"]).read_text())
    return found


def run(folder: Path, home: str, code: str, name: str, **values: Any) -> dict[str, Any]:
    job = job_of(folder, home, name, **values)
    return report(start(folder, code, job), job)


# --- each preset trains, saves and resumes in fresh processes ---

# Neither is run on every change: the first test of a machine's life builds DeepSpeed's extension.
ON_DISK = pytest.mark.skipif(
    bool(missing := what_is_missing("async_io")), reason=f"nothing can be put on disk here: {missing}"
)
# What DeepSpeed's engine is like under each preset. Both homes of Lightning take turns.
ACTED = {
    "zero_offload": {"stage": 2, "optimizer on": "cpu", "parameters on": None, "zero": "DeepSpeedZeroOptimizer"},
    "zero_offload_parameters": {
        "stage": 3,
        "optimizer on": "cpu",
        "parameters on": "cpu",
        "zero": "DeepSpeedZeroOptimizer_Stage3",
        "released": MATRICES,  # between two steps; vectors stay, they are below DeepSpeed's persistence threshold
    },
    "zero_offload_nvme": {
        "stage": 3,
        "optimizer on": "nvme",
        "parameters on": "nvme",
        "zero": "DeepSpeedZeroOptimizer_Stage3",
        "released": MATRICES,
        "files": {
            "bfloat16params": [2 * 512 * 1024] * 2,  # the matrices
            "optimizer": [4 * -(-COUNT // BLOCK) * BLOCK] * 3,  # fp32 master, exp_avg, exp_avg_sq
            "optimizer gradient": [4 * (512 * 1024 - BLOCK)] * 2,  # the part at aligned offsets
        },
    },
}
NOTHING_MORE = {
    "host": "AdamW",
    "released": [],
    "files": {},
    "dtypes": ["torch.bfloat16"],
}


@pytest.mark.parametrize(
    ("preset", "home"),
    [
        ("zero_offload", "lightning.pytorch"),
        ("zero_offload_parameters", "pytorch_lightning"),
        pytest.param("zero_offload_nvme", "lightning.pytorch", marks=[ON_DISK, pytest.mark.long]),
    ],
)
def test_a_preset_trains_saves_resumes_and_its_file_is_plain(preset: str, home: str, tmp_path: Path) -> None:
    on_disk = preset == "zero_offload_nvme"
    values = {"preset": preset, "beside": "zero_offload_parameters" if on_disk else None}
    trained = run(tmp_path, home, FIT + TRAIN, "train", **values)
    undisturbed, first = trained["undisturbed"], trained["first"]
    acted = {name: value for name, value in first["seen"].items() if name not in ("steps", "adam")}
    assert acted == {**NOTHING_MORE, **ACTED[preset]}
    assert trained["trace"] == NO_TRACE
    assert (first["step"], first["epoch"], undisturbed["step"], undisturbed["epoch"]) == (10, 1, 20, 2)
    assert first["losses"] == undisturbed["losses"][:10]
    if on_disk:
        assert first["losses"] == trained["beside"]["losses"]  # a disk changes no number

    again = run(tmp_path, home, FIT + RESUME, "resume", **values)
    resumed = again["resumed"]
    assert (resumed["step"], resumed["epoch"]) == (20, 2)
    assert again["trace"] == NO_TRACE
    # The same instructions on the same numbers in another process, in bf16 as well: to the bit.
    assert again["unequal"] == []
    assert resumed["losses"] == undisturbed["losses"][10:]
    assert resumed["seen"] == undisturbed["seen"]
    assert resumed["seen"]["steps"] == resumed["seen"]["adam"] == 20
    assert sum(resumed["losses"]) < sum(first["losses"])

    plain = run(tmp_path, home, PLAIN, "plain")
    assert plain["dtypes"] == ["torch.float32"]
    assert plain["exact"]  # the masters, not the bf16 weights widened
    assert plain["loaded"] == plain["names"] == sorted(again["names"])
    assert plain["keys"] == sorted(
        (
            *("callbacks", "epoch", "global_step", "loops", "lr_schedulers", "optimizer_states"),
            *("hparams_name", "hyper_parameters", "pytorch-lightning_version", "state_dict", "zero_offload"),
        )
    )
    assert [name.partition("{")[0] for name in plain["callbacks"]] == ["ModelCheckpoint"]
    assert plain["start"] == [10, 1, True, 7]  # the parameters all have their states
    assert plain["end"] == [20, 2]
    assert plain["step"] == [10]
    assert all(map(math.isfinite, plain["losses"]))
    assert plain["imported"] == []
    assert sum(plain["losses"]) < sum(first["losses"])


DISK = """
import lightning_solo as solo
from net import QUIET
from tests.modules import Stack, loader, regression

class Look(home.Callback):
    def on_train_batch_end(self, trainer, module, outputs, *_):
        losses.append(outputs["loss"].item())
        places = {name: p.ds_tensor.final_location for name, p in module.named_parameters()}
        self.on_disk = sorted(name for name, place in places.items() if getattr(place, "value", None) == "nvme")

found = []
for overrides, sanity in job["each"]:
    torch.manual_seed(0)
    losses, look, module = [], Look(), regression(home, Stack(blocks=job["blocks"], width=512), lr=1e-4)
    arguments = solo.trainer_kwargs(job["preset"], [*job["overrides"], overrides], callbacks=[look])
    trainer = home.Trainer(
        **arguments, **QUIET, max_epochs=1, enable_checkpointing=False, num_sanity_val_steps=sanity
    )
    trainer.fit(module, loader(batches=4, width=512), loader(batches=2, width=512))
    losses.append(trainer.callback_metrics["validation/loss"].item())
    found.append([losses, look.on_disk])
finish(found=found)
"""


@ON_DISK
@pytest.mark.long
@pytest.mark.parametrize("blocks", [1, 3])
def test_weights_beyond_those_that_are_kept_in_memory_stay_on_disk(tmp_path: Path, blocks: int) -> None:
    """DeepSpeed keeps the first 1e9 weights in memory whatever was asked for; of a larger model the rest is on disk."""
    section = "+strategy.config={zero_optimization: {offload_param: {max_in_cpu: %d}}}"
    # A forward pass without a backward before the first step, as well as after it, changes the order of fetching.
    values = {"preset": "zero_offload_nvme", "each": [(section % 10**9, 0), (section % 0, 0), (section % 0, 2)]}
    (in_memory, none), *on_disk = run(tmp_path, "lightning.pytorch", DISK, "disk", **values, blocks=blocks)["found"]
    assert none == []
    matrices = sorted(f"net.blocks.{block}.{part}.weight" for block in range(blocks) for part in ("down", "up"))
    assert on_disk == [[in_memory, matrices]] * 2


# DeepSpeed's own calls, at stage 3, on torch 2.13
@pytest.mark.filterwarnings("ignore:`torch.distributed.*` is deprecated:FutureWarning")
def test_fetched_weights_are_given_back_between_forward_and_backward(
    home: ModuleType, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Autograd's own linear layer saves a view of the weight, which would keep what was fetched for forward."""
    fetch = importlib.import_module("deepspeed.runtime.zero.partition_parameters").NoGatherHandle
    begin, fetched, kept = fetch.__init__, [], []

    def copied(handle: Any, parameter: Any) -> None:
        begin(handle, parameter)
        parameter.data = parameter.data.clone()  # as on a GPU: on a CPU what is fetched is the partition itself
        storage = parameter.data.untyped_storage()
        fetched.append((weakref.ref(storage), storage.nbytes()))

    monkeypatch.setattr(fetch, "__init__", copied)
    torch.manual_seed(0)
    made = regression(home, Stack(blocks=3, width=256))
    made.on_before_backward = lambda loss: kept.append(sum(n for storage, n in fetched if storage() is not None))
    # Otherwise DeepSpeed itself keeps weights as few as these.
    sizes = {f"stage3_{name}": 0 for name in ("max_live_parameters", "max_reuse_distance", "prefetch_bucket_size")}
    strategy = for_home(ZeroOffloadStrategy, home.__name__)(
        stage=3, offload_parameters=True, allow_cpu=True, config={"zero_optimization": sizes}
    )
    make_trainer(home, strategy=strategy, precision="bf16-mixed").fit(made, loader(batches=3, width=256))
    assert len(fetched) >= 3 * 6  # the blocks' matrices in each batch
    assert max(kept) <= 2 * 256 * 1024  # of the six of bf16 weights at most the last


# --- one process: nothing around it is needed, and nothing is left ---

TWICE = """
import gc
results = [fit(1) for _ in range(3)]
gc.collect()
native = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
names = [sorted(vars(p)) for p in results[0][0].parameters()]
finish(
    losses=[result["losses"] for _, result in results], seen=results[0][1]["seen"], names=names, native=native,
    equal=all(torch.equal(p, q) for p, q in zip(results[0][0].parameters(), results[2][0].parameters())),
)
"""


def test_again_and_again_in_one_process_with_an_empty_environment(tmp_path: Path) -> None:
    """Stage 3, without a PATH, a home folder, or anything built."""
    job = job_of(tmp_path, "lightning.pytorch", "twice", preset="zero_offload_parameters")
    found = report(start(tmp_path, FIT + TWICE, job, LC_ALL="C"), job)
    assert found["seen"]["host"] == "AdamW"
    assert found["seen"]["released"] == MATRICES
    assert found["losses"][0] == found["losses"][1] == found["losses"][2]
    assert found["equal"]
    assert found["trace"] == NO_TRACE
    assert not [name for name in found["native"] if "gloo" in name]  # C++'s are not among Python's
    assert found["names"] == [[]] * 7


# Opening a pipe waits for its other end: the second run begins in the middle of the first, and both go on together.
MEET = """
def wait(name):
    open(name, "r" if job["second"] else "w").close()

class Meet(home.Callback):
    def setup(self, trainer, module, stage):
        if job["second"]:
            wait("begin")

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            if not job["second"]:
                wait("begin")
            wait("together")

finish(**fit(1, Meet())[1])
"""


@pytest.mark.parametrize(
    "preset",
    ["zero_offload_parameters", pytest.param("zero_offload_nvme", marks=[ON_DISK, pytest.mark.long])],
)
def test_two_runs_at_the_same_time(tmp_path: Path, preset: str) -> None:
    """No port, no name and no folder is the same for both, though the nvme_path is."""
    for pipe in ("begin", "together"):
        os.mkfifo(tmp_path / pipe)
    jobs = [job_of(tmp_path, "lightning.pytorch", f"run{n}", preset=preset, second=n) for n in range(2)]
    (tmp_path / "nvme").mkdir()  # one that was there is not removed by whoever is the last to leave
    processes = [start(tmp_path, FIT + MEET, job) for job in jobs]
    try:
        found = [report(process, job) for process, job in zip(processes, jobs, strict=True)]
    finally:
        for process in processes:
            process.kill()  # the other waits for one that failed
    assert found[0]["losses"] == found[1]["losses"]
    assert [result["step"] for result in found] == [10, 10]
    assert not any((tmp_path / "nvme").iterdir())


NOTEBOOK = """
import asyncio, code

async def kernel():
    cells = code.InteractiveInterpreter(dict(fit=fit, home=home))
    for cell in ("module, result = fit(1)\\n", "again, _ = fit(1)\\n"):
        assert not cells.runsource(cell, "<cell>", "exec")
    return cells.locals

found = asyncio.run(kernel())
imports = importlib.import_module(home.__name__.replace(".pytorch", ".fabric") + ".utilities.imports")
finish(**found["result"], interactive=imports._IS_INTERACTIVE, again=found["again"].losses)
"""


def test_in_a_cell_of_a_notebook(tmp_path: Path) -> None:
    """Lightning refuses strategies with a launcher of processes there; an event loop runs around each cell."""
    found = run(tmp_path, "lightning.pytorch", FIT + NOTEBOOK, "cell", preset="zero_offload", notebook=True)
    assert found["interactive"]
    assert found["step"] == 10
    assert found["again"] == found["losses"]
    assert found["trace"] == NO_TRACE
