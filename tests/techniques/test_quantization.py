"""Quantization computes with rounded weights, passes gradients through, and leaves parameters, keys and ties alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import lightning_solo as solo
from lightning_solo.errors import ConflictError, NothingToDoError, PresetError
from lightning_solo.nn.compilation import CountingBackend, compile_blocks
from lightning_solo.nn.fake_quantization import (
    RECORD,
    Rounding,
    chosen_layers,
    levels_and_scales,
    restore,
    round_weights,
    rounded,
    unfused_attention,
)
from lightning_solo.nn.packed_weights import dequantized
from lightning_solo.nn.quantized import quantize, quantized
from lightning_solo.nn.recomputation import checkpoint_blocks
from lightning_solo.techniques.quantization.technique import Quantization
from tests.conftest import long
from tests.messages import lines_with, mentions
from tests.models import small_model
from tests.modules import Mixture, Resumable, Stack, loader, regression
from tests.training import equal

Make = Callable[..., Any]
WIDTH = 32
LAYERS = tuple(f"net.blocks.{number}.{part}" for number in (0, 1) for part in ("up", "down"))


def stack(rounding: Rounding | None = None, blocks: int = 2) -> Stack:
    torch.manual_seed(0)
    module = Stack(blocks, width=WIDTH)
    if rounding is not None:
        round_weights(chosen_layers(module, rounding), rounding)
    return module


def x_of(rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2))


def gradients(module: nn.Module) -> list[Tensor]:
    module.zero_grad()
    module(x_of()).square().mean().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def fit(make_trainer: Make, *callbacks: Any, net: nn.Module | None = None, ckpt: Any = None, **arguments: Any) -> Any:
    module = regression(L, net or stack())
    trainer = make_trainer(L, callbacks=list(callbacks), **arguments)
    trainer.fit(module, Resumable(list(loader(6, width=WIDTH))), ckpt_path=ckpt)
    return module


class Tied(nn.Module):
    """A language model whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mixing, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mixing(self.embedding(ids)))


# --- acted ---


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("group_size", [0, 8])
def test_a_weight_has_few_levels_of_which_the_nearest_is_taken(bits: int, group_size: int) -> None:
    weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    before, groups = (each.view(-1, group_size or 24) for each in (weight, rounded(weight, Rounding(bits, group_size))))
    largest = before.gather(1, before.abs().argmax(1, keepdim=True))
    scale = (largest.abs() / 3 if bits == 2 else largest / -(2 ** (bits - 1))).bfloat16().float()
    integers = torch.tensor([-3, -1, 1, 3]) if bits == 2 else torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))
    levels = integers * scale
    assert torch.equal((groups[..., None] == levels[:, None]).sum(-1), torch.ones_like(groups))
    nearest = (before[..., None] - levels[:, None]).abs().amin(-1)
    assert torch.allclose((before - groups).abs(), nearest, atol=1e-6)
    if bits > 2:
        assert torch.equal(groups.gather(1, before.abs().argmax(1, keepdim=True)), largest)


def test_zeros_and_tiny_weights_are_not_lost() -> None:
    weight = torch.zeros(2, 16)
    for bits in (2, 4):
        assert torch.equal(rounded(weight, Rounding(bits, 8)), weight)
    weight[0, :8] = torch.arange(8) * 1e-30
    levels, scales = levels_and_scales(weight, 4, 8)
    assert levels[0, 7] == -8
    assert scales.isfinite().all()


@pytest.mark.any_device
def test_layers_round_from_the_start_step_on(make_trainer: Make, caplog: pytest.LogCaptureFixture) -> None:
    technique, seen = Quantization(2, 8, start_step=2), list[tuple[tuple[str, ...], bool]]()

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            with torch.no_grad():
                layer, x = pl_module.net.blocks[0].up, x_of().to(pl_module.device)
                expected = F.linear(x, rounded(layer.weight, Rounding(2, 8)), layer.bias)
                seen.append((technique.quantized_layers, torch.equal(layer(x), expected)))

    with caplog.at_level("INFO"):
        fit(make_trainer, technique, Watch())
    assert seen == [((), False)] * 2 + [(LAYERS, True)] * 4  # not the head
    assert lines_with(caplog.text, "4 Linear", "2 bits", "groups of 8", "net.head.weight (output head)")
    assert technique.quantized_layers == ()


def test_training_beats_rounding_afterwards() -> None:
    rounding, batches = Rounding(2, 0), list(loader(1, 32, width=WIDTH))

    def loss(net: nn.Module) -> Tensor:
        return sum((F.mse_loss(net(x), y) for x, y in batches), torch.zeros(())) / len(batches)

    def train(net: Stack, steps: int) -> Stack:
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net).backward()
            optimizer.step()
        return net

    before = train(stack(), 60)
    plain, aware = copy.deepcopy(before), copy.deepcopy(before)
    for net, steps in ((aware, 60), (plain, 0)):
        train(plain, 60 - steps)
        round_weights(chosen_layers(net, rounding), rounding)
        train(aware, steps)
    assert 0 < loss(aware) < 0.5 * loss(plain)


# --- parity ---


def test_gradients_are_those_of_the_rounded_weights() -> None:
    rounding = Rounding(3, 8)
    module, reference = stack(rounding), stack()
    for layer in chosen_layers(reference, rounding).layers.values():
        layer.weight.data = dequantized(*levels_and_scales(layer.weight.data, 3, 8))  # type: ignore[union-attr]
    assert equal(gradients(module), gradients(reference))
    assert not equal(gradients(module), gradients(stack()))


def test_inputs_are_rounded_per_token() -> None:
    module, x = stack(Rounding(8, 0, "int8")), x_of()
    x[1] *= 1000  # has its own scale
    inputs = x / x.abs().amax(1, keepdim=True) * 127
    layer = module.blocks[0].up
    expected = F.linear(inputs.round() * (x.abs().amax(1, keepdim=True) / 127), rounded(layer.weight, Rounding(8, 0)))
    assert torch.allclose(layer(x), expected + layer.bias, rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    layer(x).sum().backward()
    assert torch.allclose(x.grad[0], rounded(layer.weight, Rounding(8, 0)).sum(0), atol=1e-5)  # type: ignore[index]


@pytest.mark.long
def test_compiled_and_recomputed_blocks_round_alike() -> None:
    torch._dynamo.reset()
    rounding, counting = Rounding(4, 8, "int8"), CountingBackend("aot_eager")
    module = stack(rounding, 3)
    blocks = dict(module.blocks.named_children())
    checkpoint_blocks(blocks)
    compile_blocks(blocks, counting)
    assert equal(gradients(module), gradients(stack(rounding, 3)), 1e-6)
    assert counting.graphs == 2  # one of the first block, whose input needs no gradient; none is broken


def test_a_tied_head_is_rounded_with_its_embedding() -> None:
    model, rounding, ids = Tied(), Rounding(3, 8), torch.arange(24)
    assert list(chosen_layers(model, rounding).layers) == ["mixing"]
    choice = chosen_layers(model, rounding, ["head", "mixing"])
    assert sorted(choice.layers) == ["embedding", "head", "mixing"]
    before = list(model.state_dict())
    round_weights(choice, rounding)
    weight = rounded(model.embedding.weight, rounding)
    assert torch.equal(model.embedding(ids), weight)
    assert torch.equal(model.head(torch.eye(16)), weight.t())
    assert model.head.weight is model.embedding.weight
    assert list(model.state_dict()) == before
    restore(choice)
    assert torch.equal(model.embedding(ids), model.embedding.weight)


@pytest.mark.long
def test_transposed_layers_of_transformers_are_rounded_along_their_inputs() -> None:
    model, rounding = small_model("GPT2"), Rounding(4, 8)
    choice = chosen_layers(model, rounding)
    assert {type(layer).__name__ for layer in choice.layers.values()} == {"Conv1D"}
    layer, x = choice.layers["transformer.h.0.attn.c_attn"], torch.randn(2, 3, 16)
    weight = layer.weight.detach().t()
    round_weights(choice, rounding)
    assert torch.equal(layer(x), F.linear(x, dequantized(*levels_and_scales(weight, 4, 8)), layer.bias))


INSIDE = {
    "encoder.layers.0.self_attn": ["in_proj_weight", "out_proj.weight"],
    "experts": ["up", "down"],
    "cross": ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
}


def test_attention_and_experts_compute_with_rounded_weights() -> None:
    rounding, module, reference, x = Rounding(3, 8), Mixture(), Mixture(), torch.randn(2, 5, 16)
    choice = chosen_layers(module, rounding)
    assert {name: names for name, (_, names) in choice.insides.items()} == INSIDE
    assert sorted(choice.layers) == ["encoder.layers.0.linear1", "encoder.layers.0.linear2"]
    assert list(chosen_layers(module, rounding, choice.names).weights) == list(choice.weights)
    for name in choice.weights:
        p = reference.get_parameter(name)
        p.data = dequantized(*levels_and_scales(p.data, 3, 8))
    keys = list(module.state_dict())
    round_weights(choice, rounding)
    for net in (module, reference):
        net.zero_grad()
        net(x).square().mean().backward()
    assert equal([p.grad for p in module.parameters()], [p.grad for p in reference.parameters()], 1e-6)
    with torch.no_grad(), unfused_attention():
        assert torch.allclose(module.eval()(x), reference.eval()(x), atol=1e-5)
        assert not torch.allclose(module(x), Mixture().eval()(x), atol=1e-1)
    assert list(module.state_dict()) == keys
    restore(choice)
    assert not any("forward" in vars(part) for part in module.modules())


@pytest.mark.parametrize("group_size", [0, 8])
def test_fp8_rounds_to_floating_point_numbers(group_size: int) -> None:
    weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 3, 5)[:, None]
    levels, scales = levels_and_scales(weight, "fp8", group_size)
    assert torch.equal(levels.to(torch.float8_e4m3fn).float(), levels)
    groups = weight.view(5, -1, group_size or 24)
    assert torch.equal(scales.float(), (groups.abs().amax(-1) / 448).bfloat16().float())
    error = (rounded(weight, Rounding("fp8", group_size)) - weight).abs().view_as(groups)
    assert bool((error <= groups.abs() / 16 + groups.abs().amax(-1, keepdim=True) / 448 / 512 + 1e-40).all())


# --- memory ---


def test_a_copy_of_each_weight_is_kept_for_backward() -> None:
    def kept(module: nn.Module) -> int:
        """Return the bytes that autograd keeps, without the parameters themselves."""
        own, seen = {p.data_ptr() for p in module.parameters()}, dict[int, int]()

        def pack(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() not in own:
                seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x_of().requires_grad_())
        return sum(seen.values())

    # fp32, in each of two blocks two layers of 32 x 128
    assert kept(stack(Rounding(4, 8))) - kept(stack()) == 2 * 2 * 4 * WIDTH * 4 * WIDTH


# --- trace ---


def test_validation_of_torchs_encoder_computes_with_rounded_weights(make_trainer: Make) -> None:
    losses: list[Tensor] = []

    class Rows(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:
            return super().forward(src[:, None])[:, 0, :1]

    class Losses(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
            losses.append(outputs["loss"].detach())

    torch.manual_seed(0)
    module, batches = regression(L, Rows(WIDTH, 2, WIDTH, 0.0, batch_first=True), lr=0.0), loader(1, width=WIDTH)
    trainer = make_trainer(L, callbacks=[Quantization(2, 0), Losses()], max_steps=1)
    trainer.fit(module, batches, batches)
    assert torch.allclose(trainer.callback_metrics["validation/loss"], losses[0])
    trainer.validate(module, batches, verbose=False)
    assert not torch.allclose(trainer.callback_metrics["validation/loss"], losses[0], rtol=1e-3)
    assert module.net.activation_relu_or_gelu == 1  # torch's kernel is back


def test_a_resumed_run_rounds_from_the_same_step_on(make_trainer: Make, tmp_path: Path) -> None:
    def technique() -> Quantization:
        return Quantization(2, 8, start_step=3)

    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"step={trainer.global_step}.ckpt")

    whole = fit(make_trainer, technique(), Saves())
    for step in (2, 4):
        again = fit(make_trainer, technique(), ckpt=tmp_path / f"step={step}.ckpt")
        assert equal(whole.state_dict(), again.state_dict())
    records = [torch.load(tmp_path / f"step={step}.ckpt", weights_only=True).get(RECORD) for step in (2, 5)]
    assert records[0] is None
    assert records[1] == {"bits": 2, "group_size": 8, "activations": "unchanged", "layers": list(LAYERS)}


def test_the_record_of_a_tied_head_is_one_that_an_export_takes(make_trainer: Make, tmp_path: Path) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(1, WIDTH), nn.Linear(WIDTH, 1, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    module = fit(make_trainer, Quantization(4, 8, layers=["*head"]), net=Head())
    module.trainer.save_checkpoint(tmp_path / "last.ckpt")
    record = torch.load(tmp_path / "last.ckpt", weights_only=True)[RECORD]
    assert list(chosen_layers(module, Rounding(4, 8), record["layers"]).layers) == ["net.head", "net.embedding"]


def test_forwards_are_restored_after_a_failed_fit(make_trainer: Make) -> None:
    class Fails(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            raise KeyError("stop")

    net = stack()
    with pytest.raises(KeyError):
        fit(make_trainer, Quantization(), Fails(), net=net)
    assert not any("forward" in vars(part) for part in net.modules())


# --- what is refused ---


def test_what_an_export_needs_is_checked_before_the_first_step(make_trainer: Make) -> None:
    with pytest.raises(PresetError, match=mentions("net.blocks.0.up (32)", "callback.quantization.group_size=32")):
        fit(make_trainer, Quantization(4, 48))
    with pytest.raises(NothingToDoError, match=mentions("'*.qkv'", "net.blocks.0.up")):
        fit(make_trainer, Quantization(layers=["*.qkv"]))
    net = stack()
    net.blocks[1].down.weight.data[0, 0] = torch.nan
    with pytest.raises(ConflictError, match=mentions("net.blocks.1.down", "finite")):
        fit(make_trainer, Quantization(), net=net)
    with pytest.raises(PresetError, match=mentions("start_step=6", "callback.quantization.start_step=3")):
        fit(make_trainer, Quantization(start_step=6))
    with pytest.raises(PresetError, match="bits"):
        Quantization(1)


def test_weights_in_few_bits_and_adapters_are_refused() -> None:
    net = stack()
    net.requires_grad_(False)
    quantize(net.blocks[0].up, {"weight": quantized(net.blocks[0].up.weight.detach(), "int8")})
    with pytest.raises(ConflictError, match=mentions("blocks.0.up.weight", "~callback.quantization")):
        chosen_layers(net, Rounding(4, 8), option="callback.quantization")
    with pytest.raises(ConflictError, match=mentions("callback.adapters", "~callback.adapters")):
        solo.trainer_kwargs({"callback": {"quantization": {}, "adapters": {}}})


def test_layers_that_cannot_be_rounded_are_named() -> None:
    option = "callback.quantization"
    with pytest.raises(NothingToDoError, match=rf"0.weight \(of Conv1d\); write ~{option}$"):
        chosen_layers(nn.Sequential(nn.Conv1d(8, 8, 2)), Rounding(4, 0), option=option)
    headed = nn.Sequential(nn.Conv1d(8, 8, 2), nn.Embedding(8, 8), nn.Linear(8, 8, bias=False))
    headed[2].weight = headed[1].weight
    with pytest.raises(NothingToDoError, match=mentions(f"write {option}.layers=[2], or write ~{option}")):
        chosen_layers(headed, Rounding(4, 0), option=option)
    assert [*chosen_layers(headed, Rounding(4, 0), ["2"]).weights] == ["2.weight"]
    pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)
    with pytest.raises(NothingToDoError, match=mentions("0.weight_orig", "computes its weight", "nn.utils.prune")):
        chosen_layers(nn.Sequential(pruned, nn.Linear(8, 8)), Rounding(4, 0), ["0"])
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    with pytest.raises(NothingToDoError, match=mentions("0.parametrizations.weight.original1", "computes the weight")):
        chosen_layers(nn.Sequential(computed, nn.Linear(8, 8)), Rounding(4, 0), ["0"])
    tied = Tied()
    tied.embedding.max_norm = 1.0
    with pytest.raises(ConflictError, match=mentions("head", "embedding")):
        chosen_layers(tied, Rounding(4, 0), ["head"])


@pytest.mark.parametrize("precision", [long("bf16-true"), "bf16-mixed"])
def test_other_precisions_train(make_trainer: Make, precision: str) -> None:
    before = [p.detach().clone() for p in stack().parameters()]
    after = fit(make_trainer, Quantization(4, 8, "int8"), precision=precision).net.parameters()
    assert not any(torch.equal(one, other) for one, other in zip(before, after, strict=True))
