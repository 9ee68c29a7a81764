"""Plans of a dozen small architectures under presets, and their stored bytes.

    python -m tests.planner.stored_plans [--only llama,t5] [--presets bf16]    # rewrites rows of stored_plans.json

Three have at least twelve equal blocks, and most of the others at least five. Stored are the plans of traces of all
blocks, in each of which all operators run. The file has bytes only: seconds change with the figures of devices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from lightning_solo.errors import SoloError
from lightning_solo.planner import capture, few_blocks
from lightning_solo.planner.device import device
from lightning_solo.planner.fake_modules import fake_mode
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose, compose_all
from lightning_solo.reference.byte_gpt import ByteGPT
from lightning_solo.units import MiB
from tests.planner.modules import Classifier, images, sequences

STORED = Path(__file__).with_suffix(".json")
DEVICE = "rtx-4090"
BUDGET = 64 * MiB
"""In which no example fits, so that no other micro-batches are traced."""
CLIPPED = ("llama", "encoder", "deep_encoder")
FIGURES = ("needed_bytes", "peak_bytes", "reserved_bytes", "host_bytes", "breakdown", "phases")


class Wrapped(L.LightningModule):
    """A model of transformers, which returns its own loss."""

    def __init__(self, kind: str, **sizes: Any) -> None:
        super().__init__()
        config = transformers.CONFIG_MAPPING[kind](**sizes)
        heads = {"t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}
        causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
        self.model = getattr(transformers, heads.get(kind) or causal)(config).train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class UNet(nn.Module):
    """Convolutions down and up with skips; no two levels are equal."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels)]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(size, 2 * size, 3, 2, 1) for size in sizes)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in reversed(sizes))
        self.join = nn.ModuleList(nn.Conv2d(2 * size, size, 3, padding=1) for size in reversed(sizes))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = F.silu(down(x))
        for up, join, skip in zip(self.up, self.join, reversed(skips), strict=True):
            x = F.silu(join(torch.cat([up(x), skip], 1)))
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    """A residual block of convolutions and batch norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Alternating(nn.Module):
    """Pairs of linear layers of two kinds in turn; the last pair is wider than the others."""

    def __init__(self, width: int = 16, pairs: int = 13) -> None:
        super().__init__()
        inner = [3 * width] * (pairs - 1) + [5 * width]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, n), nn.GELU(), nn.Linear(n, width), nn.Linear(width, width), nn.Tanh())
            for n in inner
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean(1))


class Encoder(nn.Module):
    """torch's own transformer with dropout, pooled."""

    def __init__(self, blocks: int = 7) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, blocks)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))


def residual() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), *(Residual(8) for _ in range(7)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


class Recurrent(nn.Module):
    """GRU layers of one width after one of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(16, 24, batch_first=True)
        self.layers = nn.ModuleList(nn.GRU(24, 24, batch_first=True) for _ in range(13))
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)[0]
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x[:, -1])


def text() -> dict[str, Tensor]:
    ids = torch.arange(4 * 24).reshape(4, 24) % 90 + 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def characters() -> Tensor:
    return torch.zeros(4, 33, dtype=torch.uint8)


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4, dtype=torch.int64)}


ARCHITECTURES: dict[str, tuple[Callable[[], L.LightningModule], Callable[[], Any]]] = {
    "byte_gpt": (lambda: ByteGPT(width=32, depth=7, heads=2), characters),
    "gpt2_tied": (lambda: Wrapped("gpt2", vocab_size=99, n_positions=64, n_embd=32, n_layer=6, n_head=4), text),
    "llama": (
        lambda: Wrapped(
            "llama", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        ),
        text,
    ),
    "t5": (
        lambda: Wrapped(
            "t5", vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=7, num_decoder_layers=6, num_heads=4,
            decoder_start_token_id=0,
        ),
        text,
    ),
    "mixtral": (
        lambda: Wrapped(
            "mixtral", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64,
        ),
        text,
    ),
    "bert": (
        lambda: Wrapped(
            "bert", vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
            max_position_embeddings=64,
        ),
        text,
    ),
    "vit": (
        lambda: Wrapped(
            "vit", hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=4, image_size=32,
            patch_size=8,
        ),
        pictures,
    ),
    "u_net": (lambda: Classifier(UNet()), images),
    "residual": (lambda: Classifier(residual()), images),
    "recurrent": (lambda: Classifier(Recurrent()), sequences),
    "alternating": (lambda: Classifier(Alternating()), sequences),
    "encoder": (lambda: Classifier(Encoder()), sequences),
    "deep_encoder": (lambda: Classifier(Encoder(12)), sequences),
}  # fmt: skip


def planned(name: str, presets: Iterable[str]) -> dict[str, Any]:
    """Return the stored figures of an architecture's plans by preset; of a preset without plan the error's class."""
    make, batch = ARCHITECTURES[name]
    target = device(DEVICE)
    trainer = {"gradient_clip_val": 1.0} if name in CLIPPED else {}
    planner = Planner(make, batch(), trainer, target, BUDGET, 1)
    found: dict[str, Any] = {}
    for preset in presets:
        try:
            plan = planner.plan(preset, compose(preset))
            found[preset] = {key: getattr(plan, key) for key in FIGURES}
        except SoloError as error:
            found[preset] = type(error).__name__
    return found


def stored() -> dict[str, Any]:
    """Return the stored figures, by architecture and preset."""
    return json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}


def as_before() -> None:
    """Trace all blocks in this process, and run each operator, as if equal blocks had never been recognised."""
    few_blocks.LEAST = 2**30
    capture._shared = lambda cuda: (fake_mode(), {})


def main() -> None:
    """Plan, and write the file after each architecture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ARCHITECTURES))
    parser.add_argument("--presets", default=",".join(preset for preset in compose_all() if preset != "auto"))
    given = parser.parse_args()
    as_before()
    for name in given.only.split(","):
        row = planned(name, given.presets.split(","))
        rows = stored()  # after the plans: another process may have written
        rows[name] = {**rows.get(name, {}), **row}
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(rows[key])}" for key in ARCHITECTURES if key in rows)
        STORED.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
        print(name, flush=True)


if __name__ == "__main__":
    main()
