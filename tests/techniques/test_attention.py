"""Attention kernels are chosen, seen and named; recomputation takes the same one; nothing is left of it after a fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from lightning_solo.errors import CapabilityError, ConflictError, NothingToDoError
from lightning_solo.memory.ledger import Ledger
from lightning_solo.nn.attention_kernels import AttentionCalls, enabled_kernel
from lightning_solo.techniques.activation_checkpointing.technique import ActivationCheckpointing
from lightning_solo.techniques.attention.technique import Attention
from lightning_solo.techniques.regional_compilation.technique import RegionalCompilation
from tests.messages import mentions
from tests.models import small_model
from tests.modules import Stack, loader, regression

FLAGS = ("flash_sdp_enabled", "cudnn_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled")


class Layer(nn.Module):
    """Causal self-attention: (batch, tokens, width) -> the same."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.inputs = nn.Linear(width, 3 * width, bias=False)  # keys' has no gradient but rounding
        self.output = nn.Linear(width, width)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, dim=-1)]

    def forward(self, x: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(*self.heads(x), is_causal=True, dropout_p=self.dropout)
        return x + self.output(attended.transpose(1, 2).flatten(2))


class ByHand(Layer):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        return x + self.output((torch.softmax(query @ key.mT, -1) @ value).transpose(1, 2).flatten(2))


class Choosing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(x)


class Torchs(nn.Module):
    """Torch's own module, which returns its weights too unless told otherwise."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(16, 2, batch_first=True), need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights)[0]


def module_of(layer: Any = Layer, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return regression(L, nn.Sequential(layer(**arguments), layer(**arguments)))


def fitted(make_trainer: Any, *callbacks: Any, module: Any = None, **arguments: Any) -> Any:
    module = module_of() if module is None else module
    torch.manual_seed(1)
    x = torch.randn(4, 3, 5, 16)  # batches of 3 sequences of 5 tokens
    make_trainer(L, callbacks=list(callbacks), **{"max_steps": 4, **arguments}).fit(
        module, DataLoader(list(zip(x, x.flip(2), strict=True)), batch_size=None)
    )
    return module


def flags() -> list[bool]:
    return [getattr(torch.backends.cuda, name)() for name in FLAGS]


class Seen(L.Callback):
    """All kernels of a fit, those of recomputation too."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.calls = AttentionCalls(pl_module)
        self.calls.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.calls.__exit__(None, None, None)


# --- it acted ---


@pytest.mark.parametrize(("kernel", "expected"), [("auto", "flash"), ("flash", "flash"), ("math", "math")])
def test_the_kernel_is_chosen_and_named(kernel, expected, make_trainer, caplog):
    callback, seen = Attention(kernel), Seen()
    with caplog.at_level("INFO"):
        fitted(make_trainer, callback, ActivationCheckpointing(blocks=["Layer"]), seen)
    assert callback.kernels == {expected: 2}
    assert f"{expected} (2 calls)" in caplog.text
    # of two layers forward and recomputation, in the last batch
    assert seen.calls.kernels == {expected: 4}


def test_attention_of_torchs_own_module_is_seen(make_trainer):
    fitted(make_trainer, callback := Attention(), module=module_of(Torchs, need_weights=False))
    assert callback.kernels == {"flash": 2}


def llama(implementation: str) -> Any:
    torch.manual_seed(0)

    class Language(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_model("Llama", num_hidden_layers=2, attn_implementation=implementation)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Language()


def trained_llama(make_trainer: Any, *callbacks: Any, implementation: str = "eager") -> Any:
    module = llama(implementation)
    data = DataLoader(list(torch.arange(4 * 2 * 9).remainder(32).view(4, 2, 9)), batch_size=None)
    make_trainer(L, callbacks=list(callbacks), max_steps=4).fit(module, data)
    return module


def test_hugging_faces_eager_attention_is_replaced_for_the_fit(make_trainer, caplog):
    callback = Attention()
    with caplog.at_level("INFO"):
        module = trained_llama(make_trainer, callback)
    assert callback.kernels == {"flash": 2}
    assert "in net instead" in caplog.text  # once, though a part of it is a model too
    assert module.net.config._attn_implementation == "eager"
    torch.testing.assert_close(module.state_dict(), trained_llama(make_trainer).state_dict(), rtol=1e-4, atol=1e-5)


def test_compiled_blocks_are_seen_and_compiled_after_the_first_batch(make_trainer):
    torch._dynamo.reset()
    callback, compilation = Attention("math"), RegionalCompilation(blocks=["Layer"], backend="aot_eager")
    fitted(make_trainer, callback, compilation)
    assert callback.kernels == {"math": 2}
    assert compilation.graphs == 2


# --- parity ---


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_a_fit_ends_with_the_weights_of_a_plain_one(kernel, make_trainer):
    plain, ours = fitted(make_trainer).state_dict(), fitted(make_trainer, Attention(kernel)).state_dict()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


# --- memory ---


def test_peak_doubles_with_the_length_under_flash_and_quadruples_under_math():
    def peak(kernel: str, tokens: int) -> int:
        module = Layer()
        x = torch.randn(1, tokens, 16)
        with enabled_kernel(kernel), Ledger(module, ()) as ledger:
            module(x).sum().backward()
        return ledger.peak_bytes - sum(2 * p.nbytes for p in module.parameters())  # with gradients

    assert peak("flash", 2048) < 2.1 * peak("flash", 1024)
    assert peak("math", 2048) > 3.8 * peak("math", 1024)
    assert peak("math", 2048) > 10 * peak("flash", 2048)


# --- no trace ---


class Fails(L.Callback):
    def on_before_optimizer_step(self, *args: Any) -> None:
        raise ArithmeticError


def test_settings_of_torch_are_as_before_and_others_in_validation_too(make_trainer):
    inside: dict[str, list[bool]] = {}

    class Watches(L.Callback):
        def on_after_backward(self, *args: Any) -> None:
            inside["backward"] = flags()

        def on_validation_batch_start(self, *args: Any) -> None:
            inside["validation"] = flags()

    before, module = flags(), module_of()
    data = DataLoader([(torch.randn(3, 5, 16), torch.randn(3, 5, 16))], batch_size=None)
    make_trainer(L, callbacks=[Attention("math"), Watches()], max_steps=1).fit(module, data, data)
    assert inside == {"backward": [False, False, False, True], "validation": before}
    assert flags() == before
    original = F.scaled_dot_product_attention
    with pytest.raises(ArithmeticError):
        fitted(make_trainer, Attention("math"), Fails())
    assert flags() == before
    assert F.scaled_dot_product_attention is original


def test_hugging_faces_setting_is_put_back_after_an_exception(make_trainer):
    module = llama("eager")
    data = DataLoader([torch.zeros(2, 9, dtype=torch.long)], batch_size=None)
    with pytest.raises(ArithmeticError):
        make_trainer(L, callbacks=[Attention(), Fails()], max_steps=1).fit(module, data)
    assert module.net.config._attn_implementation == "eager"


# --- what is refused, and what is said ---


def test_a_kernel_that_cannot_run_is_refused_with_torchs_reason(make_trainer):
    with pytest.raises(
        CapabilityError, match=mentions("flash: ", "non-zero dropout", "math", "callback.attention.kernel=auto")
    ):
        fitted(make_trainer, Attention("flash"), module=module_of(dropout=0.1))
    with pytest.raises(CapabilityError, match=mentions("cudnn: ", "flash, math", "callback.attention.kernel=auto")):
        fitted(make_trainer, Attention("cudnn"))


def test_math_kernel_of_torch_is_reported(make_trainer):
    with pytest.warns(UserWarning, match=mentions("flash: ", "non-zero dropout", "callback.attention.kernel=math")):
        fitted(make_trainer, Attention(), module=module_of(dropout=0.1))
    fitted(make_trainer, Attention("math"), module=module_of(dropout=0.1))


class Softmaxing(torchmetrics.MeanMetric):
    """A metric in place of a layer, as an AUROC that makes probabilities of logits."""

    def forward(self, x):
        self.update(x.detach().softmax(-1))
        return x


def test_modules_that_compute_a_softmax_are_named(make_trainer):
    with pytest.raises(NothingToDoError, match=mentions("net.0 (ByHand), net.1 (ByHand)", "callback.attention")):
        fitted(make_trainer, Attention(), module=module_of(ByHand))
    measured = module_of(ByHand)
    measured.net[0] = torch.nn.Sequential(measured.net[0], Softmaxing())
    with pytest.raises(NothingToDoError, match=mentions("compute a softmax: net.0.0 (ByHand), net.1 (ByHand);")):
        fitted(make_trainer, Attention(), module=measured)
    torchs = module_of(Torchs, need_weights=True)
    with pytest.raises(NothingToDoError, match=mentions("net.0.attention (MultiheadAttention)", "need_weights=False")):
        fitted(make_trainer, Attention(), module=torchs)
    with pytest.raises(NothingToDoError, match=mentions("none")):
        make_trainer(L, callbacks=[Attention()], max_steps=1).fit(regression(L, Stack()), loader())


def test_a_module_that_chooses_kernels_itself_is_refused(make_trainer):
    with pytest.raises(ConflictError, match=mentions("kernel=flash", "math", "torch.nn.attention.sdpa_kernel")):
        fitted(make_trainer, Attention("flash"), module=module_of(Choosing))
