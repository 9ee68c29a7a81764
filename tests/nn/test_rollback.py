"""What forward and backward change is put back: random numbers, buffers, states of metrics."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from lightning_solo.errors import ConflictError
from lightning_solo.nn.rollback import Rollback
from tests.messages import mentions

CPU = torch.device("cpu")


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(numpy.random.rand())


def test_random_numbers_are_drawn_again() -> None:
    rollback = Rollback(nn.Module(), CPU)
    drawn()
    rollback.save()
    first = drawn()
    for _ in range(2):
        rollback.restore()
        assert drawn() == first


@pytest.mark.parametrize("draw", [lambda: random.gauss(0, 1), numpy.random.randn], ids=["Python", "NumPy"])
def test_a_normal_number_that_waits(draw: Any) -> None:
    """They are drawn in pairs: the second one of a pair changes no bit of the generator."""
    rollback = Rollback(nn.Module(), CPU)
    for _ in range(3):
        draw()
        for _ in range(2):
            rollback.save()
            first = draw()
            rollback.restore()
            assert draw() == first


def test_a_generator_that_takes_the_place_of_numpys() -> None:
    rollback, stock = Rollback(nn.Module(), CPU), numpy.random.get_bit_generator()
    numpy.random.seed(0)  # no normal number waits
    try:
        for kind in (numpy.random.MT19937, numpy.random.PCG64, numpy.random.MT19937):
            rollback.save()
            numpy.random.set_bit_generator(kind(1))
            for _ in range(2):
                rollback.save()
                first = numpy.random.rand()
                rollback.restore()
                assert numpy.random.rand() == first
    finally:
        numpy.random.set_bit_generator(stock)


class Own(nn.Module):
    """A module with generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.old = numpy.random.default_rng(1), numpy.random.RandomState(1)
        self.python, self.torch = random.Random(1), torch.Generator().manual_seed(1)

    def forward(self) -> list[float]:
        drawn = float(torch.rand((), generator=self.torch))
        return [self.numpy.random(), self.old.rand(), self.python.random(), drawn]


def test_generators_of_modules_draw_again() -> None:
    module = nn.Sequential(Own())
    rollback = Rollback(module, CPU)
    module[0]()
    rollback.save()
    first = module[0]()
    rollback.restore()
    assert module[0]() == first


class Counting(nn.Module):
    """A module with a table that stays, a count that changes in place and a mask that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", None)

    def forward(self) -> None:
        self.count += 1
        self.mask = torch.ones(int(self.count))


def test_buffers_in_place_replaced_and_from_nothing() -> None:
    module = Counting()
    rollback, count = Rollback(module, CPU), module.count
    for step in range(3):
        rollback.save()
        mask = module.mask
        for _ in range(2):
            module()
            rollback.restore()
            assert (float(module.count), module.mask) == (step, mask)
        assert module.count is count
        module()


@pytest.mark.parametrize("make", [nn.BatchNorm1d, lambda n: nn.InstanceNorm1d(n, track_running_stats=True)])
def test_running_statistics_which_kernels_write_unseen(make: Any) -> None:
    module = make(3)
    rollback = Rollback(module, CPU)
    for _ in range(4):
        rollback.save()
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        for _ in range(2):
            module(torch.randn(4, 3, 5))
            assert not torch.equal(module.running_mean, before["running_mean"])
            rollback.restore()
            assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
        module(torch.randn(4, 3, 5))


def test_change_of_a_buffer_assumed_constant_is_refused() -> None:
    module = nn.Sequential(Counting())
    rollback = Rollback(module, CPU)
    for _ in range(3):
        rollback.save()
    module[0].table += 1
    with pytest.raises(ConflictError, match=mentions("0.table", "smaller micro-batch")):
        rollback.restore()


class Growing(nn.Module):
    """A module that registers a buffer and a submodule in a forward, as caches of positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.grows = False

    def forward(self) -> None:
        if self.grows and not hasattr(self, "table"):
            self.register_buffer("table", torch.arange(3))
            self.norm = nn.BatchNorm1d(2)


def test_buffers_registered_by_a_failing_forward_are_removed() -> None:
    module = nn.Sequential(Growing())
    rollback = Rollback(module, CPU)
    rollback.save()
    module[0].grows = True
    module[0]()
    rollback.restore()
    assert not list(module.buffers())
    assert len(list(module.modules())) == 2


def test_buffers_registered_by_a_forward_are_saved_from_the_next_step_on() -> None:
    module = nn.Sequential(Growing())
    rollback = Rollback(module, CPU)
    rollback.save()
    module[0].grows = True
    module[0]()
    rollback.save()
    module[0].table += 1
    module[0].norm(torch.randn(4, 2))
    rollback.restore()
    assert module[0].table.tolist() == [0, 1, 2]
    assert module[0].norm.running_mean.tolist() == [0, 0]


def test_a_module_in_the_place_of_another_is_refused_not_forgotten() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    rollback = Rollback(module, CPU)
    rollback.save()
    module[0] = nn.BatchNorm1d(2)
    rollback.save()
    with pytest.raises(ConflictError, match=mentions("0", "smaller micro-batch")):
        rollback.restore()


def test_a_change_of_data_which_torch_does_not_count() -> None:
    """Codebooks are updated so."""
    module = Counting()
    rollback = Rollback(module, CPU)
    for step in range(4):
        rollback.save()
        for _ in range(2):
            module.table.data.add_(1)
            rollback.restore()
            assert module.table.tolist() == [step, step + 1, step + 2]
        module.table.data.add_(1)


def test_buffers_of_inference_mode_which_count_nothing() -> None:
    module = nn.Module()
    with torch.inference_mode():
        module.register_buffer("table", torch.arange(3))
    rollback, table = Rollback(module, CPU), module.table
    for _ in range(3):
        rollback.save()
        module.table = table + 1
        rollback.restore()
        assert module.table is table


def test_constant_buffers_are_copied_once() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), Counting())
    rollback = Rollback(module, CPU)
    for _ in range(3):
        rollback.save()
        module[0](torch.randn(4, 2))
    copied = [copy for values in rollback._values for _, copies in values._groups.values() for copy in copies]
    assert sum(copy.numel() for copy in copied) == 2 + 2 + 1  # mean, variance and count of batch norm


class Labelled(Tensor):
    """A tensor of a class of its own."""


def test_buffers_of_several_kinds() -> None:
    """Those of one shape, type and device are copied in one tensor."""
    module = nn.Module()
    plain = [torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.zeros(2, 3).double(), torch.zeros(())]
    others = [torch.zeros(0, 2), torch.zeros(2).as_subclass(Labelled), nn.Parameter(torch.zeros(2), False)]
    kinds = {f"buffer_{index}": value for index, value in enumerate(plain + others)}
    for name, value in kinds.items():
        module.register_buffer(name, value)
    rollback = Rollback(module, CPU)
    for step in range(5):
        rollback.save()
        for _ in range(2 if step > 1 else 0):  # once it is known what stays as it is
            for buffer in module.buffers():
                buffer.add_(1)
            rollback.restore()
            assert all(
                module.get_buffer(name) is value and bool((value == step).all()) for name, value in kinds.items()
            )
        for buffer in module.buffers():
            buffer.add_(1)
        if step == 3:
            module.buffer_0 = kinds["buffer_0"] = torch.full((2, 4), 4.0)


def quantized(rows: Tensor) -> Tensor:
    return torch.quantize_per_tensor(rows, 0.5, 0, torch.quint8)


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("make", [Tensor.to_sparse, quantized, lambda rows: nn.Parameter(rows, False)])
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
def test_a_buffer_of_another_layout_in_two_modules(make: Any, changes: bool) -> None:
    module, buffer, before = nn.Sequential(nn.Module(), nn.Module()), make(torch.eye(3)), torch.eye(3)
    for part in module:
        part.register_buffer("buffer", buffer)
    rollback = Rollback(module, CPU)
    for step in range(4):
        rollback.save()
        if changes:
            buffer.copy_(make(2 * before))
        if step > 0:  # the first step shows what stays as it is
            rollback.restore()
        elif changes:
            before = 2 * before
        assert all(part.buffer is buffer for part in module)
        assert torch.equal(buffer.dequantize() if buffer.is_quantized else buffer.to_dense(), before)


METRICS: list[Any] = [
    torchmetrics.MeanMetric,
    torchmetrics.CatMetric,
    torchmetrics.MeanSquaredError,
    lambda: torchmetrics.CatMetric(compute_on_cpu=True),
]


@pytest.mark.parametrize("make", METRICS, ids=["mean", "list", "two arguments", "on the host"])
def test_a_metric_is_as_before_and_continues_alike(make: Any) -> None:
    calm, disturbed = make(), make()
    arguments = 1 if isinstance(calm, torchmetrics.aggregation.BaseAggregator) else 2
    batches = [torch.rand(arguments, 5) for _ in range(3)]
    rollback = Rollback(nn.ModuleList([disturbed]), CPU)
    for batch in batches:
        calm(*batch)
        rollback.save()
        disturbed(*torch.rand(arguments, 5))
        disturbed.compute()
        rollback.restore()
        disturbed(*batch)
    assert disturbed.update_count == 3
    torch.testing.assert_close(disturbed.compute(), calm.compute(), rtol=0, atol=0)


class Short(torchmetrics.MeanSquaredError):
    """A metric that runs out of memory once, within its forward."""

    def __init__(self) -> None:
        super().__init__(compute_on_cpu=True)
        self.fails = False

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds, target)
        if self.fails:
            raise torch.OutOfMemoryError


def test_a_metric_that_fails_itself_is_as_before() -> None:
    metric = Short()
    metric(torch.ones(3), torch.zeros(3))

    def state() -> dict[str, Any]:
        plain = (int, float, str, bool, type(None))
        return {key: value for key, value in vars(metric).items() if isinstance(value, plain)} | metric.metric_state

    rollback = Rollback(nn.ModuleList([metric]), CPU)
    rollback.save()
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in state().items()}
    metric.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        metric(torch.ones(3), torch.zeros(3))
    metric.fails = False
    rollback.restore()
    assert state() == before


def test_metrics_that_share_their_states() -> None:
    """Of metrics with equal states only one is updated; which ones those are is found at the first update."""

    def collection() -> torchmetrics.MetricCollection:
        return torchmetrics.MetricCollection([torchmetrics.classification.BinaryPrecision(),
                                              torchmetrics.classification.BinaryRecall()])  # fmt: skip

    calm, disturbed = collection(), collection()
    rollback = Rollback(disturbed, CPU)
    for _ in range(3):
        batch = torch.rand(9), torch.randint(2, (9,))
        calm(*batch)
        rollback.save()
        disturbed(torch.rand(9), torch.randint(2, (9,)))
        rollback.restore()
        disturbed(*batch)
    assert disturbed.compute() == calm.compute()


def test_clones_of_metrics_are_told_apart() -> None:
    """Clones of one collection: training steps update one of them, and validations between the steps another."""
    of_three = {"num_classes": 3, "average": "none"}
    kinds = torchmetrics.classification.MulticlassAccuracy, torchmetrics.classification.MulticlassF1Score
    first = torchmetrics.MetricCollection([kind(**of_three) for kind in kinds])
    module = nn.ModuleList([first.clone(f"{name}/") for name in ("train", "val", "test")])
    rollback = Rollback(module, CPU)
    answers, targets = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2])
    for step in range(6):
        rollback.save()
        updated = (0, 2) if step > 3 else (0,)  # the last collection for the first time
        for restores in (True, False) if step > 3 else (False,):
            for which in updated:
                module[which].update(answers, targets)
            if restores:
                rollback.restore()
        if step % 2:
            module[1].update(answers, targets)
            module[1].compute()
            module[1].reset()
    assert [each.update_count for collection in module for each in collection.values()] == [6, 6, 0, 0, 2, 2]
    assert [int(each.tp.sum()) for each in module[2].values(copy_state=False)] == [4, 4]


def test_expanded_buffers_which_nothing_writes_to() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
    rollback = Rollback(module, CPU)
    for _ in range(3):
        rollback.save()
        module(torch.randn(4, 2))
        rollback.restore()
    assert module.num_batches_tracked == 0
