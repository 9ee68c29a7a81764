"""InPlace overwrites the inputs that nothing else reads, changes no bit, and leaves all others alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.nn.inplace import ACTIVATIONS, ROUNDED, WITHOUT_GAIN, candidates, readers
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.inplace import technique as inplace_technique
from lightning_solo.techniques.inplace.technique import InPlace
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.modules import loader, regression
from tests.training import equal, fit

Make = Callable[..., Any]
pytestmark = pytest.mark.any_device
WIDTH = 8


class Net(nn.Module):
    """A layer, an activation, and another use of the activation's input, if there is one."""

    def __init__(self, activation: nn.Module, use: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.activation, self.drop = nn.Linear(WIDTH, WIDTH), activation, nn.Dropout(0.3)
        self.last, self.use = nn.Linear(WIDTH, 1), use
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.drop(self.activation(h) if self.use is None else self.use(self, h)))


def free(net: nn.Module, x: Tensor | None = None) -> set[str]:
    parts = candidates(net)
    batch = torch.randn(4, WIDTH) if x is None else x
    return parts.keys() - readers(parts, lambda: net(batch)).keys()


# --- which inputs are read ---


def stash(net: Any, h: Tensor) -> Tensor:
    net.kept = h
    return net.activation(h)


def view_kept(net: Any, h: Tensor) -> Tensor:
    net.kept = h.view(-1)[:1]
    return net.activation(h)


READ: dict[str, Callable[..., Tensor]] = {
    "a residual sum after it": lambda net, h: net.activation(h) + h,
    "a product before it": lambda net, h: h * 2 + net.activation(h),
    "the backward of its own layer": lambda net, h: net.activation(torch.tanh(h)),
    "an attribute": stash,
    "a view in an attribute": view_kept,
    "a detached value": lambda net, h: net.activation(h) + h.detach().mean(),
    "a recomputation": lambda net, h: checkpoint(net.activation, h, use_reentrant=False),
    "a second call on the same input": lambda net, h: net.activation(h) + net.activation(h),
}


@pytest.mark.parametrize("use", READ.values(), ids=READ.keys())
def test_input_that_is_read_elsewhere_stays(use: Callable[..., Tensor]) -> None:
    assert "activation" not in free(Net(nn.LeakyReLU(), use))


ALONE: dict[str, Callable[..., Tensor] | None] = {
    "alone": None,
    "as a view": lambda net, h: net.activation(h.view(2, 2, WIDTH)).view(4, WIDTH),
    "after batch normalisation": lambda net, h: net.activation(nn.functional.batch_norm(h, None, None, training=True)),
    "in a recomputed part": lambda net, h: checkpoint(lambda x: net.activation(x + 1), h, use_reentrant=False),
    "with its shape read": lambda net, h: net.activation(h) * h.shape[0],
}


@pytest.mark.parametrize("use", ALONE.values(), ids=ALONE.keys())
def test_input_that_nothing_else_reads_is_free(use: Any) -> None:
    assert "activation" in free(Net(nn.LeakyReLU(), use))


def test_batches_and_parameters_stay_and_uncalled_parts_are_named() -> None:
    net = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    assert free(net) == {"2"}
    net[1].requires_grad_(False)
    assert free(net) == set()  # a later step may train it, and then need its result
    parts = {"unused": nn.ReLU(), **candidates(net)}
    assert readers(parts, lambda: net(torch.randn(4, WIDTH)))["unused"] == "isn't called in training"


# --- acted, parity and memory ---


@pytest.mark.parametrize("kind", WITHOUT_GAIN + ROUNDED)
def test_other_activations_gain_nothing_or_round_otherwise(kind: Any) -> None:
    """Else they should be among those that run in place."""

    def of(inplace: bool) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(WIDTH, 64), kind(*arguments), nn.Linear(64, 1)), torch.randn(64, WIDTH)
        vars(net[1])["inplace"] = inplace
        output, saved = saved_for_backward(net, x)
        output.square().sum().backward()
        return saved, net[0].weight.grad

    arguments = (0.1, 0.2) if kind is nn.Threshold else ()
    (before, gradient), (after, in_place) = of(False), of(True)
    assert before <= after or not torch.equal(gradient, in_place)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_in_place_trains_as_out_of_place(make_trainer: Make, kind: Any) -> None:
    def module() -> Any:
        torch.manual_seed(0)
        return regression(L, Net(kind()))

    technique = InPlace()
    under = fit(make_trainer, technique, module=module())
    assert "net.activation" in technique.names
    assert equal(under, fit(make_trainer, module=module()))
    assert not under.net.activation.inplace
    assert not equal(under, module())


def test_bytes_for_backward_are_less_by_the_input() -> None:
    net, x = nn.Sequential(nn.Linear(WIDTH, 64), nn.LeakyReLU(), nn.Linear(64, 1)), torch.randn(4, WIDTH)
    before = saved_for_backward(net, x)[1]
    net[1].inplace = True
    assert before - saved_for_backward(net, x)[1] == 4 * 4 * 64  # input of the activation, fp32


def test_bytes_are_named_and_state_is_restored(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__(nn.LeakyReLU())
            self.drop.p = 0.0
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen += 1
            return super().forward(x)

    module = fit(make_trainer, technique := InPlace(), module=regression(L, Counting()))
    (line,) = lines_with(caplog.text, "inplace:", "net.activation")
    assert "128 B less for backward" in line  # of 4 rows of 8 numbers in fp32
    assert module.net.calls == module.net.seen == 10
    assert technique.names


def test_validation_is_out_of_place(make_trainer: Make) -> None:
    class Looks(L.Callback):
        seen: tuple[bool, ...] = ()

        def on_validation_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen += (pl_module.net.activation.inplace,)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen += (pl_module.net.activation.inplace,)

    looks, module = Looks(), regression(L, Net(nn.LeakyReLU()))
    trainer = make_trainer(L, callbacks=[InPlace(), looks], val_check_interval=1)
    trainer.fit(module, loader(2), loader(1))
    assert looks.seen == (True, False, True, False)


def test_recomputed_blocks_train_as_without(make_trainer: Make) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*[Block() for _ in range(3)])
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(x))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.activation, self.last = nn.Linear(WIDTH, 32), nn.LeakyReLU(), nn.Linear(32, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.last(self.activation(self.first(x)))

    def module() -> Any:
        torch.manual_seed(0)
        return regression(L, Deep())

    under = fit(make_trainer, ActivationCheckpointing(), technique := InPlace(), module=module())
    assert len(technique.names) == 3
    assert equal(under, fit(make_trainer, module=module()))


# --- refused ---


def test_module_without_such_parts_is_told_why(make_trainer: Make) -> None:
    with pytest.raises(
        NothingToDoError, match=mentions("net.activation", "read by something else", "~callback.inplace")
    ):
        fit(make_trainer, InPlace(dropouts=False), module=regression(L, Net(nn.ReLU(), READ["an attribute"])))
    with pytest.raises(NothingToDoError, match=mentions("GELU", "SiLU", "saves nothing")):
        fit(make_trainer, InPlace(), module=regression(L, nn.Sequential(nn.Linear(WIDTH, 1), nn.GELU(), nn.SiLU())))


def test_part_that_the_first_pass_misses_is_found_by_the_comparison(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inplace_technique, "readers", lambda parts, step: {})
    for use in ("the backward of its own layer", "a residual sum after it"):
        net = Net(nn.ReLU(), READ[use])
        net.drop.p = 0.0
        with pytest.raises(NothingToDoError, match=mentions("differ in place", "net.activation")):
            fit(make_trainer, InPlace(), module=regression(L, net))


@pytest.mark.parametrize(("batch", "seen"), [(2, True), long(5, True), long(11, False)])
def test_use_since_a_later_batch_is_refused_where_it_is_looked_for(make_trainer: Make, batch: int, seen: bool) -> None:
    def late(net: Any, h: Tensor) -> Tensor:
        net.calls += 1
        return net.activation(h) + (h.detach().mean() if net.calls >= batch else 0.0)  # type: ignore[no-any-return]

    net = Net(nn.LeakyReLU(), late)
    net.calls = 0
    technique = InPlace()
    if not seen:
        fit(make_trainer, technique, module=regression(L, net), data=loader(10))
        assert "net.activation" in technique.names
        assert net.calls == 10
        return
    with pytest.raises(ConflictError, match=mentions("batch 2" if batch == 2 else "batch 10", "net.activation")):
        fit(make_trainer, technique, module=regression(L, net), data=loader(10))
    assert not net.activation.inplace


def test_manual_optimization_is_refused(make_trainer: Make) -> None:
    module = regression(L, Net(nn.ReLU()))
    module.automatic_optimization = False
    with pytest.raises(ConflictError, match=mentions("manual optimization", "~callback.inplace")):
        make_trainer(L, callbacks=[InPlace()]).fit(module, loader())
