"""GradientRelease acts in backward, trains bit for bit as a plain run does, holds one gradient, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import ConflictError, GradientError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.optim.gpu_kernel import TritonKernels
from lightning_solo.optim.operator_kernels import OperatorKernels
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.units import format_bytes
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import Resumable, Stack, loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]


def net(blocks: int = 2) -> Stack:
    torch.manual_seed(1)
    return Stack(blocks=blocks)


def fit(home: ModuleType, make_trainer: Make, callbacks: Any = (), module: Any = None, **kwargs: Any) -> Any:
    """Return the Trainer after the fit of a regression on ten batches."""
    trainer = make_trainer(home, callbacks=list(callbacks), **kwargs)
    trainer.fit(module or regression(home, net()), loader(10))
    return trainer


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in trainer.lightning_module.named_parameters()}


class GradientsAfterBackward:
    """Notes how many parameters have a gradient when backward has returned."""

    def __init__(self, home: ModuleType) -> None:
        self.counts: list[int] = []
        counts = self.counts

        class Watch(home.Callback):  # type: ignore[name-defined,misc]
            def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
                counts.append(sum(p.grad is not None for p in pl_module.parameters()))

        self.callback = Watch()


# --- acted ---


@pytest.mark.filterwarnings("ignore:Watch.on_after_backward finds no .grad")
@pytest.mark.every_change
def test_acted_in_backward(home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    watch, plain = GradientsAfterBackward(home), GradientsAfterBackward(home)
    with caplog.at_level("INFO"):
        trainer = fit(home, make_trainer, [watch.callback, GradientRelease()])
    fit(home, make_trainer, [plain.callback])
    count = len(weights(trainer))
    assert watch.counts == [0] * 10
    assert plain.counts == [count] * 10
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert lines_with(caplog.text, "gradient_release: gradients", "released in backward")


def test_acted_where_gradients_are_kept(home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    kept = []
    release = GradientRelease("host")

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *_: Any) -> None:
            assert release.release is not None
            kept.append(release.release.has_kept)

    with caplog.at_level("INFO"):
        fit(home, make_trainer, [Watch(), release], accumulate_grad_batches=4)
    assert kept == [True, True, True, False] * 2 + [True, False]  # the epoch's last batch steps
    assert lines_with(caplog.text, "gradient_release: gradients", "on the host", "4.00 bytes")


def test_gradients_are_kept_under_manual_optimization(
    home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    class TwoByHand(home.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.one, self.two = net(1), net(1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for part, optimizer in zip((self.one, self.two), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(part(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.one, self.two)]

    plain = fit(home, make_trainer, [], TwoByHand())
    with caplog.at_level("INFO"):
        ours = fit(home, make_trainer, [GradientRelease()], TwoByHand())
    assert equal(weights(ours), weights(plain))
    size = sum(p.grad.nbytes for p in ours.lightning_module.parameters())
    assert lines_with(caplog.text, "gradient_release: gradients", f"{format_bytes(size)} on the device", "manual")


# --- parity ---


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 4},  # ten batches: the last window has two
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    ],
    ids=str,
)
@pytest.mark.parametrize("precision", ["32-true", long("bf16-mixed")])
def test_parity_with_a_plain_run(home: ModuleType, make_trainer: Make, arguments: Any, precision: str) -> None:
    plain = fit(home, make_trainer, max_epochs=2, precision=precision, **arguments)
    buffer = "host" if arguments else "device"
    ours = fit(home, make_trainer, [GradientRelease(buffer)], max_epochs=2, precision=precision, **arguments)
    assert equal(weights(ours), weights(plain))
    assert ours.global_step == plain.global_step
    assert not torch.equal(weights(ours)["net.head.weight"], net().head.weight)
    if "gradient_clip_val" in arguments:  # it did clip
        unclipped = fit(home, make_trainer, max_epochs=2, precision=precision)
        assert not torch.equal(weights(ours)["net.head.weight"], weights(unclipped)["net.head.weight"])


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adafactor"])
def test_parity_of_other_optimizers_with_a_schedule(make_trainer: Make, name: str) -> None:
    import lightning.pytorch as home

    def module() -> Any:
        made = regression(home, net())
        optimizer = getattr(torch.optim, name)(made.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        made.configure_optimizers = lambda: ([optimizer], [{"scheduler": scheduler, "interval": "step"}])
        return made

    plain, ours = fit(home, make_trainer, (), module()), fit(home, make_trainer, [GradientRelease()], module())
    assert equal(weights(ours), weights(plain))
    assert ours.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 / 11)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("milestones", "by"), [([[0, 4]], "epoch"), ([[0, 1], [1, 4], [2, 2]], "step")])
def test_parity_of_a_schedule_in_either_order(
    home: ModuleType, make_trainer: Make, milestones: Any, by: Any, order: int
) -> None:
    """Short windows count by what they hold: by the weight of losses, of which powers of 2 change no digit."""
    plain = fit(home, make_trainer, [AccumulationSchedule(milestones, by)], max_epochs=2)
    both = [AccumulationSchedule(milestones, by), GradientRelease()][::order]
    ours = fit(home, make_trainer, both, max_epochs=2)
    assert equal(weights(ours), weights(plain))
    assert ours.global_step == plain.global_step


def unfreezing(home: ModuleType) -> Any:
    """Return Lightning's callback that trains the head alone for an epoch, then all."""

    class Unfreeze(home.callbacks.BaseFinetuning):  # type: ignore[name-defined,misc]
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net.blocks)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net.blocks, optimizer, lr=1e-2, initial_denom_lr=1)

    return Unfreeze()


def of_head(home: ModuleType) -> Any:
    module = regression(home, net())
    module.configure_optimizers = lambda: torch.optim.AdamW(module.net.head.parameters(), lr=1e-2)
    return module


def skipping(home: ModuleType) -> Any:
    """Return a module that leaves each epoch at its seventh batch, amid a window."""
    module = regression(home, net())
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 6 else None
    return module


BESIDE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "Lightning's accumulation scheduler": (
        lambda home: home.callbacks.GradientAccumulationScheduler({0: 1, 1: 5}),
        lambda home: regression(home, net()),
        {},
    ),
    "layers that are unfrozen later": (unfreezing, of_head, {}),
    "a window that is left in the middle": (lambda home: home.Callback(), skipping, {"accumulate_grad_batches": 4}),
}


@pytest.mark.parametrize("name", BESIDE)
def test_parity_beside(home: ModuleType, make_trainer: Make, name: str) -> None:
    callback, module, arguments = BESIDE[name]
    plain, ours = (
        fit(home, make_trainer, [callback(home), *release], module(home), max_epochs=3, **arguments)
        for release in ([], [GradientRelease()])
    )
    assert equal(weights(ours), weights(plain))
    assert not torch.equal(weights(ours)["net.head.weight"], net().head.weight)


def test_hooks_of_the_step_run_once_and_after_it(make_trainer: Make) -> None:
    import lightning.pytorch as home

    seen: list[bool] = []
    module = regression(home, net())

    def configure() -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        start = net().head.weight
        optimizer.register_step_post_hook(lambda *args: seen.append(torch.equal(module.net.head.weight.cpu(), start)))
        return optimizer

    module.configure_optimizers = configure
    fit(home, make_trainer, [GradientRelease()], module, gradient_clip_val=1.0, max_steps=3)
    assert seen == [False] * 3


def test_clipping_by_hand(home: ModuleType, make_trainer: Make) -> None:
    def module() -> Any:
        made = regression(home, net())

        def clip(self: Any, optimizer: Any, **_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

        type(made).configure_gradient_clipping = lambda self, optimizer, *args, **kwargs: clip(self, optimizer)
        return made

    plain, ours = fit(home, make_trainer, (), module()), fit(home, make_trainer, [GradientRelease()], module())
    assert equal(weights(ours), weights(plain))
    other = regression(home, net())
    type(other).configure_gradient_clipping = lambda *args, **kwargs: None
    with pytest.warns(UserWarning, match=mentions("self.clip_gradients")):
        fit(home, make_trainer, [GradientRelease()], other)

    def clips(self: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.05)

    type(other).configure_gradient_clipping = clips
    with pytest.raises(ConflictError, match=mentions("self.clip_gradients", "~callback.gradient_release")):
        fit(home, make_trainer, [GradientRelease()], other)


# --- memory ---


def test_memory_in_backward_is_one_gradient_not_all(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks of 2 x 256 weights, 40 biases and 16 of a norm, and a head of 9: 2,281 gradients, or a few."""
    import lightning.pytorch as home

    for kernels in (OperatorKernels, TritonKernels):
        monkeypatch.setattr(kernels, "grouped_below", 1)  # else small gradients wait for one another

    def gradients_at_peak(callbacks: list[Any]) -> int:
        peaks = []

        class Watch(home.Callback):
            def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
                self.ledger = Ledger(pl_module, trainer.optimizers)
                self.ledger.__enter__()

            def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
                self.ledger.__exit__(None, None, None)
                peaks.append(self.ledger.peak().breakdown["gradients"])

        fit(home, make_trainer, [Watch(), *callbacks], regression(home, net(4)), max_steps=2)
        return max(peaks)

    every = 4 * sum(p.numel() for p in net(4).parameters())
    assert every == 4 * (4 * (2 * 256 + 40 + 16) + 9)
    assert gradients_at_peak([]) == every - 4 * 16  # the first norm's come when the activations of its block are gone
    # a gradient of 256, what AdamW makes of it, and what autograd holds of its layer: below an eighth of all
    assert 4 * 256 <= gradients_at_peak([GradientRelease()]) <= every / 2


# --- trace ---


@pytest.mark.parametrize("fails", [False, True])
def test_trace_no_hooks_are_left(home: ModuleType, make_trainer: Make, fails: bool) -> None:
    class Broken(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, *args: Any) -> None:
            if fails:
                raise KeyError("mine")

    module, release = regression(home, net()), GradientRelease()
    keys = list(module.state_dict())
    trainer = make_trainer(home, callbacks=[release, Broken()], gradient_clip_val=0.5)
    strategy = type(trainer.strategy)
    try:
        trainer.fit(module, loader(10))
    except KeyError:
        assert fails
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    assert release.release is None
    (optimizer,) = trainer.optimizers
    assert not {"zero_grad", "parameter_names"} & set(vars(optimizer))
    assert not optimizer._optimizer_step_pre_hooks
    assert "clip_gradients" not in vars(trainer.precision_plugin)
    assert type(trainer.strategy) is strategy
    assert list(module.state_dict()) == keys
    nn.functional.mse_loss(module.net(torch.ones(2, 8)), torch.ones(2, 1)).backward()
    assert all(p.grad is not None for p in module.parameters())


def test_trace_several_fits_and_evaluation(home: ModuleType, make_trainer: Make) -> None:
    runs = []
    for callbacks in ([], [GradientRelease()]):
        trainer, module = make_trainer(home, callbacks=callbacks), regression(home, net())
        for fits in (1, 2):
            trainer.fit_loop.max_epochs = fits
            trainer.fit(module, loader(10))
            trainer.validate(module, loader(2), verbose=False)
        trainer.test(module, loader(2), verbose=False)
        runs.append({**weights(trainer), "predicted": torch.cat(trainer.predict(module, loader(2))).cpu()})
    assert equal(*runs)


def test_trace_a_resumed_run_is_the_undisturbed_one(home: ModuleType, make_trainer: Make, tmp_path: Path) -> None:
    whole = fit(home, make_trainer, [GradientRelease()], max_epochs=3, accumulate_grad_batches=4)
    half = fit(home, make_trainer, [GradientRelease()], max_epochs=2, accumulate_grad_batches=4)
    half.save_checkpoint(tmp_path / "half.ckpt")
    for callbacks in ([GradientRelease()], []):  # a file is a plain run's
        trainer = make_trainer(home, callbacks=callbacks, max_epochs=3, accumulate_grad_batches=4)
        trainer.fit(regression(home, net()), loader(10), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
        assert equal(weights(trainer), weights(whole))


@pytest.mark.parametrize("buffer", ["device", "host"])
def test_trace_run_resumed_amid_a_window_is_the_undisturbed_one(
    home: ModuleType, make_trainer: Make, tmp_path: Path, buffer: str
) -> None:
    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "amid.ckpt")

    def run(*callbacks: Any, **options: Any) -> Any:
        callbacks = (GradientRelease(buffer), *callbacks)
        trainer = make_trainer(home, accumulate_grad_batches=3, gradient_clip_val=0.1, callbacks=[*callbacks])
        trainer.fit(regression(home, net()), Resumable(list(loader(8))), **options)
        return trainer

    whole = run(Save())
    resumed = run(ckpt_path=tmp_path / "amid.ckpt", weights_only=True)
    assert equal(weights(resumed), weights(whole))
    assert "window" in torch.load(tmp_path / "amid.ckpt")["optimizer_states"][0]


# --- refusals ---


def test_gradient_that_is_not_finite_is_named_and_nothing_is_touched(make_trainer: Make) -> None:
    import lightning.pytorch as home

    module = regression(home, net())
    module.step = lambda batch: (module.net(batch[0]) * float("nan")).mean()
    with pytest.raises(GradientError, match=mentions("net.", "not finite")):
        fit(home, make_trainer, [GradientRelease()], module, gradient_clip_val=1.0)
    assert equal(module.net, net())


def test_refusals_name_the_remedy(home: ModuleType, make_trainer: Make) -> None:
    with pytest.raises(PresetError, match=mentions("gradient_release.buffer='disk': write 'device' or 'host'")):
        GradientRelease("disk")
    many = regression(home, net())
    many.configure_optimizers = lambda: torch.optim.LBFGS(many.parameters())
    with pytest.raises(ConflictError, match="gradient_release with LBFGS"):
        fit(home, make_trainer, [GradientRelease()], many)
    with pytest.raises(ConflictError, match="two GradientRelease"):
        fit(home, make_trainer, [GradientRelease(), GradientRelease("host")])
    reads = regression(home, net())
    type(reads).on_after_backward = lambda self: None
    remedies = "+callback=gradient_norm", "~callback.gradient_release"
    with pytest.warns(UserWarning, match=mentions("on_after_backward finds no .grad: ", *remedies)):
        fit(home, make_trainer, [GradientRelease()], reads)
    halves = regression(home, net())

    def backward(self: Any, loss: Any) -> None:
        loss.backward()
        for p in self.parameters():
            assert p.grad is None

    type(halves).backward = backward
    with pytest.warns(UserWarning, match=mentions("backward finds no .grad: ", *remedies)):
        fit(home, make_trainer, [GradientRelease()], halves)


def test_gradients_that_the_module_does_not_zero_are_named(home: ModuleType, make_trainer: Make) -> None:
    def module(zero: Any) -> Any:
        made = regression(home, net())
        type(made).optimizer_zero_grad = zero
        return made

    def zeroes(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def sometimes(self: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2:
            optimizer.zero_grad()

    for accumulate in (1, 2):
        fit(home, make_trainer, [GradientRelease()], module(zeroes), accumulate_grad_batches=accumulate)
    with pytest.warns(UserWarning, match=mentions("optimizer_zero_grad", "write ~callback.gradient_release")):
        fit(home, make_trainer, [GradientRelease()], module(sometimes))


def test_callback_that_reads_gradients_is_named_and_another_is_not(home: ModuleType, make_trainer: Make) -> None:
    class Reads(home.Callback):  # type: ignore[name-defined,misc]
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            assert all(p.grad is None for p in pl_module.parameters())

    class Counts(home.Callback):  # type: ignore[name-defined,misc]
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.step = trainer.global_step

    with pytest.warns(UserWarning, match="finds no .grad") as warned:
        fit(home, make_trainer, [GradientRelease(), Reads(), Counts()])
    (message,) = {str(each.message) for each in warned if "finds no .grad" in str(each.message)}
    assert lines_with(message, "Reads.on_before_optimizer_step", "+callback=gradient_norm")


@pytest.mark.filterwarnings("ignore:Watch.on_after_backward finds no .grad")
@pytest.mark.every_change
def test_the_preset_trains(home: ModuleType, make_trainer: Make) -> None:
    watch = GradientsAfterBackward(home)
    arguments = solo.trainer_kwargs("gradient_release", lightning=home.__name__, callbacks=[watch.callback])
    trainer = make_trainer(home, **arguments)
    trainer.fit(regression(home, net()), loader(10))
    assert watch.counts == [0] * 10
    assert {p.dtype for p in trainer.lightning_module.parameters()} == {torch.float32}
    plain = fit(home, make_trainer, precision="bf16-mixed")
    assert equal(weights(trainer), weights(plain))
