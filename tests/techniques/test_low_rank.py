"""Low rank: linear layers become factors that are trained, saved, resumed and merged."""

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
from lightning_solo.cards.factors import planned
from lightning_solo.cards.tracing import Tracing
from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.blocks import feed_forward_parts, repeated_blocks
from lightning_solo.nn.factorized_layers import LinearFactors, built
from lightning_solo.nn.factorizing import factorize_linear, factorized, factors_of, largest_rank, merge_factors
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.low_rank.card import CARD
from lightning_solo.techniques.low_rank.technique import LowRank
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.models import small_batch, small_model
from tests.modules import Resumable, Stack, loader, regression
from tests.training import equal

Make = Callable[..., Any]
WIDTH = 16
LAYERS = tuple(f"net.blocks.{number}.{part}" for number in (0, 1) for part in ("up", "down"))


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack(2, width=WIDTH)


def fit(make_trainer: Make, *callbacks: Any, module: Any = None, ckpt: Any = None, **arguments: Any) -> Any:
    module = module or regression(L, stack())
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    trainer.fit(module, Resumable(list(loader(6, width=WIDTH))), ckpt_path=ckpt, weights_only=ckpt and True)
    return module


def weight_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


# --- the mechanism ---


def test_factors_of_full_rank_multiply_to_the_weight() -> None:
    for weight in (weight_of(24, 10), weight_of(10, 24).double()):
        first, second = factors_of(weight, 10)
        assert first.dtype == weight.dtype
        assert torch.allclose(first @ second, weight, atol=2e-6)


def test_factors_are_nearest_and_keep_the_share_of_energy() -> None:
    weight = weight_of(24, 10)
    values = torch.linalg.svdvals(weight)
    first, second = factors_of(weight, 4)
    assert torch.dist(first @ second, weight) == pytest.approx(float(values[4:].norm()), rel=1e-5)
    energy = values.square().cumsum(0) / values.square().sum()
    for share in (0.5, 0.9, 0.999999):
        rank = factors_of(weight, share)[0].shape[1]
        assert energy[rank - 1] >= share - 1e-6
        assert rank == 1 or energy[rank - 2] < share
    assert factors_of(torch.zeros(3, 4), 0.5)[0].shape == (3, 1)


def test_random_factors_have_the_mean_square_of_the_weight() -> None:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(300, 200)
    first, second = factors_of(weight, 32, "random")
    assert float((first @ second).std()) == pytest.approx(0.02, rel=0.1)
    assert all(bool(each.any()) for each in factors_of(torch.zeros(8, 4), 2, "random"))


def test_largest_rank_is_the_last_that_saves() -> None:
    for rows, columns in ((64, 256), (7, 7), (1, 9), (128, 128)):
        rank = largest_rank(rows, columns)
        assert rank * (rows + columns) < rows * columns <= (rank + 1) * (rows + columns)


def test_a_factorized_module_computes_as_torchs_layers_with_its_products() -> None:
    module = stack()
    dense = copy.deepcopy(module)
    change = factorize_linear(module, 5)
    for name, layer in change.layers.items():
        dense.get_submodule(name).weight.data = layer.weight.detach()
    x = weight_of(6, WIDTH)
    assert torch.allclose(module(x), dense(x), atol=1e-6)
    module(x).square().mean().backward()
    dense(x).square().mean().backward()
    layer, plain = module.blocks[0].up, dense.blocks[0].up
    assert torch.allclose(layer[1].weight.grad, plain.weight.grad @ layer[0].weight.t(), atol=1e-7)
    assert torch.allclose(layer[0].weight.grad, layer[1].weight.t() @ plain.weight.grad, atol=1e-7)
    assert torch.equal(layer.weight, layer[1].weight @ layer[0].weight)  # for who reads it


def test_the_form_is_known_while_an_engine_has_freed_the_weights() -> None:
    for form in (
        {"kind": "linear", "inputs": 5, "outputs": 7, "rank": 2, "bias": True},
        {"kind": "embedding", "rows": 5, "width": 7, "rank": 2, "padding_idx": None},
        {"kind": "head", "rows": 5, "width": 7, "rank": 2, "bias": False},
    ):
        layer = built(form)
        for p in layer.parameters():
            p.data = p.new_empty(0)
        assert layer.options() == form


def test_layers_that_factors_cannot_stand_for_stay() -> None:
    alone, scaled = nn.Linear(16, 16), nn.Linear(16, 16)
    with pytest.raises(NothingToDoError, match="the module itself"):
        factorize_linear(alone, 2)
    assert alone.bias is not None
    scaled.register_buffer("scale", torch.ones(1))
    change = factorize_linear(nn.Sequential(scaled, nn.Linear(16, 16)), 2)
    assert [*change.layers] == ["1"]
    assert "more tensors" in change.left_out["0.weight"]


def test_bytes_are_those_of_the_factors() -> None:
    module = stack()
    change = factorize_linear(module, 3)
    # of each block 2 x (16 x 64) numbers less, and 2 x 3 x (16 + 64) more
    assert change.before - change.after == 4 * 2 * (2 * 16 * 64 - 2 * 3 * (16 + 64))
    assert change.after == sum(p.nbytes for p in module.parameters())
    assert set(change.left_out) == {"head.weight"}


# --- other modules ---


class Mixed(nn.Module):
    """Attention of torch, experts in three dimensions, a convolution, shared and frozen layers, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.experts = nn.ParameterDict({"up": nn.Parameter(torch.randn(4, 16, 16))})
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.one, self.other = nn.Linear(16, 48), nn.Linear(16, 48)
        self.other.weight = self.one.weight
        self.twice = self.same = nn.Linear(48, 16, bias=False)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.narrow = nn.Linear(16, 16).bfloat16()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.attention(x, x, x)[0] + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.same(self.twice(self.one(x).relu() + self.other(x)).relu().repeat(1, 1, 3)) + self.frozen(x)
        return self.head(self.normed(x + self.narrow(x.bfloat16()).float()) + x @ self.experts["up"].sum(0))


def test_shared_layers_share_factors_and_what_cannot_be_factorized_is_listed() -> None:
    module = Mixed().eval()
    ids = torch.arange(6).view(2, 3)
    change = factorize_linear(module, 7)
    assert set(change.layers) == {"one", "other", "twice", "same", "narrow"}
    assert module.other[0].weight is module.one[0].weight
    assert module.other.bias is not module.one.bias
    assert module.same is module.twice
    assert module.narrow[0].weight.dtype == torch.bfloat16
    left = {name: change.left_out[name] for name in change.left_out}
    assert "MultiheadAttention" in left["attention.in_proj_weight"]
    assert "linear" in left["attention.out_proj.weight"]
    assert "3 dimensions" in left["experts.up"] or "ParameterDict" in left["experts.up"]
    assert "Conv1d" in left["conv.weight"]
    assert left["frozen.weight"] == "frozen"
    assert "head.weight" in left["embedding.weight"]
    assert any(name.startswith("normed") for name in left)
    expected = module(ids)
    assert set(merge_factors(module)) == set(change.layers)
    assert module.other.weight is module.one.weight
    assert [*module.state_dict()] == [*Mixed().state_dict()]
    assert torch.allclose(module(ids), expected, atol=5e-2)  # a product in bf16 is rounded
    named = factorize_linear(module, 7, ["frozen"])
    assert {*named.layers} == {"frozen"}
    assert not module.frozen[0].weight.requires_grad


@pytest.mark.parametrize("kind", [long("GPT2"), long("Llama"), long("T5"), long("Mixtral"), long("Bert")])
def test_models_of_transformers(kind: str) -> None:
    torch.manual_seed(0)
    task = {"T5": "ForConditionalGeneration", "Bert": "ForMaskedLM"}.get(kind, "ForCausalLM")
    model, batch = small_model(kind, task).eval(), small_batch(2)
    keys = [*model.state_dict()]
    change = factorize_linear(model, 4)
    assert len({*change.layers.values()}) >= 6
    assert not any("head" in name for name in change.layers)
    loss = model(**batch).loss
    loss.backward()
    assert all(layer[0].weight.grad.any() for layer in change.layers.values())
    merge_factors(model)
    assert [*model.state_dict()] == keys
    assert torch.allclose(model(**batch).loss, loss, atol=1e-5)


def test_hooks_of_a_layer_are_called_further() -> None:
    module, seen = stack(), []
    handle = module.blocks[0].up.register_forward_hook(lambda *_: seen.append("before"))
    factorize_linear(module, 4)
    module(weight_of(2, WIDTH))
    handle.remove()
    module(weight_of(2, WIDTH))
    assert seen == ["before"]


# --- a fit ---


@pytest.mark.any_device
def test_a_fit_trains_factors_and_ends_with_them(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    technique = LowRank(rank=4)
    with caplog.at_level("INFO"):
        module = fit(make_trainer, technique)
    assert lines_with(caplog.text, "4 LinearFactors", "rank 4", "net.head.weight (output head)")
    assert tuple(factorized(module)) == LAYERS
    fresh = regression(L, stack())
    factorize_linear(fresh, 4)
    for name, layer in factorized(module).items():
        before = fresh.get_submodule(name)
        assert [type(each) for each in layer] == [nn.Linear, nn.Linear]
        assert not torch.equal(layer[0].weight.cpu(), before[0].weight)
        assert not torch.equal(layer[1].weight.cpu(), before[1].weight)
        assert layer[1].bias.requires_grad
    states = module.trainer.optimizers[0].state
    held = sum(value.numel() for state in states.values() for value in state.values() if value.ndim)
    assert held == 2 * sum(p.numel() for p in module.parameters())  # AdamW has two numbers for each


@pytest.mark.parametrize(("rank", "after_fit"), [long(4, "keep"), (0.6, "keep"), (0.6, "merge")])
def test_a_resumed_run_ends_as_the_undisturbed_one(
    make_trainer: Make, tmp_path: Path, rank: int | float, after_fit: str
) -> None:
    options = {"rank": rank, "after_fit": after_fit}
    whole = fit(make_trainer, LowRank(**options), max_epochs=2)
    half = fit(make_trainer, LowRank(**options), max_epochs=1)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")  # after a fit that may have merged
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert "net.blocks.0.up.1.weight" in saved["state_dict"]
    assert "net.blocks.0.up.weight" not in saved["state_dict"]
    rest = fit(make_trainer, LowRank(**options), max_epochs=2, ckpt=tmp_path / "half.ckpt")
    assert equal(whole, rest)
    assert bool(factorized(rest)) == (after_fit == "keep")
    assert [each.rank for each in factorized(rest).values()] == [each.rank for each in factorized(whole).values()]


def test_an_evaluation_loads_a_checkpoint_with_factors(make_trainer: Make, tmp_path: Path) -> None:
    module = fit(make_trainer, LowRank(rank=4))
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    batches = loader(2, width=WIDTH)
    expected = make_trainer(L).validate(module, batches, verbose=False)
    fresh = regression(L, stack())
    trainer = make_trainer(L, callbacks=[LowRank(rank=4)])
    assert trainer.validate(fresh, batches, ckpt_path=tmp_path / "last.ckpt", weights_only=True) == expected


def test_a_second_fit_continues_and_merged_layers_are_dense_again(make_trainer: Make) -> None:
    module = fit(make_trainer, LowRank(rank=4))
    before = copy.deepcopy(module.state_dict())
    fit(make_trainer, LowRank(rank=4), module=module)
    assert [*module.state_dict()] == [*before]
    assert not equal(module.state_dict(), before)
    with pytest.raises(ConflictError, match=mentions("callback.low_rank.rank=5", "solo.merge_factors(module)")):
        fit(make_trainer, LowRank(rank=5), module=module)
    solo.merge_factors(module)
    assert [*module.state_dict()] == [*regression(L, stack()).state_dict()]
    fit(make_trainer, LowRank(rank=5), module=module)
    assert {layer.rank for layer in factorized(module).values()} == {5}


def test_a_merged_fit_leaves_the_layers_that_were_there(make_trainer: Make) -> None:
    module = regression(L, stack())
    layers = [module.net.blocks[0].up, module.net.head]
    fit(make_trainer, LowRank(rank=4, after_fit="merge"), module=module)
    assert [module.net.blocks[0].up, module.net.head] == layers
    assert int(torch.linalg.matrix_rank(module.net.blocks[0].up.weight, tol=1e-5)) == 4


def test_blocks_and_parts_are_found_through_factors() -> None:
    module = stack()
    blocks, parts = [*repeated_blocks(module)], [*feed_forward_parts(module)]
    factorize_linear(module, 4)
    assert [*repeated_blocks(module)] == blocks
    assert [*feed_forward_parts(module)] == parts


# --- refused ---


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({}, NothingToDoError, ("callback.low_rank.rank=64",)),
        ({"rank": 13}, NothingToDoError, ("callback.low_rank.rank=13", "rank 12", "~callback.low_rank")),
        ({"rank": 16}, NothingToDoError, ("net.blocks.0.up.weight", "smaller")),
        ({"rank": 400}, NothingToDoError, ("callback.low_rank.rank=400",)),
        ({"rank": 0.999999}, NothingToDoError, ("callback.low_rank.rank=0.999999",)),
        ({"rank": 4, "layers": ["upp"]}, NothingToDoError, ("callback.low_rank.layers='upp'", "did you mean 'up'")),
        ({"rank": 4, "layers": ["up", "norm"]}, NothingToDoError, ("callback.low_rank.layers='norm'",)),
        ({"rank": 4, "layers": ["head"]}, ConflictError, ("callback.low_rank.layers='head'", "smaller")),
    ],
)
def test_a_fit_without_a_smaller_layer_is_refused(
    make_trainer: Make, settings: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error, match=mentions(*words)):
        fit(make_trainer, LowRank(**settings))


def test_the_remedy_names_a_rank_and_layers_that_fit() -> None:
    narrow = nn.Sequential(nn.Conv1d(8, 8, 1), nn.Linear(8, 8), nn.Linear(8, 32))
    narrow[2].requires_grad_(False)
    option = "callback.low_rank"
    with pytest.raises(
        NothingToDoError, match=mentions(f"write {option}.rank=3, or {option}.layers=[2], or ~{option}")
    ):
        factorize_linear(narrow, 5, option=option)
    assert [*factorize_linear(copy.deepcopy(narrow), 3).layers] == ["1"]
    assert [*factorize_linear(copy.deepcopy(narrow), 5, ["2"]).layers] == ["2"]
    with pytest.raises(ConflictError, match=mentions("0.weight (of Conv1d)", "layers, or ~")) as found:
        factorize_linear(narrow, 5, ["0"], option=option)
    assert "1.weight" not in str(found.value)
    with pytest.raises(NothingToDoError, match=f"Conv1d.*; write ~{option}$"):
        factorize_linear(nn.Sequential(nn.Conv1d(8, 8, 1)), 5, option=option)


@pytest.mark.parametrize("rank", [0, -1, 0.0, 1.0, 1.5, -0.5, float("nan"), True, "half"])
def test_ranks_without_meaning_are_refused(rank: Any) -> None:
    with pytest.raises(PresetError, match=mentions("low_rank.rank")):
        LowRank(rank=rank)


def test_random_factors_have_no_share_of_energy() -> None:
    with pytest.raises(PresetError, match=mentions("low_rank.start=random", "or low_rank.start=svd")):
        LowRank(rank=0.5, start="random")


def test_weights_that_are_not_finite_are_refused_and_no_layer_is_changed() -> None:
    module = stack()
    module.blocks[1].down.weight.data[0, 0] = float("nan")
    with pytest.raises(ConflictError, match=mentions("blocks.1.down.weight", "finite", "layers")):
        factorize_linear(module, 4)
    with pytest.raises(NothingToDoError):
        factorize_linear(module, 4, ["up", "uup"])
    assert not factorized(module)


@pytest.mark.parametrize("technique", [LowRank(rank=4), LowRank(rank=4, after_fit="merge"), solo.SharedBlocks()])
def test_a_fit_that_is_refused_before_its_first_step_leaves_the_weights(make_trainer: Make, technique: Any) -> None:
    module = regression(L, stack())
    with pytest.raises(NothingToDoError, match=mentions("Nope")):
        fit(make_trainer, technique, solo.TiledMlp(parts=["Nope"]), module=module)
    assert equal(module, regression(L, stack()))
    assert len([*module.parameters()]) == len([*stack().parameters()])
    fit(make_trainer, technique, module=module)
    assert not equal(module.net.head, stack().head)


@pytest.mark.parametrize("other", ["adapters", "layer_freezing", "quantization"])
def test_what_chooses_or_rounds_parameters_is_refused(other: str) -> None:
    with pytest.raises(ConflictError, match=mentions("callback.low_rank", f"callback.{other}", "write ~callback.")):
        compose({"precision": "32-true", "callback": {"low_rank": {"rank": 4}, other: {}}})


@pytest.mark.parametrize("name", ["low_rank", "factorized_embedding", "shared_blocks"])
def test_channels_are_not_pruned_in_the_same_run(name: str) -> None:
    settings = {"pruning": {"amount": 0.5, "pattern": "channels"}, name: {}}
    with pytest.raises(ConflictError, match=mentions("callback.pruning.pattern=channels", f"~callback.{name}")):
        compose({"precision": "32-true", "callback": settings})


def test_ranks_that_depend_on_weights_are_planned_as_dense_layers() -> None:
    tracing = planned(CARD.settings(rank=0.5), Tracing("32-true", attached=CARD.settings(rank=0.5)))
    assert tracing.attached is None
    assert "low_rank.rank=0.5" in tracing.assumptions[0]
    whole = Tracing("32-true", attached=CARD.settings(rank=5))
    assert planned(CARD.settings(rank=5), whole) == whole


def test_checkpoints_of_other_layers_are_refused(make_trainer: Make, tmp_path: Path) -> None:
    plain = fit(make_trainer)
    plain.trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=mentions("callback.low_rank", "module.load_state_dict")):
        fit(make_trainer, LowRank(rank=4), ckpt=tmp_path / "plain.ckpt")
    made = fit(make_trainer, LowRank(rank=4))
    made.trainer.save_checkpoint(tmp_path / "made.ckpt")
    with pytest.raises(ConflictError, match=mentions("callback.low_rank.rank=3", "callback.low_rank.rank=4")):
        fit(make_trainer, LowRank(rank=3), ckpt=tmp_path / "made.ckpt")
    other = regression(L, Stack(1, width=WIDTH))
    with pytest.raises(CheckpointError, match=mentions("factors", "class")):
        fit(make_trainer, LowRank(rank=4), module=other, ckpt=tmp_path / "made.ckpt")


def test_type_of_a_layer_stays_a_sequence_of_two() -> None:
    layer = LinearFactors(6, 4, 2, bias=False)
    assert layer.bias is None
    assert [*layer.state_dict()] == ["0.weight", "1.weight"]
    assert copy.deepcopy(layer).rank == 2
