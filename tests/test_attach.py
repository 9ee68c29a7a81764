"""The calls that users make: `trainer_kwargs`, `callbacks`, under both homes, beside the user's own arguments."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import lightning_solo as solo
from lightning_solo.build import HOMES
from lightning_solo.errors import PresetError
from tests.messages import mentions, nearest
from tests.modules import PRESETS_OF_DOCUMENTS, classification, composed, documents, loader, regression

pytestmark = [pytest.mark.any_device, pytest.mark.filterwarnings("ignore:callback.curriculum.duration")]

NO_NCCL = pytest.mark.not_simulated("no NCCL runs on the simulated device")
MARKS = {
    "compile": [pytest.mark.long, pytest.mark.not_simulated("no Triton compiles for the simulated device")],
    "ddp": [NO_NCCL],
    "fsdp": [NO_NCCL],
}
CPU_PRESETS = tuple(
    pytest.param(name, marks=MARKS.get(name, []))
    for name in solo.list_presets()
    if name != "auto" and composed(name).needs_cuda() is None
)
INT8 = ["callback.quantized_base.format=int8"]  # the simulated device has no kernels for nf4
OVERRIDES = {"qlora": INT8, "qlora_streamed": INT8}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.mark.parametrize("preset", CPU_PRESETS)
def test_every_cpu_preset_fits_validates_tests_predicts_and_fits_again(
    preset: str, home: ModuleType, tmp_path: Path
) -> None:
    module = classification(home)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kwargs = solo.trainer_kwargs(preset, OVERRIDES.get(preset, ()), lightning=home.__name__)
    trainer = home.Trainer(**kwargs, **QUIET, max_epochs=1, default_root_dir=str(tmp_path))
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module, documents() if preset in PRESETS_OF_DOCUMENTS else loader(), loader(2))
        trainer.validate(module, loader(2))
        trainer.test(module, loader(2))
        assert len(trainer.predict(module, loader(2))) == 2
    after = module.state_dict()
    if composed(preset).has("adapters"):  # they stay in the module until they are merged or removed
        trained = {name: after.pop(name) for name in [*after] if ".lora_" in name}
        assert any(value.any() for name, value in trained.items() if ".lora_B." in name)
        after = {name.replace(".base_layer.", "."): value for name, value in after.items()}
        rounded = 0.02 if composed(preset).has("quantized_base") else 0.0
        for name, value in before.items():
            torch.testing.assert_close(
                after[name], value.to(after[name].dtype), rtol=0, atol=rounded * float(value.abs().max())
            )
        assert {value.dtype for value in trained.values()} == {torch.float32}
    else:
        assert any(not torch.equal(before[name], after[name].to(before[name].dtype)) for name in before)
    assert list(after) == list(before)


def test_only_what_the_preset_needs_and_one_device() -> None:
    kwargs = solo.trainer_kwargs("bf16")
    assert {key: value for key, value in kwargs.items() if key != "callbacks"} == {
        "devices": 1,
        "precision": "bf16-mixed",
    }
    assert [type(callback).__name__ for callback in kwargs["callbacks"]] == ["PresetGuard"]


@pytest.mark.parametrize(
    ("preset", "arguments", "call"),
    [
        ("bf16", {"precision": "32"}, "trainer_kwargs('bf16', overrides=['precision=32'])"),
        ("bf16", {"accumulate_grad_batches": 4}, "trainer_kwargs('bf16', overrides=['accumulate_grad_batches=4'])"),
        ("compact", {"max_epochs": 3}, "solo.trainer({}, 'compact', max_epochs=3)"),
        (
            ["checkpointing", "prefetch"],
            {"logger": False},
            "solo.trainer({}, ['checkpointing', 'prefetch'], logger=False)",
        ),
    ],
)
def test_argument_of_the_trainer_is_refused_with_the_call_that_takes_it(
    preset: Any, arguments: dict[str, Any], call: str
) -> None:
    with pytest.raises(PresetError, match=mentions(f"write {call}")):
        solo.trainer_kwargs(preset, **arguments)
    assert eval(call, {"solo": solo, "trainer_kwargs": solo.trainer_kwargs})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"precision": "32"}, ("precision=32", "write precision=bf16-true", "callback.compact_states.master_bits=32")),
        ({"override": ["precision=32"]}, ("override=['precision=32']", nearest("overrides"))),
        ({"max_epoch": 3}, ("max_epoch=3", nearest("max_epochs"))),
        ({"devices": 2}, ("devices=2", "devices=1")),
        ({"strategy": "zero_offload"}, ("'+strategy=zero_offload'", "~callback.compact_states")),
    ],
)
def test_argument_that_compact_refuses_is_told_the_reason(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(PresetError, match=mentions(*words)):
        solo.trainer_kwargs("compact", **arguments)


@pytest.mark.row(92)
def test_callbacks_in_the_order_listed_then_the_users() -> None:
    mine = solo.Throughput()
    kwargs = solo.trainer_kwargs("checkpointing", callbacks=[mine])
    names = [type(callback).__name__ for callback in kwargs["callbacks"]]
    assert names == ["PresetGuard", "ActivationCheckpointing", "MemoryLogger", "Throughput"]
    assert kwargs["callbacks"][-1] is mine
    assert solo.trainer_kwargs("checkpointing", callbacks=mine)["callbacks"][-1] is mine  # as a Trainer takes it
    assert len(solo.trainer_kwargs("checkpointing", callbacks=None)["callbacks"]) == 3


def test_argument_that_callbacks_does_not_take_is_refused_with_the_call_to_write() -> None:
    with pytest.raises(solo.PresetError, match=mentions("unknown=3", "overrides, allow")):
        solo.callbacks("compact", unknown=3)
    with pytest.raises(solo.PresetError, match=mentions("write trainer_kwargs('compact', overrides=['precision=")):
        solo.callbacks("compact", precision="bf16-mixed")


@pytest.mark.row(92)
def test_a_callback_of_the_preset_given_again_is_refused() -> None:
    with pytest.raises(solo.ConflictError, match="MemoryLogger"):
        solo.trainer_kwargs("checkpointing", callbacks=[solo.MemoryLogger()])
    solo.trainer_kwargs("checkpointing", ["~callback.memory_logger"], callbacks=[solo.MemoryLogger()])


def test_an_argument_given_twice_is_refused_by_python(home: ModuleType) -> None:
    with pytest.raises(TypeError, match="precision"):
        home.Trainer(**solo.trainer_kwargs("bf16", lightning=home.__name__), precision="32-true")


@pytest.mark.parametrize(
    ("preset", "overrides", "replaced"),
    [
        ("bf16", [], {"precision": "32-true"}),
        ("bf16", ["accumulate_grad_batches=4"], {"accumulate_grad_batches": 1}),
    ],
)
def test_an_argument_replaced_in_a_merged_mapping_is_refused_at_the_start(
    home: ModuleType, make_trainer: Callable[..., Any], preset: str, overrides: list[str], replaced: dict[str, Any]
) -> None:
    kwargs = solo.trainer_kwargs(preset, overrides, lightning=home.__name__)
    trainer = make_trainer(home, **{**kwargs, **replaced})
    with pytest.raises(solo.ConflictError, match=next(iter(replaced))):
        trainer.fit(regression(home), loader())


def test_callbacks_for_a_trainer_that_exists(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(home, precision="bf16-mixed")
    with pytest.warns(UserWarning, match="precision='bf16-mixed'"):
        trainer.callbacks += solo.callbacks("checkpointing")
    trainer.fit(regression(home), loader())
    assert {"ActivationCheckpointing", "MemoryLogger"} <= {type(callback).__name__ for callback in trainer.callbacks}


def test_callbacks_that_carry_everything_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (callback,) = solo.callbacks({"callback": {"memory_logger": {}}})
    assert type(callback) is solo.MemoryLogger


def test_the_room_of_callbacks_is_a_module_and_a_function() -> None:
    import lightning_solo.techniques.memory_logger.technique as by_module
    from lightning_solo import callbacks
    from lightning_solo.callbacks import MemoryLogger

    assert MemoryLogger is by_module.MemoryLogger is solo.MemoryLogger
    assert callbacks is solo.callbacks is sys.modules["lightning_solo.callbacks"]
    assert "MemoryLogger" in dir(callbacks)


def test_a_hydra_applications_node_is_checked_too() -> None:
    cfg = OmegaConf.create({"size": 7, "solo": {"precision": "bf16", "callback": {"memory_logger": {}}}})
    cfg.solo.callback.memory_logger.every_n_steps = "${size}"
    kwargs = solo.trainer_kwargs(cfg.solo)
    assert kwargs["callbacks"][1].every_n_steps == 7
    cfg.solo.callback.memory_logger.typo = 1
    with pytest.raises(solo.PresetError, match="typo"):
        solo.trainer_kwargs(cfg.solo)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*")  # what other versions of other packages say of themselves
@pytest.mark.parametrize("preset", [*CPU_PRESETS, "fp16", "zero_offload"])
def test_every_preset_fits_on_a_gpu(
    preset: str, home: ModuleType, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if preset in ("ddp", "fsdp") and request.config.pluginmanager.hasplugin("tests.simcuda.plugin"):
        pytest.skip("the simulated device has no NCCL")
    module = classification(home)
    before = [parameter.clone() for parameter in module.parameters()]
    overrides = {**OVERRIDES, "compile": ["callback.regional_compilation.backend=aot_eager"]}  # needs no Triton
    kwargs = {"accelerator": "cuda", **solo.trainer_kwargs(preset, overrides.get(preset, ()), lightning=home.__name__)}
    trainer = home.Trainer(**kwargs, **QUIET, max_epochs=2, default_root_dir=str(tmp_path))
    trainer.fit(module, documents() if preset in PRESETS_OF_DOCUMENTS else loader(), loader(2))
    trainer.validate(module, loader(2))
    assert trainer.strategy.root_device.type == "cuda"
    after = [parameter.detach().cpu().float() for parameter in module.parameters()]
    assert all(torch.isfinite(parameter).all() for parameter in after)
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("preset", ["fp16", "zero_offload"])
def test_gpu_preset_is_refused_without_a_gpu(preset: str) -> None:
    with pytest.raises(solo.CapabilityError, match="CUDA") as caught:
        solo.trainer_kwargs(preset)
    assert "'bf16'" in str(caught.value) or "'checkpointing'" in str(caught.value)


def test_schedule_is_refused_with_manual_optimization(home: ModuleType, make_trainer: Callable[..., Any]) -> None:
    module = regression(home)
    module.automatic_optimization = False
    trainer = make_trainer(home, **solo.trainer_kwargs("accumulation", lightning=home.__name__))
    with pytest.raises(
        solo.ConflictError, match=mentions("callback.accumulation_schedule", "automatic_optimization=False")
    ):
        trainer.fit(module, loader())


def test_missing_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(solo.CapabilityError, match="pip install 'deepspeed>="):
        solo.trainer_kwargs("zero_offload", ["strategy.allow_cpu=true"])


@pytest.mark.parametrize(
    ("preset", "overrides", "options", "words"),
    [
        *(("bf16", [], {"allow": allow}, "allow=") for allow in ("mine", [1], [""])),
        ("checkpointing", ["callback=throughput"], {}, "write +callback=throughput"),
        ({"precision": torch.float32}, [], {}, "precision: "),
        ("bf16", [], {"lightning": "pl"}, ", ".join(map(repr, HOMES))),
        ("bf16", [], {"callbacks": [print]}, "callbacks[0]: a Callback"),
        ("bf16", {"precision": "32-true"}, {}, "overrides="),
        ("bf16", "precision=32", {}, "overrides="),
    ],
)
def test_wrong_arguments_are_refused(preset: Any, overrides: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(solo.PresetError, match=mentions(words)):
        solo.trainer_kwargs(preset, overrides, **options)


def test_lightning_is_short_for_its_first_home() -> None:
    assert "precision" in solo.trainer_kwargs("bf16", lightning="lightning")


def test_misspelt_name_of_the_package_has_the_nearest() -> None:
    for given, right in [("CompactSates", "CompactStates"), ("trainer_kwarg", "trainer_kwargs"), ("plans", "plan")]:
        with pytest.raises(AttributeError, match=nearest(right)):
            getattr(solo, given)
