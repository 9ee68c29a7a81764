"""Losses that aren't means over samples: MicroBatching refuses them, or embeds the batch in parts."""

from __future__ import annotations

import random
import re
from collections import UserList
from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import numpy
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_solo.build import built
from lightning_solo.errors import ConflictError, NothingToDoError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.split_parity import mismatch
from lightning_solo.planner.device import device as device_of
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.layer_drop.technique import LayerDrop
from lightning_solo.techniques.micro_batching import gradient_caching
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from lightning_solo.units import GiB
from tests.messages import mentions
from tests.modules import Stack
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
WIDTH = 8


class Towers(L.LightningModule):
    """Two encoders, and the loss of their embeddings with those of the whole batch as negatives."""

    def __init__(self, dropout: float = 0.0, most: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = Stack(2, WIDTH, dropout, WIDTH), Stack(1, WIDTH, 0.0, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.most, self.rows, self.losses, self.gradients = most, [], [], []
        self.error = torchmetrics.MeanMetric()

    def embed(self, batch: Any) -> dict[str, Tensor]:
        self.rows.append(len(batch["x"]))
        if len(batch["x"]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {name: F.normalize(tower(batch["x"])) for name, tower in (("a", self.image), ("b", self.text))}

    def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
        logits = self.scale.exp() * embeddings["a"] @ embeddings["b"].T
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.embed(batch))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.error.update(loss.detach())
        self.losses.append(float(loss.detach()))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fitted(make_trainer: Make, module: Any, *callbacks: Any, batch: int = 32, **arguments: Any) -> Any:
    """Return a module after a fit of three batches."""
    torch.manual_seed(1)
    dtype = next(module.parameters()).dtype
    data = DataLoader([{"x": x} for x in torch.randn(3 * batch, WIDTH).to(dtype)], batch_size=batch)
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    trainer.fit(module, data)
    module.logged = dict(trainer.callback_metrics)
    return module


# --- acted: losses that compare samples are refused, and the remedy works ---


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("size", [4, "auto"])
def test_a_loss_over_the_batch_is_refused_before_the_first_step(make_trainer: Make, size: Any, precision: str) -> None:
    module = Towers()
    start = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ConflictError, match=mentions("by samples", "embed=", "check=false")):
        fitted(make_trainer, module, MicroBatching(size), precision=precision)
    assert equal(start, [p.detach().cpu() for p in module.parameters()])


def test_whole_batch_and_parts_are_compared_with_the_same_random_numbers(make_trainer: Make) -> None:
    rows: list[int] = []

    class Noisy(Towers):
        def loss(self, embeddings: dict[str, Tensor]) -> Tensor:
            rows.append(len(embeddings["a"]))
            noise = torch.tensor([[random.random()] for _ in embeddings["a"]]).to(embeddings["a"])
            return (embeddings["a"] + 100 * noise).square().mean()

    fitted(make_trainer, Noisy(), MicroBatching(4), batch=8, max_epochs=1)
    assert rows == [8, 4, 4] + 3 * [4, 4]  # with other numbers the first comparison would be followed by four


def test_the_remedies_work_when_they_are_pasted(make_trainer: Make) -> None:
    with pytest.raises(ConflictError) as refused:
        fitted(make_trainer, Towers().double(), MicroBatching(4))
    embed, check = re.findall(r"callback\.micro_batching\.\w+=(?:\[.*?\]|\w+)", str(refused.value))
    whole = fitted(make_trainer, Towers().double())
    for override, is_whole in ((embed, True), (check, False)):
        chosen = compose("baseline", ["+callback=micro_batching", "callback.micro_batching.micro_batch=4", override])
        split = fitted(make_trainer, Towers().double(), built(chosen.techniques[0]))
        assert equal([*whole.parameters()], [*split.parameters()], 1e-9) == is_whole, override


def test_a_batch_is_embedded_in_parts_twice(make_trainer: Make) -> None:
    towers = Towers()
    towers.rows = UserList()  # a list would be put back
    module = fitted(make_trainer, towers, MicroBatching(12, embed="embed", check=False))
    assert module.rows == 3 * [11, 11, 10, 10, 11, 11]  # backward begins with the last part


# --- parity with the whole batch ---


@pytest.mark.parametrize("embed", ["embed", ["image", "text"], ["image.blocks", "text"]])
def test_weights_and_logged_values_are_those_of_the_whole_batch(make_trainer: Make, embed: Any) -> None:
    whole = fitted(make_trainer, Towers().double())
    split = fitted(make_trainer, Towers().double(), MicroBatching(4, embed=embed))
    assert equal(whole.gradients, split.gradients, 1e-12)
    assert equal([*whole.parameters()], [*split.parameters()], 1e-9)
    assert whole.losses == pytest.approx(split.losses, abs=1e-12)
    assert whole.logged.keys() == split.logged.keys() == {"loss", "loss_step", "loss_epoch"}
    torch.testing.assert_close(split.logged, whole.logged)
    assert float(split.error.compute()) == pytest.approx(float(whole.error.compute()))


@pytest.mark.parametrize("accumulating", [{"accumulate_grad_batches": 2}, {"global_batch": 64}])
def test_a_step_of_several_batches_is_the_mean_of_their_losses(make_trainer: Make, accumulating: Any) -> None:
    arguments = dict(accumulating)
    technique = MicroBatching(4, embed="embed", global_batch=arguments.pop("global_batch", None))
    split = fitted(make_trainer, Towers().double(), technique, **arguments)
    whole = fitted(make_trainer, Towers().double(), limit_train_batches=2, accumulate_grad_batches=2)
    assert len(split.gradients) == 2
    assert equal(whole.gradients[0], split.gradients[0], 1e-12)


@pytest.mark.filterwarnings("ignore:Towers.on_before_optimizer_step finds no .grad")
@pytest.mark.parametrize("others", [(GradientRelease,), (GradientRelease, lambda: CompactStates(32, 32))])
def test_released_gradients_are_those_of_the_whole_batch(make_trainer: Make, others: Any) -> None:
    whole = fitted(make_trainer, Towers(), *[other() for other in others])
    split = fitted(make_trainer, Towers(), MicroBatching(4, embed="embed"), *[other() for other in others])
    assert equal([*whole.parameters()], [*split.parameters()], 1e-6)


def test_inner_blocks_may_be_recomputed(make_trainer: Make) -> None:
    whole = fitted(make_trainer, Towers().double())
    techniques = MicroBatching(4, embed="embed"), ActivationCheckpointing(blocks="Block")
    split = fitted(make_trainer, Towers().double(), *techniques)
    assert equal([*whole.parameters()], [*split.parameters()], 1e-9)


def test_16_bit_gradients_are_those_of_the_whole_batch_within_rounding(make_trainer: Make) -> None:
    exact = fitted(make_trainer, Towers()).gradients[0]
    whole = fitted(make_trainer, Towers(), precision="bf16-mixed").gradients[0]
    split = fitted(make_trainer, Towers(), MicroBatching(4, embed="embed"), precision="bf16-mixed").gradients[0]
    for a, b, c in zip(exact, whole, split, strict=True):
        assert (c - a).norm() <= 1.5 * (b - a).norm() + 1e-3 * a.norm()


class Noisy(Towers):
    """Draws from the generators of torch, Python, NumPy and its own in each part."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.draws, self.rows = numpy.random.default_rng(1), UserList()  # a list would be put back

    def embed(self, batch: Any) -> dict[str, Tensor]:
        noise = random.random() + numpy.random.rand()
        return super().embed({"x": batch["x"] * (1 + noise)})


def test_random_numbers_of_a_part_are_those_of_its_first_forward(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with parts that keep their activations, which draw once."""
    recomputed = fitted(make_trainer, Noisy().double(), MicroBatching(4, embed="embed"))
    monkeypatch.setattr(
        gradient_caching, "run_recomputed", lambda owner, wrap, function, args, kwargs: function(*args, **kwargs)
    )
    kept = fitted(make_trainer, Noisy().double(), MicroBatching(4, embed="embed"))
    assert len(recomputed.rows) > len(kept.rows)
    assert equal(recomputed.gradients, kept.gradients, 1e-12)
    assert recomputed.losses == kept.losses


def test_smaller_parts_after_running_out_of_memory(make_trainer: Make) -> None:
    calm = fitted(make_trainer, Towers(0.3).double(), MicroBatching(4, embed="embed"))
    technique = MicroBatching(embed="embed")
    disturbed = fitted(make_trainer, Towers(0.3, most=4).double(), technique)
    assert (technique.retries, technique.fits) == (3, 4)
    assert equal([*calm.parameters()], [*disturbed.parameters()])


# --- memory ---


def test_activations_are_those_of_one_part(make_trainer: Make, accelerator: str) -> None:
    """Of 128 samples, whole and in parts of 32 and of 8."""
    if accelerator != "cpu":
        pytest.skip("counts on the CPU")
    peaks = {}
    for size in (None, 32, 8):
        module = Towers()
        module.image = Stack(24, WIDTH, 0.0, WIDTH)
        technique = [] if size is None else [MicroBatching(size, embed="embed", check=False)]
        with Ledger(module) as ledger:
            fitted(make_trainer, module, *technique, batch=128, limit_train_batches=1)
        peaks[size] = ledger.peak_bytes
    assert peaks[8] < peaks[32] < 0.5 * peaks[None]


@pytest.mark.long
def test_a_plan_has_the_whole_batch_and_the_activations_of_a_part() -> None:
    def make() -> Towers:
        module = Towers()
        module.image = Stack(24, WIDTH, 0.0, WIDTH)
        return module

    planner = Planner(make, {"x": torch.randn(128, WIDTH)}, {}, device_of("cpu"), GiB)
    plans = []
    for overrides in ([], ["+callback=micro_batching", "callback.micro_batching={micro_batch: 8, embed: embed}"]):
        plans.append(planner.plan("tried", compose("baseline", overrides)))
    whole, split = plans
    assert (split.micro_batch, split.accumulation) == (128, 1)
    assert split.peak_bytes < 0.5 * whole.peak_bytes


# --- trace, and what is refused ---


def test_the_module_is_as_before(make_trainer: Make) -> None:
    for embed in ("embed", "image"):
        module = Towers()
        before = {name: {*vars(part)} for name, part in module.named_modules()}
        fitted(make_trainer, module, MicroBatching(4, embed=embed))
        assert "embed" not in vars(module)
        assert "forward" not in vars(module.image)
        assert before["image"] == {*vars(module.image)}


class Similarities(Towers):
    """Embeds by the similarities with the other samples of a batch."""

    def embed(self, batch: Any) -> dict[str, Tensor]:
        embeddings = super().embed(batch)
        return {name: each @ each.T for name, each in embeddings.items()}

    def loss(self, embeddings: Any) -> Tensor:
        return embeddings["a"].square().mean()


class Centred(Towers):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        return {name: each - each.mean(0) for name, each in super().embed(batch).items()}


class Pooled(Towers):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        return {name: each.mean(0) for name, each in super().embed(batch).items()}

    def loss(self, embeddings: Any) -> Tensor:
        return embeddings["a"].square().mean()


@pytest.mark.parametrize("kind", [Similarities, Centred, Pooled])
def test_embeddings_that_depend_on_other_samples_are_refused(make_trainer: Make, kind: Any) -> None:
    with pytest.raises(ConflictError, match=mentions("embed=embed", "row for each sample")):
        fitted(make_trainer, kind(), MicroBatching(4, embed="embed"))


@pytest.mark.parametrize(
    ("embed", "error", "words"),
    [
        ("imag", NothingToDoError, ("imag", "image, text")),
        ("scale", NothingToDoError, ("scale", "Parameter")),
        ("error", ConflictError, ("embed=error", "never calls")),
    ],
)
def test_a_name_that_embeds_nothing_is_refused(make_trainer: Make, embed: str, error: Any, words: Any) -> None:
    with pytest.raises(error, match=mentions(*words)):
        fitted(make_trainer, Towers(), MicroBatching(4, embed=embed))


class Feature(Towers):
    """Its loss has a term of a feature inside the part that embeds, which a hook keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        self.image.blocks[0].register_forward_hook(lambda module, inputs, output: self.features.append(output))

    def embed(self, batch: Any) -> dict[str, Tensor]:
        self.rows.append(len(batch["x"]))
        return {"a": self.image(batch["x"]), "b": self.text(batch["x"]), "feature": self.features.pop()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        embeddings = self.embed(batch)
        return self.loss(embeddings) + embeddings["feature"].square().mean()


class Kept(Feature):
    def embed(self, batch: Any) -> dict[str, Tensor]:
        embeddings = super().embed(batch)
        self.feature = embeddings.pop("feature")
        return embeddings

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.embed(batch)) + 0.5 * self.feature.square().mean()


def test_loss_of_a_feature_that_the_part_does_not_return_is_refused(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("embed=embed", "not returned", "rows of one micro-batch")):
        fitted(make_trainer, Kept().double(), MicroBatching(4, embed="embed"))
    whole = fitted(make_trainer, Feature().double())
    split = fitted(make_trainer, Feature().double(), MicroBatching(4, embed="embed"))
    assert max(split.rows[3:]) == 4  # before that the embeddings are checked
    assert equal(whole.gradients, split.gradients, 1e-12)


def test_value_that_is_logged_in_the_part_that_embeds_is_refused_in_the_first_batch(make_trainer: Make) -> None:
    class Logs(Towers):
        def embed(self, batch: Any) -> dict[str, Tensor]:
            embeddings = super().embed(batch)
            self.log("spread", embeddings["a"].std(0).mean())
            return embeddings

    module = Logs()
    with pytest.raises(ConflictError, match=mentions("embed=embed", "self.log('spread'", "training_step")):
        fitted(make_trainer, module, MicroBatching(4, embed="embed"))
    assert module.trainer.global_step == 0
    fitted(make_trainer, Logs(), MicroBatching(32, embed="embed"))  # the batch isn't split


def test_metric_that_the_part_that_embeds_updates_is_refused(make_trainer: Make) -> None:
    class Counts(Towers):
        def embed(self, batch: Any) -> dict[str, Tensor]:
            self.error.update(1.0)  # again in backward
            return super().embed(batch)

    with pytest.raises(ConflictError, match=mentions("embed=embed", "MeanMetric.", "embed=<")):
        fitted(make_trainer, Counts(), MicroBatching(4, embed="embed"))


# --- the check: what it takes as a mean ---


class Step(L.LightningModule):
    """A module with any step, of a net and a batch of x: (batch, width)."""

    def __init__(self, step: Callable[..., Any], net: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.step, self.steps, self.seen = net or Stack(1, WIDTH, 0.3), step, [], {"count": 0}
        self.generator = torch.Generator().manual_seed(1)
        self.error = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch["x"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drops(nn.Module):
    """Drops samples as stochastic depth does."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty(len(x), 1).bernoulli_(0.5) if self.training else x


def functional(module: Any, x: Tensor) -> Tensor:
    attended = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0]
    return module.net(F.dropout(x, 0.5) + attended).square().mean()


def noisy(module: Any, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=module.generator).to(x)
    return (module.net(x + noise) - random.random() - numpy.random.rand()).square().mean()


def mixed(module: Any, x: Tensor) -> Tensor:
    return module.net(0.5 * x + 0.5 * x[torch.randperm(len(x), device=x.device)]).square().mean()


def penalized(module: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        output = module.net(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def taken(module: Any, x: Tensor) -> Tensor:
    gradient, _ = torch.autograd.grad(module.net(x).square().mean(), [*module.net.parameters()][-2:], create_graph=True)
    return module.net(x).square().mean() + 0 * gradient.sum()


def in_place(module: Any, x: Tensor) -> Tensor:
    return module.net(x.mul_(2)).square().mean()


def centred(module: Any, x: Tensor) -> Tensor:
    return module.net(x).mean() - 0.5 * module.net(x).mean()


STEPS = [functional, noisy, mixed, penalized, taken, in_place, centred]


@pytest.mark.parametrize("step", STEPS)
def test_means_over_samples_are_accepted_and_nothing_changes(make_trainer: Make, step: Any) -> None:
    runs = []
    for check in (False, True):
        torch.manual_seed(3)
        module = Step(step, nn.Sequential(Stack(1, WIDTH, 0.3, WIDTH), Drops(), nn.Linear(WIDTH, 1)))
        runs.append(fitted(make_trainer, module, MicroBatching(4, check=check), batch=8))
    assert equal(runs[0], runs[1])


def test_layers_that_are_dropped_make_no_difference(make_trainer: Make) -> None:
    module = Step(lambda module, x: module.net(x).square().mean(), Stack(3, WIDTH))
    fitted(make_trainer, module, MicroBatching(4), LayerDrop(), batch=8)


@pytest.mark.filterwarnings("ignore:.*training_step changes latest")
@pytest.mark.filterwarnings("ignore:.*training_step updates the metric error")
def test_state_that_a_step_keeps_is_that_of_its_parts(make_trainer: Make) -> None:
    def keeps(module: Any, x: Tensor) -> Tensor:
        loss = module.net(x).square().mean()
        module.steps.append(len(x))
        module.seen["count"] += 1
        module.latest = module.seen["count"]
        module.error.update(loss.detach())
        module.log("loss", loss)
        return loss

    module = fitted(make_trainer, Step(keeps), MicroBatching(4), batch=8)
    assert module.steps == 6 * [4]
    assert (module.seen, module.latest, module.error.update_count) == ({"count": 6}, 6, 6)


def logs(value: Callable[..., Any]) -> Callable[..., Any]:
    def step(module: Any, x: Tensor) -> Tensor:
        loss = module.net(x).square().mean()
        module.log("value", value(module, x, loss.detach()), on_epoch=True)
        return loss

    return step


def scored(module: Any, x: Tensor, loss: Tensor) -> Any:
    module.score(x[:, :2].sign(), x[:, 2:4].sign())
    return module.score


ONCE_PER_PART: dict[str, tuple[str, Callable[..., Any]]] = {
    "mean of losses": ("metric error", lambda module, x, loss: module.error.update(loss) or loss),
    "sum of losses": ("metric total", lambda module, x, loss: module.total.update(loss) or loss),
    "number of samples": ("logs value", lambda module, x, loss: float(len(x))),
    "standard deviation": ("logs value", lambda module, x, loss: x.std()),
    "value of a metric": ("logs value", lambda module, x, loss: scored(module, x, loss)(x[:, :2], x[:, 2:4])),
    "attribute": ("changes seen_x", lambda module, x, loss: vars(module).update(seen_x=float(x[0, 0])) or loss),
}
AS_THE_WHOLE: dict[str, Callable[..., Any]] = {
    "weighed": lambda module, x, loss: module.error.update(loss, weight=len(x)) or loss,
    "rows": lambda module, x, loss: module.error.update(x.mean(1)) or loss,
    "metric": scored,
    "sum of losses": lambda module, x, loss: module.total.update(loss * len(x)) or loss,
    "random": lambda module, x, loss: loss + torch.rand(()),
    "total": lambda module, x, loss: vars(module).update(sum_x=module.sum_x + float(x.sum())) or loss,
}


def measured(make_trainer: Make, value: Callable[..., Any]) -> None:
    module = Step(logs(value))
    module.total, module.score, module.sum_x = torchmetrics.SumMetric(), torchmetrics.R2Score(), 0.0
    fitted(make_trainer, module, MicroBatching(4), batch=8)


@pytest.mark.parametrize("name", ONCE_PER_PART)
def test_what_a_step_counts_once_per_part_is_named(make_trainer: Make, name: str) -> None:
    words, value = ONCE_PER_PART[name]
    with pytest.warns(UserWarning, match=mentions("callback.micro_batching", words)):
        measured(make_trainer, value)


@pytest.mark.parametrize("name", AS_THE_WHOLE)
def test_what_a_step_counts_as_the_whole_batch_is_not_warned_of(make_trainer: Make, name: str) -> None:
    measured(make_trainer, AS_THE_WHOLE[name])


def test_batch_norm_that_is_allowed_makes_no_difference(make_trainer: Make) -> None:
    net = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module = Step(lambda module, x: module.net(x).square().mean(), net)
    fitted(make_trainer, module, MicroBatching(4, batch_norm="ghost"), batch=8)


@pytest.mark.not_simulated("the simulated device has no LSTM")
def test_attention_and_recurrent_layers_that_drop_make_no_difference(make_trainer: Make) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, 0.5, batch_first=True), nn.Linear(WIDTH, 1)
            self.recurrent = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.5)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None] * torch.ones(1, 3, 1, device=x.device)
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(self.recurrent(x)[0][:, -1])

    module = Step(lambda module, x: module.net(x).square().mean(), Attending())
    fitted(make_trainer, module, MicroBatching(4), batch=8)


def test_an_undivided_batch_is_not_checked(make_trainer: Make) -> None:
    module = fitted(make_trainer, Towers(), MicroBatching(32))
    assert module.rows == 3 * [32]


def test_forwards_that_run_out_of_memory_are_checked_with_fewer_samples(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("loss of 2 samples")):
        fitted(make_trainer, Towers(most=3), MicroBatching())
    technique = MicroBatching()
    fitted(make_trainer, Towers(most=1), technique)
    assert technique.fits == 1


@pytest.mark.parametrize(
    ("loss", "remedy"),
    [
        (lambda module, x: module.net(x).square().sum(), "mean from training_step"),
        (lambda module, x: (module.net(x).square() / (x > 0).sum()).sum(), "embed=net"),
        (lambda module, x: (module.net(x) * x @ x.T).logsumexp(1).mean() + 0.1 * torch.rand(()), "embed=net"),
    ],
    ids=["sum", "mean over other numbers", "random"],
)
def test_other_losses_are_refused_with_their_remedy(make_trainer: Make, loss: Any, remedy: str) -> None:
    with pytest.raises(ConflictError, match=mentions(remedy, "check=false")):
        fitted(make_trainer, Step(loss), MicroBatching(4), batch=8)


@pytest.mark.parametrize("by", ["tokens", "shifted_tokens"])
def test_a_mean_over_tokens_is_refused_with_its_weights(make_trainer: Make, by: str) -> None:
    labels = torch.arange(8 * 6).view(8, 6) % 5
    labels[torch.arange(6) >= torch.tensor([6, 5, 2, 6, 3, 2, 2, 1])[:, None]] = -100

    class Language(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits, labels = self.net.weight[batch["labels"].clamp(min=0)], batch["labels"]
            if by == "shifted_tokens":
                logits, labels = logits[:, :-1], labels[:, 1:]
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def fit(weight_by: str) -> None:
        data = DataLoader([{"labels": row} for row in labels], batch_size=8)
        technique = MicroBatching(4, weight_by=weight_by)
        make_trainer(L, callbacks=[technique]).fit(Language(lambda: None, nn.Embedding(5, 5)), data)

    with pytest.raises(ConflictError, match=f"write callback.micro_batching.weight_by={by},"):
        fit("samples")
    fit(by)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("by", ["tokens", "shifted_tokens"])
def test_mean_over_tokens_is_refused_in_a_model_that_predicts_all_tokens_alike(
    make_trainer: Make, by: str, precision: str
) -> None:
    """A model that hasn't been trained: the losses of all tokens are nearly the same, and so are their means."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (8, 12), generator=generator)
    tokens[torch.arange(12) >= torch.tensor([12, 11, 12, 10, 7, 8, 5, 6])[:, None]] = -100

    class Language(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            labels = batch["labels"]
            logits = 1e-3 * self.net(F.one_hot(labels.clamp(min=0), 50).float())
            if by == "shifted_tokens":
                logits, labels = logits[:, :-1], labels[:, 1:]
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def fit(weight_by: str) -> None:
        data = DataLoader([{"labels": row} for row in tokens], batch_size=8)
        technique = MicroBatching(4, weight_by=weight_by)
        torch.manual_seed(0)
        make_trainer(L, callbacks=[technique], precision=precision).fit(Language(lambda: None, nn.Linear(50, 50)), data)

    for wrong in {"samples", "tokens", "shifted_tokens"} - {by}:
        with pytest.raises(ConflictError, match=f"write callback.micro_batching.weight_by={by},"):
            fit(wrong)
    fit(by)


def test_loss_with_weights_of_classes_is_refused_though_the_first_parts_have_none_that_is_rare(
    make_trainer: Make,
) -> None:
    class Weighted(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(
                self.net(batch["x"]), batch["rare"], weight=torch.tensor([1.0, 9.0], device=self.device)
            )

    items = [{"x": row, "rare": int(index >= 24)} for index, row in enumerate(torch.randn(32, WIDTH))]
    with pytest.raises(ConflictError, match=mentions("the loss of 32 samples", "check=false")):
        make_trainer(L, callbacks=[MicroBatching(4)]).fit(
            Weighted(lambda: None, nn.Linear(WIDTH, 2)), DataLoader(items, batch_size=32)
        )


def test_frozen_part_is_not_proposed_to_embed_samples(make_trainer: Make) -> None:
    """Such as a momentum encoder, which runs without gradients."""

    class Momentum(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.text.requires_grad_(False)

    with pytest.raises(ConflictError, match=mentions("embed=image")):
        fitted(make_trainer, Momentum(), MicroBatching(4), batch=8)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_learning_rate_finder_trains_on_whole_batches(make_trainer: Make, tmp_path: Any) -> None:
    """It drops the other callbacks for its steps."""

    class Tuned(Towers):
        lr = 1e-2

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.image(batch["x"]).square().mean()

    finder = L.callbacks.LearningRateFinder(num_training_steps=3, early_stop_threshold=None)
    module = fitted(make_trainer, Tuned(), MicroBatching(4), finder, batch=8, default_root_dir=tmp_path)
    assert module.trainer.global_step == 3


def test_mean_over_tokens_is_refused_at_the_first_batch_whose_rows_differ(make_trainer: Make) -> None:
    tokens = torch.arange(16 * 6).view(16, 6) % 5
    tokens[12:, 2:] = -100  # of the last half batch

    class Language(Step):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net.weight[batch["labels"].clamp(min=0)]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    module = Language(lambda: None, nn.Embedding(5, 5))
    data = DataLoader([{"labels": row} for row in tokens], batch_size=8)
    with pytest.raises(ConflictError, match=mentions("write callback.micro_batching.weight_by=tokens")):
        make_trainer(L, callbacks=[MicroBatching(4)]).fit(module, data)
    assert module.trainer.global_step == 1


def test_counts_and_averages_that_a_step_keeps_are_named(make_trainer: Make) -> None:
    class Annealed(Step):
        def __init__(self, step: Any) -> None:
            super().__init__(step, nn.Linear(WIDTH, 1))
            self.calls = self.samples = self.latest = 0
            self.register_buffer("centre", torch.zeros(WIDTH))
            self.register_buffer("total", torch.zeros(()))

    def counts(module: Any, x: Tensor) -> Tensor:
        module.calls += 1
        module.samples += len(x)
        module.latest = 7
        module.total += x.detach().sum()
        return module.net(x).square().mean()

    def averages(module: Any, x: Tensor) -> Tensor:
        module.centre.lerp_(x.detach().mean(0), 0.1)
        return module.net(x).square().mean()

    for step, name in ((counts, "calls"), (averages, "centre")):
        with pytest.warns(UserWarning, match=rf"training_step changes {name} for each micro-batch"):
            fitted(make_trainer, Annealed(step), MicroBatching(4), batch=8)


class Averaging(Towers):
    """A network whose training step moves an average of its weights, as those of BYOL often do."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.average = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.average.weight.lerp_(self.average.bias.expand(WIDTH, WIDTH), 0.1)
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.image(batch["x"]).square().mean()


@pytest.mark.parametrize("size", ["auto", 4])
def test_training_step_that_changes_parameters_in_place_is_refused(make_trainer: Make, size: Any) -> None:
    """It would change them once per part, and a repeated batch once more."""
    with pytest.raises(ConflictError, match=mentions("average.weight", "on_train_batch_end")):
        fitted(make_trainer, Averaging(), MicroBatching(size), batch=8)
    with pytest.raises(ConflictError, match=mentions("average.weight", "on_train_batch_end")):
        fitted(make_trainer, Averaging(fails=True), MicroBatching("auto", check=False), batch=8)


def test_a_difference_in_random_losses_counts_if_it_is_larger_than_their_range() -> None:
    draw = random.Random(0).gauss
    small = [mismatch(lambda _: draw(5, 0.3), lambda _: [draw(5, 0.3)], 1e-3) for _ in range(200)]
    assert small == 200 * [None]
    assert mismatch(lambda _: draw(5, 0.3), lambda _: [draw(1, 0.3)], 1e-3) is not None
    assert mismatch(lambda _: float("nan"), lambda _: [1.0], 1e-3) is None
    assert mismatch(lambda _: 1.0, lambda _: [float("nan")], 1e-3) is not None
