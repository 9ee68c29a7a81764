"""Pruned weights and their moments are exactly zero after each step, resumed or averaged, and the count is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError, SoloError
from lightning_solo.nn.prunable import prunable_weights
from lightning_solo.nn.quantized import quantize, quantized
from lightning_solo.optim.weight_masks import WeightMasks, pack, smallest, unpack
from lightning_solo.techniques.exact_resume.technique import ExactResume
from lightning_solo.techniques.pruning.technique import Pruning
from tests.messages import mentions
from tests.models import small_model
from tests.modules import Stack, loader, regression
from tests.training import equal

Make = Callable[..., Any]
WIDTH = 16
STEPS = 10
pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Be aware that when using .ckpt_path."),
]


class Smooth(nn.Module):
    """Two linear layers and a head, without units whose gradient may be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.tanh(self.up(x))))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1)


def module_of(optimizer: Callable[[Any], Any] = adamw) -> Any:
    torch.manual_seed(0)
    module = regression(L, Smooth())
    module.configure_optimizers = lambda: optimizer(module.parameters())
    return module


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    module = module or module_of()
    options = {name: arguments.pop(name) for name in ("ckpt_path", "weights_only") if name in arguments}
    trainer = make_trainer(L, callbacks=[*callbacks], **arguments)
    torch.manual_seed(2)
    trainer.fit(module, loader(STEPS, width=WIDTH), **options)
    return module


def zeros(module: nn.Module, technique: Pruning) -> dict[str, int]:
    """Return how many weights of each pruned parameter are zero."""
    return {name: int((module.get_parameter(name) == 0).sum()) for name in technique.pruned}


# --- acted ---

WAYS: list[tuple[dict[str, Any], int]] = [
    ({"amount": 0.5}, 8 + 2 * 512),
    ({"amount": 0.35, "scope": "global"}, round(0.35 * (16 + 2 * 1024))),
    ({"amount": 0.7, "kept": ["head"]}, 2 * 717),
    ({"amount": 0.7, "layers": ["down"]}, 717),
    ({"pattern": "2:4"}, 8 + 2 * 512),
    ({"amount": 0.8, "schedule": "cubic", "begin": 1, "end": 7, "every_n_steps": 2}, 13 + 2 * 819),
    ({"amount": 0.8, "schedule": "regrow", "begin": 1, "end": 7, "every_n_steps": 2}, 13 + 2 * 819),
]


@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize(("options", "count"), WAYS, ids=[str(options) for options, _ in WAYS])
def test_so_many_weights_and_their_moments_are_zero(
    options: Any, count: int, optimizer: Any, make_trainer: Make
) -> None:
    technique, module = Pruning(**options), module_of(optimizer)
    fit(make_trainer, technique, module=module)
    assert sum(technique.pruned.values()) == count
    if "regrow" not in options.values():  # a unit whose weights are all pruned has no gradient to grow by
        assert zeros(module, technique) == technique.pruned
    for name, mask in technique.state_dict()["masks"].items():
        p = module.get_parameter(name)
        pruned = unpack(mask, p.numel()).view(p.shape)
        moments = [each for each in module.optimizers().state[p].values() if each.shape == p.shape]
        assert moments
        for each in (p, *moments):
            assert bool((each[pruned] == 0).all())
            assert bool((each[~pruned] != 0).any())
        if "pattern" in options:
            assert bool(((p.view(-1, 4) == 0).sum(1) == 2).all())


def test_threshold_prunes_smaller_weights(make_trainer: Make) -> None:
    module, technique = module_of(), Pruning(threshold=0.1)
    expected = {
        name: int((module.get_parameter(name).abs() < 0.1).sum())
        for name in ("net.up.weight", "net.down.weight", "net.head.weight")
    }
    fit(make_trainer, technique, module=module)
    assert technique.pruned == expected == zeros(module, technique)
    assert min(expected.values()) > 0


def test_the_cubic_schedule_counts_optimizer_steps_under_accumulation(make_trainer: Make) -> None:
    technique, seen = Pruning(amount=0.5, schedule="cubic", begin=1, end=3, every_n_steps=1), []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.append(zeros(pl_module, technique)["net.up.weight"])

    fit(make_trainer, technique, Watch(), accumulate_grad_batches=2)
    half = round(1024 * 0.5 * (1 - 0.5**3))
    assert seen == [0, 0, 0, 0, half, half, 512, 512, 512, 512]


def test_the_smallest_are_those_of_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    for most, count in ((4, 700), (2**31 - 2, 300), (2**17, 1), (3, 0), (2, 1000)):
        keys = torch.randint(most, (1000,), generator=generator, dtype=torch.int32)
        parts = keys.split([3, 500, 0, 497])
        expected = torch.zeros(1000, dtype=torch.bool)
        expected[keys.argsort(stable=True)[:count]] = True
        assert torch.equal(torch.cat(list(smallest(lambda parts=parts: parts, count))), expected)


@pytest.mark.parametrize("over_all", [False, True])
def test_the_choice_is_that_of_torch(over_all: bool) -> None:
    net = Smooth()
    weights = {name: p for name, p in net.named_parameters() if p.ndim == 2}
    masks = WeightMasks(weights)
    masks.prune_share(0.3, [], over_all=over_all)
    layers = [(net.up, "weight"), (net.down, "weight"), (net.head, "weight")]
    if over_all:
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.3)
    else:
        for layer, name in layers:
            prune.l1_unstructured(layer, name, amount=0.3)
    for (name, p), (layer, _) in zip(weights.items(), layers, strict=True):
        assert torch.equal(unpack(masks.packed[name], p.numel()), layer.weight_mask.flatten() == 0)


def test_weights_of_another_memory_order_are_pruned_by_their_place() -> None:
    conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
    before, optimizer = conv.weight.detach().clone(), adamw(conv.parameters())
    masks = WeightMasks({"weight": conv.weight})
    conv(torch.randn(2, 8, 5, 5)).sum().backward()
    optimizer.step()
    optimizer.state[conv.weight]["exp_avg_sq"] = optimizer.state[conv.weight]["exp_avg_sq"].contiguous()
    conv.weight.data.copy_(before)
    masks.prune_share(0.5, [optimizer], over_all=False)
    masks.apply(optimizer)
    expected = before.abs() <= before.abs().flatten().kthvalue(288).values
    assert torch.equal(conv.weight == 0, expected)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(optimizer.state[conv.weight][name] == 0, expected)


def test_two_of_four_inputs_are_those_of_the_layer() -> None:
    transformers = pytest.importorskip("transformers")
    layers = nn.ModuleList([nn.Linear(8, 6), transformers.pytorch_utils.Conv1D(6, 8)])
    choice = prunable_weights(layers, in_fours=True)
    assert choice.transposed == {"1.weight"}
    masks = WeightMasks(choice.weights)
    masks.prune_fours([], choice.transposed)
    masks.apply_to(choice.weights)
    for matrix in (layers[0].weight, layers[1].weight.T):  # outputs, inputs
        groups = matrix.detach().reshape(-1, 4)
        assert bool(((groups == 0).sum(1) == 2).all())
    assert masks.pruned == {"0.weight": 24, "1.weight": 24}


def test_regrown_weights_start_at_zero_and_are_drawn_by_seed_and_step() -> None:
    layer = nn.Linear(100, 10, bias=False)
    optimizer = adamw(layer.parameters())
    masks = WeightMasks({"weight": layer.weight})
    masks.prune_share(0.8, [optimizer], over_all=False)
    masks.apply(optimizer)
    first, weights = masks.packed["weight"], layer.weight.detach().clone().flatten()
    was_pruned = unpack(first, 1000)
    drawn = []
    for step, seed in ((5, 0), (5, 0), (6, 0), (5, 1)):
        masks.packed["weight"] = first
        masks.exchange(0.25, [optimizer], step, seed)
        drawn.append(unpack(masks.packed["weight"], 1000))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[3])
    grown, dropped = was_pruned & ~drawn[0], ~was_pruned & drawn[0]
    assert (int(grown.sum()), int(dropped.sum())) == (50, 50)  # a quarter of 200
    assert weights[dropped].abs().max() < weights[~was_pruned & ~dropped].abs().min()
    assert bool((weights[grown] == 0).all())


# --- which weights ---


class Mixed(nn.Module):
    """Layers of many kinds: tied embedding and head, attention, convolution, a recurrent layer, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.conv = nn.Conv1d(4, 4, 3)
        self.lstm = nn.LSTM(4, 4)
        self.norm = nn.LayerNorm([4, 4])
        self.experts = Experts()
        self.scale = nn.Parameter(torch.ones(4, 4))
        self.head = nn.Linear(4, 8)
        self.head.weight = self.embed.weight


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 4, 4))


def test_weights_of_layers_are_pruned_and_tied_embeddings_only_by_name() -> None:
    module = Mixed()
    choice = prunable_weights(module)
    assert list(choice.weights) == [
        "attention.in_proj_weight", "attention.out_proj.weight", "conv.weight", "lstm.weight_ih_l0",
        "lstm.weight_hh_l0", "experts.up",
    ]  # fmt: skip
    assert choice.left_out == {
        "embed.weight": "tied to an embedding",
        "norm.weight": "of LayerNorm",
        "norm.bias": "of LayerNorm",
        "scale": "of Mixed",
    }
    assert list(prunable_weights(module, ["head", "scale"]).weights) == ["scale", "embed.weight"]
    assert list(prunable_weights(module, ["attention", "exp*"], ["out_proj"]).weights) == [
        "attention.in_proj_weight",
        "experts.up",
    ]


def test_experts_of_transformers_are_pruned() -> None:
    model = small_model("Mixtral", num_local_experts=2)
    names = {name.rpartition(".")[2] for name in prunable_weights(model).weights}
    assert {"gate_up_proj", "down_proj", "weight"} == names


def changed(change: Callable[[nn.Module], Any]) -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    change(net)
    return net


BAD_LAYERS: list[tuple[str, Callable[[nn.Module], Any], tuple[str, ...]]] = [
    ("frozen", lambda net: net[1].weight.requires_grad_(False), ("1.weight", "frozen", "callback.pruning.kept=[")),
    ("parametrized", lambda net: parametrizations.weight_norm(net[1]), ("1.weight", "parametrization", "kept=[")),
    ("weight norm", lambda net: nn.utils.spectral_norm(net[1]), ("1.weight", "computed", "kept=[")),
    (
        "in few bits",
        lambda net: quantize(net.requires_grad_(False)[1], {"weight": quantized(net[1].weight.detach(), "int8")}),
        ("1.weight", "8 bits", "callback.pruning.kept=["),
    ),
    ("pruned", lambda net: prune.l1_unstructured(net[1], "weight", 0.5), ("1.weight", "remove(", "~callback.pruning")),
]


@pytest.mark.parametrize(("change", "words"), [each[1:] for each in BAD_LAYERS], ids=[each[0] for each in BAD_LAYERS])
def test_weights_that_cannot_be_pruned_are_refused_if_asked_for(change: Any, words: Any) -> None:
    with pytest.raises(ConflictError, match=mentions(*words)):
        prunable_weights(changed(change), ["1"])


def test_weights_that_cannot_be_pruned_are_left_out_and_listed() -> None:
    net = changed(lambda net: (net[0].requires_grad_(False), parametrizations.weight_norm(net[1])))
    with pytest.raises(NothingToDoError, match=mentions("0.weight (frozen)", "1.weight (computed", "layers=[")):
        prunable_weights(net)
    with pytest.raises(NothingToDoError, match=mentions("callback.pruning.layers='2'")):
        prunable_weights(net, ["2"])
    with pytest.raises(NothingToDoError, match=mentions("none", "~callback.pruning")):
        prunable_weights(nn.LayerNorm(4))


def test_inputs_that_are_no_multiple_of_four_are_refused() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Conv1d(4, 4, 4))
    with pytest.raises(ConflictError, match=mentions("0.weight", "6 inputs", "callback.pruning.kept=[0.weight]")):
        prunable_weights(net, in_fours=True)
    choice = prunable_weights(net, kept=["0.weight"], in_fours=True)
    assert list(choice.weights) == ["1.weight"]
    assert "2:4" in choice.left_out["2.weight"]


# --- refused settings ---

BAD: list[tuple[type[SoloError], dict[str, Any], tuple[str, ...]]] = [
    (PresetError, {"amount": 1.5}, ("amount", "1.5")),
    (PresetError, {"amount": 0}, ("amount",)),
    (PresetError, {"threshold": -1.0}, ("threshold",)),
    (ConflictError, {"amount": 0.5, "threshold": 0.1}, ("amount=0.5", "threshold=0.1", "drop")),
    (ConflictError, {"amount": 0.7, "pattern": "2:4"}, ("pattern=2:4", "drop")),
    (ConflictError, {"threshold": 0.1, "schedule": "cubic", "end": 3}, ("schedule=cubic", "schedule=once")),
    (PresetError, {"amount": 0.5, "schedule": "cubic"}, ("end=None", "end=<")),
    (PresetError, {"amount": 0.5, "schedule": "regrow", "begin": 3, "end": 3}, ("end=3", "begin=3")),
    (ConflictError, {"amount": 0.5, "end": 3}, ("end=3", "schedule=once")),
    (NothingToDoError, {}, ("callback.pruning.amount=0.5", "callback.pruning.pattern")),
    (NothingToDoError, {"threshold": 1e-9}, ("threshold=1e-09", "amount=0.5")),
    (NothingToDoError, {"amount": 1e-6}, ("amount=1e-06", "no weight", "or more")),
    (NothingToDoError, {"amount": 1e-6, "scope": "global"}, ("amount=1e-06", "all weights together", "or more")),
    (PresetError, {"amount": 0.5, "begin": STEPS}, (f"begin={STEPS}", f"{STEPS} optimizer steps", "begin=5")),
    (PresetError, {"amount": 0.5, "schedule": "cubic", "end": 99}, ("end=99", f"{STEPS} optimizer steps", "end=5")),
    (ConflictError, {"amount": 0.99, "scope": "global"}, ("net.", "scope=layer", "callback.pruning.kept=[net.")),
    (ConflictError, {"threshold": 10.0}, ("net.up.weight", "threshold")),
]


@pytest.mark.parametrize(("kind", "options", "words"), BAD, ids=[str(each[1]) for each in BAD])
def test_settings_that_cannot_work_are_refused(kind: Any, options: Any, words: Any, make_trainer: Make) -> None:
    module = module_of()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(kind, match=mentions(*words)):
        fit(make_trainer, Pruning(**options), module=module)
    assert equal(module.state_dict(), before)


def test_weights_that_are_nan_are_refused(make_trainer: Make) -> None:
    module = module_of()
    module.net.down.weight.data[3, 3] = float("nan")
    for options in ({"amount": 0.5}, {"pattern": "2:4"}, {"threshold": 0.1}):
        with pytest.raises(ConflictError, match=mentions("net.down.weight", "NaN", "finite_guard")):
            fit(make_trainer, Pruning(**options), module=module)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"moment_bits": 4}, "moment_bits=8"),
        ({"state_budget": "1GiB"}, "state_budget=null"),
        ({"back_end": "torchao_8bit"}, "back_end=own"),
    ],
)
def test_states_that_no_mask_reaches_are_refused(settings: Any, remedy: str) -> None:
    preset = {"precision": "bf16-true", "callback": {"compact_states": settings, "pruning": {"amount": 0.5}}}
    with pytest.raises(ConflictError, match=mentions("callback.pruning", "callback.compact_states", remedy)):
        solo.trainer_kwargs(preset)


# --- parity ---


def test_a_fit_is_a_loop_that_masks_after_each_step(make_trainer: Make) -> None:
    ours, by_hand = module_of(), module_of()
    fit(make_trainer, Pruning(amount=0.6, layers=["up", "down"], begin=2), module=ours)
    optimizer = by_hand.configure_optimizers()
    weights = [by_hand.net.up.weight, by_hand.net.down.weight]
    kept: list[Tensor] = []
    for number, batch in enumerate(loader(STEPS, width=WIDTH)):
        if number == 2:
            bounds = [p.detach().abs().flatten().kthvalue(round(0.6 * p.numel())).values for p in weights]
            kept = [p.detach().abs() > bound for p, bound in zip(weights, bounds, strict=True)]
            mask(optimizer, weights, kept)
        optimizer.zero_grad()
        by_hand.training_step(batch, number).backward()
        optimizer.step()
        mask(optimizer, weights, kept)
    assert equal(ours.state_dict(), by_hand.state_dict())


@torch.no_grad()
def mask(optimizer: Any, weights: list[Tensor], kept: list[Tensor]) -> None:
    for p, mine in zip(weights, kept, strict=False):
        for each in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            each.mul_(mine)


SCHEDULES: list[dict[str, Any]] = [
    {"amount": 0.5, "begin": 4},
    {"amount": 0.8, "schedule": "cubic", "begin": 1, "end": 9, "every_n_steps": 2},
    {"amount": 0.8, "schedule": "regrow", "begin": 1, "end": 9, "every_n_steps": 2},
]


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda options: str(options.get("schedule", "once")))
@pytest.mark.parametrize("step", [4, 5])
def test_a_resumed_run_ends_as_the_uninterrupted_one(
    options: Any, step: int, make_trainer: Make, tmp_path: Path
) -> None:
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=step, save_top_k=-1)
    whole, technique = module_of(), Pruning(**options)
    fit(make_trainer, technique, ExactResume(), saving, module=whole, enable_checkpointing=True)
    path, again = tmp_path / f"step={step}.ckpt", Pruning(**options)
    resumed = fit(make_trainer, again, ExactResume(), ckpt_path=path, weights_only=True)
    assert equal(resumed.state_dict(), whole.state_dict())
    assert again.pruned == technique.pruned
    assert all(zeros(resumed, again)[name] >= count for name, count in again.pruned.items())
    assert equal(again.state_dict(), technique.state_dict())


def saved_checkpoint(make_trainer: Make, tmp_path: Path, *callbacks: Any) -> Path:
    saving = ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=5, save_top_k=1)
    fit(make_trainer, *callbacks, saving, enable_checkpointing=True, max_steps=8)
    return tmp_path / "saved.ckpt"


def test_a_dense_checkpoint_is_pruned_from_its_step_on(make_trainer: Make, tmp_path: Path) -> None:
    path = saved_checkpoint(make_trainer, tmp_path)
    with pytest.raises(PresetError, match=mentions("begin=0", "step 5", "callback.pruning.begin=5")):
        fit(make_trainer, Pruning(amount=0.5), ckpt_path=path, weights_only=True)
    technique = Pruning(amount=0.5, begin=5)
    module = fit(make_trainer, technique, ckpt_path=path, weights_only=True)
    assert zeros(module, technique) == technique.pruned == {
        "net.up.weight": 512, "net.down.weight": 512, "net.head.weight": 8
    }  # fmt: skip


def test_masks_of_other_weights_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    path = saved_checkpoint(make_trainer, tmp_path, Pruning(amount=0.5))
    with pytest.raises(CheckpointError, match=mentions("net.head.weight", "callback.pruning.kept")):
        fit(make_trainer, Pruning(amount=0.5, kept=["head"]), ckpt_path=path, weights_only=True)
    saved = torch.load(path, weights_only=True)
    saved["state_dict"]["net.up.weight"].fill_(1.0)
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match=mentions("net.up.weight", "different runs")):
        fit(make_trainer, Pruning(amount=0.5), ckpt_path=path, weights_only=True)


def test_averages_of_lightning_are_as_sparse(make_trainer: Make, tmp_path: Path) -> None:
    technique, module = Pruning(amount=0.5, begin=3), module_of()
    saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6)
    fit(make_trainer, technique, EMAWeightAveraging(decay=0.9), saving, module=module, enable_checkpointing=True)
    plain = fit(make_trainer, Pruning(amount=0.5, begin=3))
    assert not equal(module.state_dict(), plain.state_dict())  # it is an average
    assert zeros(module, technique) == technique.pruned
    (path,) = tmp_path.glob("*.ckpt")
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert {name: int((saved[name] == 0).sum()) for name in technique.pruned} == technique.pruned


@pytest.mark.parametrize("place", ["host", "module"])
def test_our_averages_are_as_sparse(place: str, make_trainer: Make) -> None:
    average, module = solo.WeightAverage(decay=0.9, device=place, start_step=7), module_of()
    technique = Pruning(amount=0.8, schedule="cubic", begin=3, end=7, every_n_steps=2)
    fit(make_trainer, technique, average, module=module)
    values = average.averaged_weights
    assert {name: int((values[name] == 0).sum()) for name in technique.pruned} == technique.pruned
    assert zeros(module, technique) == technique.pruned
    plain = fit(make_trainer, Pruning(amount=0.8, schedule="cubic", begin=3, end=7, every_n_steps=2))
    assert not equal(module.state_dict(), plain.state_dict())  # it is the average


@pytest.mark.parametrize("bits", [{"master_bits": 32}, {}, {"master_bits": "16-stochastic"}], ids=str)
def test_split_weights_and_compressed_moments_are_zero(bits: Any, make_trainer: Make) -> None:
    torch.manual_seed(0)
    module = regression(L, Stack(blocks=1, width=32), lr=1e-3)  # matrices of 4,096: moments in 8 bits
    preset = {"precision": "bf16-true", "callback": {"compact_states": bits, "pruning": {"amount": 0.5}}}
    trainer = make_trainer(L, **solo.trainer_kwargs(preset))
    trainer.fit(module, loader(STEPS, width=32))
    (technique,) = (each for each in trainer.callbacks if isinstance(each, Pruning))
    (optimizer,) = trainer.optimizers
    for name, count in technique.pruned.items():
        p = module.get_parameter(name)
        states = {key: each for key, each in optimizer.state[p].items() if each.shape == (p.numel(),)}
        assert len(states) == 3 - (bits.get("master_bits") == "16-stochastic")
        pruned = unpack(technique.state_dict()["masks"][name], p.numel())
        assert int(pruned.sum()) == count
        assert bool((optimizer.master_weight(p).flatten()[pruned] == 0).all())
        assert all(bool((each[pruned] == 0).all()) for each in states.values())
        assert bool((optimizer.master_weight(p).flatten()[~pruned] != 0).any())


def test_both_optimizers_of_manual_optimization_are_masked(make_trainer: Make) -> None:
    module, technique = module_of(), Pruning(amount=0.5, kept=["head"])
    module.automatic_optimization = False
    module.configure_optimizers = lambda: (adamw(module.net.up.parameters()), sgd(module.net.down.parameters()))

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizers = module.optimizers()
        for each in optimizers:
            each.zero_grad()
        module.manual_backward(module.step(batch))
        for each in optimizers:
            each.step()

    module.training_step = training_step
    before = copy.deepcopy(module.state_dict())
    fit(make_trainer, technique, module=module)
    assert zeros(module, technique) == technique.pruned == {"net.up.weight": 512, "net.down.weight": 512}
    assert not torch.equal(module.net.down.weight, before["net.down.weight"])
    late = Pruning(amount=0.5, kept=["head"], begin=999)
    with pytest.warns(UserWarning, match=mentions("callback.pruning.begin=999", "0 weights", "smaller", "resume")):
        fit(make_trainer, late, module=module)


# --- memory ---


def test_masks_take_a_bit_per_weight_outside_of_the_module(make_trainer: Make) -> None:
    technique, module = Pruning(amount=0.5), module_of()
    keys = list(module.state_dict())
    fit(make_trainer, technique, module=module)
    masks = technique.state_dict()["masks"]
    assert sum(mask.nbytes for mask in masks.values()) == (1024 + 1024 + 16) // 8
    assert list(module.state_dict()) == keys
    copy.deepcopy(module.net)
    bits = torch.rand(1001) < 0.5
    assert torch.equal(unpack(pack(bits), 1001), bits)
