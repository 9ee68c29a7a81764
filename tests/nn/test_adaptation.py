"""Adapters stand where they are to stand, or are refused; they train, merge, tie and come out without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.errors import CheckpointError, ConflictError, NothingToDoError
from lightning_solo.nn import adaptation, adapter_merging, adapter_weights
from lightning_solo.nn.adaptation import AdapterConfig
from lightning_solo.nn.adapter_targets import KINDS, feed_forward_outputs, targets_of
from lightning_solo.nn.blocks import blocks_of_class, repeated_blocks
from lightning_solo.nn.quantized import quantize, quantized
from tests.messages import mentions
from tests.models import small_model
from tests.modules import Classifier, Stack

WIDTH = 16


class Words(nn.Module):
    """Embedding, blocks, and a head that is tied to the embedding, as of a language model; beside them a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.blocks = Stack(2, WIDTH).blocks
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embed.weight
        self.teacher = Stack(2, WIDTH).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = self.first
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Attention(nn.Module):
    """Attention of torch, whose output projection is never called, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.encoder2 = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder2(self.encoder(x))


def config(module: nn.Module, targets: Any = "all-linear", method: str = "lora", **values: Any) -> AdapterConfig:
    layers = targets_of(module, targets, method).layers
    feed_forward = tuple(feed_forward_outputs(module, layers)) if method == "ia3" else ()
    settings: dict[str, Any] = {"name": "default", "r": 4, "alpha": 8.0, "dropout": 0.0, **values}
    return AdapterConfig(method=method, layers=tuple(layers), feed_forward=feed_forward, **settings)


def put_in(module: nn.Module, targets: Any = "all-linear", method: str = "lora", **values: Any) -> AdapterConfig:
    """Put an adapter in, and change it, since LoRA's second factor begins as zero."""
    chosen = config(module, targets, method, **values)
    adaptation.insert(module, chosen)
    generator = torch.Generator().manual_seed(7)
    for p in adaptation.adapter_parameters(module, chosen.name).values():
        p.data += 0.2 * torch.randn(p.shape, generator=generator)
    return chosen


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


# --- which layers ---


def test_all_linear_leaves_out_heads_tied_and_frozen_layers() -> None:
    module = made(Words)
    targets = targets_of(module, "all-linear", "lora")
    assert list(targets.layers) == [f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")]
    assert {"head", "teacher.head", "teacher.blocks.0.up"} <= targets.left_out.keys()
    assert "frozen" in targets.left_out["teacher.blocks.0.up"]


def test_all_linear_finds_heads_without_a_method_that_names_them() -> None:
    assert "head" not in targets_of(Stack(2, WIDTH), "all-linear", "lora").layers
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    assert list(targets_of(plain, "all-linear", "lora").layers) == ["0"]


def test_all_linear_of_a_module_that_was_frozen_by_hand() -> None:
    module = Stack(2, WIDTH).requires_grad_(False)
    assert len(targets_of(module, "all-linear", "lora").layers) == 4
    module.head.requires_grad_(True)
    targets = targets_of(module, "all-linear", "lora")
    assert (len(targets.layers), list(targets.left_out)) == (4, ["head"])


def test_patterns_select_by_class_name_and_end_of_name() -> None:
    module = Stack(2, WIDTH)
    assert list(targets_of(module, ["up"], "lora").layers) == ["blocks.0.up", "blocks.1.up"]
    assert list(targets_of(module, ["blocks.1.*"], "lora").layers) == ["blocks.1.up", "blocks.1.down"]
    assert len(targets_of(module, "Linear", "lora").layers) == 5
    assert list(targets_of(made(Words), ["up"], "lora").layers) == ["blocks.0.up", "blocks.1.up"]  # without the teacher


@pytest.mark.parametrize("targets", ["q_proj", ["up", "q_proj"]])
def test_each_pattern_must_match(targets: Any) -> None:
    with pytest.raises(NothingToDoError, match=mentions("q_proj", "up", "down", "Linear")):
        targets_of(Stack(2, WIDTH), targets, "lora")


def test_pattern_of_other_modules_is_refused() -> None:
    with pytest.raises(NothingToDoError, match=mentions("norm", "LayerNorm", "method=lora")):
        targets_of(Stack(2, WIDTH), ["norm"], "lora")


def test_tied_head_is_refused() -> None:
    with pytest.raises(ConflictError, match=mentions("head", "embed", "modules_to_save")):
        targets_of(made(Words), ["head"], "lora")


def test_computed_weight_is_refused_and_left_out() -> None:
    module = Stack(2, WIDTH)
    nn.utils.parametrizations.spectral_norm(module.blocks[0].up)
    with pytest.raises(ConflictError, match=mentions("blocks.0.up", "computed")):
        targets_of(module, ["up"], "lora")
    assert "blocks.0.up" in targets_of(module, "all-linear", "lora").left_out


KINDS_OF_MODELS: list[tuple[str, str, set[str]]] = [
    ("Llama", "ForCausalLM", {"lm_head"}),
    ("GPT2", "", {"lm_head"}),
    ("T5", "ForConditionalGeneration", {"lm_head"}),
    ("Bert", "ForSequenceClassification", {"classifier", "bert.pooler.dense"}),
    ("Mixtral", "ForCausalLM", {"lm_head", *(f"model.layers.{i}.mlp.experts" for i in range(3))}),
    ("Mamba", "ForCausalLM", {"lm_head", *(f"backbone.layers.{i}.mixer.out_proj" for i in range(3))}),
]


@pytest.mark.parametrize(
    ("kind", "task", "left_out"),
    [pytest.param(*row, marks=[pytest.mark.long] * (row[0] not in ("Llama", "Mixtral"))) for row in KINDS_OF_MODELS],
)
def test_layers_of_transformers_models(kind: str, task: str, left_out: set[str]) -> None:
    model = small_model(kind, task)
    targets = targets_of(model, "all-linear", "lora")
    assert set(targets.left_out) == left_out
    linear = {name for name, part in model.named_modules() if type(part).__name__ in ("Linear", "Conv1D")}
    assert targets.layers.keys() == linear - left_out
    if kind == "Mamba":
        with pytest.raises(ConflictError, match=mentions("out_proj", "MambaMixer")):
            targets_of(model, ["out_proj"], "lora")


def test_convolution_of_which_peft_drops_an_option_is_refused_by_name_and_left_out_by_class() -> None:
    for options in ({"dilation": 2}, {"padding": 1, "padding_mode": "reflect"}, {"groups": 3}):
        net = nn.Sequential(nn.Conv2d(3, 6, 3, **options), nn.Conv2d(6, 6, 1))
        with pytest.raises(ConflictError, match=mentions("0", "groups")):
            targets_of(net, ["0"], "lora")
        targets = targets_of(net, ["Conv2d"], "lora")
        assert (list(targets.layers), list(targets.left_out)) == (["1"], ["0"])
        with pytest.raises(NothingToDoError, match=mentions("groups", "method=lora")):
            targets_of(net[:1], ["Conv2d"], "lora")


def test_layers_that_can_be_written_are_named() -> None:
    net = nn.Sequential(nn.Embedding(4, 8), nn.LSTM(8, 8), nn.Linear(8, 8))
    with pytest.raises(NothingToDoError, match=mentions("LSTM", "modules_to_save")):
        targets_of(net, ["1"], "lora")
    with pytest.raises(NothingToDoError, match=r"write callback\.adapters\.targets=\[Embedding\]"):
        targets_of(net[:2], "all-linear", "lora")
    with pytest.raises(NothingToDoError, match=r"as \['blocks\.\*'\]"):
        targets_of(Stack(2, WIDTH), ["blocks"], "lora")


def test_projection_that_attention_never_calls_is_refused_and_its_attention_taken() -> None:
    module = made(Attention)
    with pytest.raises(ConflictError, match=mentions("self_attn.out_proj", "targets=[self_attn]")):
        targets_of(module, ["out_proj"], "lora")
    assert {"encoder.self_attn", "encoder.linear1"} <= targets_of(module, "all-linear", "lora").layers.keys()
    assert "encoder.self_attn.out_proj" in targets_of(module, "all-linear", "dora").left_out


def feed_forward() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(*[feed_forward() for _ in range(3)]),
    "attention": Attention,
    "Bert": lambda: small_model("Bert", "ForSequenceClassification"),
    "Albert": lambda: small_model("Albert", "ForSequenceClassification"),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_are_those_of_the_module_without_adapters(kind: str) -> None:
    module = BLOCKS[kind]()
    before = repeated_blocks(module)
    put_in(module)
    assert repeated_blocks(module) == before
    classes = list(dict.fromkeys(type(block).__name__ for block in before.values()))
    assert blocks_of_class(module, classes) == before
    module = BLOCKS[kind]()
    put_in(module, list(targets_of(module, "all-linear", "lora").layers)[:3])
    assert repeated_blocks(module).keys() == before.keys()


# --- outputs ---


METHODS = list(KINDS)


@pytest.mark.parametrize("method", METHODS)
def test_adapter_starts_without_an_effect_and_merges(method: str) -> None:
    module = made(lambda: Classifier(2, WIDTH))
    x, before, keys = rows(5, WIDTH), module(rows(5, WIDTH)), list(module.state_dict())
    adaptation.insert(module, config(module, method=method))
    assert torch.allclose(module(x), before, atol=1e-5)
    adaptation.freeze(module, config(module, method=method))
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert trained == adaptation.adapter_parameters(module).keys()
    assert len(trained) >= 4
    for p in adaptation.adapter_parameters(module).values():
        p.data += 0.2 * torch.randn(p.shape)
    adapted = module(x)
    assert (adapted - before).abs().max() > 0.1
    differences = adapter_merging.merge(module)
    assert len(differences) == 4
    assert max(differences.values()) < 1e-5
    assert torch.allclose(module(x), adapted, rtol=0, atol=1e-5 * adapted.abs().max().item())
    assert list(module.state_dict()) == keys


KINDS_OF_LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.Conv2d(8, 2, 1)),
        rows(2, 3, 8, 8),
    ),
    "convolution of sequences": (lambda: nn.Sequential(nn.Conv1d(3, 8, 3, padding=1)), rows(2, 3, 16)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(10, 8)), torch.arange(10)),
    "attention": (Attention, rows(2, 5, WIDTH)),
    "shared": (Twice, rows(4, WIDTH)),
}


@pytest.mark.parametrize("kind", KINDS_OF_LAYERS)
def test_each_kind_of_layer_is_adapted_merged_and_restored(kind: str) -> None:
    make, x = KINDS_OF_LAYERS[kind]
    module = made(make).eval()
    targets: Any = {"attention": ["self_attn", "linear?"], "shared": ["first"]}.get(kind, ["*"])
    weights = copy.deepcopy(module.state_dict())
    parts = [id(part) for part in module.modules()]
    before = module(x)
    put_in(module, targets)
    adapted = module(x)
    with torch.inference_mode():
        assert torch.allclose(module(x), adapted, atol=1e-5)  # torch's kernel for inference would read the weights
    assert (adapted - before).abs().max() > 0.05
    other = copy.deepcopy(module)
    adapter_merging.remove_adapters(module)
    assert [id(part) for part in module.modules()] == parts
    assert all(torch.equal(weight, weights[name]) for name, weight in module.state_dict().items())
    assert torch.equal(module(x), before)
    assert max(adapter_merging.merge(other).values()) < 1e-5
    assert torch.allclose(other(x), adapted, atol=1e-4)
    assert [type(part) for part in other.modules()] == [type(part) for part in module.modules()]
    assert list(other.state_dict()) == list(weights)


def test_layer_under_two_names_is_adapted_under_both() -> None:
    module = made(Twice)
    put_in(module, ["first"])
    assert module.first is module.second
    assert module.first is not adaptation.plain(module.first)


def test_attention_keeps_its_weights_to_the_bit() -> None:
    module = made(Attention)
    weight = module.encoder.self_attn.in_proj_weight.detach().clone()
    put_in(module, ["self_attn"])
    for _ in range(20):
        module(rows(2, 5, WIDTH)).sum().backward()
    assert torch.equal(adaptation.plain(module.encoder.self_attn).in_proj_weight, weight)


def test_attention_has_the_gradients_of_its_outputs() -> None:
    module = made(Attention)
    put_in(module, ["self_attn"])
    x, step = rows(2, 5, WIDTH).double(), 1e-6
    module.double()
    for p in adaptation.adapter_parameters(module).values():
        p.grad = None
        module(x).square().sum().backward()
        expected = []
        for sign in (1, -1):
            with torch.no_grad():
                p[0, 0] += sign * step
                expected.append(module(x).square().sum())
                p[0, 0] -= sign * step
        assert p.grad is not None
        assert p.grad[0, 0].item() == pytest.approx((expected[0] - expected[1]).item() / (2 * step), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_merging_in_bf16_rounds_once(method: str) -> None:
    module = made(lambda: Classifier(2, WIDTH)).to(torch.bfloat16)
    whole = copy.deepcopy(module).float()
    for each in (module, whole):
        put_in(each, method=method)
    factors = adaptation.adapter_parameters(module), adaptation.adapter_parameters(whole)
    assert {p.dtype for p in factors[0].values()} == {torch.float32}
    for name, p in factors[0].items():
        factors[1][name].data = p.data.clone()
    assert max(adapter_merging.merge(module).values()) < 1e-2
    adapter_merging.merge(whole)
    assert torch.equal(module.blocks[0].up.weight, whole.blocks[0].up.weight.to(torch.bfloat16))


def test_damaged_adapter_is_refused_before_a_weight_changes() -> None:
    module = made(lambda: Classifier(2, WIDTH))
    put_in(module)
    weights = copy.deepcopy(module.state_dict())
    next(iter(adaptation.adapter_parameters(module).values())).data[0, 0] = torch.nan
    with pytest.raises(ConflictError, match="lora_A"):
        adapter_merging.merge(module)
    base = adaptation.plain(module.blocks[0].down).weight
    assert torch.equal(base, weights["blocks.0.down.base_layer.weight"])


class Scaled(nn.Linear):
    """A linear layer that uses its weight in its own way."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, 2 * self.weight, self.bias)


def test_merge_that_would_change_outputs_is_refused_before_a_weight_changes() -> None:
    module = made(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(WIDTH, WIDTH)))
    put_in(module, ["Linear"])
    weights, x = copy.deepcopy(module.state_dict()), rows(3, WIDTH)
    adapted = module(x)
    with pytest.raises(ConflictError, match=mentions("1, a Scaled", "after_fit=keep")):
        adapter_merging.merge(module)
    assert all(torch.equal(weight, weights[name]) for name, weight in module.state_dict().items())
    assert torch.equal(module(x), adapted)


def test_removing_what_pissa_moved_is_refused() -> None:
    module = made(lambda: Classifier(2, WIDTH))
    x, before = rows(3, WIDTH), module(rows(3, WIDTH))
    adaptation.insert(module, config(module, method="pissa"))
    with pytest.raises(ConflictError, match=mentions("PiSSA", "merge_adapters")):
        adapter_merging.remove_adapters(module)
    adapter_merging.merge(module)
    assert torch.allclose(module(x), before, atol=1e-5)
    with pytest.raises(NothingToDoError, match="Classifier"):
        adapter_merging.merge(module)


# --- tokens, whole modules, several adapters ---


def test_only_chosen_rows_train_and_a_tied_head_has_them_too() -> None:
    module = made(Words)
    ids = torch.arange(10)
    chosen = put_in(module, tokens={"embed": (2, 7)})
    adaptation.freeze(module, chosen)
    weight = module.embed.weight if isinstance(module.embed, nn.Embedding) else adaptation.plain(module.embed).weight
    changed = (module.embed(ids) - weight).abs().amax(1) > 0
    assert changed.nonzero().flatten().tolist() == [2, 7]
    hidden = rows(3, WIDTH)
    assert ((module.head(hidden) - hidden @ weight.T).abs().amax(0) > 0).nonzero().flatten().tolist() == [2, 7]
    module(ids).square().sum().backward()
    assert weight.grad is None
    adapted = module(ids)
    adapter_merging.merge(module)
    assert module.head.weight is module.embed.weight
    assert torch.allclose(module(ids), adapted, atol=1e-5)


def test_row_that_does_not_exist_is_refused() -> None:
    module = made(Words)
    with pytest.raises(NothingToDoError, match=mentions("=10", "embed", "0 to 9")):
        adaptation.insert(module, config(module, tokens={"embed": (2, 10)}))


def test_module_trained_whole_stays_tied() -> None:
    module = made(Words)
    chosen = put_in(module, modules_to_save=("head",))
    adaptation.freeze(module, chosen)
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.requires_grad
    keys = adapter_weights.trained_keys(module, chosen, module.state_dict())
    assert {"head.weight", "embed.weight"} <= set(keys)
    assert not any("norm" in key for key in keys)


def test_of_several_adapters_one_acts_and_is_trained() -> None:
    module = made(lambda: Classifier(2, WIDTH))
    x = rows(3, WIDTH)
    put_in(module)
    first = module(x)
    second = put_in(module, ["up"], name="other")
    adaptation.freeze(module, second)
    assert adaptation.adapter_names(module) == ["default", "other"]
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert trained
    assert all(".other." in name for name in trained)
    assert not torch.equal(module(x), first)
    adaptation.use_adapter(module, "default")
    assert torch.equal(module(x), first)
    assert [name for name, p in module.named_parameters() if p.requires_grad] == trained
    with pytest.raises(NothingToDoError, match=mentions("poems", "default", "other")):
        adaptation.use_adapter(module, "poems")


# --- saved ---


def test_other_base_is_refused_by_the_name_of_its_weight() -> None:
    module = made(lambda: Classifier(2, WIDTH))
    chosen = config(module)
    saved = adapter_weights.base_record(module, chosen)
    rounded = copy.deepcopy(module).to(torch.bfloat16)
    adapter_weights.refuse_other_base(adapter_weights.base_record(rounded, chosen), saved)
    small = copy.deepcopy(module).requires_grad_(False)
    quantize(small.blocks[0].up, {"weight": quantized(small.blocks[0].up.weight, "int8")})
    other_bits = copy.deepcopy(small)
    in_8_bits = adapter_weights.base_record(small, chosen)
    adapter_weights.refuse_other_base(in_8_bits, saved)
    adapter_weights.refuse_other_base(in_8_bits, in_8_bits)
    other_bits.blocks[0].up.weight = torch.randn_like(small.blocks[0].up.weight)
    with pytest.raises(CheckpointError, match=mentions("blocks.0.up.weight", "same base")):
        adapter_weights.refuse_other_base(adapter_weights.base_record(other_bits, chosen), in_8_bits)
    put_in(module)
    adapter_weights.refuse_other_base(adapter_weights.base_record(module, chosen), saved)
    adaptation.plain(module.blocks[1].down).weight.data += 1
    with pytest.raises(CheckpointError, match=mentions("blocks.1.down.weight", "same base")):
        adapter_weights.refuse_other_base(adapter_weights.base_record(module, chosen), saved)
    other = made(lambda: Classifier(3, WIDTH))
    with pytest.raises(CheckpointError, match=mentions("other weights", "blocks.2.up.weight")):
        adapter_weights.refuse_other_base(adapter_weights.base_record(other, config(other)), saved)


def test_weights_that_are_missing_or_unknown_are_refused() -> None:
    module = made(lambda: Classifier(2, WIDTH))
    chosen = put_in(module)
    state = module.state_dict()
    weights = {key: state[key] for key in adapter_weights.trained_keys(module, chosen, state)}
    adapter_weights.load_adapter_weights(module, chosen, weights)
    key = next(iter(weights))
    for wrong in ({k: v for k, v in weights.items() if k != key}, {**weights, "net.more": state[key]}, dict(state)):
        with pytest.raises(CheckpointError, match="default"):
            adapter_weights.load_adapter_weights(module, chosen, wrong)
