"""The planner itself, in this process: its bytes against a real fit's, and what it says where it can't know."""

from __future__ import annotations

import importlib
import json
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_solo.cards.configuration import Configuration, Target
from lightning_solo.cards.footprint import Sizes
from lightning_solo.errors import PlanError, PresetError
from lightning_solo.planner import traces
from lightning_solo.planner.allocator import UNLIMITED
from lightning_solo.planner.capture import capture
from lightning_solo.planner.device import Device, device
from lightning_solo.planner.plan import TIGHT, Plan
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.replay import Capacities
from lightning_solo.planner.rules import arrange
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.zero_offload.footprint import layout_for
from lightning_solo.units import GiB, MiB
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Held
from tests.planner.modules import Classifier, dense, vectors

ROOT = Path(__file__).parents[2]
CPU, GPU = device("cpu"), device("rtx_4090")


def planned(
    make: Callable[[], Any],
    batch: Any,
    config: Configuration | str = "baseline",
    on: Device = CPU,
    budget: int = 16 * GiB,
    micro_batch: int | None = None,
    overrides: Sequence[str] = (),
    **trainer: Any,
) -> Plan:
    config = compose(config, overrides) if isinstance(config, str) else config
    return Planner(make, batch, trainer, on, budget, micro_batch).plan("tried", config)


# --- against a real fit, by a ledger that knows nothing of the planner ---


class Attends(L.LightningModule):
    """A module that the package knows nothing of: (batch, 12, width) -> 3 classes."""

    def __init__(self, hidden: int = 48, dropout: float = 0.0, masked: bool = False, optimizer: Any = None) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, hidden), nn.Linear(hidden, 16), nn.LayerNorm(16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 3)
        self.dropout, self.masked, self.optimizer = dropout, masked, optimizer

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 12, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = torch.ones(12, 12, dtype=torch.bool).tril() if self.masked else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        x = x + F.dropout(y.transpose(1, 2).flatten(2), self.dropout, self.training)
        return self.head((x + self.down(F.gelu(self.up(x)))).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return (self.optimizer or torch.optim.AdamW)(self.parameters(), lr=1e-3)


def examples(size: int = 4) -> Any:
    return torch.randn(size, 12, 16), torch.randint(3, (size,))


def held(make: Callable[[], Any], batch: Any, steps: int = 3, **trainer: Any) -> int:
    """Return the bytes that a real fit holds at most, measured without the planner."""
    watch = Held()
    loader: Any = DataLoader([batch] * 8, batch_size=None)  # of batches from before, which count nowhere
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        enable_model_summary=False,
        callbacks=[watch],
        **{**quiet, **trainer},
    ).fit(make(), loader)
    return watch.peak_bytes


CHANGES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "wider": {"hidden": 96},
    "dropout": {"dropout": 0.1},
    "masked": {"masked": True},
    "momentum": {"optimizer": partial(torch.optim.SGD, momentum=0.9)},
}


@cache
def plan_of(change: str) -> Plan:
    return planned(partial(Attends, **CHANGES[change]), examples())


@pytest.mark.parametrize("change", CHANGES)
def test_peak_equals_that_of_a_real_fit(change: str) -> None:
    make, plan = partial(Attends, **CHANGES[change]), plan_of(change)
    assert plan.peak_bytes == held(make, examples(), precision="32-true")
    assert plan.needed_bytes == plan.peak_bytes
    assert plan.traced == "fake tensors"


@pytest.mark.long
@pytest.mark.parametrize(("preset", "trainer"), [("bf16", "bf16-mixed"), long("bf16_true", "bf16-true")])
def test_peak_in_other_precisions_equals_that_of_a_real_fit(preset: str, trainer: str) -> None:
    plan = planned(Attends, examples(), preset, micro_batch=9)
    assert plan.peak_bytes == held(Attends, examples(9), precision=trainer)


def test_arguments_of_the_users_trainer_are_planned() -> None:
    plan = planned(Attends, examples(), gradient_clip_val=1.0, accumulate_grad_batches=2)
    real = held(Attends, examples(), precision="32-true", gradient_clip_val=1.0, accumulate_grad_batches=2)
    assert plan.peak_bytes == real


# --- what adds up ---


@pytest.mark.parametrize("on", [long(CPU), GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("preset", ["baseline", "bf16", *map(long, ("bf16_true", "checkpointing", "zero_offload"))])
def test_breakdown_sums_to_the_peak(preset: str, on: Device) -> None:
    overrides = ["callback.activation_checkpointing.blocks=[Linear]"] if preset == "checkpointing" else []
    plan = planned(Attends, examples(), preset, on, overrides=overrides)
    assert sum(plan.breakdown.values()) == plan.peak_bytes
    assert min(plan.breakdown.values()) >= 0
    exact = plan.peak_bytes - plan.breakdown.get("workspace", 0) - plan.breakdown.get("rounding", 0)
    assert max(plan.phases.values()) == exact
    if on == GPU:
        assert plan.breakdown["workspace"] == GPU.workspace_bytes
        assert plan.breakdown["rounding"] > 0
        assert plan.needed_bytes % MiB == GPU.context_bytes % MiB
    assert plan.needed_bytes >= plan.peak_bytes + on.context_bytes
    json.dumps(plan.as_dict())


def test_the_device_shows_more_than_is_needed_and_no_more_than_it_has() -> None:
    plenty = planned(Attends, examples(), on=GPU)
    assert plenty.peak_bytes + GPU.context_bytes < plenty.needed_bytes <= plenty.reserved_bytes
    trace = capture(Attends, examples(), {"precision": "32-true"})
    unlimited = Capacities(trace.log, GPU.workspace_bytes).peak_reserved() + GPU.context_bytes
    assert plenty.reserved_bytes == unlimited
    assert planned(Attends, examples(), on=GPU, budget=plenty.needed_bytes).reserved_bytes <= plenty.needed_bytes
    assert planned(Attends, examples()).reserved_bytes == plan_of("as it is").peak_bytes


def test_a_plan_replays_what_it_has_found_to_fit_no_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[int] = []
    replay, planner = Capacities._replay, Planner(Attends, examples(), {}, GPU, GPU.memory_bytes)
    monkeypatch.setattr(Capacities, "_replay", lambda self, one: (replayed.append(one.capacity), replay(self, one))[1])
    trace, arranged = capture(Attends, examples(), {}), arrange(compose("baseline"), {})
    assert planner._fits_at(trace, arranged)
    assert len(replayed) == 1
    assert planner._fits_at(trace, arranged)
    assert len(replayed) == 1
    planner.costs(arranged, trace)
    assert UNLIMITED not in replayed  # the first replay met no limit


# --- states, to the byte ---

PARAMETERS = sum(p.numel() for p in Attends().parameters())
TENSORS = len(list(Attends().parameters()))


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (torch.optim.AdamW, 8 * PARAMETERS + 4 * TENSORS),  # two of fp32, a step of 4 bytes in each tensor
        long(torch.optim.SGD, 0),
        long(partial(torch.optim.SGD, momentum=0.9), 4 * PARAMETERS),
        long(partial(torch.optim.Adam, amsgrad=True), 12 * PARAMETERS + 4 * TENSORS),
        long(torch.optim.Adagrad, 4 * PARAMETERS + 4 * TENSORS),
    ],
    ids=["AdamW", "SGD", "momentum", "amsgrad", "Adagrad"],
)
def test_model_states(optimizer: Any, states: int) -> None:
    breakdown = planned(partial(Attends, optimizer=optimizer), examples(2), on=GPU).breakdown
    assert breakdown["weights"] == 4 * PARAMETERS
    assert breakdown["gradients"] == 4 * PARAMETERS
    assert breakdown["optimizer_states"] == states


# --- verdicts ---


@pytest.mark.row(67)
def test_verdicts_around_the_need() -> None:
    planner = Planner(Attends, examples(), {}, GPU, 16 * GiB)
    config = compose("baseline")
    needed = planner.plan("tried", config).needed_bytes
    for budget, verdict in [
        (needed - 1, "does not fit"),
        (needed, "tight"),
        (int(needed * (1 + TIGHT)) - 1, "tight"),
        (int(needed * (1 + TIGHT)) + 1, "fits"),
    ]:
        planner.budget = budget
        plan = planner.plan("tried", config)
        assert (plan.verdict, plan.fits) == (verdict, verdict != "does not fit")
        assert plan.margin_bytes == budget - needed


@pytest.mark.parametrize(
    ("on", "budget"), [long(CPU, 4 * MiB), (GPU, GPU.context_bytes + 64 * MiB)], ids=["cpu", "gpu"]
)
def test_the_largest_micro_batch_fits_and_one_more_does_not(on: Device, budget: int) -> None:
    planner = Planner(Attends, examples(), {}, on, budget)
    config = compose("baseline")
    largest = planner.plan("tried", config).largest_micro_batch
    assert largest is not None
    assert largest > 8
    verdicts = []
    for size in (largest, largest + 1):
        planner.micro_batch = size
        verdicts.append(planner.plan("tried", config).verdict)
    assert verdicts[0] == "fits"
    assert verdicts[1] != "fits"


@pytest.mark.long
def test_no_micro_batch_fits_in_nothing() -> None:
    plan = planned(Attends, examples(), budget=1000)
    assert (plan.largest_micro_batch, plan.verdict) == (0, "does not fit")


# --- techniques ---


def test_a_strategy_without_a_rule_is_refused() -> None:
    config = replace(compose("baseline"), foreign=(Target("strategy", {"_target_": "mine.Own"}, ("mine",)),))
    with pytest.raises(PlanError, match=r"strategy='mine.Own': no card"):
        arrange(config, {})


@pytest.mark.long
def test_zero_offload_has_the_bytes_of_its_layout() -> None:
    config = compose("zero_offload")
    assert config.strategy is not None
    plan = planned(Attends, examples(64), config, on=GPU)
    sizes = [p.numel() for p in Attends().parameters()]
    (zero,) = config.techniques
    layout = layout_for(zero.settings, Sizes(tuple(sizes), (), 0), config.precision or "32-true", 1, cuda=True)
    assert plan.host_bytes == layout.host_bytes > 12 * PARAMETERS
    breakdown = plan.breakdown
    states = breakdown["weights"] + breakdown["gradients"] + breakdown["optimizer_states"]
    assert states == sum(layout.device.values())
    assert breakdown["optimizer_states"] == 0
    # forward and backward hold what they hold in bf16 without it
    bf16 = planned(Attends, examples(64), "bf16_true", on=GPU).phases["backward"]
    held_bf16 = 2 * 2 * PARAMETERS + 4 * PARAMETERS + 4 * TENSORS  # weights, gradients, two states, steps
    activations = plan.phases["backward"] - sum(layout.device.values())
    assert activations == pytest.approx(bf16 - held_bf16, rel=0.02)


def test_accumulation_multiplies_flops_and_keeps_the_peak() -> None:
    plans = [planned(Attends, examples(), overrides=[f"accumulate_grad_batches={n}"], on=GPU) for n in (2, 8)]
    assert plans[1].flops == 4 * plans[0].flops
    assert plans[1].peak_bytes == plans[0].peak_bytes
    assert 3 < plans[1].seconds_per_step / plans[0].seconds_per_step < 4  # the update is there once


class OnlyInBf16(Classifier):
    """Fails in any other precision."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if next(self.parameters()).dtype != torch.bfloat16:
            raise RuntimeError(f"weights of {next(self.parameters()).dtype}")
        return super().training_step(batch, batch_idx)


def test_module_that_works_in_one_precision_passes_the_check() -> None:
    planner = Planner(lambda: OnlyInBf16(nn.Linear(16, 5)), vectors(), {}, CPU, 16 * GiB)
    planner.check_module(["32-true", "bf16-true"])
    with pytest.raises(PlanError, match=mentions("torch.float32")):
        planner.check_module(["32-true", "64-true"])


# --- where fake tensors end ---


@torch.library.custom_op("planned::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An operator without a rule for fake tensors."""
    return 2 * x


doubled.register_autograd(lambda ctx, grad: 2 * grad)


class Custom(Classifier):
    """Uses an operator of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(doubled(self.network(x)), y)


def custom() -> Custom:
    return Custom(nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 5)))


@pytest.mark.long
def test_an_operator_without_a_rule_is_planned_by_real_steps() -> None:
    plan = planned(custom, vectors(), micro_batch=9)
    assert "real steps" in plan.traced
    assert plan.peak_bytes == held(custom, vectors(9), precision="32-true")


@pytest.mark.long
def test_a_module_too_large_for_real_steps_is_refused_with_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = sum(p.numel() for p in custom().parameters())
    monkeypatch.setattr(traces, "host_memory", lambda: (GiB, 16 * parameters))
    with pytest.raises(PlanError) as caught:
        planned(custom, vectors())
    assert "planned" in str(caught.value), "the first way's reason, with the operator's name"
    assert "doubled" in str(caught.value)
    # weight, gradient and two states of fp32
    assert lines_with(str(caught.value), "AdamW", traces.format_bytes(16 * parameters))


@pytest.mark.long
def test_sparse_gradients() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(100, 8, sparse=True), nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding((x[:, :1] > 0).long()).mean(1))

    plan = planned(lambda: Classifier(Sparse(), partial(torch.optim.SGD, lr=0.1)), vectors())
    assert plan.breakdown["weights"] == 4 * (100 * 8 + 8 * 5 + 5)


# --- habits of a constructor ---


def test_a_module_that_reads_a_file_and_starts_a_process(tmp_path: Path) -> None:
    (tmp_path / "width").write_text("24")

    def make() -> Classifier:
        width = int((tmp_path / "width").read_text())
        assert subprocess.run(["true"], check=False).returncode == 0
        return Classifier(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 5)))

    assert planned(make, vectors()).breakdown["weights"] == 4 * (17 * 24 + 25 * 5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_module_that_needs_a_gpu_in_its_constructor_is_refused_with_its_line() -> None:
    def make() -> Classifier:
        return Classifier(nn.Linear(16, 5).cuda())

    with pytest.raises(PlanError, match=r"test_planner.py:\d+; .*without data"):
        planned(make, vectors())


def test_a_batch_of_the_wrong_shape_names_the_line() -> None:
    with pytest.raises(PlanError, match=r"RuntimeError: .*modules.py:\d+"):
        planned(dense, (torch.randn(4, 17), torch.randint(5, (4,))))


@pytest.mark.long
def test_users_folder_named_like_a_library_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "lightning" / "torch"
    folder.mkdir(parents=True)
    (folder / "mine.py").write_text("def wrong(x):\n    return x @ x\n")
    found: dict[str, Any] = {}
    exec(compile((folder / "mine.py").read_text(), str(folder / "mine.py"), "exec"), found)

    class Wrong(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return found["wrong"](self.network(batch[0])).sum()

    with pytest.raises(PlanError, match=mentions("lightning/torch/mine.py:2;")):
        planned(lambda: Wrong(nn.Linear(16, 5)), vectors())


class Never(Classifier):
    """Optimizes by hand, and doesn't."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Picky(Classifier):
    """Trains on hard batches only: of a number that nobody knows it can't be told which those are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        return loss if loss.item() > 1.01 else None


def test_a_module_that_makes_no_step_is_refused() -> None:
    with pytest.raises(PlanError, match=mentions("Never", "64 batches")):
        planned(lambda: Never(nn.Linear(16, 5)), vectors())


def test_a_loss_that_depends_on_its_number_is_planned_by_real_steps() -> None:
    make = lambda: Picky(nn.Linear(16, 5))  # noqa: E731
    plan = planned(make, vectors())
    assert "real steps" in plan.traced
    assert plan.breakdown["gradients"] == plan.breakdown["weights"] == 4 * (16 * 5 + 5)


def test_missing_batch_is_refused_with_a_remedy() -> None:
    with pytest.raises(PresetError, match=mentions("train_dataloader() gives none", "write batch=datamodule")):
        planned(dense, None)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(PresetError, match="no tensor"):
        planned(dense, {"x": 3})


@pytest.mark.long
@pytest.mark.parametrize("part", ["presets", "streaming"])
def test_peaks_are_those_of_an_h200(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("examples", "examples/gpu"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    replan, train = (importlib.import_module(name) for name in ("replan", "train"))
    rows = json.loads((ROOT / "examples" / "results" / "gpu" / f"{part}.json").read_text())["rows"]
    compared = [row for row in rows if "planned_bytes" in row]
    assert compared
    for row in compared:
        given = train.parsed(shlex.split(row["arguments"]))
        figures = train.planned(given, *train.made(given), replan.calibrated_device(), 600)
        assert figures["planned_bytes"] == pytest.approx(row["peak_allocated_bytes"], rel=0.01), row["what"]
