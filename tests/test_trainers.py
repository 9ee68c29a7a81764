"""A Trainer's configuration and a preset make one Trainer; what both set to different values is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import pytorch_lightning
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

import lightning_solo as solo
from lightning_solo.errors import ConflictError, PresetError
from lightning_solo.presets.compose import VERSION_BASE
from tests.messages import mentions, nearest
from tests.modules import loader, regression

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.mark.parametrize(
    ("target", "home"),
    [
        ("lightning.pytorch.trainer.Trainer", L),
        ("lightning.Trainer", L),
        ("pytorch_lightning.Trainer", pytorch_lightning),
    ],
)
def test_trainer_of_a_configuration_trains_under_the_preset(target: str, home: Any, tmp_path: Path) -> None:
    config = OmegaConf.create(
        {
            **QUIET,
            "_target_": target,
            "devices": "auto",
            "precision": None,
            "accumulate_grad_batches": None,
            "default_root_dir": str(tmp_path),
        }
    )
    trainer = solo.trainer(config, "bf16", ["+callback=gradient_release"], callbacks=[home.callbacks.Timer()])
    assert type(trainer) is home.Trainer
    assert trainer.precision == "bf16-mixed"
    names = [type(callback).__name__ for callback in trainer.callbacks]
    assert names[:3] == ["PresetGuard", "GradientRelease", "Timer"]
    trainer.fit(regression(home), loader(2))
    assert trainer.global_step == 2
    assert config.devices == "auto"  # it is not changed


def test_objects_in_the_configuration_are_made(tmp_path: Path) -> None:
    csv = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": str(tmp_path)}
    timer = {"_target_": "lightning.pytorch.callbacks.Timer"}
    trainer = solo.trainer({**QUIET, "logger": csv, "callbacks": {"timer": timer}}, "bf16")
    assert isinstance(trainer.logger, L.loggers.CSVLogger)
    assert any(isinstance(callback, L.callbacks.Timer) for callback in trainer.callbacks)


AGREE = [
    ({"precision": "bf16"}, "bf16"),
    ({"devices": [0]}, "bf16"),
    ({"devices": "1"}, "bf16"),
    ({"accumulate_grad_batches": 4}, {"accumulate_grad_batches": 4}),
]


@pytest.mark.parametrize(("arguments", "preset"), AGREE)
def test_same_value_in_both_is_taken(arguments: dict[str, Any], preset: Any) -> None:
    config = {**QUIET, **arguments}
    if arguments.get("devices") == [0]:
        config["devices"] = 1 if config["accelerator"] == "cpu" else [0]  # a list of indices is for GPUs
    assert solo.trainer(config, preset).num_devices == 1


DIFFER = [
    (
        {"precision": "16-mixed"},
        "bf16",
        ("trainer.precision='16-mixed'", "bf16-mixed", "overrides=['precision=16-mixed']"),
    ),
    ({"devices": 2}, "compact", ("trainer.devices=2", "devices=1")),
    ({"devices": [0, 1]}, "compact", ("trainer.devices=[0, 1]", "devices=1")),
    ({"accumulate_grad_batches": 2}, {"accumulate_grad_batches": 4}, ("accumulate_grad_batches=2", "drop")),
]


@pytest.mark.parametrize(("arguments", "preset", "words"), DIFFER)
def test_different_values_are_refused(arguments: dict[str, Any], preset: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConflictError, match=mentions(*words)):
        solo.trainer({**QUIET, **arguments}, preset)
    with pytest.raises(ConflictError, match=mentions(*words)):
        solo.trainer(QUIET, preset, **arguments)


def test_remedy_of_a_refusal_works() -> None:
    config = {**QUIET, "precision": "32-true"}
    with pytest.raises(ConflictError, match=mentions("overrides=['precision=32-true']")):
        solo.trainer(config, "bf16")
    assert solo.trainer(config, "bf16", ["precision=32-true"]).precision == "32-true"


def test_remedy_in_a_hydra_application_is_that_of_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.yaml").write_text("defaults:\n- solo: bf16\n")
    with initialize_config_dir(str(tmp_path), **VERSION_BASE):
        cfg = compose("app", return_hydra_config=True)
        monkeypatch.setattr(HydraConfig.instance(), "cfg", cfg)
        with pytest.raises(ConflictError, match=mentions("write solo.precision=32-true")):
            solo.trainer({**QUIET, "precision": "32-true"}, cfg.solo)
        cfg = compose("app", overrides=["solo.precision=32-true"])
    assert solo.trainer({**QUIET, "precision": "32-true"}, cfg.solo).precision == "32-true"


def test_override_that_the_preset_refuses_is_not_proposed() -> None:
    with pytest.raises(ConflictError, match=mentions("drop precision")) as caught:
        solo.trainer({**QUIET, "precision": "32-true"}, "compact")
    assert "overrides=" not in str(caught.value)


def test_strategy_is_named_by_its_class() -> None:
    preset, allow = {"strategy": {"_target_": "lightning.pytorch.strategies.SingleDeviceStrategy"}}, ["lightning"]
    words = mentions("trainer.strategy=DDPStrategy", "strategy=SingleDeviceStrategy", "overrides=['~strategy']")
    with pytest.raises(ConflictError, match=words) as caught:
        solo.trainer(QUIET, preset, allow=allow, strategy=DDPStrategy())
    assert " at 0x" not in str(caught.value)
    assert isinstance(solo.trainer(QUIET, preset, ["~strategy"], allow=allow, strategy=DDPStrategy()), L.Trainer)


REFUSED = [
    ({"_target_": "os.system"}, ("trainer._target_='os.system'", "lightning.pytorch.Trainer")),
    ({"logger": {"_target_": "os.getcwd"}}, ("trainer.logger._target_", "allow=['os']")),
    # a part of Lightning that loads any pickle
    ({"logger": {"_target_": "lightning.fabric.utilities.cloud_io._load"}}, ("trainer.logger._target_", "allow")),
    ({"max_epoch": 3}, ("max_epoch", nearest("max_epochs"))),
    ({"max_epochs": "abc"}, ("trainer.max_epochs='abc'", "integer")),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_unknown_trainer_argument_is_refused(config: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PresetError, match=mentions(*words)):
        solo.trainer({**QUIET, **config}, "bf16")


def test_unknown_keyword_is_refused_like_one_of_the_configuration() -> None:
    with pytest.raises(PresetError, match=mentions("max_epoch", nearest("max_epochs"))):
        solo.trainer({}, "bf16", max_epoch=3)


def test_argument_that_is_given_twice_is_refused() -> None:
    with pytest.raises(PresetError, match=mentions("max_epochs", "drop one")):
        solo.trainer(QUIET, "bf16", max_epochs=2)


def test_auto_knows_the_configuration() -> None:
    module = regression(L)
    module.train_dataloader = lambda: loader(1)
    config = {**QUIET, "gradient_clip_val": 0.5}
    trainer = solo.trainer(config, "auto", ["auto.presets=[baseline]", "auto.budget=1GiB"], module=module)
    assert trainer.gradient_clip_val == 0.5
