"""Every preset that runs on a GPU keeps its contract there: fit, validate, a resume that is exact, a fit that fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import lightning_solo as solo
from lightning_solo.errors import ConflictError
from lightning_solo.machine import is_installed
from tests.conftest import long
from tests.modules import PRESETS_OF_DOCUMENTS, Classifier, classification, composed, documents, loader
from tests.simcuda import device
from tests.training import equal

pytestmark = [
    pytest.mark.simcuda,
    pytest.mark.filterwarnings("ignore:You are using a CUDA device"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]
WIDTH = 64  # matrices of 64 x 256 = 16,384 elements, which are compressed
ENGINES = {name for name in solo.list_presets() if composed(name).has("zero_offload")}
NEEDS_NCCL = {name for name in solo.list_presets() if composed(name).engine in ("ddp", "fsdp")}
"""Presets whose processes speak through NCCL, which the simulated device hasn't; they run on the CPU, and on a GPU."""
PLAIN = [name for name in solo.list_presets() if name != "auto" and name not in ENGINES | NEEDS_NCCL]
NEEDS_DEEPSPEED = pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
DEEPSPEED = [
    pytest.param("zero_offload", marks=NEEDS_DEEPSPEED),
    pytest.param("zero_offload_parameters", marks=[NEEDS_DEEPSPEED, pytest.mark.long]),
]
SMALL = ["callback.activation_offloading.min_offload_bytes=64"]  # by default larger than all here
OVERRIDES = {
    "offloading": SMALL,
    "long_context": SMALL,
    "curriculum": ["callback.curriculum.duration=2"],
    "qlora_streamed": ["callback.quantized_base.format=int8"],
    "qlora": ["callback.quantized_base.format=int8"],  # bitsandbytes' kernels don't run on the simulated device
    "compile": ["callback.regional_compilation.backend=aot_eager"],  # no Triton compiles for the simulated device
}
TOGETHER = ("compact_checkpointing", "compact_host_checkpointing", "long_context", "compile")
"""Presets whose parts are resumed in other presets, or on the CPU."""
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def module() -> Any:
    torch.manual_seed(1)
    return classification(L, Classifier(blocks=2, width=WIDTH))


def batches(preset: str = "", count: int = 6) -> Any:
    return documents() if preset in PRESETS_OF_DOCUMENTS else loader(batches=count, batch_size=8, width=WIDTH)


def kwargs_of(preset: str, callbacks: list[Any]) -> dict[str, Any]:
    return solo.trainer_kwargs(preset, OVERRIDES.get(preset, ()), callbacks=callbacks)


def trainer(preset: str, folder: Path, **arguments: Any) -> L.Trainer:
    kwargs = {"accelerator": "cuda", **kwargs_of(preset, arguments.pop("callbacks", []))}
    return L.Trainer(**{**kwargs, **QUIET, "default_root_dir": str(folder), **arguments})


def weights(one: nn.Module) -> list[torch.Tensor]:
    return [p.detach().float().cpu() for p in one.parameters()]


def test_no_preset_is_left_out() -> None:
    tried = {one.values[0] for one in DEEPSPEED}
    assert ENGINES - tried == {"zero_offload_nvme"}  # needs libaio and a disk


@pytest.mark.parametrize("preset", [*PLAIN, *DEEPSPEED])
def test_trains_validates_and_frees_the_device(preset: str, tmp_path: Path) -> None:
    ours = module()
    start = weights(ours)
    run = trainer(preset, tmp_path, max_epochs=2)
    run.fit(ours, batches(preset), batches(count=2))
    loss = run.validate(ours, batches(count=2), verbose=False)[0]["validation/loss"]
    assert torch.isfinite(torch.tensor(loss))
    assert all(torch.isfinite(p).all() for p in weights(ours))
    assert not equal(weights(ours), start)
    assert all(p.device.type == "cpu" for p in ours.parameters())


@pytest.mark.parametrize("preset", [long(name) if name in TOGETHER else name for name in PLAIN])
def test_a_resumed_run_is_the_undisturbed_one(preset: str, tmp_path: Path) -> None:
    undisturbed, first, second = module(), module(), module()
    torch.manual_seed(1)  # adapters start at random
    trainer(preset, tmp_path, max_epochs=2).fit(undisturbed, batches(preset))
    begun = trainer(preset, tmp_path, max_epochs=1)
    torch.manual_seed(1)
    begun.fit(first, batches(preset))
    begun.save_checkpoint(tmp_path / "half.ckpt", weights_only=False)
    again = trainer(preset, tmp_path, max_epochs=2)
    again.fit(second, batches(preset), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert again.global_step > begun.global_step
    assert equal(weights(second), weights(undisturbed))


@pytest.mark.parametrize("preset", PLAIN)
def test_a_fit_that_fails_leaves_a_module_that_trains(preset: str, tmp_path: Path) -> None:
    broken, plain = module(), module()
    stock = broken.training_step

    def fail(batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ArithmeticError("mine")
        return stock(batch, batch_idx)

    broken.training_step = fail
    with pytest.raises(ArithmeticError, match="mine"):
        trainer(preset, tmp_path, max_epochs=1).fit(broken, batches(preset))
    own = [name.replace(".base_layer.", ".") for name in broken.state_dict() if ".lora_" not in name]  # adapters stay
    assert own == list(plain.state_dict())
    broken.training_step = stock
    trainer(preset, tmp_path, max_epochs=1).fit(broken, batches(preset))
    assert all(torch.isfinite(p).all() for p in weights(broken))


@pytest.mark.parametrize("what", ["copies", "all"])
@pytest.mark.parametrize("preset", ["compact", "compact_host", "checkpointing", "offloading"])
def test_delays_change_no_number(preset: str, what: str, tmp_path: Path) -> None:
    held_back, plain = module(), module()
    trainer(preset, tmp_path, max_epochs=1).fit(plain, batches())
    with device.delayed(what):
        trainer(preset, tmp_path, max_epochs=1).fit(held_back, batches())
    assert equal(weights(held_back), weights(plain))


class Gan(L.LightningModule):
    """A generator and a critic, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.generator, self.critic = Classifier(blocks=1, width=WIDTH), Classifier(blocks=1, width=WIDTH)
        self.generator.head = nn.Linear(WIDTH, WIDTH)

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0].to(self.dtype)
        for number, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            score = self.critic(self.generator(real)).float().square().mean()
            if number == 1:
                score = (self.critic(real).float() - 1).square().mean() - 0.1 * score
            self.manual_backward(score)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def trained_gan(preset: str, tmp_path: Path, *overrides: str) -> tuple[Gan, L.Trainer]:
    gan = Gan()
    kwargs = solo.trainer_kwargs(preset, overrides)
    trained = L.Trainer(**QUIET, default_root_dir=tmp_path, max_epochs=5, **kwargs)
    trained.fit(gan, batches())
    return gan, trained


def moves(gan: Gan) -> torch.Tensor:
    """Return how far training moved the weights, as one fp32 vector."""
    pairs = zip(weights(gan), weights(Gan()), strict=True)
    return torch.cat([(after.float().cpu() - before.float().cpu()).flatten() for after, before in pairs])


@NEEDS_DEEPSPEED
def test_presets_that_the_refusal_of_several_optimizers_names_train_a_gan(tmp_path: Path) -> None:
    with pytest.raises(ConflictError) as refused:
        trained_gan("zero_offload", tmp_path)
    named = {name for name in solo.list_presets() if re.search(rf"\b{name}\b", str(refused.value))} - ENGINES
    assert named == {"compact_host", "host_states"}
    small = sum(12 * p.numel() for p in Gan().parameters() if p.numel() < 4096)  # these states are never on the host
    plain, rounded = (moves(trained_gan(name, tmp_path)[0]) for name in ("baseline", "bf16_true"))
    for name in sorted(named):
        gan, trained = trained_gan(name, tmp_path, "callback.compact_states.state_budget=64KiB")
        states: Any = trained.optimizers
        assert len(states) == 2
        assert all(each.host_bytes > 0 for each in states)
        assert sum(each.state_bytes - each.host_bytes for each in states) <= 64 * 1024 + small
        resident, _ = trained_gan(name, tmp_path, "callback.compact_states.state_budget=null")
        assert equal(weights(gan), weights(resident))
        assert (moves(gan) - plain).norm() < min(0.04 * plain.norm(), (rounded - plain).norm() / 2)
