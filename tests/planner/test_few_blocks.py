"""A plan from a few equal blocks is the plan from all of them, to the byte; unequal blocks are all traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.cards.configuration import Target
from lightning_solo.planner import capture as capturing
from lightning_solo.planner import few_blocks
from lightning_solo.planner.bases import with_modes
from lightning_solo.planner.block_tables import block_table
from lightning_solo.planner.depth_scaling import NotRepeatedError, Stretch, equal_traces
from lightning_solo.planner.device import device
from lightning_solo.planner.equal_blocks import Run, equal_runs, shortened
from lightning_solo.planner.few_blocks import FEW, FewBlocks
from lightning_solo.planner.notes import resolved
from lightning_solo.planner.plan import Plan
from lightning_solo.planner.planner import Planner
from lightning_solo.planner.rules import arrange
from lightning_solo.presets.compose import compose, compose_all
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import MiB
from tests.planner.modules import Classifier, sequences

DEPTH = 8


class Numbered(nn.Module):
    """A block that knows its number."""

    def __init__(self, layer_idx: int, width: int = 16) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.layers = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Stack(nn.Module):
    """Blocks in a list, of which some may be wider; pooled."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Numbered(number, width) for number, width in enumerate(widths))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def stack(*widths: int) -> L.LightningModule:
    return Classifier(Stack(list(widths)))


def gpt() -> L.LightningModule:
    return ByteGPT(width=32, depth=DEPTH, heads=2)


def characters() -> Tensor:
    return torch.zeros(2, 17, dtype=torch.uint8)


def planned(
    make: Callable[[], Any],
    batch: Any,
    preset: str,
    monkeypatch: pytest.MonkeyPatch,
    least: int,
    budget: int = 0,
    trainer: dict[str, Any] | None = None,
) -> tuple[Plan, list[int]]:
    """Return a plan, and the number of parameters of each module that is traced in this process."""
    traced = counted(monkeypatch)
    monkeypatch.setattr(few_blocks, "LEAST", least)
    target = device("rtx-4090")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = Planner(make, batch, trainer or {}, target, budget or target.memory_bytes).plan(preset, compose(preset))
    monkeypatch.undo()
    return plan, traced


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of parameters of each module that is traced in this process."""
    traced: list[int] = []
    to_fake = capturing.built_without_data

    def built(make: Callable[[], Any], mode: Any) -> Any:
        module = to_fake(make, mode)
        traced.append(len(list(module.parameters())))
        return module

    monkeypatch.setattr(capturing, "built_without_data", built)
    return traced


def test_plan_from_few_blocks_equals_that_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    # a budget in which not even one example fits: no other micro-batches are traced
    few, short = planned(gpt, characters()[:1], "bf16", monkeypatch, DEPTH, MiB)
    whole, full = planned(gpt, characters()[:1], "bf16", monkeypatch, DEPTH + 1, MiB)
    per_block = 12  # two norms and four linear layers, with biases
    assert {max(full) - count for count in short} >= {per_block * (DEPTH - FEW - more) for more in (0, 1, 2)}
    assert few == whole


def test_two_runs_of_unlike_blocks_are_planned_from_few_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> L.LightningModule:
        network = Stack([24] * 7 + [40] * 7)
        network.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), block) for block in network.blocks)
        return Classifier(network)

    few, short = planned(make, sequences(1), "bf16", monkeypatch, 7, MiB)
    whole, full = planned(make, sequences(1), "bf16", monkeypatch, 8, MiB)
    assert few == whole
    assert short.count(max(full)) == 1, "all blocks are traced once, until backward"


def test_forward_of_all_blocks_is_traced_once_for_presets_of_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_blocks, "LEAST", DEPTH)
    forwards: list[str] = []
    end = few_blocks._Look.on_before_backward
    monkeypatch.setattr(
        few_blocks._Look, "on_before_backward", lambda look, *args: (forwards.append("whole"), end(look, *args))
    )
    planner = Planner(gpt, characters()[:1], {}, device("rtx-4090"), MiB)
    first = compose("bf16")
    for config in (first, compose("checkpointing")):
        assert config.precision == first.precision
        planner.plan("", config)
    assert len(planner._traces) == 2
    assert forwards == ["whole"]


def test_forward_of_all_blocks_is_traced_for_each_preset_with_other_objects() -> None:
    planner = Planner(gpt, characters()[:1], {}, device("rtx-4090"), MiB)
    config = compose("baseline")
    other = Target("callback.other", {"_target_": "mine.Other"}, ("mine",))
    arranged = [arrange(each, {}) for each in (config, replace(config, foreign=(other,)))]
    blocks = [planner._block_traces(each, partial(planner._captured, each, 1)) for each in arranged]
    assert [each._precision for each in blocks] == ["32-true", ""]


class UnlikeOne(Stack):
    """A module that runs a further operator for batches of several examples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if len(x) == 1 else x.sigmoid())


def test_micro_batches_share_the_traces_with_one_block_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_blocks, "LEAST", 9)
    make = lambda: Classifier(UnlikeOne([24] * 9))  # noqa: E731
    planner = Planner(make, sequences(1), {}, device("rtx-4090"), MiB)
    arranged = arrange(compose("baseline"), {})
    one, two, three = (partial(planner._captured, arranged, size) for size in (1, 2, 3))
    blocks = planner._block_traces(arranged, one)
    traced = counted(monkeypatch)
    traces = [blocks.trace(two), blocks.trace(three)]
    short = min(traced)
    assert traced == [short, short + 4, short]  # weights and biases of two layers in the block more of the first
    assert equal_traces(traces[1], resolved(three(make)))


@pytest.mark.long
@pytest.mark.parametrize("preset", [name for name in compose_all() if name != "auto"])
def test_plans_of_all_presets_from_few_blocks_equal_those_from_all(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[Any] = []
    for least in (DEPTH, DEPTH + 1):
        try:
            plans.append(planned(gpt, characters(), preset, monkeypatch, least)[0])
        except Exception as error:
            monkeypatch.undo()
            plans.append(str(error))
    assert plans[0] == plans[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("preset", "clipped"),
    [
        ("stream", False),
        ("stream", True),
        ("stream_checkpointing", False),
        ("compact_host", False),
        ("host_states", True),
        ("gradient_release", False),
    ],
)
def test_plans_with_pieces_and_rings_from_few_blocks_equal_those_from_all(
    preset: str, clipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = lambda: ByteGPT(width=64, depth=22, heads=2)  # noqa: E731
    trainer = {"gradient_clip_val": 1.0} if clipped else {}
    few, traced = planned(make, characters()[:1], preset, monkeypatch, few_blocks.LEAST, MiB, trainer)
    whole, full = planned(make, characters()[:1], preset, monkeypatch, 23, MiB, trainer)
    assert few == whole
    assert traced.count(max(full)) == 1  # until the first backward


@pytest.mark.long
@pytest.mark.parametrize("mode", ["keep", "recompute", "offload"])
def test_tables_of_the_solver_from_few_blocks_equal_those_from_all(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    depth, target = 12, device("rtx-4090")
    config = with_modes(compose("bf16"), {mode: [f"blocks.{number}" for number in range(depth)]})
    config = compose("bf16") if mode == "keep" else config
    traced = counted(monkeypatch)
    traces: list[Any] = []
    for least in (depth, depth + 1):
        monkeypatch.setattr(few_blocks, "LEAST", least)
        planner = Planner(lambda: ByteGPT(width=32, depth=depth, heads=2), characters(), {}, target, MiB)
        traces.append(planner.captured(arrange(config, {}), len(characters())))
    few, whole = traces
    assert traced.count(max(traced)) == 2  # until the first backward, and in the trace of all
    assert few.marks == whole.marks
    assert len({mark.block for mark in few.marks}) == depth
    assert block_table(few, target) == block_table(whole, target)
    assert (few.costs, few.phases, few.steps) == (whole.costs, whole.phases, whole.steps)


@pytest.mark.long
def test_trace_of_few_blocks_asks_for_host_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, target, trainer = 12, device("rtx-4090"), {"gradient_clip_val": 1.0}
    host = 22 * 4 * (12 * 32**2 + 13 * 32)  # room for weights and gradients of 7 blocks, and not of 12
    traced = counted(monkeypatch)
    traces: list[Any] = []
    for least in (3, depth + 1):
        monkeypatch.setattr(few_blocks, "LEAST", least)
        make = partial(ByteGPT, width=32, depth=depth, heads=2)
        planner = Planner(make, characters(), trainer, target, MiB, host_memory=host)
        config = compose({"callback": {"weights_on_host": {}}})
        traces.append(planner.captured(arrange(config, trainer), len(characters())))
    few, whole = traces
    assert traced.count(max(traced)) == 2  # until the first backward, and in the trace of all
    assert len(traced) > 2
    assert "kept gradients" in "".join(few.assumptions)
    assert (few.costs, few.phases, few.steps) == (whole.costs, whole.phases, whole.steps)
    assert (few.host_bytes, few.assumptions) == (whole.host_bytes, whole.assumptions)


@pytest.mark.parametrize(
    ("short", "longer", "most"),
    [
        ("abxyxyxyc", "abxyxyxyxyc", "ab" + 7 * "xy" + "c"),
        ("xxyzyzyzxx", "xxyzyzyzyzxx", "xx" + 7 * "yz" + "xx"),
        ("ppppxyxyxy", "pppppxyxyxyxy", 8 * "p" + 7 * "xy"),  # two periods
    ],
)
def test_periods_are_inserted_where_a_block_more_inserts_one(short: str, longer: str, most: str) -> None:
    stretch = Stretch(short, [longer], [[len(short)], [len(longer)]])
    for more, expected in ((0, short), (1, longer), (4, most)):
        assert "".join(short[place.token] for place in stretch.places([more])) == expected


def test_periods_of_blocks_that_begin_alike_do_not_overlap() -> None:
    blocks = lambda one, other: "x" + one * "ab" + other * "ac" + "y"  # noqa: E731
    short, longer = blocks(3, 3), [blocks(4, 3), blocks(3, 4)]
    stretch = Stretch(short, longer, [[len(each)] for each in (short, *longer)])
    for more in ([0, 0], [1, 0], [0, 1], [5, 4]):
        expected = blocks(3 + more[0], 3 + more[1])
        assert "".join(short[place.token] for place in stretch.places(more)) == expected


@pytest.mark.parametrize(("short", "longer"), [("abcd", "abxcd"), ("abab", "abbaab"), ("abcabc", "abcab")])
def test_other_differences_are_no_periods(short: str, longer: str) -> None:
    with pytest.raises(NotRepeatedError):
        Stretch(short, [longer], [[len(short)], [len(longer)]])


@pytest.mark.parametrize(
    ("make", "runs"),
    [
        (partial(stack, *[24] * 6), [Run("network.blocks", 0, 6)]),
        (partial(stack, *[24] * 5, 40, *[24] * 4), [Run("network.blocks", 0, 5), Run("network.blocks", 6, 4)]),
        (partial(stack, *[24, 40] * 4), []),
    ],
)
def test_runs_are_blocks_of_equal_shapes(make: Callable[[], nn.Module], runs: list[Run]) -> None:
    assert equal_runs(make(), 4) == runs


def test_blocks_with_different_settings_or_shared_weights_are_not_equal() -> None:
    module = stack(*[24] * 9)
    blocks: Any = module.network.blocks
    blocks[2].layers[1] = nn.GELU("tanh")
    blocks[5].layers[0].weight = blocks[8].layers[0].weight
    assert equal_runs(module, 2) == [
        Run("network.blocks", 0, 2),
        Run("network.blocks", 3, 2),
        Run("network.blocks", 6, 2),
    ]


def test_recurrent_layers_with_references_to_their_weights_are_equal() -> None:
    module = nn.ModuleList([nn.GRU(8, 16), *(nn.GRU(16, 16) for _ in range(5)), nn.LSTM(16, 16)])
    assert equal_runs(module, 4) == [Run("", 1, 5)]


def test_name_of_a_block_in_a_shorter_module() -> None:
    blocks = FewBlocks(partial(stack, *[24] * 20, 40))
    names = [f"network.blocks.{number}" for number in range(21)] + ["network.head"]
    short = [blocks.named([5], name) for name in names]
    assert short == [*names[:5], *[None] * 15, "network.blocks.5", "network.head"]
    assert len(blocks.make([5]).network.blocks) == 6


def test_shortened_list_keeps_the_blocks_after_a_run_and_counts_on() -> None:
    module = stack(*[24] * 6, 40)
    blocks: Any = module.network.blocks
    with shortened(module, [Run("network.blocks", 0, 6)], [2]):
        assert [block.layers[0].out_features for block in blocks] == [24, 24, 40]
        assert blocks[-1].layers[0].out_features == 40
    assert [block.layers[0].out_features for block in blocks] == [24] * 6 + [40]


@pytest.mark.long
def test_module_that_needs_all_its_blocks_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Indexed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for number in range(7):
                x = self.blocks[number](x)
            return self.head(x.mean(1))

    make = lambda: Classifier(Indexed([24] * 7))  # noqa: E731
    assert FewBlocks(make).runs == []  # 7 are fewer than are worth it
    few, _ = planned(make, sequences(2), "bf16", monkeypatch, 7)
    whole, _ = planned(make, sequences(2), "bf16", monkeypatch, 8)
    assert few == whole


class ByNumber(Numbered):
    """A block whose code depends on its number, beyond those that the short traces have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid() if self.layer_idx >= 7 else super().forward(x)


class ByPosition(Stack):
    """A module whose forward treats one of its blocks differently."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x) if number != 7 else block(x).detach()
        return self.head(x.mean(1))


class ByGroup(Classifier):
    """A module whose optimizer has one block in a group of its own."""

    def configure_optimizers(self) -> Any:
        parameters = list(self.named_parameters())
        own = [weight for name, weight in parameters if ".7." in name]
        rest = [weight for name, weight in parameters if ".7." not in name]
        return torch.optim.AdamW([{"params": rest}, {"params": own, "lr": 1e-4}])


def unlike(kind: str) -> L.LightningModule:
    if kind == "group":
        return ByGroup(Stack([24] * 9))
    network = ByPosition([24] * 9) if kind == "position" else Stack([24] * 9)
    if kind == "number":
        for block in network.blocks:
            block.__class__ = ByNumber
    return Classifier(network)


@pytest.mark.parametrize(
    "kind", ["number", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("position", "group"))]
)
def test_blocks_that_differ_only_in_code_or_optimizer_are_all_traced(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert equal_runs(unlike(kind), 9)  # they look equal
    few, _ = planned(partial(unlike, kind), sequences(1), "bf16", monkeypatch, 9, MiB)
    whole, _ = planned(partial(unlike, kind), sequences(1), "bf16", monkeypatch, 10, MiB)
    assert few == whole


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    ["gradients", "dtype"],
)
def test_unlike_treatment_of_blocks_is_traced_whole(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Frozen(Classifier):
        def on_fit_start(self) -> None:
            for block in list(self.network.blocks)[7:]:  # more than are in the short traces
                if change == "gradients":
                    block.requires_grad_(False)
                else:
                    block.bfloat16().forward = lambda x: x

    make = lambda: Frozen(Stack([24] * 9))  # noqa: E731
    few, _ = planned(make, sequences(2), "baseline", monkeypatch, 9)
    whole, _ = planned(make, sequences(2), "baseline", monkeypatch, 10)
    assert few == whole
