"""Quantized weights equal those of bitsandbytes to the bit, and survive what breaks its modules."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

import lightning_solo as solo
from lightning_solo import bitsandbytes_operators
from lightning_solo.bitsandbytes_operators import bitsandbytes
from lightning_solo.memory.ledger import saved_for_backward
from lightning_solo.nn.quantized import AT_ONCE, QuantizedLinear, QuantizedWeight, quantize, quantized

TYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = ((512, 768), (100, 36), (33, 7))  # several parts of AT_ONCE; a short last block; an odd number
assert SIZES[0][0] * SIZES[0][1] > AT_ONCE


def linear(inputs: int = 64, outputs: int = 96, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs)
    layer = nn.Linear(inputs, outputs, bias).to(dtype)
    layer.weight.requires_grad_(False)
    return layer


def in_place(layer: Any, format: str = "nf4") -> Any:
    """Quantize a layer's weight, and return the layer."""
    quantize(layer, {"weight": quantized(layer.weight, format)})
    return layer


def run(layer: Any, dtype: torch.dtype = torch.float32, inputs: int = 64) -> tuple[Tensor, Tensor]:
    """Return a layer's output and the gradient of its input."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, inputs, generator=generator).to(dtype).requires_grad_()
    output = layer(x)
    (gradient,) = torch.autograd.grad(output, x, torch.randn(output.shape, generator=generator).to(output.dtype))
    return output, gradient


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SIZES)
def test_products_are_those_of_bitsandbytes_also_after_an_evaluation(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    layer = linear(inputs, outputs, dtype)
    theirs = bitsandbytes().nn.Linear4bit(inputs, outputs, compute_dtype=dtype, quant_type="nf4")
    theirs.support_avx512bf16_for_cpu = False  # it would lose gradients after an evaluation
    theirs.load_state_dict(layer.state_dict())
    theirs.to("cpu")
    plain = linear(inputs, outputs, dtype)
    mine = in_place(layer)
    plain.weight.data = mine.weight
    assert not torch.equal(plain.weight, linear(inputs, outputs, dtype).weight)
    with torch.no_grad():
        for each in (mine, theirs):
            each.eval()(torch.ones(3, inputs, dtype=dtype))
            each.train()
    expected = run(theirs, dtype, inputs)
    for each in (mine, plain):
        output, gradient = run(each, dtype, inputs)
        assert torch.equal(output, expected[0])
        assert torch.equal(gradient, expected[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_8_bits_are_those_of_dequantized_weights(dtype: torch.dtype) -> None:
    plain, mine = linear(dtype=dtype), in_place(linear(dtype=dtype), "int8")
    error = (mine.weight - plain.weight).float().norm() / plain.weight.float().norm()
    assert 1e-3 < error < 1e-2
    plain.weight.data = mine.weight
    for one, other in zip(run(plain, dtype), run(mine, dtype), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-3)])
@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_rounding_again_moves_weights_little(format: str, dtype: torch.dtype, bound: float) -> None:
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = quantized(weight, format).dequantized()
    again = quantized(once, format).dequantized()
    assert (once - weight).norm() > 5e-3 * weight.norm()
    assert (again - once).float().norm() < bound * once.float().norm()


def test_bytes_and_saved_tensors() -> None:
    layer = in_place(linear(1024, 1024, bias=False))
    # 2 codes a byte; a byte per 64; an fp32 scale per 64 * 256, and the mean; a table of 256, and an empty tensor
    expected = 1024 * 1024 // 2 + 1024 * 1024 // 64 + 4 * (64 + 1) + 4 * 256
    assert layer.quantized_weights["weight"].nbytes == expected
    assert expected / 1024**2 < 0.52
    assert list(layer.parameters()) == []
    x = torch.ones(1, 1024, requires_grad=True)
    # neither the dequantized weight nor the input is kept, and the buffers belong to the layer
    assert saved_for_backward(lambda *_: layer(x).sum(), layer)[1] == 4


def test_buffers_are_saved_tensors_and_a_change_before_backward_is_an_error() -> None:
    layer, seen = in_place(linear()), list[int]()
    with saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        layer(torch.ones(2, 64, requires_grad=True))
    assert {buffer.data_ptr() for buffer in layer.quantized_weights["weight"].tensors()} <= set(seen)
    output = layer(torch.ones(2, 64, requires_grad=True))
    layer.quantized_weights["weight"].codes.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        output.sum().backward()


def test_autocast_gives_its_type_and_gradients_of_the_input_and_bias() -> None:
    layer, plain = in_place(linear()), linear()
    plain.weight.data = layer.quantized_weights["weight"].dequantized(torch.bfloat16).float()
    with torch.autocast("cpu", torch.bfloat16):
        mine, expected = run(layer), run(plain)
    assert mine[0].dtype is torch.bfloat16
    assert mine[1].dtype is torch.float32
    assert torch.equal(mine[0], expected[0])
    assert torch.equal(mine[1], expected[1])
    with torch.autocast("cpu", torch.bfloat16):
        for each in (layer, plain):
            each(torch.ones(2, 3, 64)).float().square().sum().backward()
    assert torch.allclose(layer.bias.grad, plain.bias.grad, rtol=1e-2)  # sums in bf16 in another order


def test_conversions_of_a_module_round_no_scale() -> None:
    layer = in_place(linear())
    before = layer.weight
    assert torch.equal(layer.to(torch.bfloat16).weight, before.to(torch.bfloat16))
    assert layer.weight.dtype is torch.bfloat16
    assert torch.equal(layer.float().weight, before)


def test_copies_and_files_have_their_own_storage() -> None:
    layer = in_place(linear())
    expected, _ = run(layer)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = in_place(linear(64, 96))
    loaded.quantized_weights["weight"].codes.zero_()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(run(other)[0], expected)
        pointers = {each.data_ptr() for each in layer.state_dict().values()}
        assert pointers.isdisjoint(each.data_ptr() for each in other.state_dict().values())


def test_a_file_with_plain_weights_is_quantized_and_one_without_scales_refused() -> None:
    layer, other = in_place(linear()), linear()
    other.weight.data.mul_(2)
    expected = in_place(copy.deepcopy(other))
    layer.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(layer.weight, expected.weight)
    states = in_place(linear()).state_dict()
    del states["quantized_weights.weight.scales"]
    with pytest.raises(RuntimeError, match=r"lacks its quantized_weights\.weight\.scales"):
        layer.load_state_dict(states, strict=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        layer.load_state_dict({"bias": layer.bias})
    with pytest.raises(ValueError, match="frozen"):
        layer.weight = nn.Parameter(torch.zeros(96, 64))


def test_a_trained_weight_is_refused() -> None:
    layer = nn.Linear(64, 96)
    with pytest.raises(ValueError, match="requires_grad=True"):
        in_place(layer)
    assert type(layer) is nn.Linear
    assert layer.weight.numel()


def test_hooks_names_and_references_stay_and_all_is_undone() -> None:
    layer, calls = linear(), list[Any]()
    layer.register_forward_hook(lambda *_: calls.append(1))
    parameter, keys, attributes = layer.weight, list(layer.state_dict()), sorted(vars(layer))
    undo = quantize(layer, {"weight": quantized(layer.weight)})
    assert isinstance(layer, QuantizedLinear)
    assert parameter.numel() == 0
    expected = layer.weight
    layer(torch.ones(1, 64))
    undo()
    assert calls == [1]
    assert type(layer) is nn.Linear
    assert layer.weight is parameter
    assert torch.equal(parameter, expected)
    assert (list(layer.state_dict()), sorted(vars(layer))) == (keys, attributes)


class Experts(nn.Module):
    """Three experts: (3, tokens, 32) -> (3, tokens, 48)."""

    def __init__(self, inputs: int = 32) -> None:
        super().__init__()
        self.inputs = inputs
        self.up = nn.Parameter(torch.randn(3, inputs, 48), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(48))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[i] @ self.up[i] for i in range(3)]) * self.scale


@pytest.mark.parametrize("format", ["nf4", "int8"])
def test_parameters_of_any_module(format: str) -> None:
    torch.manual_seed(0)
    plain = Experts()
    mine = copy.deepcopy(plain)
    undo = quantize(mine, {"up": quantized(mine.up, format)})
    assert [name for name, _ in mine.named_parameters()] == ["scale"]
    assert not torch.equal(mine.up, plain.up)
    plain.up.data = mine.up
    x = torch.randn(3, 4, 32, requires_grad=True)
    assert mine(x=x.bfloat16().detach()).dtype == torch.float32  # as `up` in bf16 times a scale in fp32
    outputs = [each(x) for each in (plain, mine, pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine))]
    gradients = [torch.autograd.grad(output.sum(), x)[0] for output in outputs]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)
    assert "up" not in vars(mine)
    with torch.no_grad():
        assert torch.equal(torch.compile(mine, backend="eager")(x), outputs[0])
    undo()
    assert type(mine) is Experts
    assert [name for name, _ in mine.named_parameters()] == ["up", "scale"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_layer_of_transformers_is_exact_and_keeps_no_dequantized_weight(dtype: torch.dtype) -> None:
    pytorch_utils = pytest.importorskip("transformers.pytorch_utils")
    torch.manual_seed(0)
    plain = pytorch_utils.Conv1D(96, 64).requires_grad_(False).to(dtype)
    plain.bias.data.normal_()
    plain.bias.requires_grad_(True)
    mine = copy.deepcopy(plain)
    quantize(mine, {"weight": quantized(mine.weight)})
    plain.weight.data = mine.weight
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    for layer in (plain, mine):
        layer.output = layer(x)
        layer.gradients = torch.autograd.grad(layer.output.square().sum(), [x, layer.bias])
    assert torch.equal(plain.output, mine.output)
    assert all(torch.equal(one, other) for one, other in zip(plain.gradients, mine.gradients, strict=True))
    # of the layer only its buffers, which it holds anyway; the plain one keeps its weight in the same way
    assert (
        saved_for_backward(lambda *_: mine(x).sum(), mine)[1] == saved_for_backward(lambda *_: plain(x).sum(), plain)[1]
    )


def test_embedding_in_8_bits() -> None:
    torch.manual_seed(0)
    plain = nn.Embedding(50, 32).requires_grad_(False)
    mine = in_place(copy.deepcopy(plain), "int8")
    index = torch.tensor([[0, 3, 49], [7, 7, 1]])
    assert torch.equal(mine(index), mine.weight[index])
    assert 1e-4 < (mine(index) - plain(index)).norm() / plain(index).norm() < 1e-2
    assert mine.to(torch.bfloat16)(index).dtype is torch.bfloat16


def test_embedding_on_the_host_keeps_its_numbers_and_gives_the_modules_type() -> None:
    plain = nn.Embedding(10, 6).requires_grad_(False)
    mine = in_place(copy.deepcopy(plain), "host")
    weight, ids = mine.quantized_weights["weight"], torch.tensor([[1, 9], [0, 0]])
    table = weight.codes
    assert torch.equal(mine(ids), plain(ids))
    mine.to(torch.bfloat16)
    assert weight.codes is table
    assert torch.equal(mine(ids), plain(ids).bfloat16())
    mine.to("meta")
    assert (weight.codes is table, weight.device.type) == (True, "meta")
    with pytest.raises(IndexError):
        in_place(copy.deepcopy(plain), "host")(torch.tensor([10]))
    other = in_place(nn.Embedding(10, 6).requires_grad_(False), "host")
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other(ids), plain(ids))
    other.weight = plain.weight * 2
    assert torch.equal(other(ids), plain(ids) * 2)
    again = pickle.loads(pickle.dumps(copy.deepcopy(other)))
    assert torch.equal(again(ids), other(ids))
    head = in_place(linear(), "host")
    assert all(torch.equal(one, other) for one, other in zip(run(head), run(linear()), strict=True))


def test_fake_tensors_and_compiled_code() -> None:
    with FakeTensorMode():
        layer = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
        layer.requires_grad_(False)
        in_place(layer)
        output, gradient = run(layer, torch.bfloat16, 4096)
        assert (output.shape, gradient.shape) == ((2, 5, 4096), (2, 5, 4096))
        assert layer.quantized_weights["weight"].nbytes / 4096**2 < 0.52
        assert F.linear(torch.ones(1, 4096, dtype=torch.bfloat16), layer.weight).shape == (1, 4096)
    layer = in_place(linear())
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for one, other in zip(run(layer), run(compiled), strict=True):
        assert torch.equal(one, other)


def test_export_has_dequantized_weights() -> None:
    module = nn.Sequential(in_place(linear(64, 96)), nn.ReLU(), in_place(linear(96, 8), "int8"))
    weights = solo.export_weights(module)
    assert list(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(weights["0.weight"], module[0].weight)
    assert torch.equal(weights["2.weight"], module[2].weight)
    nn.Sequential(linear(64, 96), nn.ReLU(), linear(96, 8)).load_state_dict(weights)


def test_zeros_have_no_nan() -> None:
    layer = linear()
    layer.weight.data[:2] = 0
    for format in ("nf4", "int8"):
        weight = quantized(layer.weight, format).dequantized()
        assert weight.isfinite().all()
        assert weight[:2].abs().max() < 1e-3


@pytest.mark.long
def test_import_asks_no_hub_and_prints_nothing() -> None:
    code = (
        "import sys, types\n"
        "asked = []\n"
        "kernels = types.ModuleType('kernels')\n"
        "kernels.get_kernel = lambda *args, **kwargs: asked.append(args)\n"
        "sys.modules['kernels'] = kernels\n"
        "from lightning_solo.bitsandbytes_operators import bitsandbytes\n"
        "bitsandbytes()\n"
        "assert sys.modules['kernels'] is kernels\n"
        "assert 'torch._inductor.compile_fx' not in sys.modules\n"
        "print(asked)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr == ""


def test_functions_of_bitsandbytes_are_compiled_when_they_are_first_called(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[str, Any]] = []

    def compile(function: Any, **options: Any) -> Any:
        compiled.append(options)
        return lambda x: 10 * function(x)

    monkeypatch.setattr(torch, "compile", compile)
    double = bitsandbytes_operators._compiled_at_first_call(dynamic=False)(lambda x: 2 * x)
    assert not compiled
    assert [double(1), double(2)] == [20, 40]
    assert compiled == [{"dynamic": False}]


def test_weights_without_numbers_are_not_computed_when_quantization_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        layer = nn.Linear(64, 96, dtype=torch.bfloat16).requires_grad_(False)
        undo = quantize(layer, {"weight": quantized(layer.weight)})
        assert "weight" not in layer._parameters
    monkeypatch.delattr("lightning_solo.nn.quantized.dequantized")
    undo()  # also where the mode has ended
    assert isinstance(layer.weight.data, FakeTensor)
    assert (layer.weight.shape, layer.weight.dtype) == ((96, 64), torch.bfloat16)


def test_weights_of_64_bits_and_rows_that_are_not_contiguous() -> None:
    weight = torch.randn(64, 96).T
    assert torch.equal(quantized(weight).dequantized(), quantized(weight.contiguous()).dequantized())
    stored: QuantizedWeight = quantized(weight.double())
    assert stored.dequantized().dtype is torch.float64
    assert len(list(chain(stored.parameters()))) == 0


def test_one_dimension_and_a_trained_bias() -> None:
    layer = linear()
    plain = copy.deepcopy(layer)
    plain.weight.data = quantized(plain.weight).dequantized()
    x = torch.randn(64)
    for each in (in_place(layer), plain):
        each(x).square().sum().backward()
    assert torch.equal(layer.bias.grad, plain.bias.grad)
