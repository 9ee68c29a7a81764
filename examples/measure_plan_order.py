"""Measures whether plans order presets by time: planned against real step times of twenty small modules on this CPU.

Plans are made for this machine's CPU as the table has it, and as calibrated beforehand. A real time is that of the
fastest of some optimizer steps behind the first two: seconds of the processor in one thread, so that other work on the
machine changes it little.

    python examples/measure_plan_order.py     # to examples/results/plan_order_cpu.json, about ten minutes
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.callbacks import Callback
from this_machine import machine, versions
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_solo as solo
from lightning_solo.errors import NothingToDoError, PlanError
from lightning_solo.planner.calibrate import calibrate
from lightning_solo.planner.device import device
from lightning_solo.planner.planner import Planner
from lightning_solo.presets.compose import compose

PRESETS = ("baseline", "bf16", "checkpointing", "compact")
STEPS, WARM_UP = 6, 2
NEAR = 0.10  # a preset as fast as the fastest, within the noise of a measurement
WORDS = {"vocab_size": 1024, "max_position_embeddings": 128}
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}


class Wrapped(L.LightningModule):
    """A model that returns its own loss, or scores whose targets are given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.train()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            return self.model(**batch).loss
        return F.cross_entropy(self.model(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class UNet(nn.Module):
    """Three levels of convolutions with skip connections: (batch, 3, side, side) -> (batch, 4, side, side)."""

    def __init__(self, width: int) -> None:
        super().__init__()

        def block(inputs: int, outputs: int) -> nn.Sequential:
            layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU())

        self.down = nn.ModuleList([block(3, width), block(width, 2 * width), block(2 * width, 4 * width)])
        self.up = nn.ModuleList([block(6 * width, 2 * width), block(3 * width, width)])
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        x = self.up[0](torch.cat([F.interpolate(x, scale_factor=2.0), second], 1))
        return self.head(self.up[1](torch.cat([F.interpolate(x, scale_factor=2.0), first], 1)))


def perceptron(width: int, depth: int) -> nn.Module:
    """Return linear layers: (batch, width) -> (batch, 10)."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def plain_convolutions(width: int, depth: int) -> nn.Module:
    """Return convolutions without branches: (batch, 3, side, side) -> (batch, 10)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def of_transformers(kind: str, model: str, **sizes: Any) -> nn.Module:
    """Return a model of the transformers library with random weights."""
    made: nn.Module = getattr(transformers, model)(getattr(transformers, f"{kind}Config")(**sizes))
    return made


def tokens(size: int = 4, length: int = 128) -> dict[str, Tensor]:
    """Return text with labels."""
    ids = torch.randint(5, 1024, (size, length))
    return {"input_ids": ids, "labels": ids.clone()}


def pictures(size: int = 8, side: int = 64) -> dict[str, Tensor]:
    """Return pictures with classes, for a model of transformers."""
    return {"pixel_values": torch.randn(size, 3, side, side), "labels": torch.randint(2, (size,))}


def labelled(size: int, *shape: int, each: tuple[int, ...] = (), classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return inputs with a class each, or for each pixel."""
    return torch.randn(size, *shape), torch.randint(classes, (size, *each))


TEXT = {**WORDS, **SIZES}
GPT2 = {"vocab_size": 1024, "n_positions": 128, "n_embd": 256, "n_layer": 4, "n_head": 4}
IMAGE = {**SIZES, "image_size": 64, "patch_size": 8, "num_labels": 2}
MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "perceptron_512": (partial(perceptron, 512, 6), partial(labelled, 64, 512)),
    "perceptron_2048": (partial(perceptron, 2048, 4), partial(labelled, 64, 2048)),
    "plain_convolutions": (partial(plain_convolutions, 64, 8), partial(labelled, 8, 3, 32, 32)),
    "unet_16": (partial(UNet, 16), partial(labelled, 8, 3, 64, 64, each=(64, 64), classes=4)),
    "unet_48": (partial(UNet, 48), partial(labelled, 4, 3, 64, 64, each=(64, 64), classes=4)),
    "gpt2": (partial(of_transformers, "GPT2", "GPT2LMHeadModel", **GPT2), tokens),
    "gpt2_wide": (partial(of_transformers, "GPT2", "GPT2LMHeadModel", **{**GPT2, "n_embd": 768}), tokens),
    "llama": (partial(of_transformers, "Llama", "LlamaForCausalLM", **TEXT), tokens),
    "llama_deep": (
        partial(of_transformers, "Llama", "LlamaForCausalLM", **{**TEXT, "num_hidden_layers": 12, "hidden_size": 128}),
        tokens,
    ),
    "mistral": (partial(of_transformers, "Mistral", "MistralForCausalLM", **TEXT, num_key_value_heads=2), tokens),
    "qwen2": (partial(of_transformers, "Qwen2", "Qwen2ForCausalLM", **TEXT, num_key_value_heads=2), tokens),
    "opt": (
        partial(of_transformers, "OPT", "OPTForCausalLM", **TEXT, ffn_dim=1024, word_embed_proj_dim=256),
        tokens,
    ),
    "bert": (partial(of_transformers, "Bert", "BertForMaskedLM", **TEXT), tokens),
    "roberta": (
        partial(of_transformers, "Roberta", "RobertaForMaskedLM", **{**TEXT, "max_position_embeddings": 132}),
        tokens,
    ),
    "albert": (partial(of_transformers, "Albert", "AlbertForMaskedLM", **TEXT, embedding_size=128), tokens),
    "t5": (
        partial(of_transformers, "T5", "T5ForConditionalGeneration", vocab_size=1024, d_model=256, d_kv=64, d_ff=1024,
                num_layers=3, num_heads=4, decoder_start_token_id=0),
        partial(tokens, length=64),
    ),
    "vit": (partial(of_transformers, "ViT", "ViTForImageClassification", **IMAGE), pictures),
    "deit": (partial(of_transformers, "DeiT", "DeiTForImageClassification", **IMAGE), pictures),
    "resnet": (
        partial(of_transformers, "ResNet", "ResNetForImageClassification", embedding_size=32,
                hidden_sizes=[64, 128, 256, 512], depths=[1, 1, 1, 1], num_labels=2),
        pictures,
    ),
    "convnext": (
        partial(of_transformers, "ConvNext", "ConvNextForImageClassification", hidden_sizes=[48, 96, 192, 384],
                depths=[2, 2, 2, 2], num_labels=2),
        pictures,
    ),
}  # fmt: skip


class Timed(Callback):
    """The processor's seconds at the end of each optimizer step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.ends.append(time.process_time())


def real_seconds(make: Callable[[], Any], batch: Any, preset: str) -> float:
    """Return the seconds of the fastest optimizer step of a real fit."""
    timed = Timed()
    arguments = solo.trainer_kwargs(preset, callbacks=[timed])
    trainer = L.Trainer(
        **arguments, accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    loader: Any = DataLoader([batch] * STEPS, batch_size=None)
    trainer.fit(make(), loader)
    return min(b - a for a, b in zip(timed.ends[WARM_UP - 1 :], timed.ends[WARM_UP:], strict=False))


def ranks(values: list[float]) -> list[float]:
    """Return the rank of each value; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def spearman(first: list[float], second: list[float]) -> float:
    """Return Spearman's rank correlation."""
    a, b = (torch.tensor(ranks(values), dtype=torch.float64) for values in (first, second))
    return round(float(torch.corrcoef(torch.stack([a, b]))[0, 1]), 3)


def compared(rows: list[dict[str, Any]], planned: str) -> dict[str, Any]:
    """Return how well planned times order presets: all rows, those of each module, and the presets chosen."""
    modules = {name: [row for row in rows if row["module"] == name] for name in {row["module"] for row in rows}}
    each = {name: spearman([r[planned] for r in of], [r["real_s"] for r in of]) for name, of in sorted(modules.items())}
    losses = {}
    for name, of in modules.items():
        chosen = min(of, key=lambda row: row[planned])
        losses[name] = chosen["real_s"] / min(row["real_s"] for row in of) - 1
    return {
        "spearman_all": spearman([row[planned] for row in rows], [row["real_s"] for row in rows]),
        "spearman_of_a_module_mean": round(mean(each.values()), 3),
        "spearman_of_a_module_median": round(median(each.values()), 3),
        "spearman_of_each_module": each,
        "fastest_chosen_within_10_percent": f"{sum(loss <= NEAR for loss in losses.values())} of {len(losses)}",
        "chosen_slower_than_the_fastest_median": round(median(losses.values()), 3),
        "chosen_slower_than_the_fastest_most": round(max(losses.values()), 3),
        "planned_over_real_median": round(median(row[planned] / row["real_s"] for row in rows), 2),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "plan_order_cpu.json")
    parser.add_argument("--only", default=",".join(MODULES), help="some modules, joined by commas")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"], before = cache, os.environ.get("XDG_CACHE_HOME")
        calibrated, readings, _ = calibrate()
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
    table = device("cpu")
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for name in asked.only.split(","):
        build, batch = MODULES[name][0], MODULES[name][1]()

        def make(build: Callable[[], nn.Module] = build) -> Any:
            torch.manual_seed(0)
            return Wrapped(build())

        planners = {"table_s": table, "calibrated_s": calibrated}
        planners = {key: Planner(make, batch, {}, on, on.memory_bytes) for key, on in planners.items()}
        planners["calibrated_s"]._traces = planners["table_s"]._traces  # a trace knows no speeds
        for preset in PRESETS:
            try:
                plans = {key: planner.plan(preset, compose(preset)) for key, planner in planners.items()}
                seconds = {key: plan.seconds_per_step for key, plan in plans.items()}
                row = {"module": name, "preset": preset, "real_s": real_seconds(make, batch, preset), **seconds}
            except (PlanError, NothingToDoError) as error:
                left_out[f"{name}, {preset}"] = str(error)[:160]
                continue
            rows.append(row)
            print(
                {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}, flush=True
            )
        result = {
            "what": "planned against real step times on a CPU, small modules under four presets",
            "hardware": machine(),
            "versions": {**versions(), "transformers": transformers.__version__},
            "command": "python examples/measure_plan_order.py",
            "calibration": {"flops": dict(readings.flops), "bandwidth": readings.bandwidth},
            "modules": len({row["module"] for row in rows}),
            "as_in_the_table": compared(rows, "table_s"),
            "as_calibrated": compared(rows, "calibrated_s"),
            "left_out": left_out,
            "rows": rows,
        }
        asked.out.write_text(json.dumps(result, indent=1) + "\n")  # after each module
    for key in ("as_in_the_table", "as_calibrated"):
        print(key, result[key])
    print(f"written: {asked.out}")


if __name__ == "__main__":
    main()
