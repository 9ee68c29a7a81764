"""Shared blocks compute with one block's weights, keep their names and buffers, and are stored and stepped once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

import lightning_solo as solo
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.blocks import named_blocks
from lightning_solo.nn.sharing import Sharing, as_before, separate, share_blocks, take_back
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.shared_blocks.technique import SharedBlocks
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.models import small_batch, small_model
from tests.modules import Resumable, Stack, loader, regression
from tests.training import equal

Make = Callable[..., Any]


def stack(blocks: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack(blocks)


def share(module: nn.Module, **options: Any) -> Sharing:
    return share_blocks(module, named_blocks(module), option="callback.shared_blocks", **options)


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, ckpt: Any = None, **arguments: Any) -> Any:
    module = module or regression(L, stack())
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    batches = Resumable(list(loader(6)))
    trainer.fit(module, batches, loader(3, seed=2), ckpt_path=ckpt, weights_only=ckpt and True)
    return module


# --- the mechanism ---


@pytest.mark.parametrize("group", [None, 2])
@pytest.mark.parametrize("start", ["mean", "first"])
def test_groups_of_blocks_have_one_blocks_parameters(group: int | None, start: str) -> None:
    module, before = stack(), stack()
    sharing = share(module, group=group, start=start)
    size = group or 4
    assert sharing.groups == [[f"blocks.{at + i}" for i in range(size)] for at in range(0, 4, size)]
    for at, block in enumerate(module.blocks):
        first = at - at % size
        assert block.up.weight is module.blocks[first].up.weight
        rows = [before.blocks[first + i].up.weight for i in range(size)]
        expected = torch.stack([*rows]).mean(0) if start == "mean" else rows[0]
        assert torch.allclose(block.up.weight, expected, atol=1e-7)
    assert [*module.state_dict()] == [*before.state_dict()]
    one = sum(p.nbytes for p in before.blocks[0].parameters())
    assert sharing.before - sharing.after == (4 - 4 // size) * one
    assert sharing.after == sum(p.nbytes for p in module.parameters())
    x = torch.randn(5, 8)
    with as_before(module, sharing.own):
        assert torch.equal(module(x), before(x))
    assert module.blocks[1].up.weight is module.blocks[0].up.weight
    separate(module, sharing)
    assert len([*module.parameters()]) == len([*before.parameters()])


def test_gradients_are_the_sums_over_the_blocks() -> None:
    module = stack()
    sharing = share(module)
    dense = copy.deepcopy(module)
    separate(dense, sharing)
    x = torch.randn(5, 8)
    for each in (module, dense):
        each(x).square().mean().backward()
    total = sum((block.down.weight.grad for block in dense.blocks), torch.zeros(()))
    assert torch.allclose(module.blocks[2].down.weight.grad, total, atol=1e-6)


class Normed(nn.Module):
    """A block with running statistics, a weight of its own that is tied inside, and one that is tied outside."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.norm, self.one, self.other = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.weight = self.one.weight
        self.outside = nn.Linear(8, 8)
        self.outside.weight = shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outside(self.other(self.one(self.norm(x)).relu()))


class Nets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Normed(self.head.weight) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_buffers_stay_each_blocks_own_and_ties_stay() -> None:
    module, before = Nets(), Nets()
    module.blocks[2].norm.bias.requires_grad_(False)
    sharing = share(module, start="mean")
    module(torch.randn(16, 8) + torch.arange(8))
    means = [block.norm.running_mean for block in module.blocks]
    assert not torch.equal(means[0], means[1])
    assert len({block.one.weight for block in module.blocks} | {block.other.weight for block in module.blocks}) == 1
    expected = torch.stack([block.one.weight for block in before.blocks]).mean(0)
    assert torch.allclose(module.blocks[0].one.weight, expected, atol=1e-7)
    assert module.blocks[1].outside.weight is module.head.weight
    assert "head.weight" in sharing.left_out["blocks.0.outside.weight"]
    assert "frozen" in sharing.left_out["blocks.0.norm.bias"]
    assert module.blocks[0].norm.bias is not module.blocks[1].norm.bias
    separate(module, sharing)
    assert module.blocks[1].outside.weight is module.head.weight
    assert module.blocks[1].one.weight is module.blocks[1].other.weight is not module.blocks[0].one.weight


def test_blocks_that_were_not_trained_get_their_own_parameters_back() -> None:
    module, before = Nets(), Nets()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    take_back(module, share(module, start="mean"))
    assert equal(module, before)
    assert all(p is parameters[name] for name, p in module.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize("kind", [long("Llama"), long("T5"), long("Mixtral"), long("Bert")])
def test_models_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    task = {"T5": "ForConditionalGeneration", "Bert": "ForMaskedLM"}.get(kind, "ForCausalLM")
    model, batch = small_model(kind, task).eval(), small_batch(2)
    keys, count = [*model.state_dict()], sum(p.numel() for p in model.parameters())
    sharing = share(model)
    model(**batch).loss.backward()
    assert [*model.state_dict()] == keys
    assert sum(p.numel() for p in model.parameters()) < count
    assert all(p.grad is not None for name, p in model.named_parameters() if name in sharing.names.values())


# --- a fit ---


@pytest.mark.any_device
def test_a_fit_steps_each_shared_weight_once_and_logs_what_sharing_costs(
    make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    technique = SharedBlocks(group=2)
    with caplog.at_level("INFO"):
        module = fit(make_trainer, technique)
    assert lines_with(caplog.text, "4 Block in groups of 2", "first", "instead of")
    (line,) = lines_with(caplog.text, "shared_blocks: validation/loss")
    before, after = (float(word) for word in line.replace(",", "").split() if word[0].isdigit())
    plain = regression(L, stack())
    trainer = make_trainer(L)
    assert before == pytest.approx(trainer.validate(plain, loader(3, seed=2))[0]["validation/loss"], abs=1e-4)
    share(plain.net, group=2)
    assert after == pytest.approx(trainer.validate(plain, loader(3, seed=2))[0]["validation/loss"], abs=1e-4)
    assert technique.shared["net.blocks.3.up.weight"] == "net.blocks.2.up.weight"
    assert module.net.blocks[3].up.weight is module.net.blocks[2].up.weight
    held = [p for group in module.trainer.optimizers[0].param_groups for p in group["params"]]
    assert len(held) == len({*held}) == 2 * 6 + 2  # two groups of a norm and two layers, and the head


def test_validation_at_the_start_changes_no_bit(make_trainer: Make) -> None:
    with_dropout = [regression(L, Stack(4, dropout=0.5)) for _ in range(2)]
    with_dropout[1].load_state_dict(with_dropout[0].state_dict())
    fits = []
    for module, batches in zip(with_dropout, (loader(3, seed=2), None), strict=True):
        torch.manual_seed(3)
        make_trainer(L, callbacks=[SharedBlocks()]).fit(module, loader(6), batches)
        fits.append(module)
    assert equal(*fits)


@pytest.mark.parametrize("after_fit", ["keep", "separate"])
def test_a_resumed_run_ends_as_the_undisturbed_one(make_trainer: Make, tmp_path: Path, after_fit: str) -> None:
    options = {"after_fit": after_fit, "start": "mean"}
    stack_of_three = regression(L, stack(3))
    whole = fit(make_trainer, SharedBlocks(**options), module=copy.deepcopy(stack_of_three), max_epochs=2)
    half = fit(make_trainer, SharedBlocks(**options), module=copy.deepcopy(stack_of_three), max_epochs=1)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = fit(make_trainer, SharedBlocks(**options), module=stack_of_three, max_epochs=2, ckpt=tmp_path / "half.ckpt")
    assert equal(whole, rest)
    assert (rest.net.blocks[2].up.weight is rest.net.blocks[0].up.weight) == (after_fit == "keep")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert [*saved] == [*whole.state_dict()]
    if after_fit == "keep":  # stored once
        assert saved["net.blocks.2.up.weight"].data_ptr() == saved["net.blocks.0.up.weight"].data_ptr()
        weights = solo.export_weights(tmp_path / "half.ckpt", output=tmp_path / "out.safetensors")
        assert weights["net.blocks.2.up.weight"] is weights["net.blocks.0.up.weight"]
    plain = regression(L, stack(3))
    plain.load_state_dict(saved)  # a plain module has the names
    assert equal(plain, half)


def test_factors_of_shared_blocks_are_shared_whatever_the_order(make_trainer: Make) -> None:
    module = fit(make_trainer, solo.LowRank(rank=2), SharedBlocks())
    assert module.net.blocks[3].up[0].weight is module.net.blocks[0].up[0].weight
    assert len([*module.net.blocks.parameters()]) == 2 + 2 * 2 + 2  # a norm, two factors of each layer, two biases
    apart = fit(make_trainer, solo.LowRank(rank=2), SharedBlocks(after_fit="separate"))
    assert apart.net.blocks[3].up[0].weight is not apart.net.blocks[0].up[0].weight
    assert equal(apart, module)


def test_a_second_fit_trains_shared_blocks_further(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    module = fit(make_trainer, SharedBlocks())
    with caplog.at_level("INFO"):
        fit(make_trainer, SharedBlocks(), module=module)
    assert lines_with(caplog.text, "shared_blocks", "earlier fit")
    fit(make_trainer, SharedBlocks(after_fit="separate"), module=module)
    assert module.net.blocks[1].up.weight is not module.net.blocks[0].up.weight


# --- refused ---


def test_a_group_that_does_not_divide_is_refused(make_trainer: Make) -> None:
    for group in (3, 8):
        with pytest.raises(PresetError, match=mentions(f"callback.shared_blocks.group={group}", "group=2 or 4")):
            fit(make_trainer, SharedBlocks(group=group))
    with pytest.raises(PresetError, match=mentions("shared_blocks.group=1")):
        SharedBlocks(group=1)


def test_blocks_without_equals_are_refused(make_trainer: Make) -> None:
    module = regression(L, stack(2))
    module.net.blocks[1].up, module.net.blocks[1].down = nn.Linear(8, 16), nn.Linear(16, 8)
    with pytest.raises(NothingToDoError, match=mentions("callback.shared_blocks", "net.blocks.1", "~callback.shared")):
        fit(make_trainer, SharedBlocks(), module=module)
    with pytest.raises(NothingToDoError, match=mentions("Blok", "did you mean 'Block'")):
        fit(make_trainer, SharedBlocks(blocks=["Blok"]))


def test_experts_of_a_mixture_are_refused(make_trainer: Make) -> None:
    module = regression(L, nn.Module())
    module.net.experts, module.net.router = nn.ModuleList(stack().blocks), nn.Linear(8, 4)
    module.net.forward = lambda x: sum(each(x) for each in module.net.experts).mean(-1, keepdim=True)
    with pytest.raises(ConflictError, match=mentions("net.experts.0", "blocks=[Block]", "~callback.shared_blocks")):
        fit(make_trainer, SharedBlocks(), module=module)
    fit(make_trainer, SharedBlocks(blocks=["Block"]), module=module)
    assert module.net.experts[3].up.weight is module.net.experts[0].up.weight


@pytest.mark.parametrize("other", ["adapters", "layer_freezing"])
def test_what_chooses_parameters_is_refused(other: str) -> None:
    with pytest.raises(
        ConflictError, match=mentions("callback.shared_blocks", f"callback.{other}", "write ~callback.")
    ):
        compose({"precision": "32-true", "callback": {"shared_blocks": {}, other: {}}})


def test_checkpoints_of_other_runs_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    fit(make_trainer).trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=mentions("callback.shared_blocks", "module.load_state_dict")):
        fit(make_trainer, SharedBlocks(), ckpt=tmp_path / "plain.ckpt")
    fit(make_trainer, SharedBlocks(group=2)).trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(CheckpointError, match=mentions("groups of 2", "callback.shared_blocks.group=2")):
        fit(make_trainer, SharedBlocks(), ckpt=tmp_path / "two.ckpt")
