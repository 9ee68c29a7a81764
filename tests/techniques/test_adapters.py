"""Adapters: only the adapters are trained, saved and resumed, as peft itself trains them; the module is as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.export.adapter_files import load_adapters, merge_adapters
from lightning_solo.export.weights import export_weights
from lightning_solo.nn import adaptation
from lightning_solo.nn.adaptation import plain_key
from lightning_solo.nn.adapted import plain
from lightning_solo.nn.adapter_merging import remove_adapters
from lightning_solo.nn.quantized import QuantizedWeight, quantize, quantized
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.adapters.technique import Adapters
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_solo.techniques.compact_states.technique import CompactStates
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.layer_freezing.technique import LayerFreezing
from lightning_solo.techniques.quantized_base.technique import QuantizedBase
from lightning_solo.techniques.safe_checkpoint.technique import SafeCheckpoint
from lightning_solo.units import GiB
from tests.messages import mentions
from tests.models import small_model
from tests.modules import Classifier, Held, Stack, classification, loader, regression

Make = Callable[..., Any]
WIDTH = 16
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
]


def module_of(net: nn.Module | None = None, **attributes: Any) -> Any:
    torch.manual_seed(0)
    return classification(L, net or Classifier(2, WIDTH), **attributes)


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, batches: int = 6, **arguments: Any) -> Any:
    """Return the module of a fit; its Trainer is its `trainer`."""
    module = module if module is not None else module_of()
    options = {name: arguments.pop(name) for name in ("ckpt_path", "weights_only") if name in arguments}
    trainer = make_trainer(L, callbacks=list(callbacks) or [Adapters(r=4)], **arguments)
    torch.manual_seed(2)
    trainer.fit(module, loader(batches, width=WIDTH), **options)
    return module


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


# --- acted ---


def test_only_adapters_change(make_trainer: Make) -> None:
    module = module_of()
    before = weights(module)
    fit(make_trainer, module=module)
    after = weights(module)
    assert {plain_key(name) for name in after} > set(before)
    assert all(torch.equal(after[name], before[plain_key(name)]) for name in after if plain_key(name) in before)
    factors = [name for name in after if ".lora_B." in name]
    assert len(factors) == 4
    assert all(after[name].abs().max() > 0 for name in factors)


def test_rows_of_tokens_and_whole_modules_are_trained_with_the_adapters(make_trainer: Make, caplog: Any) -> None:
    module = module_of()
    before = weights(module)
    fit(make_trainer, Adapters(r=4, modules_to_save=["head", "blocks.0.norm", "1.down"]), module=module)
    assert "in 3 layers" in caplog.text
    assert "net.head" not in caplog.text  # it isn't left out, but trained whole
    changed = {name for name, p in weights(module).items() if name in before and not torch.equal(p, before[name])}
    whole = ("head", "blocks.0.norm", "blocks.1.down")
    assert changed == {f"net.{name}.{kind}" for name in whole for kind in ("weight", "bias")}


# --- parity ---


class Language(L.LightningModule):
    """A small Llama."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = small_model("Llama")
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)


def sentences(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, 32, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in ids]


class Randomised(Adapters):
    """Adapters whose second factors aren't zero."""

    def transform(self, ctx: Any) -> None:
        super().transform(ctx)
        randomise(ctx.module)


def randomise(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(9)
    for name, p in module.named_parameters():
        if ".lora_B." in name:
            p.data = 0.05 * torch.randn(p.shape, generator=generator)


OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft's model asks transformers for it
@pytest.mark.parametrize("method", [pytest.param(m, marks=[pytest.mark.long] * (m != "lora")) for m in OPTIONS])
def test_losses_equal_those_of_peft_to_the_bit(method: str, make_trainer: Make) -> None:
    import peft

    batches = [{key: value[None] for key, value in each.items()} for each in sentences(6)]
    ours = Language()
    trainer = make_trainer(L, callbacks=[Randomised(r=4, alpha=8, method=method)])
    torch.manual_seed(1)
    trainer.fit(ours, torch.utils.data.DataLoader(batches, batch_size=None))
    theirs = Language()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **OPTIONS[method])
    model = peft.get_peft_model(theirs.net, config)
    randomise(model)
    optimizer = theirs.configure_optimizers()
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.losses.append(loss.item())
    assert len(set(ours.losses)) == 6
    assert ours.losses == theirs.losses
    expected = [p for _, p in model.named_parameters() if p.requires_grad]
    trained = list(adaptation.adapter_parameters(ours).values())
    assert len(trained) == len(expected) > 0
    assert all(torch.equal(p, q) for p, q in zip(trained, expected, strict=True))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_sixty_losses_equal_those_of_transformers_trainer(make_trainer: Make, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    data = sentences(240)
    ours = Language()
    torch.manual_seed(1)
    trainer = make_trainer(L, callbacks=[Randomised(r=4, alpha=8)], gradient_clip_val=1.0)
    batches = torch.utils.data.DataLoader(data, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(ours, batches)
    theirs = Language()
    torch.manual_seed(1)
    model = peft.get_peft_model(theirs.net, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    randomise(model)

    losses: list[float] = []

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1, max_grad_norm=1.0, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    other = InOrder(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    other.train()
    assert len(ours.losses) == 60
    assert ours.losses == losses


class ReadsWeights(nn.Module):
    """A network of which one layer is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, WIDTH).blocks
        self.read = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(nn.functional.linear(x, self.read.weight)))


def test_layer_that_is_never_called_is_named(make_trainer: Make) -> None:
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=mentions("net.read", "6 batches", "callback.adapters.targets")) as record:
        fit(make_trainer, Adapters(r=4, targets=["up", "read"]), module=regression(L, ReadsWeights()))
    (message,) = [str(each.message) for each in record if "adapters" in str(each.message)]
    assert "up" not in message


# --- memory ---


class Bytes(L.Callback):
    """Counts the bytes of gradients after the first backward, and of optimizer states."""

    gradients: dict[str, int]
    states = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = {name: p.grad.nbytes for name, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        tensors = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.states = sum(value.nbytes for value in tensors if value.dim())


@pytest.mark.any_device
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_gradients_and_states_are_those_of_the_adapters_in_fp32(precision: str, make_trainer: Make) -> None:
    count = Bytes()
    module = fit(make_trainer, Adapters(r=4), count, precision=precision)
    factors = adaptation.adapter_parameters(module)
    # two factors of rank 4 in each of 4 layers between 16 and 64, in fp32
    size = 4 * 4 * 4 * (16 + 64)
    assert count.gradients.keys() == factors.keys()
    assert sum(count.gradients.values()) == sum(p.nbytes for p in factors.values()) == size
    assert count.states == 2 * size
    base = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {p.dtype for name, p in module.named_parameters() if name not in factors} == {base}
    assert {p.dtype for p in factors.values()} == {torch.float32}


@pytest.mark.long  # the first plan of a process takes seconds
def test_planned_bytes_in_bf16_are_those_of_a_real_fit(make_trainer: Make) -> None:
    held = Held()
    (batch,) = loader(1, width=WIDTH)
    batches: Any = torch.utils.data.DataLoader([batch] * 6, batch_size=None)
    trainer = make_trainer(L, callbacks=[Adapters(r=4), held], precision="bf16-true")
    trainer.fit(module_of(), batches)
    preset = compose({"precision": "bf16-true", "callback": {"adapters": {"r": 4}}})
    plan = Planner(module_of, batch, {}, device("cpu"), 16 * GiB).plan("tried", preset)
    assert plan.peak_bytes == held.peak_bytes > 0


def test_inactive_adapter_has_no_gradient_and_no_state(make_trainer: Make) -> None:
    module, count = fit(make_trainer), Bytes()
    first = {name: p.clone() for name, p in adaptation.adapter_parameters(module).items()}
    fit(make_trainer, Adapters(r=2, targets=["up"], adapter_name="second"), count, module=module)
    assert count.gradients.keys() == adaptation.adapter_parameters(module, "second").keys()
    assert count.states == 2 * 4 * 2 * 2 * (16 + 64)
    assert all(torch.equal(p, first[name]) for name, p in adaptation.adapter_parameters(module, "default").items())


# --- checkpoints ---


def saved(make_trainer: Make, folder: Path, *callbacks: Any, **arguments: Any) -> tuple[Any, Path]:
    module = fit(make_trainer, *callbacks, **arguments)
    module.trainer.save_checkpoint(folder / "a.ckpt")
    return module, folder / "a.ckpt"


def test_checkpoint_has_the_adapters_alone_and_a_resumed_run_is_exact(make_trainer: Make, tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None) -> Any:
        callbacks = [Adapters(r=4), ExactResume(), SafeCheckpoint(signals=False, durable=False)]
        return fit(make_trainer, *callbacks, max_epochs=epochs, ckpt_path=path, weights_only=path and True)

    half = run(1)
    path = tmp_path / "a.ckpt"
    half.trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert content["state_dict"].keys() == adaptation.adapter_parameters(half).keys()
    assert len(content["optimizer_states"][0]["state"]) == len(content["state_dict"])
    whole, rest = run(2), run(2, path)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), rest.parameters(), strict=True))
    assert not torch.equal(whole.net.blocks[0].up.lora_B.default.weight, half.net.blocks[0].up.lora_B.default.weight)


class Normed(nn.Module):
    """A network with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Stack(2, WIDTH).blocks
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("still", torch.ones(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


def test_running_statistics_that_have_changed_are_saved_and_resumed(make_trainer: Make, tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None) -> Any:
        torch.manual_seed(0)
        module = regression(L, Normed())
        return fit(make_trainer, module=module, max_epochs=epochs, ckpt_path=path, weights_only=path and True)

    half = run(1)
    half.trainer.save_checkpoint(tmp_path / "a.ckpt")
    keys = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"].keys()
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    assert keys - adaptation.adapter_parameters(half).keys() == {f"net.norm.{name}" for name in kinds}
    whole, rest = run(2), run(2, tmp_path / "a.ckpt")
    assert all(torch.equal(p, q) for p, q in zip(whole.state_dict().values(), rest.state_dict().values(), strict=True))


@pytest.mark.parametrize("base", ["plain", "int8"])
def test_best_checkpoint_is_tested_in_the_same_module_and_in_a_new_one(
    base: str, make_trainer: Make, tmp_path: Path
) -> None:
    techniques = [QuantizedBase(base)] if base == "int8" else []
    path, tests = tmp_path / "1.ckpt", loader(2, width=WIDTH)

    class Save(L.Callback):
        def on_validation_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch + 1}.ckpt")
            losses.append(trainer.callback_metrics["validation/loss"].item())

    losses: list[float] = []
    module = module_of()
    trainer = make_trainer(L, callbacks=[Adapters(r=4), *techniques, Save()], max_epochs=2)
    trainer.fit(module, loader(6, width=WIDTH), tests)
    assert losses[0] != losses[1]
    other = module_of()
    load_adapters(other, path)
    rounded = not torch.equal(plain(other.net.blocks[0].up).weight, module_of().net.blocks[0].up.weight)
    assert rounded is (base == "int8")
    for each, at in ((module, path), (module_of(), path), (other, None)):
        trainer = make_trainer(L, callbacks=[Adapters(r=4)])
        (result,) = trainer.test(each, tests, ckpt_path=at, weights_only=True, verbose=False)
        assert result["test/loss"] == pytest.approx(losses[0], rel=1e-6)


def test_adapter_of_a_base_in_8_bits_is_continued_on_that_base(make_trainer: Make, tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    fit(make_trainer, Adapters(r=4), QuantizedBase("int8"), Save())
    resumed: dict[str, Any] = {"max_epochs": 2, "ckpt_path": tmp_path / "a.ckpt", "weights_only": True}
    with pytest.raises(CheckpointError, match=mentions("net.blocks.0.up.weight", "callback.quantized_base", "int8")):
        fit(make_trainer, Adapters(r=4), **resumed)
    other = module_of()
    plain_weight = other.net.blocks[0].up.weight.clone()
    other.net.blocks[0].up.weight.data.neg_()
    with pytest.raises(CheckpointError, match=mentions("net.blocks.0.up.weight", "same base")):
        load_adapters(other, tmp_path / "a.ckpt")
    assert torch.equal(other.net.blocks[0].up.weight, -plain_weight)


def rounded_elsewhere(weight: Tensor, format: str, *args: Any) -> QuantizedWeight:
    """Return a quantized weight as another processor may round it: a few codes and all scales are a little off."""
    made = quantized(weight, format, *args)
    made.codes.view(-1)[::100] ^= 1
    made.scales.view(torch.float32).mul_(1.0001)
    return made


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_adapter_of_a_base_that_another_processor_rounded_is_loaded(
    format: str, make_trainer: Make, tmp_path: Path, monkeypatch: Any
) -> None:
    class Save(L.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    monkeypatch.setattr("lightning_solo.techniques.quantized_base.technique.quantized", rounded_elsewhere)
    fit(make_trainer, Adapters(r=4), QuantizedBase(format), Save())
    load_adapters(module := module_of(), tmp_path / "a.ckpt")
    base = plain(module.net.blocks[0].up).weight
    assert torch.equal(base, quantized(module_of().net.blocks[0].up.weight, format).dequantized())
    (result,) = make_trainer(L).test(module, loader(2, width=WIDTH), verbose=False)
    fitted = module_of()
    trainer = make_trainer(L, callbacks=[Adapters(r=4), QuantizedBase(format)])
    (other,) = trainer.test(fitted, loader(2, width=WIDTH), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert result["test/loss"] == pytest.approx(other["test/loss"])
    torch.manual_seed(1)
    with pytest.raises(CheckpointError, match=mentions("net.blocks.0.up.weight", "same base")):
        load_adapters(classification(L, Classifier(2, WIDTH)), tmp_path / "a.ckpt")


def test_adapters_of_a_checkpoint_are_loaded_beside_others(make_trainer: Make, tmp_path: Path) -> None:
    module, path = saved(make_trainer, tmp_path)
    x, other = torch.randn(3, WIDTH), module_of()
    before = other.net(x)
    load_adapters(other, path)
    assert torch.equal(other.net(x), module.net(x))
    with pytest.raises(CheckpointError, match=mentions("default", "name=")):
        load_adapters(other, path)
    load_adapters(other, path, name="again")
    assert adaptation.adapter_names(other) == ["default", "again"]
    assert torch.equal(other.net(x), module.net(x))
    remove_adapters(other)
    assert torch.equal(other.net(x), before)


def test_master_weights_of_compact_states_are_loaded_and_resumed(make_trainer: Make, tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None) -> Any:
        callbacks = [Adapters(r=4), CompactStates()]
        options: dict[str, Any] = {"max_epochs": epochs, "ckpt_path": path, "weights_only": path and True}
        return fit(make_trainer, *callbacks, precision="bf16-true", **options)

    half = run(1)
    half.trainer.save_checkpoint(tmp_path / "a.ckpt")
    masters = export_weights(half)
    other = module_of()
    load_adapters(other, tmp_path / "a.ckpt")
    loaded = adaptation.adapter_parameters(other)
    assert {p.dtype for p in loaded.values()} == {torch.float32}
    assert all(torch.equal(p, masters[name]) for name, p in loaded.items())
    assert any(not torch.equal(p, p.bfloat16().float()) for p in loaded.values())
    whole, rest = run(2), run(2, tmp_path / "a.ckpt")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), rest.parameters(), strict=True))


def test_checkpoint_of_another_base_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path)
    other = module_of()
    other.net.blocks[0].up.weight.data += 1
    keys = list(other.state_dict())
    with pytest.raises(CheckpointError, match=mentions("net.blocks.0.up.weight", "same base")):
        fit(make_trainer, module=other, ckpt_path=path, weights_only=True)
    assert list(other.state_dict()) == keys
    with pytest.raises(CheckpointError, match=mentions("net.blocks.0.up.weight")):
        load_adapters(other, path)
    assert list(other.state_dict()) == keys


def test_checkpoint_of_other_settings_or_without_adapters_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path)
    with pytest.raises(CheckpointError, match=mentions("alpha=32.0", "callback.adapters")):
        fit(make_trainer, Adapters(r=4, alpha=8), ckpt_path=path, weights_only=True)
    trainer = make_trainer(L)
    trainer.fit(module_of(), loader(2, width=WIDTH))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=mentions("no adapters", "load_state_dict")):
        fit(make_trainer, ckpt_path=tmp_path / "plain.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match="no adapters"):
        load_adapters(module_of(), tmp_path / "plain.ckpt")


# --- trace ---


def test_module_keeps_its_adapters_and_its_flags_are_as_before(make_trainer: Make) -> None:
    module = module_of()
    module.net.blocks[1].norm.weight.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    x, keys, before = torch.randn(3, WIDTH), list(module.state_dict()), module.net(torch.zeros(1, WIDTH))
    fit(make_trainer, module=module)
    base = {plain_key(name): p.requires_grad for name, p in module.named_parameters() if plain_key(name) in flags}
    assert base == flags
    adapted = module.net(x)
    assert not hasattr(module, "peft_config")
    difference = merge_adapters(copy.deepcopy(module))
    assert 0 < difference < 1e-5
    remove_adapters(module)
    assert list(module.state_dict()) == keys
    assert torch.equal(module.net(torch.zeros(1, WIDTH)), before)
    assert not torch.equal(module.net(x), adapted)


def test_second_fit_continues_with_the_same_adapter(make_trainer: Make) -> None:
    module = fit(make_trainer)
    first = module.net.blocks[0].up.lora_B.default.weight.detach().clone()
    layer = module.net.blocks[0].up
    fit(make_trainer, module=module)
    assert module.net.blocks[0].up is layer
    assert not torch.equal(layer.lora_B.default.weight, first)
    with pytest.raises(ConflictError, match=mentions("r=4", "callback.adapters.adapter_name", "merge_adapters")):
        fit(make_trainer, Adapters(r=8), module=module)


def test_failed_set_up_leaves_no_adapter(make_trainer: Make) -> None:
    module = module_of()
    keys = list(module.state_dict())
    module.configure_optimizers = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(make_trainer, module=module)
    assert list(module.state_dict()) == keys
    assert all(p.requires_grad for p in module.parameters())


def test_merged_at_the_end_on_request(make_trainer: Make, tmp_path: Path) -> None:
    kept = fit(make_trainer)
    merged, path = saved(make_trainer, tmp_path, Adapters(r=4, after_fit="merge"))
    x = torch.randn(5, WIDTH)
    assert list(merged.state_dict()) == list(module_of().state_dict())
    assert torch.allclose(merged.net(x), kept.net(x), atol=1e-4)
    assert torch.load(path, weights_only=True)["state_dict"].keys() == adaptation.adapter_parameters(kept).keys()
    assert_exported(merged)


def assert_exported(module: Any) -> None:
    """The exported weights of a module are those of a plain one, with its numbers."""
    exported, expected = export_weights(module), module.state_dict()
    assert list(exported) == list(expected) == list(module_of().state_dict())
    assert all(torch.equal(exported[name], weight) for name, weight in expected.items())


def test_what_is_merged_by_hand_is_saved_and_exported_whole(make_trainer: Make, tmp_path: Path) -> None:
    module = fit(make_trainer)
    merge_adapters(module)
    assert_exported(module)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    checkpoint, other = torch.load(tmp_path / "a.ckpt", weights_only=True), module_of()
    other.load_state_dict(checkpoint["state_dict"])
    assert "adapter" not in checkpoint
    x = torch.randn(3, WIDTH)
    assert torch.equal(other.net(x), module.net(x))


# --- refused ---


def test_settings_that_contradict_each_other() -> None:
    for wrong in ({"alpha": 0}, {"dropout": 1.0}, {"targets": ["all-linear", "up"]}, {"adapter_name": "a.b"}):
        with pytest.raises(PresetError, match=next(iter(wrong))):
            Adapters(**wrong)
    with pytest.raises(PresetError, match="ia3"):
        Adapters(method="ia3", trainable_token_indices=[1])


@pytest.mark.parametrize(
    ("options", "named", "error"),
    [
        ({"targets": ["q_proj"]}, ["q_proj", "up", "down"], NothingToDoError),
        ({"modules_to_save": ["haed"]}, ["haed", "net.head"], NothingToDoError),
        ({"modules_to_save": ["blocks"]}, ["net.blocks", "net.blocks.0.up"], ConflictError),
        ({"modules_to_save": ["drop"]}, ["net.blocks.0.drop", "no weights"], ConflictError),
        ({"modules_to_save": ["head.weight"]}, ["head.weight is a parameter", "net.head"], NothingToDoError),
        ({"modules_to_save": ["prompt"]}, ["prompt is a parameter", "own module"], NothingToDoError),
        ({"trainable_token_indices": [3]}, ["no embedding"], NothingToDoError),
        ({"method": "pissa", "r": 40}, ["r=40", "net.blocks.0.up"], PresetError),
    ],
)
def test_bad_settings_are_named(make_trainer: Make, options: Any, named: list[str], error: Any) -> None:
    module = module_of()
    module.prompt = nn.Parameter(torch.zeros(2))
    keys = list(module.state_dict())
    with pytest.raises(error, match=mentions(*named)):
        fit(make_trainer, Adapters(**options), module=module)
    assert list(module.state_dict()) == keys


@pytest.mark.parametrize("name", ["EMAWeightAveraging", "StochasticWeightAveraging", "BackboneFinetuning"])
def test_callback_that_copies_or_unfreezes_the_module_is_refused(name: str, make_trainer: Make) -> None:
    for technique in (Adapters(r=4), QuantizedBase("int8"), LayerFreezing(trained_blocks=1)):
        callback = getattr(L.callbacks, name)(**{"swa_lrs": 1e-3} if name.startswith("Stoch") else {})
        module = module_of()
        module.backbone = module.net.blocks.requires_grad_(not isinstance(technique, QuantizedBase))
        keys = list(module.state_dict())
        if "Averaging" in name and isinstance(technique, LayerFreezing):  # changes no layers
            fit(make_trainer, technique, callback, module=module, max_epochs=2)
            continue
        with pytest.raises(
            ConflictError, match=mentions(f"callback.{technique.technique}", name, "remove the callback")
        ):
            fit(make_trainer, technique, callback, module=module)
        assert list(module.state_dict()) == keys


def test_module_trained_whole_in_4_bits_is_refused(make_trainer: Make) -> None:
    module, up = module_of(), Adapters(r=4, targets=["up"], modules_to_save=["blocks.0.down"])
    with pytest.raises(ConflictError, match=mentions("net.blocks.0.down", "trained", "quantized_base.layers")):
        fit(make_trainer, up, QuantizedBase(layers=["*down"]), module=module)
    module = module_of().requires_grad_(False)
    quantize(module.net.blocks[0].down, {"weight": quantized(module.net.blocks[0].down.weight)})
    with pytest.raises(ConflictError, match=mentions("net.blocks.0.down", "4 or 8 bits")):
        fit(make_trainer, up, module=module)
    x = torch.randn(3, WIDTH)
    fit(make_trainer, Adapters(r=4), module=module)
    adapted = module.net(x)
    with pytest.raises(ConflictError, match=mentions("net.blocks.0.down", "4 or 8 bits")):
        merge_adapters(module)
    assert torch.equal(module.net(x), adapted)


@pytest.mark.parametrize("layers", ["frozen", ["net.blocks.0.*", "net.blocks.1.up.weight"]])
def test_adapters_over_a_base_in_4_bits(layers: Any, make_trainer: Make, caplog: Any) -> None:
    module, technique = module_of(), QuantizedBase(layers=layers)
    counted: list[int] = []

    class Count(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            counted.append(len(technique.weights))

    fit(make_trainer, Adapters(r=4), technique, Count(), module=module)
    assert set(counted) == {4 if layers == "frozen" else 3}
    rounded = 16 * 64 * (4 if layers == "frozen" else 3)
    assert f"leaves out these {rounded:,} numbers" in caplog.text
    assert all(p.abs().max() > 0 for name, p in adaptation.adapter_parameters(module).items() if "lora_B" in name)


def test_weights_in_4_bits_are_counted_as_parameters(make_trainer: Make, caplog: Any) -> None:
    module = module_of().requires_grad_(False)
    every = sum(p.numel() for p in module.parameters())
    quantize(module.net.blocks[0].up, {"weight": quantized(module.net.blocks[0].up.weight)})
    fit(make_trainer, module=module)
    factors = 4 * 4 * (16 + 64)  # of rank 4, in four layers
    assert f"{factors:,} of {every + factors:,} parameters" in caplog.text


def test_two_of_them_in_one_run_are_refused(make_trainer: Make) -> None:
    with pytest.raises(ConflictError, match=mentions("two Adapters", "drop one")):
        fit(make_trainer, Adapters(r=4), Adapters(r=2, adapter_name="second"))


def test_the_loss_of_a_head_with_an_adapter_is_not_chunked(make_trainer: Make) -> None:
    module = regression(L, nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), loss=nn.functional.cross_entropy)
    callbacks = [ChunkedCrossEntropy(head="net.1"), Adapters(targets=["net.1"])]
    match = r"'net\.1' has an adapter.*write callback.adapters.targets without it, or ~callback.chunked_cross_entropy"
    with pytest.raises(ConflictError, match=match):
        make_trainer(L, callbacks=callbacks, max_steps=1).fit(module, loader(1))
    assert type(module.net[1]) is nn.Linear
