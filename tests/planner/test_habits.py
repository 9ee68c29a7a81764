"""Modules and batches as people write them: each is planned as it runs, or refused in words; none is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn, zeros
from torch.utils._device import _device_constructors
from torch.utils.data import DataLoader, TensorDataset

from lightning_solo.errors import PlanError, PresetError
from lightning_solo.planner.batches import examples, first_batch, sized
from lightning_solo.planner.capture import capture
from lightning_solo.planner.cuda_rules import CudaByHand
from lightning_solo.planner.fake_modules import fake_mode, known_numbers, with_numbers
from lightning_solo.planner.tracer import Tracer
from tests.conftest import long
from tests.messages import mentions
from tests.planner.modules import Classifier, vectors
from tests.planner.test_capture import assert_equal, both


def layer() -> nn.Linear:
    return nn.Linear(16, 5)


def fp32() -> dict[str, Any]:
    return {"precision": "32-true"}


# --- batches ---


class Reads(Classifier):
    """Takes a tuple or a mapping."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch if isinstance(batch, tuple) else (batch["x"], batch["y"])
        return F.cross_entropy(self.network(x), y)


def test_nested_batch_is_resized_and_planned() -> None:
    x, y = vectors(4)
    batch = {"x": x, "y": y, "names": ["a"] * 4, "nothing": None, "number": 3}
    assert examples(batch) == 4
    larger = sized(batch, 4, 6)
    assert examples(larger) == 6
    assert examples(batch) == 4, "the user's own is left as it is"
    for cuda in (False, True):
        peaks = [capture(lambda: Reads(layer()), each, fp32(), cuda=cuda).log.peak() for each in (larger, vectors(6))]
        assert peaks[0] == peaks[1]


def test_batch_of_an_unknown_class_is_refused() -> None:
    class Opaque:
        x = torch.ones(3)

    with pytest.raises(PresetError, match=mentions("batch=Opaque", "lists, mappings and dataclasses")):
        examples(Opaque())


# --- loaders of its own ---


def loader(size: int = 4) -> Any:
    return DataLoader(TensorDataset(*vectors(3 * size)), batch_size=size)


@pytest.mark.parametrize(
    ("loaders", "kind"),
    [
        (lambda: loader(), list),
        (lambda: {"a": loader(), "b": loader(2)}, dict),
        (lambda: [loader(), loader(2)], list),
        (lambda: CombinedLoader({"a": loader(), "b": loader(2)}, "min_size"), dict),
    ],
    ids=["one", "mapping", "list", "combined"],
)
def test_the_first_batch_of_several_loaders_is_one_of_each(loaders: Callable[[], Any], kind: type) -> None:
    class Own(Classifier):
        def train_dataloader(self) -> Any:
            return loaders()

    batch = first_batch(lambda: Own(layer()))
    assert type(batch) is kind
    parts = batch.values() if isinstance(batch, dict) else batch if isinstance(batch[0], list) else [batch]
    assert [len(part[0]) for part in parts] == [4, 2][: len(parts)]


# --- habits of a module, planned to the byte ---


class Hooked(Classifier):
    """Has all hooks around the transfer of a batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].double(), batch[1]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return tuple(tensor.to(device) for tensor in batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch[0].float(), batch[1]


class Averaged(Classifier):
    """Keeps a copy that follows the weights, made when the fit begins."""

    def on_fit_start(self) -> None:
        self.average = copy.deepcopy(self.network).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        for mean, new in zip(self.average.parameters(), self.network.parameters(), strict=True):
            mean.lerp_(new.detach(), 0.01)


class Branches(Classifier):
    """Reads numbers to decide: those of the batch are known, of the rest it is assumed that they are unremarkable."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = self.network(x)[:, : int(y.max().item()) + 1]
        if scores.abs().max().item() > 100:
            scores = scores.repeat(100, 1)[: len(x)]
        while scores.sum() > 1e9:
            scores = scores / 2
        return F.cross_entropy(scores, y)


class Penalized(Classifier):
    """Differentiates a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].clone().requires_grad_()
        scores = self.network(x)
        (slope,) = torch.autograd.grad(scores.tanh().sum(), x, create_graph=True)
        return F.cross_entropy(scores, batch[1]) + slope.norm()


class Tabled(Classifier):
    """Keeps widths in a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__(layer())
        self.widths = torch.tensor([2, 3])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = self.network(batch[0]).split([int(width) for width in self.widths], dim=1)
        return parts[0].sum() + parts[1].exp().sum()


class Draws(Classifier):
    """Writes pictures to the logger that a run would have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.experiment.add_scalar("weight", 1)  # type: ignore[union-attr]
        self.logger.log_image("batch", [batch[0]])  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class Built(Classifier):
    """Is made late, by `configure_model`."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())

    def configure_model(self) -> None:
        if isinstance(self.network, nn.Identity):
            self.network = layer()


HABITS: dict[str, Callable[[], L.LightningModule]] = {
    "transfer hooks": lambda: Hooked(layer()),
    "averaged": lambda: Averaged(layer()),
    "branches": lambda: Branches(layer()),
    "penalized": lambda: Penalized(nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))),
    "tabled": Tabled,
    "built": Built,
    "spectral norm": lambda: Classifier(nn.utils.parametrizations.spectral_norm(layer())),
}


@pytest.mark.parametrize("habit", [habit if index % 2 else long(habit) for index, habit in enumerate(HABITS)])
def test_fake_steps_hold_what_real_steps_hold(habit: str) -> None:
    assert_equal(*both(HABITS[habit], vectors(), fp32))


@pytest.mark.long
def test_module_finds_a_logger_without_memory() -> None:
    plain, drawn = (capture(lambda: kind(layer()), vectors(), fp32(), cuda=False) for kind in (Classifier, Draws))  # noqa: B023
    assert drawn.log.peak() == plain.log.peak()


# --- constructors that compute with weights ---


class Measures(Classifier):
    """Learns a width from a forward."""

    def __init__(self) -> None:
        body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
        super().__init__(nn.Sequential(body, nn.Linear(body(torch.zeros(1, 3, 8, 8)).shape[1], 5)))


class Lazy(Classifier):
    """Learns its widths from a forward, by torch's own lazy layers."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(5)))
        self.network(torch.zeros(1, 3, 8, 8))


class Loads(Classifier):
    """Loads weights from a file."""

    def __init__(self, file: Path) -> None:
        super().__init__(layer())
        self.network.load_state_dict(torch.load(file))


class Overwrites(Classifier):
    """Puts other data into its weights, and sums them up."""

    def __init__(self) -> None:
        super().__init__(layer())
        self.network.weight.data = torch.eye(5, 16)
        self.total = self.network.weight.sum()


# 4 x (3 x 9 + 1) of the convolution, 4 x 6 x 6 x 5 + 5 behind it
@pytest.mark.parametrize("make", [long(Measures), Lazy])
def test_constructor_may_run_a_forward(make: Callable[[], Classifier]) -> None:
    batch = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    fake, real = both(make, batch, fp32)
    assert_equal(fake, real)
    assert fake.log.breakdown(0)["weights"] == 4 * (4 * 28 + 144 * 5 + 5)


@pytest.mark.long
def test_constructor_may_load_and_overwrite_weights(tmp_path: Path) -> None:
    torch.save(layer().state_dict(), tmp_path / "weights.pt")
    for make in (lambda: Loads(tmp_path / "weights.pt"), Overwrites):
        assert_equal(*both(make, vectors(), fp32))


# --- CUDA by hand ---


class ByHand(Classifier):
    """Puts things on CUDA devices in every way there is, and casts there."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 5, device="cuda").cuda())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch[0].cuda(), batch[1].to("cuda:0", non_blocking=True)
        with torch.device("cuda"):
            scale = torch.ones(5)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = self.network(x)
        assert scores.dtype is torch.bfloat16
        zero = zeros(1, device="cuda") + torch.zeros(1, device=torch.device("cuda", 0))
        return F.cross_entropy(scores.float() * scale + zero, y)


class ByNothing(Classifier):
    """The same, by the precision and the device of its Trainer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = torch.ones(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = self.network(batch[0])
        zero = zeros(1) + torch.zeros(1)
        return F.cross_entropy(scores.float() * scale + zero, batch[1])


def test_tensors_put_on_cuda_by_hand_are_an_assumption() -> None:
    by_hand, plain = capture(ByHand, vectors(), fp32()), capture(lambda: ByNothing(layer()), vectors(), fp32())
    assert by_hand.log.peak() == plain.log.peak()
    (assumption,) = set(by_hand.assumptions) - set(plain.assumptions)
    assert "CUDA device" in assumption


def test_tensors_put_on_cuda_by_hand_are_refused_on_a_cpu() -> None:
    class InStep(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.network(batch[0]).sum() + torch.zeros(1, device="cuda").sum()

    with pytest.raises(RuntimeError, match=mentions("CUDA device", "CPU")):
        capture(lambda: InStep(layer()), vectors(), fp32(), cuda=False)
    before = torch.autocast.__init__
    assert capture(lambda: Classifier(layer()), vectors(), fp32()).steps
    assert torch.autocast.__init__ is before


def test_a_context_of_a_device_places_tensors_during_a_plan_and_after_it() -> None:
    _device_constructors.cache_clear()  # as in a process without such a context so far
    for context in (CudaByHand(allowed=True).on_cpu(), nullcontext()):
        with context, torch.device("meta"):
            assert torch.zeros(2).is_meta
            assert nn.Linear(2, 2).weight.is_meta


def test_an_optimizer_that_can_be_captured() -> None:
    def make(**arguments: Any) -> Callable[[], Classifier]:
        return lambda: Classifier(layer(), lambda parameters: torch.optim.Adam(parameters, **arguments))

    plain, captured = (capture(make(capturable=choice), vectors(), fp32()) for choice in (False, True))
    states = [trace.log.breakdown(len(trace.log.events))["optimizer_states"] for trace in (plain, captured)]
    assert states == [2 * 4 * 85 + 2 * 4] * 2  # two of fp32 for each of 16 x 5 + 5 weights, two counters
    weights = nn.Parameter(torch.ones(3))
    weights.grad = torch.ones(3)
    with pytest.raises(AssertionError, match="capturable"):  # as torch by itself
        torch.optim.Adam([weights], capturable=True).step()


# --- indices out of range ---


class Embedded(Classifier):
    """Looks rows up."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Embedding(10, 8), nn.Flatten(), nn.Linear(16, 5)))


class Gathers(Classifier):
    """Takes the score of the answer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0]).gather(1, batch[1][:, None]).sum()


class Indexes(Classifier):
    """Takes rows by number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch[0])[batch[1]].sum()


def ids(highest: int) -> Any:
    return torch.tensor([[0, 9], [1, highest], [2, 3], [-0, 4]]), torch.randint(5, (4,))


def labels(highest: int) -> Any:
    return torch.randn(4, 16), torch.tensor([0, 1, highest, 2])


WRONG: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "embedding": (Embedded, ids(9), ids(10), "embedding: an index of 10 .* 10 .0 to 9.; a real run fails there"),
    "negative": (Embedded, ids(9), ids(-1), "embedding: an index of -1"),
    "classes": (lambda: Classifier(layer()), labels(4), labels(5), "nll_loss.*: an index of 5 .* 5 .0 to 4."),
    "gather": (lambda: Gathers(layer()), labels(4), labels(5), "gather: an index of 5"),
    "rows": (lambda: Indexes(layer()), labels(-4), labels(4), "index.*: an index of 4 .* 4 .-4 to 3."),
}


@pytest.mark.parametrize("case", [name if name == "classes" else long(name) for name in WRONG])
def test_index_out_of_range_is_refused(case: str) -> None:
    make, right, wrong, says = WRONG[case]
    for cuda in (False, True):
        assert capture(make, right, fp32(), cuda=cuda).steps
        with pytest.raises(PlanError, match=says):
            capture(make, wrong, fp32(), cuda=cuda)
    with pytest.raises((IndexError, RuntimeError)):
        capture(make, wrong, fp32(), fake=False, cuda=False)


def test_ignored_class_is_allowed() -> None:
    assert capture(lambda: Classifier(layer()), labels(-100), fp32()).steps


LOOKUPS: dict[str, Callable[[Tensor], Any]] = {
    "classes of pixels": lambda i: F.nll_loss(torch.empty(1, 5, 2, 2), i.view(1, 2, 2)),
    "scatter": lambda i: torch.empty(4, 5).scatter(1, i[:, None], torch.empty(4, 1)),
    "scatter a number": lambda i: torch.empty(4, 5).scatter(1, i[:, None], 1.0),
    "scatter in place": lambda i: torch.empty(4, 5).scatter_(1, i[:, None], torch.empty(4, 1)),
    "scatter a number in place": lambda i: torch.empty(4, 5).scatter_(1, i[:, None], 1.0),
    "add": lambda i: torch.empty(4, 5).scatter_add(1, i[:, None], torch.empty(4, 1)),
    "add in place": lambda i: torch.empty(4, 5).scatter_add_(1, i[:, None], torch.empty(4, 1)),
    "select": lambda i: torch.empty(4, 5).index_select(1, i),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_every_lookup_is_checked(name: str) -> None:
    mode = fake_mode()
    with known_numbers():
        right, wrong = (with_numbers(mode, torch.tensor([0, 1, most, 2])) for most in (4, 5))
        with mode, Tracer(nn.Identity()):
            LOOKUPS[name](right)
            with pytest.raises(PlanError, match=mentions("index of 5", "0 to 4")):
                LOOKUPS[name](wrong)
