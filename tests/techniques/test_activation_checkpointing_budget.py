"""A budget keeps as many blocks as fit, changes no number, is never exceeded and leaves no trace."""

from __future__ import annotations

import gc
import importlib
import logging
from contextlib import ExitStack
from itertools import accumulate
from types import ModuleType
from typing import Any

import lightning.pytorch as lightning_pytorch
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader

from lightning_solo.cards.budget import bytes_or_share
from lightning_solo.errors import BudgetError, ConflictError, PresetError
from lightning_solo.machine import cxx_compiler
from lightning_solo.memory.ledger import Ledger
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.activation_offloading.technique import ActivationOffloading
from lightning_solo.techniques.memory_logger.technique import MemoryLogger
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from lightning_solo.units import GiB, MiB
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Held, Stack, loader, regression
from tests.training import equal, workspaces

WIDTH = 32
BLOCKS = 6
pytestmark = [pytest.mark.any_device, pytest.mark.filterwarnings("ignore:.*MemoryLogger")]


class Peaks(lightning_pytorch.Callback):
    """Counts each batch, on a CPU with a ledger of its own, the blocks kept in it, and workspaces after the last."""

    def __init__(self, technique: ActivationCheckpointing | None = None) -> None:
        self.technique = technique
        self.bytes: list[int] = []
        self.kept: list[int] = []
        self.workspaces = 0
        self.on = ExitStack()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.on_cuda = pl_module.device.type == "cuda"
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            self.ledger = self.on.enter_context(Ledger(pl_module, trainer.optimizers))

    def on_train_batch_end(self, *_: Any) -> None:
        self.on.close()
        self.bytes.append(torch.cuda.max_memory_allocated() if self.on_cuda else self.ledger.peak_bytes)
        self.kept.append(len(self.technique.kept) if self.technique is not None else 0)

    def on_train_end(self, *_: Any) -> None:
        self.workspaces = workspaces() if self.on_cuda else 0

    def on_exception(self, *_: Any) -> None:
        self.on.close()

    @property
    def largest(self) -> int:
        return max(self.bytes)


def fitted(
    home: ModuleType, make_trainer: Any, technique: ActivationCheckpointing | None = None, **arguments: Any
) -> tuple[Peaks, list[Tensor]]:
    """Return the counts of a fit, and the weights behind it."""
    gc.collect()  # what other tests left on the device counts, too
    torch.manual_seed(0)
    module = arguments.pop("module", None) or regression(home, Stack(BLOCKS, WIDTH, dropout=0.1))
    data = arguments.pop("data", None) or loader(5, 256, WIDTH)
    peaks = Peaks(technique)
    callbacks = [peaks, *([] if technique is None else [technique]), *arguments.pop("callbacks", ())]
    torch.manual_seed(1)
    make_trainer(home, callbacks=callbacks, **arguments).fit(module, data)
    return peaks, list(module.parameters())


def with_workspaces_of(recomputed: Peaks, plain: Peaks) -> int:
    """Return the peak of a plain fit, with the workspaces that a recomputation before it leaves on a GPU."""
    return plain.largest - plain.workspaces + recomputed.workspaces


def bounds(home: ModuleType, make_trainer: Any, **arguments: Any) -> tuple[int, int]:
    """Return the peaks with every block recomputed and with none."""
    recomputed = fitted(home, make_trainer, ActivationCheckpointing(), **arguments)[0]
    least, most = recomputed.largest, with_workspaces_of(recomputed, fitted(home, make_trainer, **arguments)[0])
    assert least - recomputed.workspaces < 0.8 * (most - recomputed.workspaces)
    return least, most


def with_workspaces(size: int, make_trainer: Any, **arguments: Any) -> int:
    """Return a budget of a size beside the workspaces of products."""
    return size + fitted(lightning_pytorch, make_trainer, ActivationCheckpointing(), **arguments)[0].workspaces


# Acted


def test_half_of_the_way_keeps_half_of_the_blocks_and_says_so(home, make_trainer, caplog):
    least, most = bounds(home, make_trainer)
    budget = (least + most) // 2
    with caplog.at_level(logging.INFO):
        peaks, _ = fitted(home, make_trainer, ActivationCheckpointing(budget=budget))
    # the first batch has no optimizer states yet, the second is counted
    assert peaks.kept == [0, 0, 3, 3, 3]
    assert peaks.bytes[1] == least < peaks.bytes[2] <= budget
    assert (
        len(lines_with(caplog.text, f"{BLOCKS} blocks", "3 are recomputed", "3 keep", "budget=", "planned peak")) == 1
    )


@pytest.mark.parametrize(("share", "kept"), [(0, 0), (0.34, 2), (0.5, 3), (0.99, 5), (1, 6)])
def test_a_share_is_that_of_what_blocks_keep_from_the_second_batch_on(home, make_trainer, share, kept):
    peaks, _ = fitted(home, make_trainer, ActivationCheckpointing(budget=share))
    assert peaks.kept == [0, kept, kept, kept, kept]


def test_with_every_second_block_the_others_are_always_kept(make_trainer):
    technique = ActivationCheckpointing(every_k=2, budget=0.34)
    peaks, _ = fitted(lightning_pytorch, make_trainer, technique)
    assert peaks.kept[-1] == 1


INDUCTOR = [pytest.mark.long, pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=INDUCTOR)]


class Saved(lightning_pytorch.Callback):
    """Counts the bytes that each batch saves for backward, the blocks kept in it, and the graphs compiled until then.

    A ledger would do the first, but under one nothing is compiled.
    """

    def __init__(self, technique: ActivationCheckpointing, compilation: RegionalCompilation) -> None:
        self.technique, self.compilation = technique, compilation
        self.bytes: list[int] = []
        self.kept: list[int] = []
        self.graphs: list[int] = []
        self.on = ExitStack()

    def on_train_batch_start(self, *_: Any) -> None:
        storages: dict[int, Any] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[id(tensor.untyped_storage())] = tensor.untyped_storage()
            return tensor

        self.storages = storages
        self.on.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))

    def on_train_batch_end(self, *_: Any) -> None:
        self.on.close()
        self.bytes.append(sum(storage.nbytes() for storage in self.storages.values()))
        self.kept.append(len(self.technique.kept))
        self.graphs.append(self.compilation.graphs)


def compiled_fit(
    make_trainer: Any, budget: int | float | str | None, backend: str = "aot_eager", **options: Any
) -> Any:
    """Return the counts of a fit with compiled blocks, and the module behind it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    home = lightning_pytorch
    module = regression(home, options.pop("net", None) or Stack(BLOCKS, WIDTH, dropout=0.1))
    blocks = options.pop("blocks", "auto")
    technique = ActivationCheckpointing(budget=budget, blocks=blocks)
    compilation = RegionalCompilation(backend=backend, blocks=blocks)
    counts = options.pop("counts", Saved)(technique, compilation)
    module.training_step = options.pop("step", lambda step: step)(module.training_step)
    data = options.pop("data", None) or loader(5, 256, WIDTH)
    make_trainer(home, callbacks=[counts, technique, compilation], **options).fit(module, data)
    return counts, module


@pytest.mark.long
@pytest.mark.cpu_only("the graphs are the same there")
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_compiled_blocks_a_share_is_kept_in_a_graph_of_its_own(make_trainer, backend):
    none, half, every = (compiled_fit(make_trainer, share, backend)[0] for share in (0.0, 0.5, 1.0))
    assert (none.kept, half.kept, every.kept) == ([0] * 5, [0, 3, 3, 3, 3], [0, 6, 6, 6, 6])
    # for the first block and for all others, kept once to count, and recomputed
    assert (none.graphs, half.graphs, every.graphs) == ([2, 4, 4, 4, 4], [2, 4, 4, 4, 4], [2, 2, 2, 2, 2])
    assert 0 < 2 * (half.bytes[-1] - none.bytes[-1]) == pytest.approx(every.bytes[-1] - none.bytes[-1], rel=1e-3)


# Parity and memory


class Allocated(lightning_pytorch.Callback):
    """Measures the peak of each batch by torch's allocator on the CPU, which Inductor's buffers come from, too."""

    def __init__(self, *_: Any) -> None:
        self.peaks: list[int] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        ledger = Ledger(pl_module, trainer.optimizers)
        ledger.see_owned()
        self.held = ledger.live_bytes
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.profile.__exit__(None, None, None)
        events = self.profile.profiler.kineto_results.events()
        changes = [event.nbytes() for event in events if event.name() == "[memory]"]
        self.peaks.append(self.held + max(accumulate(changes)))


@pytest.mark.long
@pytest.mark.cpu_only("needs a compiler of its own there")
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_of_compiled_blocks_stay_in_the_budget_by_the_allocator(make_trainer, backend):
    def peak(budget: int | float) -> int:
        options = {"net": Stack(BLOCKS, 64), "counts": Allocated, "data": loader(4, 1024, 64)}
        return compiled_fit(make_trainer, budget, backend, **options)[0].peaks[-1]

    least, most = peak(0.0), peak(1.0)
    budget = (least + most) // 2
    assert 0.75 * budget < peak(budget) <= budget


class Counting(nn.Module):
    """A block whose forward changes running statistics and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.BatchNorm1d(width), nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


@pytest.mark.long
@pytest.mark.cpu_only("the graphs are the same there")
def test_bytes_saved_by_compiled_blocks_are_counted_without_side_effects(make_trainer):
    ends = []
    for budget in (None, 0.5):
        torch.manual_seed(0)
        net = nn.Sequential(*[Counting(WIDTH) for _ in range(4)], nn.Linear(WIDTH, 1))
        counts, module = compiled_fit(make_trainer, budget, net=net, blocks=["Counting"])
        assert counts.kept[-1] == (2 if budget else 0)
        ends.append(list(module.state_dict().values()))
    assert equal(*ends)


@pytest.mark.simcuda
def test_fewer_compiled_blocks_are_kept_where_the_allocator_shows_more(make_trainer):
    def larger_from_the_third(step: Any) -> Any:
        def training_step(batch: Any, batch_idx: int) -> Tensor:
            extra = torch.zeros(2**18 if batch_idx > 1 else 1, device=batch[0].device)
            return step(batch, batch_idx) + 0 * extra.sum()

        return training_step

    budget = with_workspaces(3 * MiB, make_trainer, accelerator="cuda")
    gc.collect()
    torch.cuda.reset_peak_memory_stats()  # of other tests, some of which keep memory
    budget += torch.cuda.memory_allocated()
    with pytest.warns(UserWarning, match=mentions("budget=", "callback.activation_checkpointing.budget")):
        counts, _ = compiled_fit(
            make_trainer, budget, net=Stack(BLOCKS, WIDTH), step=larger_from_the_third, accelerator="cuda"
        )
    assert 0 < counts.kept[3] < counts.kept[2]


@pytest.mark.parametrize(
    ("factor", "precision"), [(3, "32-true"), long(1, "bf16-mixed"), long(1, "32-true"), long(3, "bf16-mixed")]
)
def test_no_step_is_above_the_budget_and_no_bit_changes(home, make_trainer, precision, factor):
    arguments = {"precision": precision, "accumulate_grad_batches": factor, "data": loader(12, 256, WIDTH)}
    least, most = bounds(home, make_trainer, **dict(arguments))
    _, plain = fitted(home, make_trainer, **dict(arguments))
    kept = []
    for number in range(5):
        budget = least + (most - least) * number // 4
        technique = ActivationCheckpointing(budget=budget)
        peaks, weights = fitted(home, make_trainer, technique, **dict(arguments))
        assert peaks.largest <= budget
        assert budget - peaks.largest < (most - least) / (BLOCKS - 1)  # no room for another block
        assert equal(weights, plain)
        kept.append(max(peaks.kept))
    assert kept == sorted(kept)
    assert kept[-1] == BLOCKS
    assert len(set(kept)) >= 4


def test_the_first_micro_batch_of_a_window_and_the_others_keep_what_fits_each(make_trainer):
    home, arguments = lightning_pytorch, {"accumulate_grad_batches": 3, "data": loader(12, 256, WIDTH)}
    least, most = bounds(home, make_trainer, **dict(arguments))
    peaks, _ = fitted(
        home, make_trainer, ActivationCheckpointing(budget=least + (most - least) * 3 // 4), **dict(arguments)
    )
    first, *others = peaks.kept[-3:]
    assert first > others[0] == others[1] > 0  # gradients are gone before backward in the first alone


def batches(*sizes: int) -> Any:
    rows = torch.randn(max(sizes), WIDTH)
    return DataLoader([(rows[:size], rows[:size, :1]) for size in sizes], batch_size=None)


@pytest.mark.long
def test_a_larger_batch_is_counted_before_blocks_are_kept_in_it(home, make_trainer):
    sizes = (128, 128, 128, 256, 64, 256, 192)
    arguments = {"data": batches(*sizes)}
    least, most = bounds(home, make_trainer, **dict(arguments))
    budget = (least + most) // 2
    _, plain = fitted(home, make_trainer, **dict(arguments))
    peaks, weights = fitted(home, make_trainer, ActivationCheckpointing(budget=budget), **dict(arguments))
    assert peaks.largest <= budget
    assert peaks.kept == [0, 0, 6, 0, 6, 3, 3]  # 64 rows as 128, 192 as 256
    assert equal(weights, plain)


@pytest.mark.long
def test_two_optimizers_by_hand(home, make_trainer):
    class ByHand(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.nets = nn.ModuleList(Stack(3, WIDTH) for _ in range(2))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for net, optimizer in zip(self.nets, self.optimizers(), strict=True):
                loss = nn.functional.mse_loss(net(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in self.nets]

    def fit(technique: ActivationCheckpointing | None) -> tuple[Peaks, list[Tensor]]:
        torch.manual_seed(0)
        return fitted(home, make_trainer, technique, module=ByHand())

    recomputed, (plain, weights) = fit(ActivationCheckpointing())[0], fit(None)
    budget = (recomputed.largest + with_workspaces_of(recomputed, plain)) // 2
    peaks, trained = fit(ActivationCheckpointing(budget=budget))
    assert peaks.largest <= budget
    assert 0 < peaks.kept[-1] < 6
    assert equal(weights, trained)


def test_steps_that_a_loss_scaler_skips_are_not_counted(home, make_trainer):
    class States(home.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            states.append(len(trainer.optimizers[0].state))

    # scales of 2**64 and 2**36 overflow in float16, 2**8 doesn't
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**64, backoff_factor=2.0**-28)
    plugin = importlib.import_module(f"{home.__name__}.plugins").MixedPrecision("16-mixed", kind, scaler)
    states, technique = list[int](), ActivationCheckpointing(budget="1GiB")
    peaks, _ = fitted(
        home,
        make_trainer,
        technique,
        callbacks=[States()],
        plugins=[plugin],
        data=loader(6, 256, WIDTH),
    )
    # two steps without states, the first with them, one that is counted, and all blocks fit from then on
    assert [count > 0 for count in states] == [False, False, False, True, True, True]
    assert peaks.kept == [0, 0, 0, 0, BLOCKS, BLOCKS]


@pytest.mark.long
def test_with_a_memory_logger_that_counts_too(make_trainer):
    home = lightning_pytorch
    least, most = bounds(home, make_trainer)
    technique = ActivationCheckpointing(budget=(least + most) // 2)
    peaks, _ = fitted(home, make_trainer, technique, callbacks=[MemoryLogger()])
    assert peaks.kept[-1] == 3
    assert peaks.largest <= technique.budget


@pytest.mark.long
@pytest.mark.cpu_only("the ledger counts page-locked buffers as well")
@pytest.mark.parametrize("mode", ["block_inputs", long("disk", id="disk")])
def test_inputs_that_are_offloaded_make_room_for_less_than_recomputing_all_takes(make_trainer, mode):
    home = lightning_pytorch
    arguments = {"precision": "32-true", "data": loader(5, 1024, WIDTH)}
    least, most = bounds(home, make_trainer, **dict(arguments))
    _, plain = fitted(home, make_trainer, **dict(arguments))

    def offloaded(budget: int | None) -> tuple[Peaks, list[Tensor], int]:
        offloading = ActivationOffloading(mode, min_offload_bytes=1024, allow_cpu=True)
        technique = ActivationCheckpointing(budget=budget)
        peaks, weights = fitted(home, make_trainer, technique, callbacks=[offloading], **dict(arguments))
        return peaks, weights, offloading.moved_bytes

    block_input = 4 * 1024 * WIDTH
    with pytest.raises(BudgetError):
        fitted(home, make_trainer, ActivationCheckpointing(budget=least - 1), **dict(arguments))
    alone, _, moved = offloaded(None)
    assert moved == 5 * BLOCKS * block_input
    assert least - alone.largest > block_input  # at the peak one is in use, one comes back, and one is the batch
    counts = []
    with pytest.raises(BudgetError) as error:
        offloaded(alone.largest - 1)
    assert error.value.needed == alone.largest
    assert "activation_offloading" not in str(error.value)  # it is there
    for number in range(3):
        budget = alone.largest + (most - alone.largest) * number // 2
        peaks, weights, moved = offloaded(budget)
        assert peaks.largest <= budget
        assert equal(weights, plain)
        kept = peaks.kept[-1]
        assert moved == (5 * BLOCKS - 3 * kept) * block_input  # a kept block's input stays, from the third step on
        counts.append(kept)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] >= BLOCKS - 1


@pytest.mark.long
@pytest.mark.cpu_only("planned for a CPU")
@pytest.mark.parametrize(("budget", "kept"), [("bytes", 3), (0.5, 3), (1.0, BLOCKS)])
def test_kept_blocks_are_planned_as_they_train(make_trainer, budget, kept):
    home = lightning_pytorch
    data = list(loader(1, 256, WIDTH)) * 5  # from before, counted nowhere
    least, most = bounds(home, make_trainer)
    budget = (least + most) // 2 if budget == "bytes" else budget
    watch, technique = Held(), ActivationCheckpointing(budget=budget)
    peaks, _ = fitted(home, make_trainer, technique, data=DataLoader(data, batch_size=None), callbacks=[watch])
    assert peaks.kept[-1] == kept

    def planned(budget: int | float | None, device: str = "cpu") -> Any:
        overrides = {"precision": "32-true", "callback": {"activation_checkpointing": {"budget": budget}}}
        planner = Planner(lambda: regression(home, Stack(BLOCKS, WIDTH, 0.1)), data[0], {}, device_of(device), GiB)
        return planner.plan("tried", compose(overrides))

    plan, recomputed = planned(budget), planned(None)
    assert least < plan.peak_bytes == watch.peak_bytes
    assert plan.flops < recomputed.flops
    # a share keeps the same blocks in a batch of any size
    assert (plan.largest_micro_batch is None) == isinstance(budget, int)
    assert recomputed.largest_micro_batch is not None
    if isinstance(budget, int):
        assert plan.peak_bytes <= budget
        with pytest.raises(BudgetError, match=mentions("budget=")):
            planned(least - 1)
    else:
        gpu, recomputed = planned(budget, "rtx-4090"), planned(None, "rtx-4090")
        assert gpu.peak_bytes > recomputed.peak_bytes
        assert gpu.flops < recomputed.flops


# Refused


@pytest.mark.long
def test_less_than_recomputing_all_takes_is_refused_with_the_least(home, make_trainer):
    gc.collect()
    least = fitted(home, make_trainer, ActivationCheckpointing())[0].largest
    gc.collect()  # what earlier fits left on a device is part of the peak
    assert fitted(home, make_trainer, ActivationCheckpointing(budget=least))[0].largest == least
    gc.collect()
    with pytest.raises(BudgetError, match=mentions(f"budget={least}", "activation_offloading")) as error:
        fitted(home, make_trainer, ActivationCheckpointing(budget=least - 1), module=None)
    assert (error.value.needed, error.value.available) == (least, least - 1)


@pytest.mark.every_change
@pytest.mark.parametrize("factor", [2, long(3)])
def test_less_than_a_whole_window_takes_is_refused_in_the_first(make_trainer, factor):
    home, arguments = lightning_pytorch, {"accumulate_grad_batches": factor, "data": loader(4 * factor, 256, WIDTH)}
    gc.collect()
    peaks = fitted(home, make_trainer, ActivationCheckpointing(), **arguments)[0]
    window = peaks.bytes[factor : 2 * factor]
    assert window[0] < max(window)  # the first micro-batch has no gradients from before
    gc.collect()
    technique = ActivationCheckpointing(budget=(window[0] + max(window)) // 2)
    with pytest.raises(BudgetError, match=mentions("callback.activation_checkpointing.budget=")) as error:
        fitted(home, make_trainer, technique, **arguments)
    assert error.value.needed == max(window)


@pytest.mark.cpu_only("with the bytes of a GPU's operators a block can be kept")
def test_a_later_batch_that_takes_more_is_warned_of_once(make_trainer, recwarn):
    home, data = lightning_pytorch, batches(64, 64, 64, 512, 512, 512)
    least = fitted(home, make_trainer, ActivationCheckpointing(), data=batches(64, 64, 64))[0].largest
    peaks, _ = fitted(home, make_trainer, ActivationCheckpointing(budget=2**21), data=data)
    assert least < 2**21
    assert peaks.kept == [0, 0, BLOCKS, 0, 0, 0]
    messages = [str(warning.message) for warning in recwarn if "budget" in str(warning.message)]
    assert len(messages) == 1
    assert f"budget={peaks.largest} or more" in messages[0]


def test_a_step_that_takes_more_than_the_counted_one_is_warned_of(home, make_trainer):
    module = regression(home, Stack(BLOCKS, WIDTH))
    step = module.training_step

    def larger_in_the_third(batch: Any, batch_idx: int) -> Tensor:
        extra = torch.zeros(2**22 if batch_idx == 2 else 1, device=module.device)
        return step(batch, batch_idx) + 0 * extra.sum()

    module.training_step = larger_in_the_third
    budget = with_workspaces(2 * MiB, make_trainer)
    with pytest.warns(UserWarning, match=mentions("budget=", "callback.activation_checkpointing.budget")):
        fitted(home, make_trainer, ActivationCheckpointing(budget=budget), module=module)


@pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing")
def test_compiled_blocks_are_refused(home, make_trainer):
    module = regression(home, Stack(BLOCKS, WIDTH))
    module.net.blocks[1].compile(backend="eager")
    with pytest.raises(
        ConflictError, match=mentions("budget=0.5", "net.blocks.1", "callback.activation_checkpointing.budget=null")
    ):
        fitted(home, make_trainer, ActivationCheckpointing(budget=0.5), module=module)


@pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing")
def test_a_compiled_part_beside_the_blocks_is_allowed(home, make_trainer):
    """It has a metric, which equals every module."""
    module = regression(home, Stack(BLOCKS, WIDTH))
    module.net.head.metric = torchmetrics.MeanMetric()
    module.net.head.compile(backend="eager")
    fitted(home, make_trainer, ActivationCheckpointing(budget=0.5), module=module)


def test_results_inside_blocks_and_whole_blocks_are_not_chosen_both():
    with pytest.raises(ConflictError, match=mentions("budget=0.5", "keep='products'", "keep=nothing", "budget=null")):
        ActivationCheckpointing(keep="products", budget=0.5)


@pytest.mark.parametrize("budget", [-1, 1.5, 2, "6", "6GB", "50%", "1.5", "much"])
def test_invalid_budget_is_refused_with_the_allowed_forms(budget):
    with pytest.raises(PresetError, match=mentions(f"budget={budget!r}", "16GiB", "17179869184", "0.5")):
        ActivationCheckpointing(budget=budget)


@pytest.mark.parametrize(("text", "budget"), [("0.5", 0.5), ("1", 1.0), ("12061416", 12061416), ("12MiB", 12 * 2**20)])
def test_a_text_may_be_any_form_of_a_budget(text, budget):
    assert ActivationCheckpointing(budget=text).budget == text
    parsed = bytes_or_share(text)
    assert (type(parsed), parsed) == (type(budget), budget)


# Trace


@pytest.mark.parametrize("failing", [0, long(1), long(2)])
def test_nothing_counts_after_a_fit_or_a_failure(home, make_trainer, failing):
    module = regression(home, Stack(BLOCKS, WIDTH))
    technique = ActivationCheckpointing(budget="1GiB")
    before = [(name, sorted(part.__dict__)) for name, part in module.net.named_modules()]
    for _ in range(2):
        peaks, _ = fitted(home, make_trainer, technique, module=module)
        assert peaks.kept == [0, 0, BLOCKS, BLOCKS, BLOCKS]
        assert _get_current_dispatch_mode() is None
        assert technique.kept == technique.wrapped == ()
    step = module.training_step

    def fail(batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == failing:
            raise RuntimeError("on purpose")
        return step(batch, batch_idx)

    module.training_step = fail
    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(home, make_trainer, technique, module=module)
    assert _get_current_dispatch_mode() is None
    assert [(name, sorted(part.__dict__)) for name, part in module.net.named_modules()] == before


def test_an_epoch_that_a_module_leaves_within_a_batch_counts_no_longer(home, make_trainer):
    module = regression(home, Stack(BLOCKS, WIDTH))
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 1 else None
    seen = []

    class Look(lightning_pytorch.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(_get_current_dispatch_mode())

    technique = ActivationCheckpointing(budget="1GiB")
    make_trainer(home, callbacks=[technique, Look()], max_epochs=2).fit(module, loader(4, 8, WIDTH))
    assert seen == [None, None]
