"""MicroBatching where memory runs short: anywhere in random modules, for a while; in other precisions and engines."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_solo.cards.phase import Phase
from lightning_solo.memory.limit import MemoryLimit
from lightning_solo.seams.homes import for_home
from lightning_solo.seams.technique import Technique
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.techniques.zero_offload.technique import ZeroOffloadStrategy
from tests.conftest import long
from tests.modules import Stack, loader, regression

Make = Callable[..., Any]

# --- anywhere in random modules: the run ends as if nothing had happened ---

BATCH, LENGTH, WIDTH, CLASSES, STEPS = 8, 6, 8, 5, 4


class Scaled(torch.autograd.Function):
    """An operator of one's own, which saves tensors and computes in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.tanh()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight.tanh(), (gradient * x * (1 - weight.tanh() ** 2)).sum((0, 1))


class Custom(nn.Module):
    """An operator of one's own, noise of three generators and a mean that is kept, by replacing it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.draws = numpy.random.default_rng(1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        self.calls.data.add_(1)
        noise = self.draws.random() + random.random() + numpy.random.randn()
        return Scaled.apply(x, self.weight) * (1 + 0.1 * noise)


class Tied(nn.Module):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Recurrent(nn.Module):
    """Layers of an LSTM, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Convolved(nn.Module):
    """Convolutions over the sequence with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm1d(WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.transpose(1, 2)).transpose(1, 2)


class Recomputed(nn.Module):
    """A block with dropout that is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.block, x, use_reentrant=False)


def attending() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.2, batch_first=True)


PARTS: list[Callable[[], nn.Module]] = [attending, Custom, Tied, Recurrent, Convolved, Recomputed]
LOSSES: list[tuple[str, Callable[[Tensor, Tensor], Tensor]]] = [
    ("samples", lambda out, labels: out.square().mean()),
    ("samples", lambda out, labels: nn.functional.huber_loss(out.mean(1)[:, 0], labels.clamp(0).to(out.dtype).mean(1))),
    ("samples", lambda out, labels: out.logsumexp(-1).mean() - out.softmax(-1).var(-1).mean()),
    ("tokens", lambda out, labels: nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())),
]


class Model(L.LightningModule):
    """Parts drawn at random with a loss drawn at random; a value and a metric are logged."""

    def __init__(self, draw: random.Random, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net = nn.Sequential(*[make() for make in draw.sample(PARTS, 3)], nn.Linear(WIDTH, CLASSES))
        self.loss, self.error = loss, torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch["x"]), batch["labels"])
        self.error(loss.detach())
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Parts(Technique):
    """Calls a function after the backward of each micro-batch."""

    phase = Phase.OBSERVE

    def __init__(self, after: Callable[[], None]) -> None:
        self.after = after

    def backward(self, ctx: Any, proceed: Callable[..., Any], loss: Tensor) -> Any:
        result = proceed(loss)
        self.after()
        return result


class Short(TorchDispatchMode):
    """Runs out of memory at a random operator of each attempt with micro-batches that are too large.

    Args:
        technique: whose attempts these are; before each step it forgets what it has learned.
        operators: the fewest in an attempt with micro-batches of so many samples, as counted in earlier runs.
        fits: samples that do.
        draw: of the operators that fail.
    """

    def __init__(self, technique: MicroBatching, operators: dict[int, int], fits: int, draw: random.Random) -> None:
        super().__init__()
        self.operators, self.failures = operators, 0
        self._fits, self._draw = fits, draw
        self._left = self._count = 0  # micro-batches of this attempt, operators so far
        self._position: int | None = None
        self._size = 0
        whole = technique._splitter.micro_batches

        def micro_batches(batches: Any, max_samples: int | None = None) -> Any:
            parts = whole(batches, max_samples)
            self._size, self._left, self._count = max(part.samples or BATCH for part in parts), len(parts), 0
            # zeroing writes two records of the profiler, in the first attempt of a step alone
            self._position = self._draw.randrange(operators[self._size] - 2) if self._size > self._fits else None
            return parts

        technique._splitter.micro_batches = micro_batches  # type: ignore[method-assign]
        technique._splitter.require_parts = lambda batch: None  # type: ignore[method-assign]  # it would begin an attempt
        self.watch = L.Callback()
        self.watch.on_train_batch_start = lambda *_: setattr(technique._size, "current", None)  # type: ignore[method-assign]
        self.parts = Parts(self._end_part)

    def _end_part(self) -> None:
        self._left -= 1
        if not self._left:
            self.operators[self._size] = min(self._count, self.operators.get(self._size, self._count))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left:
            if self._count == self._position:
                self._left, self.failures = 0, self.failures + 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            self._count += 1
        return func(*args, **(kwargs or {}))


def batches_of(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
        labels[torch.rand(BATCH, LENGTH, generator=generator) < 0.3] = -100
        labels[:, 0] = 0  # at least one in each row
        batches.append({"x": torch.randn(BATCH, LENGTH, WIDTH, generator=generator).double(), "labels": labels})
    return batches


def run(make: Make, seed: int, way: str, size: Any, operators: dict[int, int], fits: int) -> Any:
    """Return what a fit ends with."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    by, loss = draw.choice(LOSSES)
    module = Model(draw, loss).double()
    technique = MicroBatching(size, weight_by=by, batch_norm="ghost", check=False)  # whose operators would count
    short = Short(technique, operators, fits, draw)
    if size != "auto":
        short.watch.on_train_batch_start = lambda *_: None  # type: ignore[method-assign]
    others = [] if way == "plain" else [GradientRelease()]
    batches = batches_of(seed)
    if way == "compact":
        module.float()
        others.append(CompactStates(32, 32))
        batches = [{**batch, "x": batch["x"].float()} for batch in batches]
    random.seed(seed)
    numpy.random.seed(seed)
    trainer = make(L, callbacks=[technique, short.watch, short.parts, *others])
    with short:
        trainer.fit(module, DataLoader(batches, batch_size=None))
    return SimpleNamespace(
        states={name: value.clone() for name, value in module.state_dict().items()},
        logged={name: value.clone() for name, value in trainer.callback_metrics.items()},
        drawn=[float(torch.rand(())), random.random(), numpy.random.rand(), *map(float, draws_of(module))],
        retries=technique.retries,
        failures=short.failures,
    )


def draws_of(module: nn.Module) -> list[float]:
    return [part.draws.random() for part in module.modules() if isinstance(part, Custom)]


SEEDS = [1, *[long(seed) for seed in (0, *range(2, 30))]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore:.*LSTM.*:UserWarning")
def test_wherever_memory_runs_short_the_run_ends_with_the_same_bits(make_trainer: Make, seed: int) -> None:
    """Each step begins with the whole batch, which fails at a random operator, as do its halves, until one fits."""
    way = ["plain", "released", "compact"][seed % 3]
    operators: dict[int, int] = {}
    for size in (8, 4, 2):
        run(make_trainer, seed, way, size, operators, fits=BATCH)
    calm = run(make_trainer, seed, way, 1, operators, fits=BATCH)
    disturbed = run(make_trainer, seed, way, "auto", operators, fits=1)
    assert calm.retries == 0
    assert disturbed.retries == disturbed.failures == 3 * STEPS
    for part in ("states", "logged"):
        one, other = getattr(calm, part), getattr(disturbed, part)
        assert one.keys() == other.keys()
        different = [name for name in one if not torch.equal(one[name], other[name])]
        assert not different, part
    assert calm.drawn == disturbed.drawn


# --- short for a while ---


def test_memory_that_was_short_for_a_while(make_trainer: Make) -> None:
    """Larger parts are tried after some steps that fitted; each try that fails doubles the wait, for good."""
    module = regression(L, Stack(1))
    technique, sizes, waits = MicroBatching(), [], []
    weights = sum(p.nbytes for p in module.parameters())

    class Steps(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            technique._size.wait = 2 if batch_idx == 0 else technique._size.wait  # in place of 100
            limit.limit = 10 * weights if 2 <= batch_idx < 16 else 2**40

        def on_train_batch_end(self, *_: Any) -> None:
            sizes.append(technique.fits or 512)
            waits.append(technique.state_dict()["wait"])

    batches = [*loader(70, 512)]  # before the limit counts
    with MemoryLimit(2**40, module) as limit:
        make_trainer(L, callbacks=[technique, Steps()]).fit(module, DataLoader(batches, batch_size=None))
    assert sizes[:2] == [512, 512]
    assert max(sizes[2:16]) < 512
    assert sizes[-1] == 512  # as large as before
    tries = [step for step, (one, next_one) in enumerate(pairwise(waits)) if one < next_one]
    assert 2 <= len(tries) <= 4  # after 2, 4 and 8 steps: no more than that in 16
    assert waits[-1] == 2 ** (1 + len(tries))  # a run that is resumed waits as long
    assert technique.retries == limit.raised


# --- other precisions and engines ---


def over_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over valid tokens, as many write it: over none it is NaN, and so are its gradients."""
    valid = labels.ne(-100)
    return (nn.functional.cross_entropy(logits, labels.clamp(0), reduction="none") * valid).sum() / valid.sum()


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, over_tokens])
@pytest.mark.row(74)
def test_a_window_without_a_valid_token_is_what_it_is_undivided(make_trainer: Make, loss: Any) -> None:
    """Under 16-mixed, whose scaler leaves out a step with gradients that aren't finite."""
    ids = torch.arange(4 * LENGTH).view(4, LENGTH) % CLASSES
    empty = torch.full_like(ids, -100)
    labels = [ids, empty, empty, empty, empty, ids]

    def fit(labels: list[Tensor], callbacks: list[Any], factor: int) -> list[Tensor]:
        torch.manual_seed(0)
        table = nn.Embedding(CLASSES, CLASSES)
        module, weights = regression(L, table), [table.weight.detach().clone()]
        module.training_step = lambda batch, batch_idx: loss(
            table(batch["ids"]).flatten(0, 1).float(), batch["labels"].flatten()
        )
        look = L.Callback()
        look.on_train_batch_end = lambda *_: weights.append(table.weight.detach().clone())  # type: ignore[method-assign]
        batches = [{"ids": ids.repeat(len(each) // 4, 1), "labels": each} for each in labels]
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
        trainer = make_trainer(L, callbacks=[*callbacks, look], accumulate_grad_batches=factor, plugins=[precision])
        trainer.fit(module, DataLoader(batches, batch_size=None))
        return weights

    whole = fit([torch.cat(pair) for pair in zip(labels[::2], labels[1::2], strict=True)], [], 1)
    split = fit(labels, [MicroBatching(2, weight_by="tokens")], 2)[::2]
    assert torch.equal(whole[1], whole[2]) == (loss is over_tokens)
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(split[0], split[-1])


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:zero_offload runs on the CPU")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}])
def test_parts_of_one_size_under_deepspeed(make_trainer: Make, stage: int, options: Any) -> None:
    pytest.importorskip("deepspeed", reason="listed on Linux only")

    def fit(callbacks: list[Any], **extra: Any) -> Any:
        torch.manual_seed(0)
        module, sizes = regression(L, Stack(2)), []
        module.net.register_forward_pre_hook(lambda net, inputs: sizes.append(len(inputs[0])))
        trainer = make_trainer(L, callbacks=callbacks, **options, **extra)
        trainer.fit(module, loader(7, 8))
        assert sizes == ([3, 3, 2] * 7 if callbacks else [8] * 7)
        return module, trainer.global_step

    def offloaded() -> Any:
        return for_home(ZeroOffloadStrategy, L.__name__)(allow_cpu=True, host_optimizer="torch", stage=stage)

    plain, steps = fit([MicroBatching(3, check=False)])  # whose forward would count
    whole, _ = fit([], strategy=offloaded())
    split, other = fit([MicroBatching(3, check=False)], strategy=offloaded())
    assert steps == other
    for p, q, r in zip(plain.parameters(), split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
        if "accumulate_grad_batches" not in options:  # whose short window the engine divides by its full length
            torch.testing.assert_close(q, r, rtol=1e-4, atol=1e-5)
