"""Layers in few bits are called wherever the module's own were, and pass gradients on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_solo.export.quantized import export_quantized
from lightning_solo.nn.fake_quantization import Layers, Rounding, chosen_layers, levels_and_scales, round_weights
from lightning_solo.nn.packed_weights import PackedLinear, kernels_past, load, pack
from tests.models import small_model


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2).eval()


def inputs() -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(5) >= torch.tensor([[5], [3], [4]])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("activations", ["unchanged", "int8"])
def test_the_kernel_of_torchs_encoder_does_not_pass_them_by(tmp_path: Path, activations: str) -> None:
    trained, (x, padded) = encoder(), inputs()
    export_quantized(trained, tmp_path / "few", 2, 0, activations)
    rounding = Rounding(2, 0, activations)
    choice = chosen_layers(trained, rounding)
    with torch.no_grad():
        full = trained(x)
        round_weights(choice, rounding)
        assert torch.equal(trained(x), full)  # the kernel reads the weights
        for part, name, value in kernels_past(trained, choice.layers.values()):
            setattr(part, name, value)
        loaded = load(encoder(), tmp_path / "few")
        assert (trained(x) - full).abs().max() > 1e-2
        for options in ({}, {"src_key_padding_mask": padded}):
            one, other = (each(x, **options)[~padded] for each in (trained, loaded))
            assert torch.allclose(one, other, atol=1e-5)


def test_a_module_that_reads_the_weight_reads_the_rounded_one() -> None:
    levels, layer = torch.arange(-8, 8, dtype=torch.int8).view(2, 8), PackedLinear(2, 8, 4, 0)
    layer.codes, layer.scales = pack(levels, 4), torch.ones(2, 1, dtype=torch.bfloat16).view(torch.int16)
    assert torch.equal(layer.weight, levels.float())
    assert layer.half().weight.dtype is torch.float16


def test_inputs_get_the_gradient_of_training() -> None:
    torch.manual_seed(0)
    plain, packed = nn.Linear(8, 4), PackedLinear(4, 8, 8, 0, activations="int8")
    levels, scales = levels_and_scales(plain.weight.detach(), 8, 0)
    packed.codes, packed.scales, packed.bias = levels.to(torch.int8), scales.view(torch.int16), plain.bias
    round_weights(Layers(layers={"": plain}), Rounding(8, 0, "int8"))
    outputs, gradients = [], []
    for layer in (plain, packed):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs.append(layer(x))
        gradients += torch.autograd.grad(outputs[-1].square().sum(), [x])
    assert torch.allclose(*outputs, atol=1e-6)
    assert torch.allclose(*gradients, atol=1e-5)
    assert gradients[0].abs().sum() > 1


def test_transposed_weights_are_stored_in_whole_bytes(tmp_path: Path) -> None:
    export_quantized(small_model("GPT2"), tmp_path / "few", 8, 0, "int8")
    assert isinstance(load(small_model("GPT2"), tmp_path / "few").transformer.h[0].mlp.c_fc, PackedLinear)
