"""A converted checkpoint resumes in a stock Trainer as by hand; an unconverted one is refused by the command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.cli import main
from lightning_solo.cli.convert import parse
from lightning_solo.errors import CheckpointError, NothingToDoError, PresetError
from lightning_solo.export.conversion import convert_checkpoint
from lightning_solo.optim import CompactAdamW
from tests.messages import mentions
from tests.modules import Stack, loader, regression
from tests.training import equal

pytestmark = pytest.mark.any_device

Make = Callable[..., Any]
WIDTH = 64
SAVED = Path(__file__).parents[1] / "saved_by_0_2_0"


class Tied(Stack):
    """A stack with a layer tied to another, a convolution in another order of memory, and one that is never used."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(blocks=1, width=WIDTH)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.image = nn.Conv2d(8, 64, 3, padding=1).to(memory_format=torch.channels_last)
        self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.image(x.view(-1, 8, 2, 4)).mean((2, 3))
        return super().forward(self.second(torch.relu(self.first(x))))


def module_of(optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: Any) -> Any:
    """Return a regression with two groups in an order of their own, and a schedule."""
    module = regression(lightning.pytorch, Tied())
    net = module.net
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1][::-1]},
        {"params": [p for p in net.parameters() if p.dim() == 1], "lr": 2e-2},
    ]

    def configure_optimizers() -> Any:
        made = optimizer(groups, **{"lr": 1e-2, **options})
        schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
        return [made], [{"scheduler": schedule, "interval": "step"}]

    module.configure_optimizers = configure_optimizers
    return module


def fit(
    make_trainer: Make, preset: Any, overrides: Any = (), *, path: Any = None, module: Any = None, **more: Any
) -> Any:
    """Return the Trainer after a fit under a preset, or in a stock Trainer with the preset None."""
    arguments = {} if preset is None else solo.trainer_kwargs(preset, overrides)
    trainer = make_trainer(lightning.pytorch, **{**arguments, **more})
    module = module_of() if module is None else module
    trainer.fit(module, loader(10, 8, WIDTH), **({"ckpt_path": path, "weights_only": True} if path else {}))
    return trainer


def saved(
    make_trainer: Make, tmp_path: Path, preset: Any = "compact", overrides: Any = (), **more: Any
) -> tuple[Any, Path]:
    trainer = fit(make_trainer, preset, overrides, **{"max_epochs": 2, **more})
    trainer.save_checkpoint(path := tmp_path / "saved.ckpt", weights_only=False)
    return trainer, path


def plain_optimizer(trainer: Any) -> dict[str, Any]:
    """Return the states that torch's AdamW would have, by the optimizer's own function."""
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, CompactAdamW)
    return optimizer.adamw_state_dict()


# --- to plain: the same bits, and a stock Trainer goes on with them ---


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["precision=bf16-mixed", "callback.compact_states.master_bits=32"],
        ["callback.compact_states.master_bits=32", "callback.compact_states.moment_bits=32"],
        ["callback.compact_states.checkpoint_weights=fp32"],
        ["precision=32-true", "callback.compact_states.master_bits=32"],
        ["callback.compact_states.master_bits=16-stochastic"],
    ],
    ids=str,
)
def test_plain_file_has_the_bits_of_masters_and_states_and_resumes_in_a_stock_trainer(
    make_trainer: Make, tmp_path: Path, overrides: list[str]
) -> None:
    trainer, path = saved(make_trainer, tmp_path, "compact", overrides)
    convert_checkpoint(path, "plain")
    file = torch.load(tmp_path / "saved-plain.ckpt", weights_only=True)
    original = torch.load(path, weights_only=True)
    (optimizer,) = trainer.optimizers
    named = trainer.lightning_module.named_parameters(remove_duplicate=False)
    masters = {name: optimizer.master_weight(p).cpu() for name, p in named}
    assert equal({name: value.float() for name, value in file["state_dict"].items()}, masters)
    has_masters = "callback.compact_states.master_bits=16-stochastic" not in overrides
    assert {value.dtype for value in file["state_dict"].values()} == {torch.float32 if has_masters else torch.bfloat16}
    before = dict(plain_optimizer(trainer)["state"])
    assert len(before) == len(list(trainer.lightning_module.parameters())) - 2  # the spare layer has none
    for number, state in file["optimizer_states"][0]["state"].items():
        assert equal(state, {name: value.cpu() for name, value in before.pop(number).items()})
    assert not before
    assert file["optimizer_states"][0]["param_groups"] == original["optimizer_states"][0]["param_groups"]
    assert {key: file[key] for key in ("loops", "callbacks", "lr_schedulers", "global_step")} == {
        key: original[key] for key in ("loops", "callbacks", "lr_schedulers", "global_step")
    }

    resumed = fit(make_trainer, None, path=tmp_path / "saved-plain.ckpt", max_epochs=3)
    by_hand = module_of()  # torch's own, from the masters and states of the optimizer
    by_hand.load_state_dict(masters)
    by_hand.to(resumed.strategy.root_device)
    ([ours], [config]) = by_hand.configure_optimizers()
    ours.load_state_dict(plain_optimizer(trainer))
    schedule = config["scheduler"]
    schedule.load_state_dict(trainer.lr_scheduler_configs[0].scheduler.state_dict())
    for x, y in loader(10, 8, WIDTH):
        ours.zero_grad()
        by_hand.step((x.to(by_hand.device), y.to(by_hand.device))).backward()
        ours.step()
        schedule.step()
    assert resumed.global_step == 30
    assert equal(dict(resumed.lightning_module.state_dict()), dict(by_hand.cpu().state_dict()))
    moved = (resumed.lightning_module.net.first.weight, file["state_dict"]["net.first.weight"])
    assert not torch.equal(*(each.detach().cpu() for each in moved))
    assert type(resumed.optimizers[0]) is torch.optim.AdamW
    assert optimizer is not resumed.optimizers[0]


def test_training_without_compression_is_continued_exactly(make_trainer: Make, tmp_path: Path) -> None:
    """In fp32 with 32 and 32 bits: one more epoch in a stock Trainer equals three epochs of the preset."""
    bits = ["precision=32-true", "callback.compact_states.master_bits=32", "callback.compact_states.moment_bits=32"]
    bits.append("callback.compact_states.state_budget=0")  # else torch's own optimizer steps
    whole = fit(make_trainer, "compact_states", bits, max_epochs=3)
    half, path = saved(make_trainer, tmp_path, "compact_states", bits)
    assert type(half.optimizers[0]) is CompactAdamW
    convert_checkpoint(path, "plain", tmp_path / "plain.ckpt")
    resumed = fit(make_trainer, None, path=tmp_path / "plain.ckpt", max_epochs=3)
    ours, expected = (dict(each.lightning_module.state_dict()) for each in (resumed, whole))
    assert equal(ours, expected, 1e-6)  # torch's AdamW rounds in another order


def test_checkpoint_before_the_first_step_and_of_an_open_window(make_trainer: Make, tmp_path: Path) -> None:
    path, exports = tmp_path / "open.ckpt", []

    class Save(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(path, weights_only=False)
                exports.append((trainer.global_step, solo.export_weights(pl_module)))

    kwargs = solo.trainer_kwargs("compact", ["accumulate_grad_batches=4"], callbacks=[Save()])
    make_trainer(lightning.pytorch, **kwargs).fit(module_of(), loader(10, 8, WIDTH))
    ((step, weights),) = exports
    assert step == 0
    lines = convert_checkpoint(path, "plain")
    assert re.search(mentions("left out", "window"), "\n".join(lines))
    file = torch.load(tmp_path / "open-plain.ckpt", weights_only=True)
    assert set(file["optimizer_states"][0]) == {"state", "param_groups"}
    assert file["optimizer_states"][0]["state"] == {}
    assert equal(file["state_dict"], weights)


def test_each_of_two_optimizers_is_converted(make_trainer: Make, tmp_path: Path) -> None:
    """One steps in compact states, the other is torch's SGD on master weights."""
    module = module_of()
    module.automatic_optimization = False
    net = module.net
    parts = [[*net.blocks.parameters()][::-1], [net.first.weight, *net.image.parameters()]]
    made = [torch.optim.Adam(parts[0], lr=1e-2), torch.optim.SGD(parts[1], lr=1e-3, momentum=0.9)]
    module.configure_optimizers = lambda: made

    def step(batch: Any, batch_idx: int) -> None:
        module.manual_backward(module.step(batch))
        for optimizer in module.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    module.training_step = step
    trainer = fit(make_trainer, "compact_states", module=module)
    trainer.save_checkpoint(path := tmp_path / "saved.ckpt", weights_only=False)
    masters = solo.export_weights(module)
    assert equal(solo.export_weights(path), masters)
    (compact, other), named = trainer.optimizers, dict(module.named_parameters())
    for optimizer, weight in ((compact, "net.blocks.0.up.weight"), (other, "net.image.weight")):
        assert equal(masters[weight], optimizer.master_weight(named[weight]).cpu())
    convert_checkpoint(path, "plain")
    file = torch.load(tmp_path / "saved-plain.ckpt", weights_only=True)
    assert equal(file["state_dict"]["net.image.weight"], masters["net.image.weight"])
    both = [compact.adamw_state_dict()["state"], {n: dict(s) for n, s in other.state_dict()["state"].items()}]
    for ours, expected in zip(file["optimizer_states"], both, strict=True):
        for state in expected.values():
            state.pop("correction", None)
        assert len(ours["state"]) == len(expected)
        for number, state in ours["state"].items():
            assert equal(state, {name: torch.as_tensor(expected[number][name]).cpu() for name in state})
    assert not file["optimizer_states"][0]["param_groups"][0]["decoupled_weight_decay"]


# --- back ---


def test_back_is_the_file_with_the_same_states(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path)
    whole = fit(make_trainer, "compact", path=path, max_epochs=3)
    convert_checkpoint(path, "plain", tmp_path / "plain.ckpt")
    convert_checkpoint(tmp_path / "plain.ckpt", "compact", tmp_path / "back.ckpt")
    assert (tmp_path / "back.ckpt").stat().st_size < 0.6 * (tmp_path / "plain.ckpt").stat().st_size
    back = fit(make_trainer, "compact", path=tmp_path / "back.ckpt", max_epochs=3)
    assert equal(plain_optimizer(back), plain_optimizer(whole))
    assert equal(solo.export_weights(back.lightning_module), solo.export_weights(whole.lightning_module))
    convert_checkpoint(tmp_path / "back.ckpt", "plain", tmp_path / "again.ckpt")
    again, plain = (torch.load(tmp_path / name, weights_only=True) for name in ("again.ckpt", "plain.ckpt"))
    assert equal(again["optimizer_states"], plain["optimizer_states"])
    assert equal(again["state_dict"], plain["state_dict"])


def test_file_of_a_stock_trainer_becomes_compact_as_when_it_is_resumed(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path, None)
    convert_checkpoint(path, "compact")
    ours, plain = (
        fit(make_trainer, "compact", path=each, max_epochs=3) for each in (tmp_path / "saved-compact.ckpt", path)
    )
    assert equal(plain_optimizer(ours), plain_optimizer(plain))
    assert equal(solo.export_weights(ours.lightning_module), solo.export_weights(plain.lightning_module))


# --- without conversion ---


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("compact", []),
        ("compact", ["callback.compact_states.checkpoint_weights=fp32"]),
        ("compact", ["callback.compact_states.master_bits=16-stochastic", "callback.compact_states.moment_bits=32"]),
        ("split_weights", []),
        ("compact_host", []),
    ],
    ids=str,
)
def test_stock_trainer_refuses_compact_states_by_the_command(
    make_trainer: Make, tmp_path: Path, preset: str, overrides: list[str]
) -> None:
    _, path = saved(make_trainer, tmp_path, preset, overrides, max_epochs=1)
    with pytest.raises(ValueError, match=mentions("lightning-solo convert FILE --to plain")):
        fit(make_trainer, None, path=path, max_epochs=2)
    module_of().load_state_dict(torch.load(path, weights_only=True)["state_dict"])  # the weights alone load


@pytest.mark.parametrize("name", ["SGD", "NAdam", "Adafactor"])
def test_stock_trainer_resumes_other_optimizers_from_the_masters(make_trainer: Make, tmp_path: Path, name: str) -> None:
    options = {"momentum": 0.9, "lr": 1e-4} if name == "SGD" else {"lr": 1e-3}
    kind = getattr(torch.optim, name)
    trainer, path = saved(make_trainer, tmp_path, "split_weights", module=module_of(kind, **options))
    masters = solo.export_weights(trainer.lightning_module)
    with pytest.raises(NothingToDoError, match=mentions(str(path), "as it is")):
        convert_checkpoint(path, "plain")
    resumed = fit(make_trainer, None, path=path, module=module_of(kind, **options), max_epochs=2)  # no step is left
    assert equal({k: v.cpu() for k, v in resumed.lightning_module.state_dict().items()}, masters)
    assert fit(make_trainer, None, path=path, module=module_of(kind, **options), max_epochs=3).global_step == 30


def test_other_bits_are_refused_by_the_bits_of_the_file(make_trainer: Make, tmp_path: Path) -> None:
    _, path = saved(make_trainer, tmp_path, max_epochs=1)
    other = ["callback.compact_states.master_bits=32"]
    named = "callback.compact_states.master_bits=24 callback.compact_states.moment_bits=8"
    with pytest.raises(CheckpointError, match=mentions(named, "lightning-solo convert FILE --to plain")):
        fit(make_trainer, "compact", other, path=path, max_epochs=2)
    convert_checkpoint(path, "plain")
    assert fit(make_trainer, "compact", other, path=tmp_path / "saved-plain.ckpt", max_epochs=2).global_step == 20


# --- refusals ---


def test_what_cannot_be_converted_is_refused(make_trainer: Make, tmp_path: Path) -> None:
    trainer, path = saved(make_trainer, tmp_path, None, max_epochs=1)
    with pytest.raises(PresetError, match=mentions("--to plane", "did you mean 'plain'", "compact")):
        parse([str(path), "--to", "plane"])
    with pytest.raises(NothingToDoError, match=mentions("as it is")):
        convert_checkpoint(path, "plain")
    (tmp_path / "saved-compact.ckpt").touch()
    with pytest.raises(CheckpointError, match=mentions("saved-compact.ckpt", "--force")):
        convert_checkpoint(path, "compact")
    convert_checkpoint(path, "compact", overwrite=True)
    with pytest.raises(NothingToDoError, match=mentions("saved-compact.ckpt")):
        convert_checkpoint(tmp_path / "saved-compact.ckpt", "compact")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with pytest.raises(CheckpointError, match=mentions("optimizer states", f"lightning-solo export {tmp_path}")):
        convert_checkpoint(tmp_path / "weights.ckpt", "plain")
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "hyper_parameters": {"folder": tmp_path}}, path)
    with pytest.raises(CheckpointError, match=mentions("pathlib.PosixPath", "save_hyperparameters(ignore=")):
        convert_checkpoint(path, "compact", overwrite=True)
    with pytest.raises(CheckpointError, match=mentions("resume it once", "trainer.save_checkpoint")):
        convert_checkpoint(SAVED / "compact_states.ckpt", "plain", tmp_path / "old.ckpt")
    with pytest.raises(CheckpointError, match=mentions("resume it once", "trainer.save_checkpoint")):
        solo.export_weights(SAVED / "compact_states.ckpt")
    assert not (tmp_path / "old.ckpt").exists()


def test_command_writes_the_file_that_it_names(
    make_trainer: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = saved(make_trainer, tmp_path, max_epochs=1)
    for arguments, code, words in (
        ([str(path), "--to", "plain"], 0, [str(tmp_path / "saved-plain.ckpt"), "24 bits"]),
        ([str(path), "--to", "plain"], 2, ["--force"]),
        ([str(path)], 2, ["--to plain|compact"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["convert", *arguments])
        assert ended.value.code == code
        assert re.search(mentions(*words), "".join(capsys.readouterr()))
    assert (tmp_path / "saved-plain.ckpt").is_file()
