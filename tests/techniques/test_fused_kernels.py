"""FusedKernels finds layers by what they compute, keeps less for backward, and leaves out what only looks alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.errors import CapabilityError, ConflictError, GradientError, NothingToDoError, PresetError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import liger
from lightning_solo.nn.fused_kernels import KERNELS, LayerNorm, RmsNorm, fusable_layers, fuse_layers
from lightning_solo.presets.compose import compose
from lightning_solo.techniques.fused_kernels import card
from lightning_solo.techniques.fused_kernels.technique import FusedKernels
from tests.messages import lines_with, mentions
from tests.modules import loader, regression

Make = Callable[..., Any]
CPU = torch.device("cpu")
WIDTH, INNER = 8, 24


class Rms(nn.Module):
    """As Llama's; others below differ from it in one point."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.scale * exact.to(x.dtype)


class Gemmas(Rms):
    def forward(self, x: Tensor) -> Tensor:
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return (exact * (1 + self.scale.float())).to(x.dtype)


class EpsilonOutside(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.epsilon)


class Shifted(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-2


class Detached(Rms):
    """The same outputs, and other gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * torch.rsqrt(x.detach().pow(2).mean(-1, keepdim=True) + self.epsilon)


class Mlp(nn.Module):
    """As Llama's; up and gate are not told by their names."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu, dropout: float = 0.0) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.w2, self.drop = nn.Linear(INNER, WIDTH), nn.Dropout(dropout)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.w2(self.activation(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Rms(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def net(blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def found(*layers: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    return fusable_layers(nn.ModuleList(layers), KERNELS, "operators", CPU)


def fused(module: nn.Module) -> nn.Module:
    computations, _ = fusable_layers(module, KERNELS, "operators", CPU)
    fuse_layers({name: module.get_submodule(name) for name in computations}, computations, "operators")
    return module


def fit(make_trainer: Make, *callbacks: Any, home: ModuleType = L, model: Any = None, **arguments: Any) -> Any:
    module = regression(home, model or net(), lr=1e-3)
    torch.manual_seed(2)
    make_trainer(home, callbacks=list(callbacks), **arguments).fit(module, loader(6, width=WIDTH))
    return module


def gradients(module: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(5, 3, WIDTH, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    module(x).square().sum().backward()
    return torch.cat([t.grad.flatten() for t in (x, *module.parameters()) if t.grad is not None])


# --- acted ---


def test_layers_are_found_by_what_they_compute() -> None:
    layers = [Rms(), Gemmas(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False), nn.RMSNorm(WIDTH), Mlp()]
    computations, left_out = found(*layers, Mlp(tanh_gelu), nn.Linear(WIDTH, WIDTH), nn.Embedding(3, WIDTH))
    assert not left_out
    assert [computation.kernel for computation in computations.values()] == [
        *("rms_norm", "rms_norm", "layer_norm", "layer_norm", "rms_norm", "swiglu", "geglu")
    ]
    assert computations["0"] == RmsNorm("scale", 1e-6, 0.0, "llama")
    assert computations["1"] == RmsNorm("scale", 1e-6, 1.0, "gemma")
    assert computations["3"] == LayerNorm("weight", None, 1e-5)
    assert (computations["5"].gate, computations["5"].up) == ("w1", "w3")


@pytest.mark.parametrize(
    "layer", [EpsilonOutside(), Shifted(), Detached(), Mlp(F.gelu), Mlp(F.relu)], ids=lambda layer: type(layer).__name__
)
def test_layer_of_similar_structure_is_left_out(layer: nn.Module) -> None:
    computations, left_out = found(layer, Rms())
    assert list(computations) == ["1"]
    assert list(left_out) == ["0"]


def test_dropout_and_norms_of_other_dimensions_are_left_out() -> None:
    computations, left_out = found(
        Mlp(dropout=0.1), nn.GroupNorm(1, WIDTH), nn.LayerNorm((3, WIDTH)), nn.BatchNorm1d(8)
    )
    assert not computations
    assert list(left_out) == ["0", "1"]
    assert "random" in left_out["0"]


def test_layers_of_one_class_are_told_apart_by_their_attributes() -> None:
    other = Rms()
    other.epsilon = 1e-3
    computations, _ = found(Rms(), other, Mlp(), Mlp(tanh_gelu))
    assert [computations[name].eps for name in "01"] == [1e-6, 1e-3]
    assert [computations[name].activation for name in "23"] == ["silu", "gelu_tanh"]


def test_trying_layers_changes_neither_them_nor_random_numbers() -> None:
    module, state = net(), torch.get_rng_state()
    before = copy.deepcopy(module.state_dict())
    called: list[Any] = []
    module[0].norm.register_forward_hook(lambda *_: called.append(1))
    fusable_layers(module, KERNELS, "operators", CPU)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not called


def test_a_trainer_replaces_layers_and_says_which(
    home: ModuleType, make_trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    technique, seen = FusedKernels(allow_cpu=True), list[dict[str, str]]()

    class Watch(home.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            replaced = {name for name, part in pl_module.named_modules() if "forward" in vars(part)}
            assert replaced == set(technique.layers)
            seen.append(technique.layers)

    model = net()
    model.append(EpsilonOutside(1))
    with caplog.at_level("INFO"):
        fit(make_trainer, technique, Watch(), home=home, model=model)
    kernels = {"mlp": "swiglu", "norm": "rms_norm"}
    blocks = {f"net.{n}.{part}": kernel for n in (0, 1) for part, kernel in kernels.items()}
    assert seen == [blocks | {"net.2": "layer_norm"}] * 6
    assert lines_with(caplog.text, "2 Rms by rms_norm", "1 LayerNorm", "2 Mlp by swiglu", "net.4")
    assert not technique.layers


# --- parity ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_are_those_without(dtype: torch.dtype, frozen: bool) -> None:
    def made() -> nn.Module:
        module = net().to(dtype)
        for p in module[0].norm.parameters() if frozen else ():
            p.requires_grad_(False)
        return module

    expected, got = gradients(made(), dtype), gradients(fused(made()), dtype)
    assert (got - expected).norm() <= {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype] * expected.norm()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_a_fit_ends_where_it_would(make_trainer: Make, precision: str) -> None:
    def weights(*callbacks: Any) -> Tensor:
        module = fit(make_trainer, *callbacks, precision=precision)
        return torch.cat([p.detach().flatten().float() for p in module.parameters()])

    start = torch.cat([p.detach().flatten() for p in net().parameters()])
    plain, got = weights(), weights(FusedKernels(allow_cpu=True))
    moved = (plain - start).norm()
    assert moved > 0
    assert (plain - got).norm() <= (1e-4 if precision == "32-true" else 0.2) * moved


def test_numbers_of_another_type_than_the_weights_are_left_to_the_layer() -> None:
    layer, x = Rms(), torch.randn(4, WIDTH, dtype=torch.bfloat16)
    expected = layer(x)
    assert expected.dtype is torch.float32
    assert torch.equal(fused(nn.Sequential(layer))(x), expected)


# --- memory ---


def test_planned_bytes_for_backward_equal_those_of_the_kernels() -> None:
    rows = 16
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16, requires_grad=True)

    def kept(layer: nn.Module) -> int:
        layer = layer.to(torch.bfloat16)
        with Ledger() as ledger:
            output = layer(x)
            return ledger.live_bytes - output.nbytes

    # a copy of the input in fp32, a number per row, and in bf16 what is multiplied by the weight; of the kernel, the
    # number per row
    assert kept(Rms()) == rows * (WIDTH * 4 + 4 + WIDTH * 2)
    assert kept(fused(nn.Sequential(Rms()))) == rows * 4
    # gate, up, the activation's result and the product with it; of the kernel all but the activation's result
    assert kept(Mlp()) == rows * INNER * 2 * 4
    assert kept(fused(nn.Sequential(Mlp()))) == rows * INNER * 2 * 3


def test_a_second_backward_is_refused_where_the_first_has_overwritten() -> None:
    loss = fused(net())(torch.randn(3, WIDTH)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match=mentions("retain_graph=True", "callback.fused_kernels")):
        loss.backward()
    x = torch.randn(3, WIDTH, requires_grad=True)
    for layer in (Rms(), nn.LayerNorm(WIDTH), Mlp()):
        with pytest.raises(GradientError, match=mentions("create_graph=True", "callback.fused_kernels")):
            torch.autograd.grad(fused(nn.Sequential(layer))(x).sum(), x, create_graph=True)


# --- refused ---


def test_a_cpu_and_a_missing_package_are_refused(make_trainer: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    import lightning_solo.techniques.fused_kernels.technique as technique

    monkeypatch.setattr(technique, "is_installed", lambda name: False)
    with pytest.raises(CapabilityError, match=mentions("liger-kernel", "pip install", "callback.fused_kernels")):
        fit(make_trainer, FusedKernels())
    monkeypatch.setattr(technique, "is_installed", lambda name: True)
    monkeypatch.setattr(liger, "runs_on", lambda device: False)
    with pytest.raises(CapabilityError, match=mentions("cpu", "allow_cpu=true")):
        fit(make_trainer, FusedKernels())


def test_kernels_without_a_layer_are_refused(make_trainer: Make) -> None:
    with pytest.raises(NothingToDoError, match=mentions("geglu", "callback.fused_kernels.kernels=auto")):
        fit(make_trainer, FusedKernels(["rms_norm", "geglu"], allow_cpu=True))
    model = nn.Sequential(EpsilonOutside(), nn.Linear(WIDTH, 1))
    with pytest.raises(NothingToDoError, match=mentions("net.0", "callback.fused_kernels")):
        fit(make_trainer, FusedKernels(allow_cpu=True), model=model)
    with pytest.raises(PresetError, match=mentions("fused_kernels.kernels='rope'", *KERNELS)):
        FusedKernels("rope")


def test_compiled_blocks_are_refused() -> None:
    callbacks = {"fused_kernels": {"allow_cpu": True}, "regional_compilation": {"backend": "aot_eager"}}
    with pytest.raises(ConflictError, match=mentions("~callback.fused_kernels", "callback.regional_compilation")):
        compose({"callback": callbacks})


def test_the_card_names_the_kernels_that_there_are() -> None:
    assert card.KERNELS == KERNELS
