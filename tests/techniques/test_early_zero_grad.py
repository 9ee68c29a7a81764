"""EarlyZeroGrad zeroes before forward, trains bit for bit as a plain run does, and frees the gradients' bytes there."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import ConflictError
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.early_zero_grad.technique import EarlyZeroGrad
from tests.messages import mentions
from tests.modules import Held, Stack, loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]


def watched(home: ModuleType, net: nn.Module | None = None) -> tuple[Any, list[tuple[str, int]]]:
    """Return a module, and (moment, parameters with a gradient) as its fit comes to them."""
    torch.manual_seed(1)
    module, seen = regression(home, net), list[tuple[str, int]]()

    def note(moment: str) -> None:
        seen.append((moment, sum(p.grad is not None for p in module.parameters())))

    step = module.training_step
    module.training_step = lambda *args: note("forward") or step(*args)
    module.on_train_batch_end = lambda *args: note("batch end")
    module.on_before_zero_grad = lambda *args: note("zero")
    return module, seen


def fit(home: ModuleType, make_trainer: Make, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    module = module or watched(home)[0]
    make_trainer(home, callbacks=list(callbacks), **arguments).fit(module, loader(5))
    return module


# --- acted ---


@pytest.mark.every_change
@pytest.mark.parametrize("factor", [1, 2])
def test_no_gradient_of_the_last_step_is_left_in_forward(home: ModuleType, make_trainer: Make, factor: int) -> None:
    module, seen = watched(home)
    fit(home, make_trainer, EarlyZeroGrad(), module=module, accumulate_grad_batches=factor)
    all_of_them = len(list(module.parameters()))
    begins = [index % factor == 0 for index in range(5)]
    assert [count for moment, count in seen if moment == "forward"] == [0 if new else all_of_them for new in begins]
    # others find them as before
    assert {count for moment, count in seen if moment == "batch end"} == {all_of_them}
    assert [count for moment, count in seen if moment == "zero"] == [0, *[all_of_them] * (sum(begins) - 1)]


# --- parity ---


@pytest.mark.parametrize(
    "others", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"schedule": [[0, 2]]}]
)
def test_the_weights_are_those_of_a_plain_run(home: ModuleType, make_trainer: Make, others: dict[str, Any]) -> None:
    arguments = dict(others)
    schedule = [AccumulationSchedule(arguments.pop("schedule"))] if "schedule" in arguments else []
    plain = fit(home, make_trainer, *schedule, **arguments)
    assert equal(fit(home, make_trainer, EarlyZeroGrad(), *schedule, **arguments), plain)
    assert not equal(plain.cpu(), watched(home)[0])


def test_a_closure_that_runs_several_times_zeroes_each_time(make_trainer: Make) -> None:
    def trained(*callbacks: Any) -> Any:
        module, _ = watched(L)
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
        return fit(L, make_trainer, *callbacks, module=module)

    assert equal(trained(), trained(EarlyZeroGrad()))


# --- memory ---


class HeavyForward(Stack):
    """A stack whose forward sets the peak: it uses 1 MiB for a while."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        with torch.no_grad():
            torch.zeros(2**18, device=x.device)
        return output


def test_the_peak_of_forward_falls_by_the_gradients_bytes(make_trainer: Make) -> None:
    peaks = []
    for callbacks in ([], [EarlyZeroGrad()]):
        module, held = watched(L, HeavyForward())[0], Held()
        fit(L, make_trainer, *callbacks, held, module=module)
        peaks.append(held.peak_bytes)
    assert peaks[0] - peaks[1] == 4 * sum(p.numel() for p in module.parameters())


# --- what is refused ---


def test_manual_optimization_is_refused(make_trainer: Make) -> None:
    module, _ = watched(L)
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("optimizer.zero_grad()", "~callback.early_zero_grad")):
        fit(L, make_trainer, EarlyZeroGrad(), module=module)


@pytest.mark.parametrize("other", ["gradient_release", "compact"])
def test_technique_that_frees_gradients_is_refused(other: str) -> None:
    with pytest.raises(ConflictError, match=mentions("gradients", "early_zero_grad")):
        compose(other, ["+callback=early_zero_grad"])
