"""LayerFreezing trains what the step says, resumed or not; frozen parts keep nothing, their statistics stand still."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

from lightning_solo.errors import NothingToDoError, PresetError
from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.nn.freezing import Depths, frozen_parts
from lightning_solo.optim.group_division import split_groups
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.layer_freezing.technique import LayerFreezing
from tests.messages import mentions
from tests.models import small_model
from tests.modules import Block, loader, regression

Make = Callable[..., Any]
WIDTH = 8
BLOCKS = 3
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
]


class Net(nn.Module):
    """An input layer, blocks, a normalisation with running statistics in each, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*[NormedBlock(WIDTH) for _ in range(BLOCKS)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)))


class NormedBlock(Block):
    """A block with a normalisation that keeps running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.statistics = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.statistics(super().forward(x))


class Watch(L.Callback):
    """Notes of each step which parts have gradients, and how many states there are."""

    def __init__(self) -> None:
        self.parts: list[set[str]] = []
        self.states: list[int] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with_gradient = [name for name, p in pl_module.named_parameters() if p.grad is not None]
        self.parts.append({part_of(name) for name in with_gradient})

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.states.append(len(trainer.optimizers[0].state))


def part_of(name: str) -> str:
    """Return the block, or the part beside the blocks, that has a parameter."""
    return name.removeprefix("net.").removeprefix("blocks.").split(".")[0]


def module_of(scheduler: Callable[[Any], Any] | None = None) -> Any:
    torch.manual_seed(0)
    module = regression(L, Net())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    if scheduler is None:
        module.configure_optimizers = lambda: optimizer
    else:
        module.configure_optimizers = lambda: {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler(optimizer), "interval": "step"},
        }
    return module


def fit(make_trainer: Make, technique: Any, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    module = module or module_of()
    options = {name: arguments.pop(name) for name in ("ckpt_path", "weights_only") if name in arguments}
    trainer = make_trainer(L, callbacks=[technique, *callbacks], **arguments)
    torch.manual_seed(2)
    trainer.fit(module, loader(6, width=WIDTH), **options)
    return module


# --- acted ---

TRAINED: list[tuple[dict[str, Any], set[str]]] = [
    ({"trained_blocks": 0}, {"head"}),
    ({"trained_blocks": 1}, {"2", "head"}),
    ({"trained_blocks": 3}, {"embed", "0", "1", "2", "head"}),
    ({"trained_blocks": 2, "frozen": ["head"]}, {"1", "2"}),
    ({"frozen": ["embed", "blocks.[01]"]}, {"2", "head"}),
]


@pytest.mark.parametrize(("options", "parts"), TRAINED, ids=[str(options) for options, _ in TRAINED])
def test_depths_and_names_that_are_frozen_stay_as_they_are(options: Any, parts: set[str], make_trainer: Make) -> None:
    module, watch = module_of(), Watch()
    before = copy.deepcopy(module.state_dict())
    fit(make_trainer, LayerFreezing(**options), watch, module=module)
    changed = {part_of(name) for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == parts  # running statistics included
    assert watch.parts == [parts] * 6
    assert watch.states[-1] == sum(part_of(name) in parts for name, _ in module.named_parameters())


@pytest.mark.parametrize(("unit", "firsts"), [("steps", [0, 2, 4]), ("epochs", [0, 1, 2])])
def test_blocks_are_unfrozen_at_their_milestone(unit: str, firsts: list[int], make_trainer: Make) -> None:
    watch = Watch()
    rows = [[first, blocks] for first, blocks in zip(firsts, (0, 1, 3), strict=True)]
    limits: dict[str, Any] = {"max_epochs": 3, "limit_train_batches": 2} if unit == "epochs" else {}
    fit(make_trainer, LayerFreezing(milestones=rows, unit=unit), watch, **limits)
    every = {"embed", "0", "1", "2", "head"}
    assert watch.parts == [{"head"}] * 2 + [{"2", "head"}] * 2 + [every] * 2
    assert watch.states == [2, 2, 10, 10, 28, 28]  # parameters of the head, a block, and all


def test_milestones_count_optimizer_steps_under_accumulation(make_trainer: Make) -> None:
    watch = Watch()
    technique = LayerFreezing(milestones=[[0, 0], [2, 1]], unit="steps")
    fit(make_trainer, technique, watch, accumulate_grad_batches=2)
    assert watch.parts == [{"head"}, {"head"}, {"2", "head"}]


# --- parity ---


def test_what_is_trained_is_trained_as_in_a_module_frozen_by_hand(make_trainer: Make) -> None:
    ours = fit(make_trainer, LayerFreezing(trained_blocks=1))
    by_hand = module_of()
    for name, p in by_hand.named_parameters():
        p.requires_grad_(part_of(name) in ("2", "head"))
    for norm in (by_hand.net.blocks[0].statistics, by_hand.net.blocks[1].statistics):
        norm.forward = lambda x, norm=norm: nn.functional.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias
        )
    fit(make_trainer, L.Callback(), module=by_hand)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), by_hand.parameters(), strict=True))


def test_run_that_is_resumed_trains_the_same_parts(make_trainer: Make, tmp_path: Path) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    def run(*callbacks: Any, **arguments: Any) -> tuple[Any, Watch]:
        technique = LayerFreezing(milestones=[[0, 0], [2, 1], [4, 3]], unit="steps", rate_decay=0.5)
        watch = Watch()
        scheduler = lambda optimizer: LinearLR(optimizer, 1.0, 0.1, 6)  # noqa: E731
        return fit(
            make_trainer, technique, ExactResume(), watch, *callbacks, module=module_of(scheduler), **arguments
        ), watch

    whole, first = run(Save())
    for place in (1, 3, 4):
        rest, second = run(ckpt_path=tmp_path / f"{place}.ckpt", weights_only=True)
        assert second.parts == first.parts[place:]
        values = zip(whole.state_dict().values(), rest.state_dict().values(), strict=True)
        assert all(torch.equal(p, q) for p, q in values)


SCHEDULERS: dict[str, Callable[[Any], Any] | None] = {
    "none": None,
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 6),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, 1.0, 3), CosineAnnealingLR(optimizer, 3)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rate_falls_with_depth_under_every_schedule(name: str, make_trainer: Make) -> None:
    rates: list[dict[str, float]] = []

    class Rates(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            of = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
            rates.append({part_of(each): of[id(p)] for each, p in pl_module.named_parameters()})

    def plain(steps: int) -> list[float]:
        module = module_of(SCHEDULERS[name])
        made = module.configure_optimizers()
        optimizer, scheduler = (
            (made, None) if name == "none" else (made["optimizer"], made["lr_scheduler"]["scheduler"])
        )
        values = []
        for _ in range(steps):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return values

    fit(make_trainer, LayerFreezing(rate_decay=0.5), Rates(), module=module_of(SCHEDULERS[name]))
    assert len(rates) == 6
    expected = plain(6)
    factors = {"head": 1, "2": 0.5, "1": 0.25, "0": 0.125, "embed": 0.0625}
    for step, rate in enumerate(expected):
        assert rates[step] == pytest.approx({part: rate * factor for part, factor in factors.items()})


def test_groups_keep_their_options() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 1.0, "weight_decay": 0.1}, {"params": [other], "lr": 2.0}])
    split_groups(optimizer, [], lambda p: 0.5 if p is one else 1.0)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.1), (2.0, 0)]


# --- memory ---


@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_nothing_is_kept_below_the_lowest_trained_block(blocks: int, make_trainer: Make) -> None:
    saved: list[int] = []

    class Bytes(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            x = batch[0]
            saved.append(saved_for_backward(pl_module.net, x)[1])
            inner = pl_module.net.blocks[BLOCKS - blocks :]
            hidden = torch.randn(x.shape)
            saved.append(saved_for_backward(nn.Sequential(inner, pl_module.net.head), hidden)[1])

    fit(make_trainer, LayerFreezing(trained_blocks=blocks), Bytes())
    assert saved[0] == saved[1] + 4 * WIDTH * 4  # the input of the lowest trained part, (4, WIDTH), is its argument
    assert saved[1] > 0


# --- trace ---


def test_flags_and_modes_are_as_before(make_trainer: Make) -> None:
    module = module_of()
    module.net.blocks[2].up.bias.requires_grad_(False)
    flags = {name: p.requires_grad for name, p in module.named_parameters()}
    fit(make_trainer, LayerFreezing(trained_blocks=1), module=module)
    assert {name: p.requires_grad for name, p in module.named_parameters()} == flags
    assert all(part.training for part in module.modules())
    before = module.net.blocks[0].statistics.running_mean.clone()
    fit(make_trainer, LayerFreezing(trained_blocks=3), module=module)
    assert not torch.equal(module.net.blocks[0].statistics.running_mean, before)


def test_validation_leaves_frozen_statistics_alone(make_trainer: Make) -> None:
    module = module_of()
    before = module.net.blocks[0].statistics.running_mean.clone()
    trainer = make_trainer(L, callbacks=[LayerFreezing(trained_blocks=1)], val_check_interval=2, max_epochs=2)
    trainer.fit(module, loader(6, width=WIDTH), loader(2, width=WIDTH))
    assert torch.equal(module.net.blocks[0].statistics.running_mean, before)
    assert not torch.equal(module.net.blocks[2].statistics.running_mean, before)


# --- parts ---


def test_frozen_parts_are_the_outermost() -> None:
    net = Net()
    net.blocks[0].requires_grad_(False)
    net.blocks[1].up.requires_grad_(False)
    net.head.bias.requires_grad_(False)
    assert frozen_parts(net) == ["blocks.0", "blocks.1.up"]


def test_depths_of_a_language_model_with_a_tied_head() -> None:
    model = small_model("GPT2")
    depths = Depths(model, dict(model.transformer.h.named_children()))
    assert depths.count == 3
    assert depths.parameters["transformer.wte.weight"] == -1  # the head has this weight too
    assert depths.parameters["transformer.h.1.attn.c_attn.weight"] == 1
    assert depths.parameters["transformer.ln_f.weight"] == 3


@pytest.mark.parametrize(
    ("options", "named", "error"),
    [
        ({}, ["trained_blocks", "frozen", "net"], NothingToDoError),
        ({"frozen": ["embd"]}, ["embd", "embed"], NothingToDoError),
        ({"frozen": ["embed", "nothing"]}, ["nothing"], NothingToDoError),
        ({"trained_blocks": 4}, ["4", "3 NormedBlock"], PresetError),
        ({"frozen": ["net"]}, ["all parameters"], PresetError),
    ],
)
def test_bad_settings_are_named(options: Any, named: list[str], error: Any, make_trainer: Make) -> None:
    module = module_of()
    with pytest.raises(error, match=mentions(*named)):
        fit(make_trainer, LayerFreezing(**options), module=module)
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("milestones", [[[1, 0]], [[0, 2], [1, 1]], [[0, 0], [0, 1]], [[0]], [[0, -1]]], ids=str)
def test_wrong_milestones_are_refused(milestones: Any) -> None:
    with pytest.raises(PresetError, match="milestones"):
        LayerFreezing(milestones=milestones)
    with pytest.raises(PresetError, match="trained_blocks"):
        LayerFreezing(milestones=[[0, 1]], trained_blocks=1)
