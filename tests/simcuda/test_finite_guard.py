"""The guard of loss and gradients adds one wait for a GPU to a step, and none where the step itself looks at them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch

from lightning_solo.errors import CheckpointError, RefusedStepError
from lightning_solo.memory.late_values import LateValues
from lightning_solo.techniques.finite_guard.technique import FiniteGuard
from tests.messages import mentions
from tests.simcuda import device
from tests.techniques.test_finite_guard import FAULTS, WAYS, data, fit, module_of, state_of
from tests.training import equal

pytestmark = [pytest.mark.simcuda, pytest.mark.any_device]

Make = Callable[..., Any]


class Counted(lightning.pytorch.Callback):
    """Counts the waits for the device in the last four batches: earlier ones look for buffers that change."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            self.counting = device.counted()
            self.counts = self.counting.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 11:
            self.counting.__exit__(None, None, None)


def in_fused(kind: Any = torch.optim.AdamW) -> Any:
    def configure_optimizers(self: Any) -> Any:
        optimizer = kind(self.parameters(), lr=1e-2, fused=True)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return module_of(lightning.pytorch, configure_optimizers=configure_optimizers)


@pytest.mark.parametrize(
    ("way", "factor", "more"),
    [
        ("plain", 1, 4),
        ("plain", 4, 1),
        ("clipped by norm", 1, 4),
        ("fused", 1, 0),
        ("fused", 2, 0),
        ("compact states", 1, 0),
        ("compact, clipped", 1, 0),
        ("compact, clipped", 4, 0),
        ("released, clipped", 1, 0),
    ],
)
def test_waits_in_four_batches(make_trainer: Make, way: str, factor: int, more: int) -> None:
    waits = []
    for guards in ([], [FiniteGuard()]):
        counted = Counted()
        arguments = {**WAYS.get(way, {}), "accumulate_grad_batches": factor}
        module = in_fused() if way == "fused" else None
        fit(make_trainer, *guards, counted, module=module, **arguments)
        waits.append(counted.counts.synchronisations)
    assert waits[1] == waits[0] + more


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("factor", "bad"), [(1, 4), (3, 4), (1, 11)])
def test_a_fused_optimizer_does_not_step(
    make_trainer: Make, kind: Any, fault: str, factor: int, bad: int, tmp_path: Path
) -> None:
    """The host learns it a step later; weights and states are those before, and nothing has been saved since."""
    values, words = FAULTS[fault]
    expected = fit(make_trainer, module=in_fused(kind), max_steps=bad // factor, accumulate_grad_batches=factor)
    module = in_fused(kind)
    saves = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    with pytest.raises(RefusedStepError, match=mentions(words, "policy=skip_window")) as raised:
        fit(
            make_trainer, FiniteGuard(), saves, batches=data(bad, fault=values), module=module,
            accumulate_grad_batches=factor, enable_checkpointing=True,
        )  # fmt: skip
    assert (raised.value.step, raised.value.batch_idx) == (bad // factor, bad)
    assert all(torch.equal(*pair) for pair in zip(module.parameters(), expected.parameters(), strict=True))
    assert equal(state_of(module)["optimizers"], state_of(expected)["optimizers"])
    steps = sorted(int(path.stem.rpartition("=")[2]) for path in tmp_path.glob("*.ckpt"))
    assert steps == [step for step in range(1, bad // factor + 1) if step % 2 == 0]
    with pytest.raises(CheckpointError, match="last checkpoint"):
        module.trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert not hasattr(module.trainer.optimizers[0], "found_inf")


def test_nothing_is_saved_of_a_fit_that_is_interrupted_after_it(make_trainer: Make, tmp_path: Path) -> None:
    class Interrupted(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == last:
                raise LookupError

    for last, saved in ((3, 1), (4, 0)):
        folder = tmp_path / str(last)
        saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_on_exception=True)
        with pytest.warns(UserWarning, match="FiniteGuard") if not saved else nullcontext(), pytest.raises(LookupError):
            fit(
                make_trainer, FiniteGuard(), Interrupted(), saves, batches=data(4), module=in_fused(),
                enable_checkpointing=True,
            )  # fmt: skip
        assert len(list(folder.glob("*.ckpt"))) == saved


def test_other_policies_wait(make_trainer: Make) -> None:
    guard = FiniteGuard(policy="skip_window")
    module = fit(make_trainer, guard, batches=data(4), module=in_fused())
    assert guard.skipped_windows == 1
    assert equal(state_of(module), state_of(fit(make_trainer, batches=data(without=(4,)), module=in_fused())))


@pytest.mark.parametrize("way", ["compact states", "compact, clipped", "released, clipped"])
def test_a_loss_whose_gradients_are_finite(make_trainer: Make, way: str) -> None:
    """The step looks at the losses together with its gradients."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch[0]).float().square().mean()
        return loss + float("nan") if batch_idx == 4 else loss

    guards = FiniteGuard(), FiniteGuard(policy="skip_window")
    arguments = dict(WAYS[way])
    arguments.pop("batch_norm", None)
    module = module_of(lightning.pytorch, False, training_step=training_step)
    with pytest.raises(RefusedStepError, match=mentions("loss is nan", "batch 4 of epoch 0")):
        fit(make_trainer, guards[0], module=module, **arguments)
    module = module_of(lightning.pytorch, False, training_step=training_step)
    fit(make_trainer, guards[1], module=module, **arguments)
    assert guards[1].skipped_windows == 1
    assert module.trainer.global_step == 11


def test_spikes_are_found_without_a_wait(make_trainer: Make) -> None:
    from tests.techniques.test_finite_guard import many

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * 1e4 if batch_idx == 80 else loss

    module = in_fused()
    type(module).training_step = training_step
    with pytest.warns(UserWarning, match=mentions("FiniteGuard", "sigma", "optimizer step 80")):
        fit(make_trainer, FiniteGuard(), batches=many(), module=module)


def test_numbers_that_are_read_late_need_no_wait() -> None:
    with device.counted() as counts:
        late = LateValues(torch.tensor([1.0, 2.0], device="cuda"))
    torch.cuda.synchronize()
    waits = counts.synchronisations
    with device.counted() as counts:
        assert late.read() == [1.0, 2.0]
    assert counts.synchronisations == 0
    assert waits == 1  # that of the copy to the device
