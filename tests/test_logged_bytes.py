"""Every byte figure that a technique logs in a fit is the one that a ledger counts in that fit, or in one beside it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import lightning_solo as solo
from lightning_solo.memory.ledger import Ledger
from lightning_solo.units import GiB, KiB, MiB
from tests.modules import Stack, loader, regression, squares

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU"),
    pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing"),
]

WIDTH, BLOCKS, BATCH = 64, 4, 64
UNITS = {"B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB}
FIGURE = r"\d+(?:\.\d+)? (?:[KMG]i)?B(?!\w)"
EACH = r"(?P<each>\d+\.\d\d) bytes per parameter: "
LINES = [
    re.compile(pattern.replace("FIGURE", FIGURE))
    for pattern in (
        rf"gradient_release: gradients, {EACH}(?P<gradients>FIGURE) on the (?:device|host) until the step",
        r"gradient_release: gradients, (?P<own_gradients>FIGURE) on the device until the step \(manual optimization\)",
        rf"compact_states: weights, {EACH}(?P<weights>FIGURE) on the device",
        rf"compact_states: optimizer states, {EACH}(?P<states>FIGURE) on the device(?:, (?P<host_states>FIGURE) on the"
        r" host)?(?:; as many as fit return to the device after the first step)?"
        r"(?:; moments of \d+ small parameters in fp32, (?P<small_moments>FIGURE): .*)?"
        r"(?:; \w+'s own, in fp32, (?P<own_states>FIGURE))?",
        r"activation checkpointing: of \d+ blocks \d+ are recomputed and \d+ keep (?P<kept>FIGURE) of (?P<all>FIGURE);"
        r" budget=\S+(?: [KMG]iB, planned peak (?P<peak>FIGURE))?",
        r"activation offloading: (?P<block_inputs>FIGURE) of block inputs are kept on the host in each micro-batch",
        r"zero_offload, stage \d, .* (?P<host>FIGURE) of host memory, (?P<device>FIGURE) on the device",
        r"activation offloading: all (?P<block_inputs>FIGURE) stay on the device, within keep_on_device=\S+",
    )
]
"""Line of a technique, with the name of each figure in it; `each` is the first figure for one parameter."""
SLACK = 512
"""Bytes of losses and of the norms of gradients, which aren't part of any figure."""
Make = Callable[..., Any]


class Counted(L.Callback):
    """Counts the storages of each optimizer step; the last step's counts stay."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.inputs: dict[nn.Module, int] = {}

    def live(self) -> int:
        return self.ledger.live_bytes + sum(self.ledger.live(on_host=True).values())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        device = trainer.strategy.root_device.type
        self.ledger = Ledger(pl_module, trainer.optimizers, None if device == "cpu" else device)
        self.ledger.__enter__()
        for block in pl_module.net.blocks:
            block.register_forward_pre_hook(lambda block, args: self.inputs.update({block: args[0].nbytes}))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.ledger.reset_peak()
        storages = [part.untyped_storage() for part in batch]  # a budget is of a step without its batch
        self.batch = sum(s.nbytes() for s in storages if self.ledger.number_of(s) is not None)
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.begun = self.live()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self.bytes["activations"] = self.live() - self.begun

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        window = trainer.optimizers[0].state_dict().get("window", {})  # on the host the memory is allocated once
        kept = sum(total.nbytes for total in window.values()) or self.live() - self.begun
        self.bytes["gradients"] = kept

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        states = [(p, state) for optimizer in trainer.optimizers for p, state in optimizer.state.items()]
        counts = [t for _, state in states for t in state.values() if torch.is_tensor(t) and t.dim() == 0]
        small = [state for p, state in states if p.numel() < 4096]
        live = self.ledger.live()
        corrections = [state["correction"] for _, state in states if "correction" in state]
        self.bytes |= {
            "weights": live["weights"],
            "own_gradients": live["gradients"],
            "states": live["optimizer_states"] - sum(t.nbytes for t in counts),
            "own_states": live["optimizer_states"] - sum(t.nbytes for t in [*counts, *corrections]),
            "host_states": self.ledger.live(on_host=True)["optimizer_states"],
            "small_moments": sum(
                t.nbytes for state in small for name, t in state.items() if name.startswith("exp_avg")
            ),
            "peak": self.ledger.peak_bytes - self.batch,
            "block_inputs": sum(self.inputs.values()),
        }

    def on_train_end(self, *_: Any) -> None:
        self.ledger.__exit__(None, None, None)


def counts_of(make_trainer: Make, preset: Any, module: Any = None, **arguments: Any) -> dict[str, int]:
    """Return the bytes of the last step of a fit, and the number of parameters."""
    torch.manual_seed(0)
    counted = Counted()
    module = module or regression(L, Stack(BLOCKS, WIDTH))
    trainer = make_trainer(L, **solo.trainer_kwargs(preset, callbacks=[counted]), max_steps=4, **arguments)
    trainer.fit(module, loader(8, BATCH, WIDTH))
    return {**counted.bytes, "parameters": sum(p.numel() for p in module.parameters())}


def figures_in(text: str) -> dict[str, list[str]]:
    """Return name -> figures of all lines of techniques.

    Raises:
        AssertionError: a line has a figure without a name.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not re.search(FIGURE, line) or re.search(r"Memory, |resident", line):
            continue
        match = next((match for pattern in LINES if (match := pattern.search(line))), None)
        assert match is not None, f"no pattern for {line!r}: name its figures in LINES, and count them"
        named = {name: value for name, value in match.groupdict().items() if value is not None}
        last = [value for name, value in named.items() if name != "each"]
        assert len(re.findall(FIGURE, line.split("budget=")[0])) + ("peak" in named) == len(last), line
        if "states" in named:
            named.setdefault("host_states", "0 B")
        for name, value in named.items():
            found.setdefault(name, []).append(value)
    return found


def assert_equal_to(figure: str, counted: int) -> None:
    """Compare a figure, which is rounded to a hundredth of its unit, with a count."""
    value, unit = figure.split()
    assert abs(float(value) * UNITS[unit] - counted) <= 0.005 * UNITS[unit] + SLACK, f"{figure} and {counted} bytes"


def split(**settings: Any) -> dict[str, Any]:
    return {"callback": {"compact_states": settings}}


RELEASE = {"callback": {"gradient_release": {}}}
HOST = {"callback": {"gradient_release": {"buffer": "host"}}}
MODEL_STATES: list[Any] = [
    ({"precision": "32-true", **RELEASE}, {"accumulate_grad_batches": 2}),
    ({"precision": "32-true", **RELEASE}, {"gradient_clip_val": 1.0}),
    ({"precision": "bf16-true", **RELEASE}, {"gradient_clip_val": 1.0}),
    ({"precision": "bf16-mixed", **HOST}, {"accumulate_grad_batches": 2}),
    ("compact", {}),
    ("compact", {"gradient_clip_val": 1.0}),
    ("compact_host", {"accumulate_grad_batches": 2}),
    ("compact_states", {}),
    ("split_weights", {}),
    ({"precision": "bf16-mixed", **split(master_bits=24)}, {}),
    ({"precision": "32-true", **split(master_bits=32)}, {}),
    ({"precision": "bf16-true", **split(state_budget="200KiB")}, {}),
    ({"precision": "bf16-true", **split(master_bits="16-stochastic", moment_bits=32)}, {}),
    (
        {
            "precision": "32-true",
            "callback": {"compact_states": {"master_bits": 32, "moment_bits": 32}, "gradient_release": {}},
        },
        {"gradient_clip_val": 1.0},
    ),
]


@pytest.mark.parametrize(("preset", "arguments"), [*MODEL_STATES, ("compact_states", {"optimizer": "RAdam"})], ids=str)
def test_bytes_of_model_states(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, preset: Any, arguments: dict[str, Any]
) -> None:
    module, optimizer = regression(L, Stack(BLOCKS, WIDTH)), getattr(torch.optim, arguments.get("optimizer", "AdamW"))
    module.configure_optimizers = lambda: optimizer(module.parameters(), lr=1e-3)
    others = {name: value for name, value in arguments.items() if name != "optimizer"}
    with caplog.at_level("INFO"):
        counted = counts_of(make_trainer, preset, module, **others)
    found = figures_in(caplog.text)
    assert found
    each = found.pop("each")
    for number, name in enumerate(name for name in ("weights", "states", "gradients") if name in found):
        total = counted[name] + (counted["host_states"] if name == "states" else 0)
        assert float(each[number]) == pytest.approx(total / counted["parameters"], abs=0.01)
    if "host_states" in found and not counted["host_states"]:  # on a CPU both are in the same memory
        parts = [found.pop(name)[-1].split() for name in ("states", "host_states")]
        assert sum(float(value) * UNITS[unit] for value, unit in parts) == pytest.approx(counted["states"], rel=0.01)
    for name, figures in found.items():
        assert_equal_to(figures[-1], counted[name])  # the last: states may move after the first step


def test_bytes_of_gradients_under_manual_optimization(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    class ByHand(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = Stack(BLOCKS, WIDTH)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(squares(self.net(batch[0]), batch[1]))
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    with caplog.at_level("INFO"):
        counted = counts_of(make_trainer, "compact", ByHand())
    found = figures_in(caplog.text)
    for name in ("own_gradients", "weights", "states"):
        assert_equal_to(found[name][-1], counted[name])


def recomputed(**settings: Any) -> dict[str, Any]:
    return {"precision": "32-true", "callback": {"activation_checkpointing": settings}}


@pytest.mark.cpu_only("on a device a budget is counted in blocks of its allocator")
@pytest.mark.parametrize("budget", [0.5, 0.75, "bytes"])
def test_bytes_of_an_activation_budget(make_trainer: Make, caplog: pytest.LogCaptureFixture, budget: Any) -> None:
    """Between the fit that recomputes every block and the one that keeps all, at the start of backward."""
    least, most = counts_of(make_trainer, recomputed()), counts_of(make_trainer, {"precision": "32-true"})
    if budget == "bytes":
        budget = (least["peak"] + most["peak"]) // 2
    caplog.clear()
    with caplog.at_level("INFO"):
        counted = counts_of(make_trainer, recomputed(budget=budget))
    found = figures_in(caplog.text)
    assert_equal_to(found["kept"][-1], counted["activations"] - least["activations"])
    assert_equal_to(found["all"][-1], most["activations"] - least["activations"])
    assert least["activations"] < counted["activations"] < most["activations"]
    if isinstance(budget, int):
        assert_equal_to(found["peak"][-1], counted["peak"])


@pytest.mark.parametrize("settings", [{}, {"keep_on_device": "2MiB"}], ids=str)
def test_bytes_of_offloaded_block_inputs(
    make_trainer: Make, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    offloading = {"min_offload_bytes": 1, "allow_cpu": True, **settings}
    callbacks = {"activation_checkpointing": {}, "activation_offloading": offloading}
    with caplog.at_level("INFO"):
        counted = counts_of(make_trainer, {"precision": "32-true", "callback": callbacks})
    assert counted["block_inputs"] == BLOCKS * BATCH * WIDTH * 4
    assert_equal_to(figures_in(caplog.text)["block_inputs"][-1], counted["block_inputs"])


class Phases(L.Callback):
    """Counts the bytes that stay from step to step, and the peaks of backward and of the optimizer step."""

    def setup(self, *_: Any, **__: Any) -> None:
        self.ledger = Ledger(device="cpu")  # the engine makes meta tensors, too
        self.ledger.__enter__()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        self.batch = sum(part.nbytes for part in batch)
        self.kept = self.ledger.live_bytes - self.batch

    def on_before_backward(self, *_: Any) -> None:
        self.activations = self.ledger.live_bytes - self.kept
        self.ledger.reset_peak()

    def on_after_backward(self, *_: Any) -> None:
        self.backward = self.ledger.peak_bytes - self.activations - self.kept
        self.ledger.reset_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self.step = self.ledger.peak_bytes - self.batch - self.kept

    def on_train_end(self, *_: Any) -> None:
        self.ledger.__exit__(None, None, None)


@pytest.mark.long
@pytest.mark.cpu_only("the engine is asked to run on the CPU")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_bytes_of_an_engine(make_trainer: Make, caplog: pytest.LogCaptureFixture, precision: str) -> None:
    """Host and device are one memory here; what backward and the step take besides never exists together."""
    pytest.importorskip("deepspeed")
    bucket = {"zero_optimization": {"reduce_bucket_size": 66_465}}  # two of them hold all gradients
    strategy = {"name": "zero_offload", "allow_cpu": True, "host_optimizer": "torch", "config": bucket}
    phases = Phases()
    arguments = solo.trainer_kwargs({"precision": precision, "strategy": strategy}, callbacks=[phases])
    with caplog.at_level("INFO"):
        make_trainer(L, **arguments, max_steps=3).fit(regression(L, Stack(BLOCKS, WIDTH)), loader(8, 4, WIDTH))
    found = figures_in(caplog.text)
    values = [found[name][-1].split() for name in ("host", "device")]
    logged = sum(float(value) * UNITS[unit] for value, unit in values)
    assert logged == pytest.approx(
        phases.kept + phases.backward + phases.step, rel=0.03
    )  # and gradients of activations
