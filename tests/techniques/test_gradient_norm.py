"""GradientNorm logs the norms that plain training has, under release and compact states too, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.gradient_norm.technique import GradientNorm
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from tests import training
from tests.conftest import long
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
fit = partial(training.fit, log_every_n_steps=1)
BLOCKS = ["net.blocks.0", "net.blocks.1", "net.blocks.2", "net.head"]


def recording(home: ModuleType) -> Any:
    """Return a logger with the metrics that it got, by step."""

    class Logger(home.loggers.logger.DummyLogger):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[int, dict[str, float]] = {}

        def log_metrics(self, metrics: Any = None, step: Any = None) -> None:
            norms = {key: value for key, value in metrics.items() if key.startswith("gradient_norm")}
            if norms:
                self.seen[step] = norms

    return Logger()


class Reference(lightning.pytorch.Callback):
    """Computes the norms of a plain run by itself, at each optimizer step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.step = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(self.norms("gradient_norm", pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.gradient_clip_val and self.step != trainer.global_step:
            self.step = trainer.global_step
            self.seen[-1] |= self.norms("gradient_norm_clipped", pl_module)

    @staticmethod
    def norms(key: str, module: Any) -> dict[str, float]:
        gradients = {name: p.grad.double() for name, p in module.named_parameters() if p.grad is not None}
        parts = {"total": "", **{block: f"{block}." for block in BLOCKS}}
        chosen = {
            part: [g for name, g in gradients.items() if name.startswith(prefix)] for part, prefix in parts.items()
        }
        return {f"{key}/{part}": sum(float((g * g).sum()) for g in each) ** 0.5 for part, each in chosen.items()}


ARGUMENTS: list[Any] = [
    {},
    {"accumulate_grad_batches": 4},  # ten batches: the last window has two
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    {"accumulate_grad_batches": 3, "gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
]


# --- acted, and right ---


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("release", [None, "device", "host"], ids=["plain", "released", "released to the host"])
def test_norms_are_those_of_the_gradients_of_a_plain_run(make_trainer: Make, arguments: Any, release: Any) -> None:
    home, reference = lightning.pytorch, Reference()
    fit(make_trainer, reference, **arguments)
    logger, callback = recording(home), GradientNorm(1)
    releasing = None if release is None else GradientRelease(release)
    fit(make_trainer, callback, releasing, logger=logger, **arguments)
    seen = list(logger.seen.values())
    assert len(seen) == len(reference.seen) > 2
    for ours, theirs in zip(seen, reference.seen, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert all(value > 0 for value in ours.values())
    if arguments.get("gradient_clip_val"):
        assert seen[0]["gradient_norm_clipped/total"] < 0.9 * seen[0]["gradient_norm/total"]
    assert callback.figures == seen[-1]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("precision", ["bf16-true", long("bf16-mixed")])
def test_norms_of_compact_states(home: ModuleType, make_trainer: Make, precision: str, clip: float | None) -> None:
    """Released gradients are those of the preset that keeps them, and train the same weights."""
    loggers = {}
    for preset in ("compact", "compact_states"):
        loggers[preset] = recording(home)
        arguments = solo.trainer_kwargs(
            preset, [f"precision={precision}"], callbacks=[GradientNorm(1)], lightning=home.__name__
        )
        callbacks = arguments.pop("callbacks")
        fit(make_trainer, *callbacks, home=home, logger=loggers[preset], gradient_clip_val=clip, **arguments)
    released, kept = (list(logger.seen.values()) for logger in loggers.values())
    assert len(released) == 10
    for ours, theirs in zip(released, kept, strict=True):
        assert ours == pytest.approx(theirs, rel=5e-2 if clip else 1e-3)  # kept ones are clipped in bf16
        assert sum(ours[f"gradient_norm/{block}"] ** 2 for block in BLOCKS) ** 0.5 == pytest.approx(
            ours["gradient_norm/total"], rel=1e-5
        )
    assert ("gradient_norm_clipped/total" in released[0]) == (clip is not None)


def adversaries(home: ModuleType, clip: bool) -> Any:
    class Adversaries(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(5)
            self.generator, self.critic = Stack(1), Stack(1)
            self.expected: dict[str, list[float]] = {"total_0": [], "total_1": []}

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for number, part in enumerate((self.generator, self.critic)):
                optimizer = self.optimizers()[number]
                optimizer.zero_grad()
                for scale in (1.0, 0.5):  # two backward calls before a step
                    self.manual_backward(scale * nn.functional.mse_loss(part(batch[0]), batch[1]))
                grads = [p.grad for p in part.parameters()]
                self.expected[f"total_{number}"].append(float(nn.utils.get_total_norm(grads)))
                if clip:
                    self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]

    return Adversaries()


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("released", [False, True])
def test_norms_of_each_optimizer_under_manual_optimization(
    home: ModuleType, make_trainer: Make, clip: bool, released: bool
) -> None:
    logger, module = recording(home), adversaries(home, clip)
    release = GradientRelease() if released else None
    fit(make_trainer, GradientNorm(2), release, module=module, home=home, logger=logger, data=loader(6))
    assert list(logger.seen) == [0, 1, 3, 5]  # the first step, and every second
    for name, expected in module.expected.items():
        for step, seen in logger.seen.items():
            assert seen[f"gradient_norm/{name}"] == pytest.approx(expected[step], rel=1e-5)
            if clip:
                assert seen[f"gradient_norm_clipped/{name}"] == pytest.approx(0.05, rel=1e-3)
    assert ("gradient_norm_clipped/total_0" in seen) == clip
    assert {"gradient_norm/generator", "gradient_norm/critic"} < set(seen)  # equally built: they repeat


def test_clipping_by_torch_in_the_modules_own_hook_is_seen(home: ModuleType, make_trainer: Make) -> None:
    module, logger = regression(home, Stack()), recording(home)

    def clip(self: Any, optimizer: Any, **_: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    type(module).configure_gradient_clipping = lambda self, optimizer, *args, **kwargs: clip(self, optimizer)
    fit(make_trainer, GradientNorm(1), module=module, home=home, logger=logger)
    for seen in logger.seen.values():
        assert seen["gradient_norm_clipped/total"] == pytest.approx(0.05, rel=1e-3)
        assert seen["gradient_norm/total"] > 0.1


def test_due_steps_are_counted_in_optimizer_steps(home: ModuleType, make_trainer: Make) -> None:
    logger = recording(home)
    fit(
        make_trainer, GradientNorm(3), GradientRelease(), home=home, logger=logger, data=loader(20),
        accumulate_grad_batches=2,
    )  # fmt: skip
    assert list(logger.seen) == [0, 2, 5, 8]


@pytest.mark.not_simulated("the simulated device has no sparse tensors")
def test_sparse_gradients_are_measured(home: ModuleType, make_trainer: Make) -> None:
    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x[:, :2].long().abs() % 4).sum((1, 2), keepdim=False)[:, None]

    module, logger = regression(home, Looked()), recording(home)
    module.configure_optimizers = lambda: torch.optim.SparseAdam(module.parameters())
    fit(make_trainer, GradientNorm(1), module=module, home=home, logger=logger, max_steps=2)
    expected = float(module.net.table.weight.grad.to_dense().norm())
    assert logger.seen[1]["gradient_norm/total"] == pytest.approx(expected, rel=1e-5)


# --- the first step ---


def test_blocks_with_scales_out_of_range_are_named_in_the_first_step(home: ModuleType, make_trainer: Make) -> None:
    module = regression(home, Stack())
    with torch.no_grad():
        module.net.blocks[1].down.weight.mul_(1e8)
        module.net.head.weight.zero_()  # no gradient goes further back
    callback = GradientNorm(1)
    with pytest.warns(UserWarning, match="GradientNorm") as warned:
        fit(make_trainer, callback, module=module, home=home)
    activation, gradient = [
        str(each.message) for each in warned if "GradientNorm" in str(each.message)
    ]  # once, in the first step
    assert all(word in activation for word in ("activation rms", "net.blocks.1", "net.blocks.2", "[0.001, 1000.0]"))
    assert "net.blocks.0" not in activation
    assert all(word in gradient for word in ("gradient rms", "net.blocks.0 0.0e+00", "net.head", "gradient_range="))


def test_ranges_can_be_set_and_ordinary_scales_are_not_named(home: ModuleType, make_trainer: Make) -> None:
    fit(make_trainer, GradientNorm(), home=home)  # warnings are errors here
    wide = GradientNorm(activation_range=[0, 1e30], gradient_range=[100, 200])
    with pytest.warns(UserWarning, match=mentions("[100.0, 200.0]", "net.blocks.0", "net.head")):
        fit(make_trainer, wide, home=home)


@pytest.mark.parametrize("values", [[1.0], [2.0, 1.0], [-1.0, 1.0]], ids=str)
def test_ranges_that_are_none_are_refused(values: list[float]) -> None:
    with pytest.raises(PresetError, match=mentions("gradient_norm.activation_range", "[1e-3, 1e3]")):
        GradientNorm(activation_range=values)


def test_compiled_blocks_are_compiled_once(make_trainer: Make) -> None:
    """A hook that is removed after the first step would have them compiled again."""
    torch._dynamo.reset()  # what other tests compiled of the same code
    compiled = RegionalCompilation(backend="aot_eager")
    fit(make_trainer, GradientNorm(1), compiled)
    assert compiled.graphs == 2  # forward and backward


# --- memory and trace ---


def test_memory_of_a_step_grows_by_a_number_for_each_norm(make_trainer: Make) -> None:
    def peak(callback: Any) -> int:
        peaks = []

        class Watch(lightning.pytorch.Callback):
            def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
                self.ledger = Ledger(pl_module, trainer.optimizers)
                self.ledger.__enter__()

            def on_train_batch_end(self, *_: Any) -> None:
                self.ledger.__exit__(None, None, None)
                peaks.append(self.ledger.peak_bytes)

        fit(make_trainer, callback, GradientRelease(), Watch(), max_steps=4)
        return peaks[-1]

    parameters = len(list(Stack().parameters()))
    # before, after, and a view of each on which nothing is copied: two fp32 numbers for each gradient at most
    assert 0 <= peak(GradientNorm(1)) - peak(None) <= 2 * 4 * parameters


@pytest.mark.parametrize("releases", [False, True])
def test_trace_no_hook_is_left_after_a_failure(home: ModuleType, make_trainer: Make, releases: bool) -> None:
    class Broken(home.Callback):  # type: ignore[name-defined,misc]
        def on_before_backward(self, *_: Any) -> None:
            raise KeyError

    module, optimizers = regression(home, Stack()), []
    configure = module.configure_optimizers
    module.configure_optimizers = lambda: optimizers.append(configure()) or optimizers[-1]
    with pytest.raises(KeyError):
        fit(make_trainer, GradientNorm(1), GradientRelease() if releases else None, Broken(), module=module, home=home)
    assert not any(part._forward_hooks for part in module.modules())
    assert not optimizers[0]._optimizer_step_post_hooks


def test_training_is_bit_for_bit_the_same(home: ModuleType, make_trainer: Make) -> None:
    for others in ((None,), (GradientRelease(),)):
        plain = fit(make_trainer, *others, home=home, gradient_clip_val=0.05)
        ours = fit(make_trainer, *others, GradientNorm(1), home=home, gradient_clip_val=0.05)
        assert equal(ours, plain)


# --- refused ---


def test_engine_that_keeps_gradients_is_refused_by_name(tmp_path: Path) -> None:
    fields = {"strategy": {"name": "zero_offload", "allow_cpu": True}, "callback": {"gradient_norm": {}}}
    with pytest.raises(ConflictError, match=mentions("strategy=zero_offload", "; write ~callback.gradient_norm")):
        compose(fields)
