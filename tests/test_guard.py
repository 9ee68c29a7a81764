"""The guard lets through what the preset promised, and stops a run in which something of it was lost."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lightning_solo as solo
from lightning_solo.cards.configuration import Configuration
from lightning_solo.errors import BudgetError, CapabilityError, CheckpointError, ConflictError
from lightning_solo.guard import PresetGuard
from lightning_solo.techniques.accumulation_schedule.technique import AccumulationSchedule
from tests.messages import lines_with, mentions
from tests.modules import Resumable, loader, regression
from tests.training import equal


def fit(home: ModuleType, trainer: Any) -> None:
    trainer.fit(regression(home), loader(2))


def test_lets_through_what_was_promised(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    promised = {"devices": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 2, "callbacks": []}
    arguments = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    trainer = make_trainer(home, callbacks=[PresetGuard(promised)], **arguments)
    fit(home, trainer)
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("promised", "words"),
    [
        ({"precision": "bf16-mixed"}, ["precision='bf16-mixed'", "overrides=['precision=32-true']"]),
        ({"accumulate_grad_batches": 4}, ["accumulate_grad_batches=4", "overrides=['accumulate_grad_batches=1']"]),
        ({"strategy": object()}, ["strategy=object", "strategy=SingleDeviceStrategy", "overrides=['~strategy']"]),
        ({"devices": 2}, ["one device"]),
    ],
)
def test_stops_a_run_in_which_something_was_lost(
    home: ModuleType, make_trainer: Callable[..., Any], promised: dict[str, Any], words: list[str]
) -> None:
    trainer = make_trainer(home, callbacks=[PresetGuard(promised, configuration=Configuration())])
    with pytest.raises(ConflictError, match=mentions(*words)):
        fit(home, trainer)


def test_override_that_the_preset_refuses_is_not_proposed(home: ModuleType) -> None:
    kwargs = {**solo.trainer_kwargs("compact", lightning=home.__name__), "precision": "32-true"}
    trainer = home.Trainer(**kwargs, accelerator="cpu", logger=False, enable_checkpointing=False, max_epochs=1)
    with pytest.raises(ConflictError, match=mentions("trainer.precision='32-true'", "drop precision")) as caught:
        fit(home, trainer)
    assert "overrides=" not in str(caught.value)


def test_gpu_precision_is_refused_on_another_device(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(home, callbacks=[PresetGuard({"accelerator": "cuda"})])
    with pytest.raises(CapabilityError, match=mentions("CUDA", "cpu")):
        fit(home, trainer)


# --- a damaged checkpoint ---


@pytest.mark.parametrize("preset", ["bf16", "gradient_release"])
def test_damaged_checkpoint_is_named_with_the_others(
    preset: str, home: ModuleType, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    save(home, make_trainer, preset, tmp_path / "whole.ckpt")
    (tmp_path / "saved.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:999])
    trainer = make_trainer(home, **solo.trainer_kwargs(preset, lightning=home.__name__), max_epochs=2)
    with pytest.raises(CheckpointError, match=mentions("saved.ckpt is damaged", "whole.ckpt", "ckpt_path=")):
        trainer.fit(regression(home), loader(2), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert "load_checkpoint" not in vars(trainer.strategy)
    trainer.fit(regression(home), loader(2), ckpt_path=tmp_path / "whole.ckpt", weights_only=True)
    assert trainer.global_step == 4
    assert "load_checkpoint" not in vars(trainer.strategy)


# --- a checkpoint of another layout ---


def save(home: ModuleType, make_trainer: Callable[..., Any], preset: str, path: Path) -> None:
    trainer = make_trainer(home, **solo.trainer_kwargs(preset, lightning=home.__name__))
    trainer.fit(regression(home), loader(2))
    trainer.save_checkpoint(path)


def sgd(module: Any) -> Callable[[], torch.optim.Optimizer]:
    return lambda: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("saved", ["compact", "split_weights"])
@pytest.mark.parametrize("resumed", ["baseline", "bf16", "bf16_true", "checkpointing", "gradient_release"])
def test_compact_states_are_refused_where_they_cannot_be_read(
    saved: str, resumed: str, home: ModuleType, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    save(home, make_trainer, saved, tmp_path / "saved.ckpt")
    trainer = make_trainer(home, **solo.trainer_kwargs(resumed, lightning=home.__name__), max_epochs=2)
    with pytest.raises(CheckpointError, match=mentions("AdamW", "resume under", "load_from_checkpoint")):
        trainer.fit(regression(home), loader(2), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)


def test_masters_of_another_optimizer_resume_in_a_plain_run(
    home: ModuleType, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """SGD's states have the shapes of the weights under `compact` too, and torch's SGD would ignore corrections."""
    kwargs = solo.trainer_kwargs("split_weights", lightning=home.__name__)
    trainer, module = make_trainer(home, **kwargs), regression(home)
    module.configure_optimizers = sgd(module)
    trainer.fit(module, loader(2))
    trainer.save_checkpoint(tmp_path / "saved.ckpt", weights_only=False)
    masters = [trainer.optimizers[0].master_weight(p) for p in module.parameters()]
    assert not equal(masters, [p.detach().float() for p in module.parameters()])
    resumed = regression(home)
    resumed.configure_optimizers = sgd(resumed)
    trainer = make_trainer(home, max_steps=2)  # none is left
    trainer.fit(resumed, loader(2), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert equal([p.detach() for p in resumed.parameters()], masters)


@pytest.mark.parametrize("preset", ["bf16", "compact", "gradient_release"])
def test_plain_states_are_read_everywhere(
    preset: str, home: ModuleType, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    save(home, make_trainer, "baseline", tmp_path / "saved.ckpt")
    trainer = make_trainer(home, **solo.trainer_kwargs(preset, lightning=home.__name__), max_epochs=2)
    trainer.fit(regression(home), loader(2), ckpt_path=tmp_path / "saved.ckpt", weights_only=True)
    assert trainer.global_step == 4


# --- a checkpoint amid a window of accumulation ---


def fit_windows(
    home: ModuleType, make_trainer: Callable[..., Any], preset: str, path: Path, factor: int = 3, **options: Any
) -> list[torch.Tensor]:
    """Train on windows of three batches, save behind the fifth unless resumed, and return the weights."""

    class Save(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4 and not options:
                trainer.save_checkpoint(path)

    schedule = preset.endswith("+ schedule")
    overrides = ["precision=32-true", *([] if schedule else [f"accumulate_grad_batches={factor}"])]
    callbacks = [Save(), *([AccumulationSchedule([[0, factor]])] if schedule else [])]
    name = preset.removesuffix(" + schedule")
    kwargs = solo.trainer_kwargs(name, overrides, lightning=home.__name__, callbacks=callbacks)
    trainer, module = make_trainer(home, **kwargs), regression(home)
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    trainer.fit(module, Resumable(list(loader(9))), **options)
    return [p.detach().cpu().clone() for p in module.parameters()]


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("preset", ["gradient_release", "gradient_release + schedule", "baseline + schedule"])
def test_a_window_is_continued_under_the_same_preset(
    preset: str, home: ModuleType, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "amid.ckpt"
    whole = fit_windows(home, make_trainer, preset, path)
    others = fit_windows(home, make_trainer, preset, path, ckpt_path=path, weights_only=True)
    assert all(torch.equal(one, other) for one, other in zip(whole, others, strict=True))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize(
    ("saved", "resumed", "factor"),
    [
        ("gradient_release", "baseline", 3),
        ("gradient_release", "gradient_release", 1),
        ("gradient_release", "gradient_release", 2),
        ("gradient_release", "gradient_release + schedule", 3),
        ("gradient_release + schedule", "gradient_release", 3),
        ("gradient_release + schedule", "baseline + schedule", 3),
        ("baseline + schedule", "gradient_release + schedule", 3),
    ],
)
def test_a_window_that_cannot_be_continued_is_dropped_and_named_once(
    saved: str, resumed: str, factor: int, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    import lightning.pytorch as home

    path = tmp_path / "amid.ckpt"
    fit_windows(home, make_trainer, saved, path)
    state = torch.load(path, weights_only=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        told = fit_windows(home, make_trainer, resumed, path, factor, ckpt_path=path, weights_only=True)
        for each in [*state["optimizer_states"], *state["callbacks"].values()]:
            each.pop("window", None)
        torch.save(state, path)
        without = fit_windows(home, make_trainer, resumed, path, factor, ckpt_path=path, weights_only=True)
    named = [
        w for w in caught if re.search(mentions("gradients", "dropped", "accumulate_grad_batches"), str(w.message))
    ]
    assert len(named) == 1
    assert all(torch.equal(one, other) for one, other in zip(told, without, strict=True))


def test_a_window_loaded_for_another_run_of_the_trainer_is_not_the_fits(
    home: ModuleType, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "amid.ckpt"
    fit_windows(home, make_trainer, "gradient_release", path)
    trainer = make_trainer(home, **solo.trainer_kwargs("baseline", lightning=home.__name__))
    module = regression(home)
    trainer.predict(module, loader(2), ckpt_path=path, weights_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", mentions("gradients", "dropped"))
        trainer.fit(module, loader(2))


# --- an error about memory names the presets that would fit ---


def too_small(home: ModuleType, error: Exception) -> Any:
    """Return a strategy that finds in its setup that memory won't do."""

    class TooSmall(home.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        def setup(self, trainer: Any) -> None:
            raise error

    return TooSmall(device="cpu")


def test_a_budget_error_of_a_strategy_is_told_the_presets(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    kwargs = solo.trainer_kwargs("baseline", lightning=home.__name__)
    error = BudgetError("3 GiB are missing", needed=5, available=2)
    trainer = make_trainer(home, strategy=too_small(home, error), callbacks=kwargs["callbacks"])
    with pytest.raises(BudgetError) as raised:
        fit(home, trainer)
    assert raised.value is error
    first, second = str(error).split("\n")
    assert first == "3 GiB are missing"
    assert lines_with(second, "presets that would fit", "before activations", "AdamW: ", "bf16_true (")
    assert (error.needed, error.available) == (5, 2)


def test_other_errors_are_left_alone(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    error = CapabilityError("no compiler")
    asked: list[Any] = []
    guard = PresetGuard({}, lambda module: asked.append(module) or "")
    with pytest.raises(CapabilityError, match=r"^no compiler$"):
        fit(home, make_trainer(home, strategy=too_small(home, error), callbacks=[guard]))
    assert not asked


def test_advice_that_fails_does_not_hide_the_error(
    home: ModuleType, make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def advise(module: Any) -> str:
        raise KeyError("on purpose")

    guard = PresetGuard({}, advise)
    with pytest.raises(BudgetError, match=r"^missing$"):
        fit(home, make_trainer(home, strategy=too_small(home, BudgetError("missing")), callbacks=[guard]))
    assert "presets" in caplog.text


@pytest.mark.parametrize("with_technique", [False, True])
def test_epoch_with_fewer_batches_than_a_step_takes_is_warned_of(
    home: ModuleType, make_trainer: Callable[..., Any], with_technique: bool
) -> None:
    overrides = ["+callback=gradient_release"] if with_technique else []
    promised = solo.trainer_kwargs("bf16", [*overrides, "accumulate_grad_batches=3"], lightning=home.__name__)
    with pytest.warns(UserWarning, match=mentions("takes 3 batches", "only 2", "at most 2 batches")) as caught:
        fit(home, make_trainer(home, max_epochs=2, **promised))
    assert sum("takes 3 batches" in str(each.message) for each in caught) == 1


def test_full_windows_are_not_warned_of(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    promised = solo.trainer_kwargs("bf16", ["accumulate_grad_batches=2"], lightning=home.__name__)
    trainer = make_trainer(home, max_epochs=2, **promised)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an optimizer step takes")
        fit(home, trainer)
    assert trainer.global_step == 2


# --- what the log says at the start ---


@pytest.mark.parametrize(
    ("preset", "words"),
    [
        ("compact", ["preset compact", "precision=bf16-true", "compact_states", "gradient_release"]),
        (["compact", "checkpointing"], ["preset [compact,checkpointing]", "activation_checkpointing"]),
        ({"precision": "32-true"}, ["preset of your own", "precision=32-true"]),
    ],
)
@pytest.mark.filterwarnings("ignore:precision=")
@pytest.mark.filterwarnings("ignore:activation checkpointing saves nothing")
def test_the_log_names_the_preset_as_the_user_wrote_it(
    home: ModuleType, make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture, preset: Any, words: list[str]
) -> None:
    trainer = make_trainer(home, **solo.trainer_kwargs(preset, lightning=home.__name__))
    with caplog.at_level("INFO"):
        fit(home, trainer)
    (line,) = lines_with(caplog.text, "lightning-solo: preset")
    assert lines_with(line, *words)
    caplog.clear()
    trainer.validate(regression(home), loader(1), verbose=False)
    assert not lines_with(caplog.text, "lightning-solo: preset")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"accumulate_grad_batches": 2}, ["2 batches of 4 samples: 8 samples", "it takes 1 batch"]),
        ({"callback": {"accumulation_schedule": {"milestones": [[0, 4]]}}}, ["4 batches of 4 samples: 16 samples"]),
        ({"callback": {"micro_batching": {"global_batch": 8}}}, ["2 batches of 4 samples: 8 samples"]),
        ({"callback": {"micro_batching": {"micro_batch": 8}}}, None),
        ({"precision": "32-true"}, None),
    ],
    ids=str,
)
def test_the_log_says_where_a_preset_changes_the_effective_batch(
    home: ModuleType,
    make_trainer: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    words: list[str] | None,
) -> None:
    trainer = make_trainer(home, **solo.trainer_kwargs(fields, lightning=home.__name__))
    with caplog.at_level("INFO"):
        trainer.fit(regression(home), loader(8))
    lines = lines_with(caplog.text, "lightning-solo: ", "effective batch")
    assert len(lines) == (0 if words is None else 1)
    if words is not None:
        assert lines_with(lines[0], *words)
