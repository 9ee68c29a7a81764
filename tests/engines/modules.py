"""Modules of many kinds, trained under `fsdp` by name on two processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss, silu
from torch.utils.data import DataLoader, TensorDataset

from tests.engines.processes import ENGINES, AtEnd, rank, trained

ROWS, BATCH, WORDS = 24, 8, 64
Loss = Callable[..., Tensor]


class Trained(L.LightningModule):
    """A network with a loss of a batch, trained by SGD: Adam's first steps have the size of the learning rate."""

    def __init__(self, net: nn.Module, loss: Loss, momentum: float = 0.9) -> None:
        super().__init__()
        self.net, self.loss, self.momentum = net, loss, momentum

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, *batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


class ConvBlock(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(4, out)

    def forward(self, x: Tensor) -> Tensor:
        return silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """A U-Net whose decoder reads the encoder's outputs."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in zip((3, *widths), widths, strict=False))
        pairs = [(a + b, b) for a, b in zip(widths[::-1], widths[-2::-1], strict=False)]
        self.up = nn.ModuleList(ConvBlock(a, b) for a, b in pairs)
        self.last = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else x[:, :, ::2, ::2])
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([interpolate(x, scale_factor=2), skip], 1))
        return self.last(x)


class Recurrent(nn.Module):
    """An LSTM of two layers, and a stack of GRUs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.lstm = nn.LSTM(24, 24, num_layers=2, batch_first=True)
        self.grus = nn.ModuleList(nn.GRU(24, 24, batch_first=True) for _ in range(3))
        self.head = nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(self.embedding(x))
        for gru in self.grus:
            x = x + gru(x)[0]
        return self.head(x)


class Experts(nn.Module):
    """A layer of experts, each a module of its own, of which a token takes one."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (rows := chosen == number).any():
                out[rows] = expert(x[rows]) * weights[rows, None]
        return x + out


class Routed(nn.Module):
    """Layers of experts, some of which no token of a process takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 24)
        self.layers = nn.ModuleList(Experts(24, 48) for _ in range(2))
        self.head = nn.Linear(24, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class ClassToken(L.LightningModule):
    """A LightningModule with parameters of its own, among them a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 24))
        self.scale = nn.Parameter(torch.tensor([0.5]))
        self.embedding = nn.Embedding(WORDS, 24)
        layers = [nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(24, 5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, classes = batch
        x = torch.cat([self.token.expand(len(words), -1, -1), self.embedding(words)], 1)
        for layer in self.layers:
            x = layer(x)
        return cross_entropy(self.head(x[:, 0] * self.scale), classes)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Scaled(nn.Linear):
    """A layer with a parameter that is a number."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Transposed(nn.Module):
    """Layers whose weights aren't stored row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        for layer in self.layers:
            layer.weight = nn.Parameter(layer.weight.detach().T)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class Unused(nn.Module):
    """A perceptron with a layer and a parameter that its forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.spare, self.bias = nn.Linear(16, 16), nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


class TimeConvolution(nn.Module):
    """A residual convolution over time, which returns a view that it has changed in place, as SASRec's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x.transpose(-1, -2).tanh()).transpose(-1, -2)
        out += x
        return out


class Masked(nn.Module):
    """Convolutions over time whose results are masked in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TimeConvolution() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x *= 0.9
        return x


class Skipping(nn.Module):
    """A perceptron of which the second process leaves out a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != 1 or rank() == 0:
                x = x + layer(x).tanh()
        return x


class Adversarial(L.LightningModule):
    """A generator and a discriminator with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(16, 16), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        fake = self.generator(torch.randn_like(real))
        losses = (
            -self.discriminator(fake).mean(),
            (self.discriminator(fake.detach()) - self.discriminator(real)).mean(),
        )
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.generator, self.discriminator)]


PRESETS: Mapping[str, Any] = {"experts": {"strategy": {"name": "fsdp", "find_unused_parameters": True}}}
"""Presets of modules that need a setting under `fsdp`."""


def _words(length: int = 12) -> Tensor:
    return torch.randint(3, WORDS, (ROWS, length))


def _own_loss(net: nn.Module, **inputs: Tensor) -> Tensor:
    loss: Tensor = net(**inputs).loss
    return loss


def _of_words(name: str) -> Loss:
    return lambda net, words: _own_loss(net, input_ids=words, labels=words)


def _t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    net = T5ForConditionalGeneration(config)
    return Trained(net, lambda net, x, y: _own_loss(net, input_ids=x, labels=y)), (_words(), _words(7))


def _bert() -> tuple[Any, Any]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=16,
    )  # fmt: skip
    return Trained(BertForMaskedLM(config), _of_words("bert")), (_words(),)


def _gpt2() -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=32,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return Trained(GPT2LMHeadModel(config), _of_words("gpt2")), (_words(),)


def _mixtral() -> tuple[Any, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
    )  # fmt: skip
    return Trained(MixtralForCausalLM(config), _of_words("mixtral")), (_words(),)


def _vit() -> tuple[Any, Any]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5,
    )  # fmt: skip
    data = (torch.randn(ROWS, 3, 16, 16), torch.randint(0, 5, (ROWS,)))
    return Trained(ViTForImageClassification(config), lambda net, x, y: _own_loss(net, pixel_values=x, labels=y)), data


def _whisper() -> tuple[Any, Any]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, d_model=32, max_source_positions=20,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    net = WhisperForConditionalGeneration(config)
    data = (torch.randn(ROWS, 8, 40), _words(7))
    return Trained(net, lambda net, x, y: _own_loss(net, input_features=x, labels=y)), data


def _wav2vec() -> tuple[Any, Any]:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, num_labels=5,
    )  # fmt: skip
    net = Wav2Vec2ForSequenceClassification(config)
    data = (torch.randn(ROWS, 400), torch.randint(0, 5, (ROWS,)))
    return Trained(net, lambda net, x, y: _own_loss(net, input_values=x, labels=y)), data


def _classified(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(net(x).flatten(0, -2), y.flatten())


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 5))


BUILDERS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "t5": _t5,
    "bert": _bert,
    "gpt2": _gpt2,
    "mixtral": _mixtral,
    "vit": _vit,
    "whisper": _whisper,
    "wav2vec2": _wav2vec,
    "u_net": lambda: (
        Trained(UNet(), lambda net, x: mse_loss(net(x), x)),
        (torch.randn(ROWS, 3, 16, 16),),
    ),
    "recurrent": lambda: (Trained(Recurrent(), _classified), (_words(), _words())),
    "sequential": lambda: (Trained(_perceptron(), _classified), (torch.randn(ROWS, 16), torch.randint(0, 5, (ROWS,)))),
    "class_token": lambda: (ClassToken(), (_words(), torch.randint(0, 5, (ROWS,)))),
    "unused_parameter": lambda: (
        Trained(Unused(), lambda net, x: mse_loss(net(x), x.flip(1))),
        (torch.randn(ROWS, 16),),
    ),
    "transposed": lambda: (Trained(Transposed(), lambda net, x: mse_loss(net(x), x.flip(1))), (torch.randn(ROWS, 16),)),
    "masked": lambda: (Trained(Masked(), lambda net, x: mse_loss(net(x), x.flip(1))), (torch.randn(ROWS, 12, 16),)),
    "scalar": lambda: (Trained(Scaled(), lambda net, x: mse_loss(net(x), x.flip(1))), (torch.randn(ROWS, 16),)),
    "experts": lambda: (Trained(Routed(), _classified, momentum=0.0), (_words(), _words())),
    "adversarial": lambda: (Adversarial(), (torch.randn(ROWS, 16),)),
}
"""Name -> function that returns a LightningModule and the tensors of its data."""


def fit(name: str, folder: Path, preset: Any, devices: int) -> dict[str, Any]:
    """Train a module, with the whole batch on one device or half of it on each of two."""
    torch.manual_seed(7)
    module, data = BUILDERS[name]()
    batches = DataLoader(TensorDataset(*data), batch_size=BATCH // devices)
    end = AtEnd(folder / f"{name}.ckpt")
    _, losses = trained(preset, folder, devices=devices, module=module, batches=batches, callbacks=[end])
    return {"losses": losses, "weights": end.weights}


def under_stage(folder: Path, stage: str, name: str) -> dict[str, Any]:
    """Train a module under a stage of ZeRO."""
    return fit(name, folder, {"strategy": ENGINES[f"zero{stage}"]}, 2)


def seeded(folder: Path, engine: str) -> dict[str, Any]:
    """Train a module whose weights are random in each process."""
    data = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(rank())
    module = Trained(Unused(), lambda net, x: mse_loss(net(x), x.flip(1)))
    batches = DataLoader(TensorDataset(data), batch_size=BATCH if engine == "baseline" else BATCH // 2)
    alone = engine == "baseline"
    preset = engine if alone else {"strategy": {**ENGINES[engine], "find_unused_parameters": True}}
    return {"losses": trained(preset, folder, devices=1 if alone else 2, module=module, batches=batches)[1]}


def skipping(folder: Path, engine: str) -> dict[str, Any]:
    """Train a module of which one process leaves out a layer."""
    module = Trained(Skipping(), lambda net, x: mse_loss(net(x), x.flip(1)))
    batches = DataLoader(TensorDataset(torch.randn(ROWS, 16)), batch_size=BATCH // 2)
    return {"losses": trained({"strategy": ENGINES[engine]}, folder, module=module, batches=batches)[1]}


def under(folder: Path, preset: str, *names: str) -> dict[str, Any]:
    """Train each module under a preset on two processes; a failure is returned as its message."""
    results: dict[str, Any] = {}
    for name in names or BUILDERS:
        try:
            results[name] = fit(name, folder, PRESETS.get(name, preset), 2)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    return results
