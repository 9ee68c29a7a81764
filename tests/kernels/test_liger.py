"""Liger's kernels, run by Triton's interpreter, in a model of Hugging Face and a plain one: as what they replace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_solo.machine import is_installed
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn import fused_operators, liger
from lightning_solo.nn.cross_entropy import Loss, Pointwise, chunked_cross_entropy, linear_cross_entropy
from lightning_solo.nn.fused_kernels import KERNELS, fusable_layers, fuse_layers
from lightning_solo.techniques.chunked_cross_entropy.technique import ChunkedCrossEntropy
from lightning_solo.techniques.fused_kernels.technique import FusedKernels

if not is_installed("liger_kernel") or os.environ.get("TRITON_INTERPRET") != "1":
    reason = "needs Triton and Liger, and TRITON_INTERPRET=1 from the start: run by `make kernels`"
    pytest.skip(reason, allow_module_level=True)

from tests.kernels.interpreter import runs_liger

CPU = torch.device("cpu")
TYPES = (torch.float32, torch.bfloat16)
# of the largest number: sums in another order; in bf16 two roundings more or less
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    with runs_liger():
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of Liger's functions that are called."""
    noted: list[str] = []
    ops = liger._ops()

    class Ops:
        def __getattr__(self, name: str) -> Any:
            noted.append(name)
            return getattr(ops, name)

    monkeypatch.setattr(liger, "_ops", Ops)
    return noted


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape))


def fused(model: nn.Module) -> nn.Module:
    computations, left_out = fusable_layers(model, KERNELS, "liger", CPU)
    assert computations
    assert not left_out
    fuse_layers({name: model.get_submodule(name) for name in computations}, computations, "liger")
    return model


def close(got: Any, expected: Any, dtype: torch.dtype) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype
        assert one.shape == other.shape
        assert (one - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("casting", ["llama", "gemma"])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_keeps_and_returns_what_the_operators_do(dtype: torch.dtype, casting: str, offset: float) -> None:
    torch.manual_seed(0)
    x, weight, gradient = (torch.randn(*shape, 24, dtype=dtype) for shape in ((2, 3), (), (2, 3)))
    pairs = [kernels.rms_norm_forward(x, weight, 1e-6, offset, casting) for kernels in (liger, fused_operators)]
    close(*pairs, dtype)
    gradients = [
        kernels.rms_norm_backward(gradient, x, weight, pairs[1][1], offset, casting, True)
        for kernels in (liger, fused_operators)
    ]
    close(*gradients, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layer_norm_returns_what_the_operators_do(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias, gradient = (torch.randn(*shape, 24, dtype=dtype) for shape in ((2, 3), (), (), (2, 3)))
    results = []
    for kernels in (liger, fused_operators):
        output, mean, rstd = kernels.layer_norm_forward(x, weight, bias, 1e-5)
        gradients = kernels.layer_norm_backward(gradient, x, weight, bias, mean, rstd, (True, True))
        results.append((output, *gradients))
    close(*results, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gated_product_overwrites_only_what_it_may(dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(0)
    gate, up, gradient = (torch.randn(2, 3, 24, dtype=dtype) for _ in range(3))
    close([liger.gated_forward(gate, up, activation)], [fused_operators.gated_forward(gate, up, activation)], dtype)
    before = gate.clone(), up.clone()
    expected = fused_operators.gated_backward(gradient, gate, up, activation, False)
    close(liger.gated_backward(gradient, gate, up, activation, False), expected, dtype)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])
    close(liger.gated_backward(gradient, gate, up, activation, True), expected, dtype)
    assert not torch.equal(gate, before[0])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_llama_has_the_same_loss_and_gradients_and_keeps_less(dtype: torch.dtype, launches: list[str]) -> None:
    tokens = torch.randint(64, (2, 6), generator=torch.Generator().manual_seed(1))
    gradients, saved = [], []
    for model in (fused(llama().to(dtype)), llama().to(dtype)):
        launches.clear()
        logits = model(input_ids=tokens).logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        gradients.append([loss.detach(), *(p.grad for p in model.parameters())])
        with Ledger() as ledger:
            output = model(input_ids=tokens)
            saved.append(ledger.live_bytes)
        del output
        if len(saved) == 1:
            assert launches.count("rms_norm_forward") == 2 * 5  # both forwards
            assert launches.count("swiglu_backward") == 2
        else:
            assert not launches
    norm = torch.cat([(one - other).flatten().float() for one, other in zip(*gradients, strict=True)]).norm()
    whole = torch.cat([other.flatten().float() for other in gradients[1]]).norm()
    assert norm <= {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype] * whole
    # of 12 tokens: silu's result in each of two parts, and what 5 norms keep between their operators
    size = dtype.itemsize
    assert saved[1] - saved[0] >= 12 * (2 * 48 * size + 5 * 32 * size)


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.Tanh(), nn.RMSNorm(24), nn.Linear(24, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_fit_of_a_plain_module_ends_where_it_would_and_is_undone(launches: list[str]) -> None:
    def trained(*callbacks: Any) -> Plain:
        module = Plain()
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        batches: Any = torch.utils.data.DataLoader(torch.randn(6, 8, generator=torch.Generator().manual_seed(1)))
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=list(callbacks), **options)
        trainer.fit(module, batches)
        return module

    expected = trained()
    assert not launches
    module = trained(FusedKernels(allow_cpu=True))
    assert {"layer_norm_backward", "rms_norm_backward"} <= set(launches)
    assert not any("forward" in vars(part) for part in module.modules())
    assert not torch.equal(module.net[0].weight, Plain().net[0].weight)
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


# --- the loss ---


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"softcap": 3.0}, {"z_loss": 1e-2}, {"softcap": 3.0, "z_loss": 1e-2}],
    ids=str,
)
@pytest.mark.parametrize("is_biased", [False, True])
def test_the_loss_and_its_gradients_are_those_of_torch(
    options: dict[str, float], is_biased: bool, launches: list[str]
) -> None:
    torch.manual_seed(0)
    ids, table, bias = torch.randint(37, (2, 7)), torch.randn(37, 12), torch.randn(37) if is_biased else None
    labels = ids.roll(-1, 1)
    labels[0, :3] = -100
    results = []
    for backend in ("liger", "torch"):
        weight = table.clone().requires_grad_()  # the head's, and the embedding's
        loss_bias = None if bias is None else bias.clone().requires_grad_()
        hidden = F.embedding(ids, weight).tanh()
        loss = chunked_cross_entropy(hidden, weight, labels, bias=loss_bias, chunk_tokens=4, backend=backend, **options)
        (loss * 0.25).backward()  # as of one of four micro-batches, or a scaled loss
        results.append([loss.detach(), weight.grad, *([] if loss_bias is None else [loss_bias.grad])])
        assert launches.count("cross_entropy_forward") == 3  # of 11 tokens that count
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_a_llama_trains_by_ligers_loss_as_by_torchs(launches: list[str]) -> None:
    class Language(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()

        def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            return self.net(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    weights = []
    for backend in ("liger", "torch"):
        module = Language()
        tokens = torch.randint(64, (4, 6), generator=torch.Generator().manual_seed(1))
        options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        technique = ChunkedCrossEntropy(chunk_tokens=4, backend=backend)
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[technique], **options)
        batches: Any = torch.utils.data.DataLoader(tokens, batch_size=2)
        trainer.fit(module, batches)
        weights.append(module.state_dict())
    assert launches.count("cross_entropy_forward") == 2 * 3  # 10 tokens a batch that have a next one
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pointwise", [Pointwise(0.5), Pointwise(0.2, True, 3.0)], ids=str)
def test_scaled_logits_have_the_losses_of_torch(pointwise: Pointwise) -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(5, 12), torch.randn(37, 12), torch.randint(37, (5,))
    results = []
    for backend in ("liger", "torch"):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        loss = Loss(chunk_tokens=2, pointwise=pointwise, backend=backend)
        linear_cross_entropy(*leaves, None, labels, loss, torch.float32).backward()
        results.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
