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


def test_what_changes_for_the_first_time_in_a_failing_step() -> None:
    module = nn.Sequential(Counting())
    rollback = Rollback(module, CPU)
    for _ in range(3):
        rollback.save()
    module[0].table += 1
    with pytest.raises(ConflictError, match=mentions("0.table", "smaller micro-batch")):
        rollback.restore()


METRICS: list[Any] = [
    torchmetrics.MeanMetric,
    torchmetrics.CatMetric,
    torchmetrics.MeanSquaredError,
    lambda: torchmetrics.CatMetric(compute_on_cpu=True),
]


@pytest.mark.parametrize("make", METRICS, ids=["mean", "list", "two arguments", "on the host"])
def test_a_metric_is_as_before_and_goes_on_alike(make: Any) -> None:
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
