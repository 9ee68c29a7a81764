"""AccumulationSchedule by tokens, samples and noise: gradients of the whole window, counts, resuming amid a window."""

from __future__ import annotations

import copy
import math
import re
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_solo.data.loss_weights import weight_of
from lightning_solo.errors import CheckpointError, ConflictError, PresetError
from lightning_solo.optim.noise_scale import AVERAGED, NoiseScale, noise_and_signal
from lightning_solo.techniques.accumulation_schedule.milestones import Epoch, count_optimizer_steps, epoch_of, factor_at
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from lightning_solo.techniques.gradient_release.technique import GradientRelease
from lightning_solo.techniques.micro_batching.technique import MicroBatching
from tests.messages import mentions
from tests.modules import Resumable, loader, regression

pytestmark = pytest.mark.any_device

WORDS = 11
Batch = dict[str, Tensor]


class Words(nn.Module):
    """Predicts words from words, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.head = nn.Linear(4, WORDS)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(ids)))

    def losses(self, batch: Batch, reduction: str = "mean") -> Tensor:
        logits = self(batch["input_ids"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten(), reduction=reduction)


def language_model(home: Any, net: Words) -> Any:
    """Return a module that trains ``net`` with SGD by the mean over a batch's tokens, as most language models do."""
    module = regression(home, net)
    module.training_step = lambda batch, batch_idx=0: net.losses(batch)
    module.configure_optimizers = lambda: torch.optim.SGD(net.parameters(), lr=0.1)
    return module


def batches_of(valid: list[list[int]], seed: int = 0) -> list[Batch]:
    """Return a batch for each list, with a row for each number: so many labels are valid, the others -100."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for rows in valid:
        length = max(*rows, 1)
        ids = torch.randint(WORDS, (len(rows), length), generator=generator)
        labels = torch.randint(WORDS, (len(rows), length), generator=generator)
        labels[torch.arange(length) >= torch.tensor(rows)[:, None]] = -100
        batches.append({"input_ids": ids, "labels": labels, "mask": labels.ne(-100).double()})
    return batches


def gradients(home: Any, make_trainer: Any, net: Words, batches: Any, **options: Any) -> list[list[Tensor | None]]:
    """Train, and return the gradients with which the optimizer stepped, step by step."""
    seen: list[list[Tensor | None]] = []
    weight_by, by = options.pop("weight_by", "tokens"), options.pop("by", "epoch")
    schedule = AccumulationSchedule(options.pop("milestones", [[0, 3]]), by, weight_by)

    class See(home.Callback):  # type: ignore[name-defined,misc]
        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            see()

    def see() -> None:
        seen.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])

    trainer = make_trainer(home, callbacks=[schedule, See()], **options)
    trainer.fit(language_model(home, net), DataLoader(batches, batch_size=None) if type(batches) is list else batches)
    see()
    return seen[1:]  # before the first batch there is none


def by_hand(net: Words, batches: list[Batch], factor: int) -> list[list[Tensor | None]]:
    """Return the gradients of steps whose loss is the mean over all valid tokens of the window, in one backward."""
    net, found = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for first in range(0, len(batches), factor):
        window = batches[first : first + factor]
        tokens = sum(int(batch["labels"].ne(-100).sum()) for batch in window)
        optimizer.zero_grad()
        if tokens:
            (sum(net.losses(batch, "sum") for batch in window) / tokens).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
        optimizer.step()
    return found


def assert_equal(ours: Any, expected: Any) -> None:
    assert len(ours) == len(expected)
    for step, other in zip(ours, expected, strict=True):
        for gradient, wanted in zip(step, other, strict=True):
            if wanted is None:
                assert gradient is None
            else:
                torch.testing.assert_close(gradient.cpu(), wanted.cpu(), rtol=1e-10, atol=1e-12)


# --- acted, and parity ---


@given(
    valid=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=6),
    factor=st.integers(1, 4),
    weight_by=st.sampled_from(["tokens", "mask"]),
)
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.row(74)
def test_a_step_is_the_mean_over_the_tokens_of_its_window(
    make_trainer: Any, valid: Any, factor: int, weight_by: str
) -> None:
    """Batches of different lengths, rows and shares of padding; without any valid token their loss is NaN."""
    import lightning.pytorch as home

    batches, net = batches_of(valid), Words()
    expected = by_hand(net, batches, factor)
    assert_equal(gradients(home, make_trainer, net, batches, milestones=[[0, factor]], weight_by=weight_by), expected)


def test_batches_that_all_count_alike_are_a_different_mean(home: Any, make_trainer: Any) -> None:
    net, batches = Words(), batches_of([[4, 4], [1], [2, 0]])
    (expected,) = by_hand(net, batches, 3)
    (alike,) = gradients(home, make_trainer, copy.deepcopy(net), batches, weight_by="batches")
    (ours,) = gradients(home, make_trainer, net, batches, weight_by="tokens")
    assert_equal([ours], [expected])
    assert not torch.allclose(alike[0], expected[0], rtol=1e-2)  # type: ignore[arg-type]


def test_equal_weights_change_no_bit(home: Any, make_trainer: Any) -> None:
    net, batches = Words(), batches_of([[3, 2]] * 5)
    plain = gradients(home, make_trainer, copy.deepcopy(net), batches, weight_by="batches")
    ours = gradients(home, make_trainer, net, batches, weight_by="tokens")
    assert all(torch.equal(a, b) for x, y in zip(ours, plain, strict=True) for a, b in zip(x, y, strict=True))  # type: ignore[arg-type]


@pytest.mark.row(76)
def test_a_step_is_clipped_after_the_mean(home: Any, make_trainer: Any) -> None:
    net, batches = Words(), batches_of([[4, 4], [0], [1]])
    (expected,) = by_hand(net, batches, 3)
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected if g is not None))
    (ours,) = gradients(home, make_trainer, net, batches, gradient_clip_val=norm / 2)
    clipped = [g / 2 for g in expected if g is not None]
    for gradient, wanted in zip(ours, clipped, strict=True):
        torch.testing.assert_close(gradient.cpu(), wanted, rtol=1e-5, atol=1e-7)  # type: ignore[union-attr]  # torch adds 1e-6


def test_a_short_batch_counts_by_its_samples(home: Any, make_trainer: Any) -> None:
    rows = batches_of([[4] * 10])[0]
    data = TensorDataset(rows["input_ids"], rows["labels"])

    def collate(items: Any) -> Batch:
        return dict(zip(("input_ids", "labels"), map(torch.stack, zip(*items, strict=True)), strict=True))

    net = Words()
    expected = by_hand(net, [rows], 1)  # 4 + 4 + 2 rows, all their labels valid
    made = DataLoader(data, batch_size=4, collate_fn=collate)
    assert_equal(gradients(home, make_trainer, net, made, weight_by="samples"), expected)


def test_shifted_tokens_are_all_but_each_rows_first() -> None:
    (batch,) = batches_of([[3, 1, 0]])
    counts = {by: weight_of(batch, 3, by) for by in ("samples", "tokens", "shifted_tokens", "mask")}
    assert counts == {"samples": 3, "tokens": 4, "shifted_tokens": 2, "mask": 4}
    assert weight_of([batch["input_ids"], batch["labels"]], 3, "tokens") == 4


def test_batch_without_countable_weight_is_refused_by_name(home: Any, make_trainer: Any) -> None:
    for choice, named in [("tokens", "labels"), ("lengths", "lengths")]:
        with pytest.raises(ConflictError, match=mentions(named, "weight_by")):
            make_trainer(home, callbacks=[AccumulationSchedule(weight_by=choice)]).fit(regression(home), loader(2))


@pytest.mark.parametrize("choice", [{"weight_by": "samples"}, {"by": "noise_scale", "milestones": [[0, 2]]}])
def test_released_gradients_are_refused(home: Any, make_trainer: Any, choice: Any) -> None:
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(**choice), GradientRelease()])
    with pytest.raises(ConflictError, match=mentions("gradients")):
        trainer.fit(regression(home), loader(2))


@pytest.mark.parametrize("choice", [{"weight_by": "tokens"}, {"by": "noise_scale", "milestones": [[0, 2]]}])
def test_batches_that_are_divided_are_weighed_there(home: Any, make_trainer: Any, choice: Any) -> None:
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(**choice), MicroBatching(2)])
    with pytest.raises(ConflictError, match=mentions("micro_batch_weights", "weight_by=batches")):
        trainer.fit(regression(home), loader(2))


def test_two_that_say_how_many_batches_make_a_step(home: Any, make_trainer: Any) -> None:
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(), MicroBatching(2, global_batch=8)])
    with pytest.raises(ConflictError, match=mentions("accumulation_factor", "milestones=[[0,<N>]]", "global_batch")):
        trainer.fit(regression(home), loader(2))


# --- schedules by what batches hold ---


def walked(milestones: Any, batches: int, size: int, samples: int, epochs: int) -> int:
    """Return the steps of a schedule by samples, one batch at a time."""
    steps, factor, seen = 0, 1, 0
    for _ in range(epochs):
        held = 0
        for batch_idx in range(batches):
            factor = factor if held else factor_at(milestones, seen)
            seen += min(size, samples - batch_idx * size)
            held += 1
            if held == factor or batch_idx == batches - 1:
                steps, held = steps + 1, 0
    return steps


@given(
    milestones=st.dictionaries(st.integers(0, 120), st.integers(1, 9), min_size=1, max_size=4),
    batches=st.integers(1, 25),
    size=st.integers(1, 4),
    short=st.integers(0, 3),
    epochs=st.integers(0, 6),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_steps_by_samples_equal_the_walk(milestones: Any, batches: int, size: int, short: int, epochs: int) -> None:
    pairs, samples = sorted(milestones.items()), batches * size - min(short, size - 1)
    expected = walked(pairs, batches, size, samples, epochs)
    assert count_optimizer_steps(pairs, "samples", Epoch(batches, size, samples), epochs) == expected


def test_an_epoch_of_a_loader() -> None:
    data = TensorDataset(torch.zeros(10, 2))
    assert epoch_of(DataLoader(data, batch_size=4), 3) == Epoch(3, 4, 10)
    assert epoch_of(DataLoader(data, batch_size=4, drop_last=True), 2) == Epoch(2, 4, 8)
    assert epoch_of(DataLoader(data, batch_size=4), 1) == Epoch(1, 4, 4)  # limit_train_batches
    assert epoch_of(DataLoader(data, batch_size=None), 10) is None


@pytest.mark.parametrize(
    ("milestones", "by", "sizes"),
    [
        ([[0, 1], [8, 2], [24, 4]], "samples", [1, 1, 2, 2, 4, 4, 4, 2]),  # of four samples a batch: 24 at batch 6
        ([[0, 2], [9, 3]], "samples", [2, 2, 3, 3, 3, 3, 3]),  # 16 at batch 4, which 3 doesn't divide
        ([[0, 2], [11, 3]], "tokens", [2, 2, 2, 2, 3, 3, 3, 1]),  # a token and a half in the mean: 12 at batch 8
    ],
)
def test_windows_by_samples_and_tokens(
    home: Any, make_trainer: Any, milestones: Any, by: Any, sizes: list[int]
) -> None:
    notes = Notes(home)
    batches = batches_of([[1, 0, 0, 0], [1, 1, 0, 0]] * 12)[: sum(sizes)]
    trainer = make_trainer(home, callbacks=[AccumulationSchedule(milestones, by), notes.callback])
    trainer.fit(language_model(home, Words()), DataLoader(batches, batch_size=None))
    assert notes.sizes == sizes


@dataclass
class Rows:
    input_ids: Tensor
    labels: Tensor

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)  # type: ignore[no-any-return]


def test_samples_of_a_dataclass_are_counted(home: Any, make_trainer: Any) -> None:
    notes = Notes(home)
    batches = [Rows(batch["input_ids"], batch["labels"]) for batch in batches_of([[1, 1, 1, 1]] * 6)]
    trainer = make_trainer(home, callbacks=[AccumulationSchedule([[0, 1], [8, 2]], "samples"), notes.callback])
    trainer.fit(language_model(home, Words()), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert notes.sizes == [1, 1, 2, 2]


class Notes:
    """A callback that notes how many batches each optimizer step was made of."""

    def __init__(self, home: Any) -> None:
        self.sizes: list[int] = []
        self.before = self.open = 0
        notes = self

        class Note(home.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                notes.open += 1
                if trainer.global_step != notes.before:
                    notes.sizes.append(notes.open)
                    notes.open, notes.before = 0, trainer.global_step

        self.callback = Note()


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_epochs": 2, "limit_train_batches": 7}, {"max_steps": 4}])
def test_a_scheduler_made_from_the_estimate_ends_where_it_should(home: Any, make_trainer: Any, limits: Any) -> None:
    x = torch.randn(38, 8)
    module = regression(home, nn.Linear(8, 1))

    def configure_optimizers() -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        steps = int(module.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module.configure_optimizers = configure_optimizers
    schedule = AccumulationSchedule([[0, 1], [10, 2], [50, 3]], by="samples")
    trainer = make_trainer(home, callbacks=[schedule], **{"max_epochs": 5, **limits})
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :1]), batch_size=4))
    scheduler = trainer.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == scheduler.total_steps - 1 == trainer.global_step > 0


def test_steps_that_no_one_knows_beforehand(home: Any, make_trainer: Any) -> None:
    def fit(**limits: Any) -> list[Any]:
        estimates: list[Any] = []
        module = language_model(home, Words())
        stock = module.configure_optimizers

        def note() -> Any:
            estimates.append(module.trainer.estimated_stepping_batches)
            return stock()

        module.configure_optimizers = note
        schedule = AccumulationSchedule([[0, 2], [6, 4]], by="tokens")
        make_trainer(home, callbacks=[schedule], **limits).fit(
            module, DataLoader(batches_of([[2, 1]] * 8), batch_size=None)
        )
        return estimates

    assert fit(max_epochs=3, max_steps=3) == [3]
    with pytest.raises(ConflictError, match=mentions("by=tokens", "max_steps=")):
        fit(max_epochs=3)


# --- noise ---


def test_noise_and_signal_from_expected_norms() -> None:
    for noise, signal, small, large in [(8.0, 1.0, 1, 4), (0.5, 3.0, 2, 6), (0.0, 1.0, 4, 8)]:
        found = noise_and_signal(signal + noise / small, small, signal + noise / large, large)
        assert found == pytest.approx((noise, signal))


class Drawn(torch.utils.data.Dataset[Tensor]):
    """Samples whose gradients are known: of mean 0.5 and a standard deviation of 2 in each of 64 dimensions."""

    def __init__(self, batches: int, size: int) -> None:
        self.x = 0.5 + 2 * torch.randn(batches * size, 64, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


def drawn(home: Any) -> Any:
    module = regression(home, nn.Linear(64, 1, bias=False))
    module.training_step = lambda batch, batch_idx=0: module.net(batch).mean()  # its gradient is the mean sample
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)
    return module


def test_the_noise_scale_of_known_gradients(home: Any, make_trainer: Any) -> None:
    # noise 64 x 4, signal 64 x 0.25: a scale of 16 samples
    schedule = AccumulationSchedule([[0, 4], [8, 8], [1000, 16]], by="noise_scale")
    notes = Notes(home)
    trainer = make_trainer(home, callbacks=[schedule, notes.callback])
    trainer.fit(drawn(home), DataLoader(Drawn(1200, 4), batch_size=4))
    assert schedule.noise_scale == pytest.approx(16, rel=0.25)  # 175 measurements, averaged over some 50
    assert notes.sizes == [4] * AVERAGED + [8] * 125
    assert float(trainer.callback_metrics["accumulation/noise_scale"]) == pytest.approx(schedule.noise_scale)


def test_nothing_is_estimated_from_few_measurements_or_without_a_signal() -> None:
    scale = NoiseScale()
    for _ in range(AVERAGED):
        assert scale.value is None
        scale.add(3.0, 1, 2.0, 2)  # a noise of 2, a signal of 1
    scale.add(math.inf, 1, 2.0, 2)  # as of a step that is skipped under 16-mixed
    assert scale.value == pytest.approx(2.0)
    resumed = NoiseScale()
    resumed.load(scale.state())
    assert resumed.value == scale.value
    for _ in range(9 * AVERAGED):
        resumed.add(2.0, 1, 1.0, 2)  # nothing but noise
    resumed.add(2.0, 1, 0.5, 2)
    assert resumed.value is None or resumed.value > 1000


def test_noise_takes_windows_of_two() -> None:
    for milestones in ([[0, 1]], [[3, 2]]):
        with pytest.raises(PresetError, match=mentions("noise_scale", "milestones=[[0,2]]")):
            AccumulationSchedule(milestones, by="noise_scale")


# --- trace: a run that is resumed anywhere equals the undisturbed one ---


SCHEDULES = {
    "batches": {"milestones": [[0, 4]]},
    "tokens": {"milestones": [[0, 4]], "weight_by": "tokens"},
    "by_step": {"milestones": [[0, 2], [1, 3], [2, 4]], "by": "step"},  # windows from 0, 2, 5 and, of one, 9
    "by_tokens": {"milestones": [[0, 2], [8, 3]], "by": "tokens", "weight_by": "tokens"},
    "by_samples": {"milestones": [[0, 2], [7, 3]], "by": "samples"},
    "noise": {"milestones": [[0, 2], [1, 4]], "by": "noise_scale"},
}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("chosen", SCHEDULES)
@pytest.mark.row(46)
def test_a_run_resumed_at_each_place_of_a_window(home: Any, make_trainer: Any, tmp_path: Any, chosen: str) -> None:
    batches = batches_of([[4, 2], [0, 0], [1, 1], [3, 0], [4, 4], [2, 2], [0, 1], [4, 1], [3, 3], [2, 0]])

    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(tmp_path / f"{batch_idx}.ckpt")

    def fit(net: Words, *callbacks: Any, **options: Any) -> tuple[Any, AccumulationSchedule]:
        schedule = AccumulationSchedule(**SCHEDULES[chosen])  # type: ignore[arg-type]
        trainer = make_trainer(home, max_epochs=2, callbacks=[schedule, *callbacks])
        # "noise" alone weighs no tokens, and the loss of a batch without any is NaN
        data = [batches[0], *batches[2:]] if schedule.weight_by == "batches" else batches
        trainer.fit(language_model(home, net), Resumable(data), **options)
        return trainer, schedule

    first, before = Words(), Words()
    before.load_state_dict(first.state_dict())
    undisturbed, schedule = fit(first, Save())
    assert not torch.equal(first.head.weight, before.head.weight)
    for after in range(8):
        second = Words()
        resumed, again = fit(second, ckpt_path=str(tmp_path / f"{after}.ckpt"), weights_only=True)
        assert resumed.global_step == undisturbed.global_step
        assert again.state_dict() == schedule.state_dict()
        for expected, parameter in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(parameter, expected), after


def test_a_checkpoint_has_gradients_amid_a_window_alone(home: Any, make_trainer: Any, tmp_path: Any) -> None:
    schedule, states = AccumulationSchedule([[0, 2]], weight_by="tokens"), []

    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            states.append(schedule.state_dict())

    make_trainer(home, callbacks=[schedule, Save()]).fit(
        language_model(home, Words()), DataLoader(batches_of([[1]] * 5), batch_size=None)
    )
    assert ["window" in state for state in states] == [True, False, True, False, False]
    assert schedule.state_dict() == {"factor": 2, "start": 4}
    assert [type(state["window"]["gradients"]) for state in states if "window" in state] == [list, list]


def test_gradients_of_other_parameters_are_refused(home: Any, make_trainer: Any) -> None:
    schedule = AccumulationSchedule([[0, 2]])
    module = language_model(home, Words())
    window = {"held": 1.0, "reference": 0.0, "samples": 0, "first": None, "gradients": [torch.zeros(3)]}

    class Load(home.Callback):  # type: ignore[name-defined,misc]
        def on_fit_start(self, *_: Any) -> None:
            schedule.load_state_dict({"factor": 2, "window": window})

    with pytest.raises(CheckpointError, match=mentions("gradients", "other parameters")):
        make_trainer(home, callbacks=[schedule, Load()]).fit(module, DataLoader(batches_of([[1]]), batch_size=None))


def test_released_gradients_of_a_window_that_nobody_loads_are_named(home: Any, make_trainer: Any) -> None:
    schedule = AccumulationSchedule([[0, 2]])
    module = language_model(home, Words())
    window = {"held": 1.0, "reference": 0.0, "samples": 0, "first": None, "gradients": [None] * 3}

    class Load(home.Callback):  # type: ignore[name-defined,misc]
        def on_fit_start(self, *_: Any) -> None:
            schedule.load_state_dict({"factor": 2, "window": window})

    with pytest.warns(UserWarning, match=mentions("gradients", "dropped", "preset")):
        make_trainer(home, callbacks=[schedule, Load()]).fit(module, DataLoader(batches_of([[1]]), batch_size=None))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(("saved", "resumed"), [(64.0, 64.0), (64.0, None), (None, 64.0), (None, None)])
def test_a_scaled_window_is_continued_with_the_same_scaler(
    home: Any, make_trainer: Any, tmp_path: Any, saved: float | None, resumed: float | None
) -> None:
    def fit(scale: float | None, **options: Any) -> Words:
        torch.manual_seed(0)
        net, schedule = Words(), AccumulationSchedule([[0, 3]])

        class Save(home.Callback):  # type: ignore[name-defined,misc]
            def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
                if index == 1 and not options:
                    trainer.save_checkpoint(tmp_path / "amid.ckpt")

        plugins = []
        if scale is not None:
            scaler = torch.amp.GradScaler("cpu", init_scale=scale)
            plugins = [home.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)]
        trainer = make_trainer(home, callbacks=[schedule, Save()], plugins=plugins)
        trainer.fit(language_model(home, net), Resumable(batches_of([[1], [2], [3]])), **options)
        return net

    whole = fit(saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = fit(resumed, ckpt_path=tmp_path / "amid.ckpt", weights_only=True)
    dropped = [w for w in caught if re.search(mentions("gradients", "dropped", "precision"), str(w.message))]
    assert len(dropped) == (saved != resumed)
    if saved == resumed:
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_a_schedule_by_tokens_needs_their_count() -> None:
    schedule = AccumulationSchedule([[0, 2]], by="tokens")
    with pytest.raises(CheckpointError, match=mentions("lacks ['tokens']")):
        schedule.load_state_dict({"factor": 2})
    schedule.load_state_dict({"factor": 2, "start": 5, "tokens": 40})
    assert schedule.state_dict() == {"factor": 2, "start": 5, "tokens": 40}
